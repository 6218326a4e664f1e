# SPDX-License-Identifier: Apache-2.0
"""Generation far past the stored mixing weights, by every tail and storage of theirs, against recomputation."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, CompileConfig, DynamicCache, StaticCache

from mhla_hf import BlockLayout, MHLACache

from .mhla_models import mhla_model, mhla_modules
from .test_generation import generate, prompt, recompute, speculations
from .tiny_models import CACHE


# Three blocks of four tokens have weights of their own; the texts have eighteen blocks.
STEPS = 60
OPTIONS = {
    "constant": {"mixing_tail": "constant", "mixing_storage": "matrix"},
    "decay": {"mixing_tail": "decay", "mixing_tail_half_life": 2.0, "mixing_storage": "matrix"},
    "none": {"mixing_tail": "none", "mixing_storage": "matrix"},
    "distance": {"mixing_storage": "distance", "mixing_tail": "decay"},
    "shared": {"mixing_heads": "shared", "mixing_tail": "decay", "mixing_constraint": "nonnegative"},
}


# The default of new models; the others are slow.
@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.slow) if name != "distance" else name for name in OPTIONS],
)
def model(request):
    return mhla_model("llama", grid=[12], **OPTIONS[request.param], sizes={"num_hidden_layers": 2})


@pytest.fixture(scope="module")
def expected(model):
    """Tokens and logits without a cache, of whole and padded prompts."""
    return {padded: recompute(model, **prompt(padded), steps=STEPS) for padded in (False, True)}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}, {"prefill_chunk_size": 3}], ids=str)
def test_greedy_equals_recomputation(model, expected, padded, options):
    result = generate(model, prompt(padded), max_new_tokens=STEPS, **options)
    ids, logits = expected[padded]
    assert torch.equal(result.sequences, ids)
    torch.testing.assert_close(torch.stack(result.logits, dim=1), logits, rtol=1e-5, atol=1e-5)


def test_beam_search(model):
    runs = [
        generate(model, prompt(True), num_beams=3, max_new_tokens=STEPS, use_cache=use_cache)
        for use_cache in (True, False)
    ]
    assert torch.equal(runs[0].sequences, runs[1].sequences)


def test_assisted_decoding(model, expected):
    found = speculations(model, (5,), max_new_tokens=STEPS)
    assert all(torch.equal(each, expected[False][0][2:]) for each in found)


@torch.no_grad()
@pytest.mark.parametrize("make", [DynamicCache, MHLACache], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("removed", [1, 7, 41])
def test_crop_far_into_a_text(model, expected, make, removed):
    ids, logits = expected[False]
    cache = make(config=model.config)
    model(ids[:, :-1], **{CACHE: cache})
    cache.crop(-removed)
    again = model(ids[:, -removed - 1 : -1], **{CACHE: cache}).logits
    torch.testing.assert_close(again, logits[:, -removed:], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_the_state_stops_growing(model, expected):
    ids, _ = expected[False]
    ids = torch.cat([ids, ids], dim=1)
    cache, slots = DynamicCache(config=model.config), []
    for part in ids.split([11, *[1] * (ids.shape[1] - 11)], dim=1):
        model(part, **{CACHE: cache})
        slots.append(cache.layers[0].state.num_slots)
    # Three blocks of the prompt; then half as many again as needed, up to one finished block for which there are
    # weights beside the own one and the farthest, and those of 64 tokens that can be taken back.
    assert sorted(set(slots)) == [3, 5, 8, 13, 1 + 64 // 4]
    assert slots == sorted(slots) and slots.count(17) > 50
    static = StaticCache(config=model.config, max_cache_len=24)
    model(ids[:, :24], **{CACHE: static})
    assert static.layers[0].state.num_slots == 6


@pytest.mark.slow
def test_compiled_generation(model, expected):
    torch._dynamo.reset()
    compiled = CompileConfig(fullgraph=True, dynamic=None, backend="eager", mode=None)
    compiled._compile_all_devices = True
    options = {"cache_implementation": "static", "compile_config": compiled, "max_new_tokens": STEPS}
    assert torch.equal(generate(model, prompt(True), **options).sequences, expected[True][0])
    assert hasattr(model, "_compiled_call")
    torch._dynamo.reset()


@torch.no_grad()
def test_saved_models_are_the_same(model, expected, tmp_path):
    model.save_pretrained(tmp_path)
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert again.config.mhla == model.config.mhla
    ids, logits = expected[False]
    torch.testing.assert_close(again.eval()(ids[:, :-1]).logits[:, -STEPS:], logits, rtol=1e-5, atol=1e-5)
    layout = BlockLayout((72,), block_size=(4,))
    for mine, theirs in zip(mhla_modules(again), mhla_modules(model), strict=True):
        matrix = theirs.mixing_matrix(layout)
        assert matrix.shape[-2:] == (18, 18) and torch.equal(matrix, matrix.tril())
        assert torch.equal(mine.mixing_matrix(layout), matrix)
        stored = theirs.stored_mixing()
        # The last row, from where stored weights end on, falls by the tail's factor.
        tail = matrix.reshape(-1, 18, 18)[:, -1, :15]
        factor = 1.0 if stored.decay is None else stored.decay[:, None]
        torch.testing.assert_close(tail[:, :-1], tail[:, 1:] * factor, rtol=1e-5, atol=0)
