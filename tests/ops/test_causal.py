# SPDX-License-Identifier: Apache-2.0
"""The causal chunked form against the dense one, and decoding against the chunked form at every position."""

from __future__ import annotations

import pytest
import torch

from mhla_hf import BlockLayout
from mhla_hf.ops import empty_state, mhla_extend

from .reference import assert_same, make_inputs, output_and_gradients


LENGTHS = [1, 15, 16, 17, 63, 64, 65]


@pytest.mark.parametrize("normalizer", ["query", "none", "block_query"])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("blocks", [2, 8], ids=["longer-than-mixing", "mixing-to-spare"])
def test_chunked_matches_naive(length, normalizer, blocks):
    layout = BlockLayout((length,), block_size=(16,))
    inputs = make_inputs(layout, seed=length, per_head=length % 2 == 0, blocks=blocks)
    options = {"causal": True, "normalizer": normalizer}
    expected = output_and_gradients(inputs, layout, backend="naive", **options)
    assert_same(output_and_gradients(inputs, layout, **options), expected, 1e-10)


def test_decoding_keeps_float32_state_for_half_inputs():
    layout = BlockLayout((5,), block_size=(4,))
    inputs = {name: t.detach().bfloat16() for name, t in make_inputs(layout, rotated=False).items()}
    mixing = inputs.pop("mixing")
    output, state = mhla_extend(**inputs, mixing=mixing, state=empty_state(2, 3, 5, 4, 4, 2))
    assert output.dtype == torch.bfloat16
    assert state.current.dtype == state.prefix.dtype == state.summaries.dtype == torch.float32
