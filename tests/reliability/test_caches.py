# SPDX-License-Identifier: Apache-2.0
"""Caches that were silently wrong: hybrids in static ones without a mask."""

from __future__ import annotations

import pytest
import torch
from transformers import StaticCache

from ..integrations.transformers.mhla_models import mhla_model
from ..integrations.transformers.tiny_models import FIRST_ORDINARY_TOKEN, VOCABULARY


def text(length: int, batch: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(FIRST_ORDINARY_TOKEN, VOCABULARY, (150, batch), generator=generator).T[:, :length]


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
        logits.append(model(ids[:, start:end], attention_mask=mask, past_key_values=cache).logits)
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
