# SPDX-License-Identifier: Apache-2.0
"""The causal chunked form against the dense one, and decoding against the chunked form at every position."""

from __future__ import annotations

import pytest
import torch

from mhla_hf import BlockLayout, mhla_attention
from mhla_hf.ops import (
    empty_state,
    extend_mixing,
    mhla_extend,
    mhla_step,
)

from .reference import assert_same, make_inputs, output_and_gradients


LENGTHS = [1, 15, 16, 17, 63, 64, 65]


@pytest.mark.parametrize("normalizer", ["query", "none"])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("blocks", [2, 8], ids=["longer-than-mixing", "mixing-to-spare"])
def test_chunked_matches_naive(length, normalizer, blocks):
    layout = BlockLayout((length,), block_size=(16,))
    inputs = make_inputs(layout, seed=length, per_head=length % 2 == 0, blocks=blocks)
    options = {"causal": True, "normalizer": normalizer}
    expected = output_and_gradients(inputs, layout, backend="naive", **options)
    assert_same(output_and_gradients(inputs, layout, **options), expected, 1e-10)


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("length", [7, 48, 57])
def test_block_query_matches_naive(length, per_head):
    layout = BlockLayout((length,), block_size=(16,))
    inputs = make_inputs(layout, per_head=per_head)
    options = {"causal": True, "normalizer": "block_query"}
    expected = output_and_gradients(inputs, layout, backend="naive", **options)
    assert_same(output_and_gradients(inputs, layout, **options), expected, 1e-10)


def test_gradcheck():
    layout = BlockLayout((5,), block_size=(2,))
    inputs = {name: tensor[:1] if name != "mixing" else tensor for name, tensor in make_inputs(layout).items()}

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        return mhla_attention(**dict(zip(inputs, tensors)), layout=layout, causal=True)

    assert torch.autograd.gradcheck(attend, tuple(inputs.values()))


def test_a_token_does_not_see_later_ones():
    layout = BlockLayout((40,), block_size=(16,))
    inputs = {name: tensor.detach() for name, tensor in make_inputs(layout).items()}
    before = mhla_attention(**inputs, layout=layout, causal=True)
    for name in ("key", "value", "normalizer_key"):
        inputs[name] = inputs[name].clone()
        inputs[name][:, 21:] += 1
    after = mhla_attention(**inputs, layout=layout, causal=True)
    torch.testing.assert_close(after[:, :21], before[:, :21], rtol=1e-13, atol=1e-13)
    assert (after[:, 21:] - before[:, 21:]).abs().amin(dim=(0, 2, 3)).gt(0).all()


def test_constant_values_come_out_constant():
    layout = BlockLayout((40,), block_size=(16,))
    inputs = make_inputs(layout, rotated=False)
    inputs["value"] = torch.full_like(inputs["value"], -2.0)
    output = mhla_attention(**inputs, layout=layout, causal=True, eps=0.0)
    torch.testing.assert_close(output, torch.full_like(output, -2.0), rtol=1e-12, atol=0)


def test_rows_past_the_end_take_the_last_rows_weights_by_distance():
    mixing = torch.arange(1.0, 10.0).reshape(3, 3)
    expected = torch.tensor(
        [
            [1.0, 0.0, 0.0, 0.0, 0.0],
            [4.0, 5.0, 0.0, 0.0, 0.0],
            [7.0, 8.0, 9.0, 0.0, 0.0],
            [7.0, 7.0, 8.0, 9.0, 0.0],
            [7.0, 7.0, 7.0, 8.0, 9.0],
        ]
    )
    assert torch.equal(extend_mixing(mixing, 5, causal=True), expected)
    assert torch.equal(extend_mixing(mixing, 2, causal=True), expected[:2, :2])
    assert torch.equal(extend_mixing(mixing.expand(4, 3, 3), 5, causal=True), expected.expand(4, 5, 5))


def test_decoding_keeps_float32_state_for_half_inputs():
    layout = BlockLayout((5,), block_size=(4,))
    inputs = {name: t.detach().bfloat16() for name, t in make_inputs(layout, rotated=False).items()}
    mixing = inputs.pop("mixing")
    output, state = mhla_extend(**inputs, mixing=mixing, state=empty_state(2, 3, 5, 4, 4, 2))
    assert output.dtype == torch.bfloat16
    assert state.current.dtype == state.prefix.dtype == state.summaries.dtype == torch.float32


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["key", "value", "normalizer_key"])
def test_a_bad_token_spoils_its_head_from_there_on(name, bad):
    layout = BlockLayout((14,), block_size=(4,))
    inputs = {key: tensor.detach() for key, tensor in make_inputs(layout).items()}
    clean = mhla_attention(**inputs, layout=layout, causal=True)
    inputs[name] = inputs[name].clone()
    inputs[name][0, 9, 1, 2] = bad
    output = mhla_attention(**inputs, layout=layout, causal=True)
    spoiled = torch.zeros(output.shape[:3], dtype=torch.bool)
    spoiled[0, 9:, 1] = True
    assert not output[spoiled].isfinite().any()
    assert torch.equal(output[~spoiled], clean[~spoiled])


def test_gradients_are_finite_without_eps_in_a_last_chunk_that_is_not_full():
    layout = BlockLayout((7,), block_size=(3,))
    gradients = output_and_gradients(make_inputs(layout), layout, causal=True, eps=0.0)
    assert all(tensor.isfinite().all() for tensor in gradients.values())


def test_what_cannot_be_decoded_is_refused():
    layout = BlockLayout((4,), block_size=(4,))
    inputs = {name: t.detach() for name, t in make_inputs(layout, rotated=False).items()}
    mixing = inputs.pop("mixing")
    state = empty_state(2, 3, 5, 4, 4, 1, dtype=torch.float64)
    with pytest.raises(ValueError, match="block_query"):
        mhla_extend(**inputs, mixing=mixing, state=state, normalizer="block_query")
    with pytest.raises(ValueError, match="query has no tokens"):
        mhla_extend(**{name: t[:, :0] for name, t in inputs.items()}, mixing=mixing, state=state)
    with pytest.raises(ValueError, match="block_size=0"):
        empty_state(2, 3, 5, 4, 0, 1)
    with pytest.raises(ValueError, match="one token"):
        mhla_step(**inputs, mixing=mixing, state=state)


@pytest.mark.parametrize("layout", [BlockLayout((4, 4), block_size=(2, 2)), BlockLayout((7,), blocks=(3,))], ids=str)
def test_layouts_whose_boundaries_would_move_are_refused(layout):
    inputs = make_inputs(layout, rotated=False)
    with pytest.raises(ValueError, match="block_size"):
        mhla_attention(**inputs, layout=layout, causal=True)
