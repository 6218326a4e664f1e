# SPDX-License-Identifier: Apache-2.0
"""Language models with a softmax window beside MHLA: decoding with its state against recomputing the whole text."""

from __future__ import annotations

import copy

import pytest
import torch
import torch._dynamo.testing
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from mhla_hf import MHLACache
from mhla_hf.utils.compat import checkpointing_method

from .mhla_models import mhla_model, mhla_modules
from .test_generation import generate, prompt, recompute, speculations
from .tiny_models import CACHE, FIRST_ORDINARY_TOKEN, VOCABULARY, inputs


WINDOWS = [
    {"window": "adjacent", "window_size": 3},
    {"window": "block", "window_size": 5},
]


def window_model(name: str = "llama", window: int = 0, **options):
    """A model with another bias for each head of its windows."""
    model = mhla_model(name, **{**WINDOWS[window], **options})
    for module in mhla_modules(model):
        with torch.no_grad():
            module.window_bias.copy_(torch.linspace(-1, 1, len(module.window_bias)))
    return model


@pytest.fixture(scope="module")
def llama():
    return window_model()


def text(length: int, batch: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(6)
    return torch.randint(FIRST_ORDINARY_TOKEN, VOCABULARY, (150, batch), generator=generator).T[:, :length]


@pytest.mark.parametrize("padded", [False, True], ids=["full", "left-padded"])
@pytest.mark.parametrize(
    ("name", "window", "options"),
    [
        ("llama", 0, {}),
        ("llama", 1, {}),
        ("llama", 0, {"rope": "before_feature_map", "layers": [1]}),
        ("gpt2", 0, {"window_size": None}),
        ("gemma3", 0, {}),
        ("opt", 1, {}),
    ],
    ids=str,
)
def test_greedy_equals_recomputation(name, window, options, padded):
    model = window_model(name, window, **options)
    ids, logits = recompute(model, **prompt(padded))
    result = generate(model, prompt(padded))
    assert torch.equal(result.sequences, ids)
    torch.testing.assert_close(torch.stack(result.logits, dim=1), logits, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_the_window_is_that_of_the_softmax_model_of_short_texts():
    # As long as a text is no longer than the window, window alone is the whole of softmax attention.
    model = window_model("llama", 1, window_size=16)
    for module in mhla_modules(model):
        module.window_bias.fill_(float("-inf"))
    softmax = copy.deepcopy(model)
    softmax.set_attn_implementation("sdpa")
    given = {**prompt(True), "use_cache": False}
    seen = given["attention_mask"].bool()
    torch.testing.assert_close(model(**given).logits[seen], softmax(**given).logits[seen], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"cache_implementation": "static"},
        {"prefill_chunk_size": 4},
        {"prefill_chunk_size": 3, "cache_implementation": "static"},
    ],
    ids=str,
)
def test_other_ways_to_the_same_tokens(llama, options):
    ids, _ = recompute(llama, **prompt(True))
    assert torch.equal(generate(llama, prompt(True), **options).sequences, ids)


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 2}], ids=str)
def test_beam_search(llama, options):
    expected = generate(llama, prompt(True), use_cache=False, **options).sequences
    assert torch.equal(generate(llama, prompt(True), **options).sequences, expected)


def test_assisted_decoding_and_prompt_lookup(llama):
    expected, _ = recompute(llama, **{name: tensor[2:] for name, tensor in prompt(False).items()})
    assert all(torch.equal(found, expected) for found in speculations(llama, (5,)))


@torch.no_grad()
@pytest.mark.parametrize("window", [0, 1])
@pytest.mark.parametrize("size", [2, 9])
def test_tokens_are_taken_back(window, size):
    model = window_model("llama", window, window_size=size)
    ids = text(150)
    whole = model(ids, use_cache=False).logits
    cache = DynamicCache(config=model.config)
    model(ids[:, :80], **{CACHE: cache})
    wrong = ids.flip(1)[:, :64]
    parts = [(wrong[:, :63], 143, 63), (ids[:, 80:100], 100, 21), (torch.cat([ids[:, 79:83], wrong], 1), 147, 64)]
    for more, end, removed in parts:
        model(more, **{CACHE: cache})
        assert cache.get_seq_length() == end
        cache.crop(-removed)
    start = 83
    output = model(ids[:, start:88], **{CACHE: cache}).logits
    torch.testing.assert_close(output, whole[:, start:88], rtol=1e-4, atol=1e-5)
    for index in range(88, 110):
        output = model(ids[:, index : index + 1], **{CACHE: cache}).logits
        torch.testing.assert_close(output, whole[:, index : index + 1], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_the_state_follows_what_is_done_to_the_cache(llama):
    cache = MHLACache(config=llama.config)
    llama(text(11), **{CACHE: cache})
    state = cache.layers[0].window_state
    # Two blocks of three tokens, 64 that can be taken back, and the column that is never read.
    assert state.keys.shape == state.values.shape == (2, 2, 6 + 64 + 1, 8)
    without = MHLACache(config=llama.config)
    plain = mhla_model("llama")
    plain(text(11), **{CACHE: without})
    assert cache.num_bytes - without.num_bytes == 3 * (2 * 2 * 2 * 71 * 8 * 4 + 2 * 2 * 8 * 4 + 2 * 2 * 8)
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 3]))
    twin = copy.deepcopy(cache)
    swapped = text(12).flip(0)
    expected = llama(swapped, use_cache=False).logits[:, -1:]
    for each in (cache, twin):
        torch.testing.assert_close(llama(swapped[:, -1:], **{CACHE: each}).logits, expected, rtol=1e-5, atol=1e-5)
    cache.reset()
    assert cache.layers[0].window_state is None


@torch.no_grad()
def test_later_tokens_that_are_no_numbers_reach_nobody_before_them():
    model = window_model("llama", 0, window_size=6)
    embedded = model.get_input_embeddings()(text(11))
    expected = model(inputs_embeds=embedded, use_cache=False).logits
    embedded[0, 8] = float("nan")
    output = model(inputs_embeds=embedded, use_cache=False).logits
    torch.testing.assert_close(output[0, :8], expected[0, :8])
    torch.testing.assert_close(output[1], expected[1])
    assert output[0, 8:].isnan().all()


def test_gradients_flow_through_a_text_in_parts(llama):
    ids, model = text(14), copy.deepcopy(llama).train()

    def gradients(parts):
        model.zero_grad()
        cache = DynamicCache(config=model.config)
        logits = torch.cat([model(part, **{CACHE: cache}).logits for part in parts], dim=1)
        logits.sin().sum().backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    # What MHLA layers remember keeps its gradient; the window's does as well.
    expected, found = gradients([ids]), gradients([ids[:, :7], ids[:, 7:8], ids[:, 8:]])
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_saving_and_loading(tmp_path, llama):
    llama.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    options = model.config.mhla
    assert (options["window"], options["window_size"]) == ("adjacent", [3])
    given = inputs("llama")
    assert torch.equal(model(**given).logits, llama(**given).logits)


@pytest.mark.slow
@torch.no_grad()
def test_compiled_decoding(llama):
    torch._dynamo.reset()
    model = window_model("llama", 0, layers=[0])
    ids, mask = text(12), torch.ones(2, 24, dtype=torch.long)
    mask[0, :4] = 0
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    logits = []
    for step in (model, compiled):
        cache = StaticCache(config=model.config, max_cache_len=24)
        positions = (mask[:, :12].cumsum(-1) - 1).clamp(min=0)
        found = [model(ids, attention_mask=mask, position_ids=positions, **{CACHE: cache}).logits[:, -1:]]
        for index in range(6):
            position = positions[:, -1:] + index + 1
            token = found[-1].argmax(-1)
            found.append(step(token, attention_mask=mask, position_ids=position, **{CACHE: cache}).logits)
        logits.append(torch.cat(found, dim=1))
    torch.testing.assert_close(*logits)
    assert counter.frame_count <= 2
    torch._dynamo.reset()


def test_gradient_checkpointing_changes_nothing(llama):
    model, given = copy.deepcopy(llama).train(), inputs("llama", padding="right")
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            checkpointing_method(model)()
        model.zero_grad()
        model(**given, use_cache=False).logits.square().mean().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    torch.testing.assert_close(*gradients)
    assert gradients[0]["model.layers.0.self_attn.mhla.window_bias"].abs().sum() > 0
