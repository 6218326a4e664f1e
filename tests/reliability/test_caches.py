# SPDX-License-Identifier: Apache-2.0
"""Caches that were silently wrong: hybrids in static ones without a mask, and later masks that hide cached tokens."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from transformers import DynamicCache, StaticCache

from ..integrations.transformers.mhla_models import mhla_model
from ..integrations.transformers.tiny_models import CACHE, FIRST_ORDINARY_TOKEN, VOCABULARY, softmax_model


WINDOW = {"window": "adjacent", "window_size": 3}
SINKS = {**WINDOW, "sink_tokens": 2}
OTHER_MASK = "attention_mask does not begin with the mask that the tokens in the cache were passed with"


def text(length: int, batch: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(FIRST_ORDINARY_TOKEN, VOCABULARY, (150, batch), generator=generator).T[:, :length]


def make_cache(kind: str, model) -> DynamicCache | StaticCache:
    if kind == "dynamic":
        return DynamicCache(config=model.config)
    return StaticCache(config=model.config, max_cache_len=130)


@pytest.fixture(scope="module")
def llama():
    return mhla_model("llama")


# Softmax layers and the empty slots of a static cache.

HYBRIDS = [
    ("llama", [1], {}),
    ("qwen3", [0, 2], {}),
    ("gpt2", [1], {}),
    # Its window is longer than the cache, and so is never full.
    ("gemma3", None, {"sliding_window": 64}),
]


@torch.no_grad()
@pytest.mark.parametrize(("name", "layers", "sizes"), HYBRIDS, ids=str)
@pytest.mark.parametrize("cuts", [[1] * 12, [4, 4, 1, 3]], ids=len)
@pytest.mark.parametrize("mask", [None, torch.ones(2, 20)], ids=["no mask", "ones"])
def test_hybrids_in_a_static_cache_equal_recomputation(name, layers, sizes, cuts, mask):
    model, ids = mhla_model(name, layers=layers, sizes=sizes), text(12)
    cache, start, logits = StaticCache(config=model.config, max_cache_len=20), 0, []
    for length in cuts:
        end = start + length
        logits.append(model(ids[:, start:end], attention_mask=mask, **{CACHE: cache}).logits)
        start = end
    torch.testing.assert_close(torch.cat(logits, dim=1), model(ids, use_cache=False).logits, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(("name", "layers", "sizes"), HYBRIDS, ids=str)
def test_hybrids_generate_the_same_with_a_static_cache(name, layers, sizes):
    model = mhla_model(name, layers=layers, sizes=sizes)
    options = {"max_new_tokens": 6, "do_sample": False}
    left = torch.ones(2, 9, dtype=torch.long)
    left[0, :4] = 0
    for given in ({}, {"attention_mask": left}, {"num_beams": 2}):
        expected = model.generate(text(9), **options, **given)
        # The model keeps its static cache for the next text.
        for _ in range(2):
            assert torch.equal(model.generate(text(9), cache_implementation="static", **options, **given), expected)


# A second turn whose mask differs.


def two_turns(model, kind, first_mask, mask, *, first=9, step=None, change=None):
    """Logits of a second turn after a first one with another mask; in `step`s of that many tokens."""
    ids, cache = text(mask.shape[1], len(mask)), make_cache(kind, model)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    model(ids[:, :first], position_ids=positions[:, :first], attention_mask=first_mask, **{CACHE: cache})
    if change is not None:
        change(cache)
    logits, step = [], step or mask.shape[1] - first
    for start in range(first, mask.shape[1], step):
        end = start + step
        given = {"attention_mask": mask[:, :end], "position_ids": positions[:, start:end]}
        logits.append(model(ids[:, start:end], **given, **{CACHE: cache}).logits)
    return torch.cat(logits, dim=1)


def alone(model, mask, first=9):
    """The same for each row alone and without a cache."""
    ids = text(mask.shape[1], len(mask))
    rows = [model(ids[row : row + 1, mask[row].bool()], use_cache=False).logits for row in range(len(mask))]
    return torch.cat([logits[:, first - mask.shape[1] :] for logits in rows])


def padded_at_the_end_of_turn_one(first=9, padding=4, second=5):
    mask = torch.ones(2, first + second, dtype=torch.long)
    mask[0, first - padding : first] = 0
    return mask


MASKS_OF_TURN_ONE = {"none": lambda mask: None, "ones": torch.ones_like, "same": lambda mask: mask}


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("first_mask", MASKS_OF_TURN_ONE)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {}),
        ("llama", {"layers": [1]}),
        ("gpt2", {}),
        ("qwen3", {"mixing_heads": "shared"}),
        ("llama", WINDOW),
        ("llama", SINKS),
    ],
    ids=str,
)
def test_padding_that_turn_two_hides_is_hidden(name, options, first_mask, kind):
    model, mask = mhla_model(name, **options), padded_at_the_end_of_turn_one()
    for step in (None, 1):
        output = two_turns(model, kind, MASKS_OF_TURN_ONE[first_mask](mask[:, :9]), mask, step=step)
        torch.testing.assert_close(output, alone(model, mask), rtol=1e-4, atol=2e-5)


@torch.no_grad()
@pytest.mark.parametrize(("sinks", "column"), [(1, 0), (3, 1)])
def test_a_mask_that_moves_a_token_among_the_sinks_is_refused(sinks, column):
    """Its features are in the summaries, which have no sinks."""
    model, ids = mhla_model("llama", **{**SINKS, "sink_tokens": sinks}), text(24)
    mask = torch.ones(2, 24, dtype=torch.bool)
    for hidden, is_refused in ((sinks, False), (column, True)):
        cache = DynamicCache(config=model.config)
        model(ids[:, :20], **{CACHE: cache})
        mask[:] = True
        mask[0, hidden] = False
        with pytest.raises(ValueError, match="among the sinks") if is_refused else nullcontext():
            model(ids[:, 20:], attention_mask=mask, **{CACHE: cache})


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, WINDOW, SINKS], ids=str)
def test_tokens_anywhere_among_the_last_ones_are_hidden(options):
    # With one layer, keys and values depend on nothing before them: the whole text tells what is right.
    model, ids = mhla_model("llama", sizes={"num_hidden_layers": 1}, **options), text(100)
    mask = torch.rand(2, 100, generator=torch.Generator().manual_seed(0)) < 0.7
    mask[:, :26], mask[:, 90:] = True, True
    mask[1, 50:70] = False
    positions = torch.arange(100)[None].expand(2, -1)
    expected = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    cache = DynamicCache(config=model.config)
    model(ids[:, :90], **{CACHE: cache})
    early = copy.deepcopy(cache)
    for end in (91, 92, 100):
        start = cache.get_seq_length()
        output = model(
            ids[:, start:end], attention_mask=mask[:, :end], position_ids=positions[:, start:end],
            **{CACHE: cache},
        ).logits  # fmt: skip
        torch.testing.assert_close(output, expected[:, start:end], rtol=1e-4, atol=2e-5)
    # What the state has to keep in order to notice does not grow.
    assert cache.layers[0]._hidden.shape == (2,)
    # One token before the last 64.
    mask[1, 25] = False
    with pytest.raises(ValueError, match=OTHER_MASK):
        model(ids[:, 90:], attention_mask=mask, **{CACHE: early})


@torch.no_grad()
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("step", [None, 1])
def test_what_cannot_be_hidden_is_refused_and_leaves_the_cache_alone(llama, kind, step):
    mask = padded_at_the_end_of_turn_one(first=90, padding=80)
    same = two_turns(llama, kind, mask[:, :90], mask, first=90, step=step)
    torch.testing.assert_close(same, alone(llama, mask, first=90), rtol=1e-4, atol=2e-5)

    def refused(cache):
        with pytest.raises(ValueError, match="Pass the former mask, extended for the new tokens, or start again"):
            llama(text(91)[:, 90:], attention_mask=torch.ones(2, 91), **{CACHE: cache})

    again = two_turns(llama, kind, mask[:, :90], mask, first=90, step=step, change=refused)
    assert torch.equal(again, same)
    for first_mask in (None, torch.ones_like(mask[:, :90])):
        with pytest.raises(ValueError, match=OTHER_MASK):
            two_turns(llama, kind, first_mask, mask, first=90, step=step)


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, WINDOW, SINKS], ids=str)
def test_the_mask_follows_what_is_done_to_the_cache(options):
    model = mhla_model("llama", **options)
    mask = padded_at_the_end_of_turn_one()
    expected = alone(model, mask)

    def crop(cache):
        ids, longer = text(14), torch.ones(2, 12, dtype=torch.long)
        longer[:, :9], longer[1, 10] = mask[:, :9], 0
        model(ids[:, 9:12], attention_mask=longer, **{CACHE: cache})
        cache.crop(-3)

    def crop_into_the_padding(cache):
        cache.crop(-2)
        model(text(9)[:, 7:], attention_mask=mask[:, :9], **{CACHE: cache})

    for change in (crop, crop_into_the_padding):
        torch.testing.assert_close(
            two_turns(model, "dynamic", mask[:, :9], mask, change=change), expected, rtol=1e-4, atol=2e-5
        )

    cache = make_cache("dynamic", model)
    model(text(9), attention_mask=mask[:, :9], **{CACHE: cache})
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 3]))
    twin = copy.deepcopy(cache)
    positions = (mask.cumsum(-1) - 1)[:, 9:]
    given = {"attention_mask": mask.flip(0), "position_ids": positions.flip(0)}
    output = model(text(14).flip(0)[:, 9:], **given, **{CACHE: cache}).logits
    torch.testing.assert_close(output, expected.flip(0), rtol=1e-4, atol=2e-5)
    with pytest.raises(ValueError, match=OTHER_MASK):
        model(text(14)[:, 9:], attention_mask=mask, **{CACHE: twin})
    twin.reset()
    whole = model(text(14), attention_mask=mask, **{CACHE: twin}).logits
    torch.testing.assert_close(whole, model(text(14), attention_mask=mask, use_cache=False).logits)


@torch.no_grad()
def test_a_chat_of_generated_turns_as_softmax_has_it():
    # Turn one was padded on the right and generated nothing yet; turn two hides the padding and generates.
    for model in (mhla_model("llama"), mhla_model("llama", layers=[0]), softmax_model("llama")):
        mask, cache = padded_at_the_end_of_turn_one(), DynamicCache(config=model.config)
        model(text(9), **{CACHE: cache})
        options = {"max_new_tokens": 5, "do_sample": False}
        given = {"attention_mask": mask, CACHE: cache}
        output = model.generate(text(14), position_ids=(mask.cumsum(-1) - 1), **given, **options)[:, 14:]
        for row in range(2):
            expected = model.generate(text(14)[row : row + 1, mask[row].bool()], **options)[:, -5:]
            assert torch.equal(output[row : row + 1], expected)
