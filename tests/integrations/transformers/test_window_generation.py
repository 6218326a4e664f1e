# SPDX-License-Identifier: Apache-2.0
"""Language models with a softmax window beside MHLA: decoding with its state against recomputing the whole text."""

from __future__ import annotations

import copy

import pytest
import torch
import torch._dynamo.testing
from transformers import DynamicCache

from mhla_hf import MHLACache

from .mhla_models import mhla_model, mhla_modules, window_model
from .test_generation import check_greedy, prompt
from .tiny_models import CACHE, FIRST_ORDINARY_TOKEN, VOCABULARY


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
        ("llama", 2, {}),
        ("gpt2", 1, {"sink_tokens": 3}),
    ],
    ids=str,
)
def test_greedy_equals_recomputation(name, window, options, padded):
    check_greedy(window_model(name, window, **options), padded)


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


@torch.no_grad()
@pytest.mark.parametrize("window", [0, 1, 2])
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


@torch.no_grad()
@pytest.mark.parametrize("sizes", [{}, {"num_hidden_layers": 1}], ids=str)
def test_sinks_are_taken_back_and_written_anew(sizes):
    model, ids = window_model("llama", 2, sizes=sizes), text(20)
    whole = model(ids, use_cache=False).logits
    for kept in (1, 2, 3):
        cache = DynamicCache(config=model.config)
        model(torch.cat([ids[:, :kept], ids.flip(1)[:, :7]], dim=1), **{CACHE: cache})
        cache.crop(-7)
        parts = [model(part, **{CACHE: cache}).logits for part in ids[:, kept:].split([1, 6, 13 - kept], dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), whole[:, kept:], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_sinks_are_a_few_more_columns_of_the_state():
    states = []
    for sinks in (0, 2):
        model = window_model("llama", 2, sink_tokens=sinks)
        cache = MHLACache(config=model.config)
        model(text(11), **{CACHE: cache})
        states.append((cache.layers[0].window_state.keys.shape[2], cache.num_bytes))
    # Three layers of two texts, two heads of width 8, keys and values.
    assert states[1][0] - states[0][0] == 2 and states[1][1] - states[0][1] == 3 * 2 * 2 * 2 * 2 * 8 * 4
