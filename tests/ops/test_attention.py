# SPDX-License-Identifier: Apache-2.0
"""The block-parallel form against the dense definition: outputs, every gradient, and what must hold in any form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mhla_hf import BlockLayout, mhla_attention
from mhla_hf.ops import forms

from .reference import assert_same, make_inputs, output_and_gradients


RAGGED = [
    pytest.param(BlockLayout((1,), blocks=(1,)), id="T1"),
    pytest.param(BlockLayout((63,), blocks=(8,)), id="T63"),
    pytest.param(BlockLayout((64,), blocks=(8,)), id="T64"),
    pytest.param(BlockLayout((65,), block_size=(8,)), id="T65-by-size"),
    pytest.param(BlockLayout((7, 11), blocks=(4, 4)), id="7x11-over-4x4"),
    pytest.param(BlockLayout((6, 10), block_size=(4, 3)), id="6x10-by-4x3"),
    pytest.param(BlockLayout((3, 5, 7), blocks=(2, 3, 2)), id="3x5x7-over-2x3x2"),
    pytest.param(BlockLayout((2, 4, 6), blocks=(1, 2, 3)), id="even-3d"),
]


@pytest.mark.parametrize("normalizer", ["query", "none"])
@pytest.mark.parametrize("layout", RAGGED)
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("pairs", [False, True], ids=["summaries", "pairs"])
def test_matches_naive_in_float64(layout, normalizer, seed, pairs, monkeypatch):
    monkeypatch.setattr(forms, "_pairs_cost_less", lambda *_: pairs)
    inputs = make_inputs(layout, seed=seed, per_head=bool(seed), rotated=bool(seed))
    expected = output_and_gradients(inputs, layout, normalizer=normalizer, backend="naive")
    assert_same(output_and_gradients(inputs, layout, normalizer=normalizer), expected, 1e-10)


@pytest.mark.parametrize("normalizer", ["query", "none"])
@pytest.mark.parametrize("layout", RAGGED)
@pytest.mark.parametrize("seed", [0, 1])
def test_heads_that_are_computed_apart_match_naive_in_float64(layout, normalizer, seed, monkeypatch):
    monkeypatch.setattr(forms, "_MIN_HEAD", 1)
    inputs = make_inputs(layout, seed=seed, per_head=bool(seed), rotated=bool(seed))
    expected = output_and_gradients(inputs, layout, normalizer=normalizer, backend="naive")
    assert_same(output_and_gradients(inputs, layout, normalizer=normalizer), expected, 1e-10)


@pytest.mark.parametrize("normalizer", ["query", "none"])
@pytest.mark.parametrize(
    "layout", [*RAGGED, pytest.param(BlockLayout((7, 4), blocks=(3, 2), num_prefix_tokens=5), id="prefix")]
)
@pytest.mark.parametrize("backend", ["torch", "naive"])
@pytest.mark.parametrize("apart", [False, True], ids=["together", "apart"])
def test_tokens_in_block_order_match_those_in_row_major_order(layout, normalizer, backend, apart, monkeypatch):
    monkeypatch.setattr(forms, "_MIN_HEAD", 1 if apart else 2**40)
    inputs = make_inputs(layout, per_head=apart)
    expected = output_and_gradients(inputs, layout, normalizer=normalizer, backend="naive")
    actual = output_and_gradients(inputs, layout, in_block_order, normalizer=normalizer, backend=backend)
    assert_same(actual, expected, 1e-10)


def test_block_query_takes_block_order():
    layout = BlockLayout((4, 6), blocks=(2, 3))
    inputs, options = make_inputs(layout), {"normalizer": "block_query"}
    expected = output_and_gradients(inputs, layout, backend="naive", **options)
    for backend in ("torch", "naive"):
        assert_same(output_and_gradients(inputs, layout, in_block_order, backend=backend, **options), expected, 1e-10)


def in_block_order(mixing: torch.Tensor, layout: BlockLayout, **options: Any) -> torch.Tensor:
    """The operator over tokens that are put in block order before it, and back after it."""
    blocks = layout.blocks if layout._sizes is None else None
    ordered = BlockLayout(layout.grid, blocks, layout._sizes, layout.num_prefix_tokens, block_order=True)
    moved = {name: layout.to_block_order(x) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    return layout.from_block_order(mhla_attention(mixing=mixing, layout=ordered, **moved))


@pytest.mark.parametrize("layout", RAGGED)
@pytest.mark.parametrize("per_head", [False, True])
def test_matches_naive_in_float32(layout, per_head):
    double = make_inputs(layout, per_head=per_head, rotated=False)
    single = {name: tensor.detach().float().requires_grad_() for name, tensor in double.items()}
    expected = output_and_gradients(double, layout, backend="naive")
    assert_same(output_and_gradients(single, layout), expected, 1e-5)


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("grid, blocks", [((4, 6), (2, 3)), ((64,), (4,)), ((2, 4, 6), (2, 2, 3))])
def test_block_query_matches_naive(grid, blocks, per_head, rotated):
    layout = BlockLayout(grid, blocks=blocks)
    inputs = make_inputs(layout, per_head=per_head, rotated=rotated)
    expected = output_and_gradients(inputs, layout, normalizer="block_query", backend="naive")
    assert_same(output_and_gradients(inputs, layout, normalizer="block_query"), expected, 1e-10)


@pytest.mark.slow
def test_the_wan_grid_that_its_blocks_do_not_divide():
    layout = BlockLayout((3, 30, 52), blocks=(3, 5, 10))
    inputs = {name: tensor[:1] for name, tensor in make_inputs(layout, dtype=torch.float32, rotated=False).items()}
    inputs["mixing"] = make_inputs(layout, dtype=torch.float32)["mixing"]
    expected = output_and_gradients(inputs, layout, backend="naive")
    assert_same(output_and_gradients(inputs, layout), expected, 1e-5)


@settings(max_examples=40, deadline=None)
@given(
    axes=st.lists(st.tuples(st.integers(1, 7), st.integers(1, 7)), min_size=1, max_size=3),
    by_size=st.booleans(),
    normalizer=st.sampled_from(["query", "none"]),
    seed=st.integers(0, 1000),
)
def test_random_grids_match_naive(axes, by_size, normalizer, seed):
    grid = [max(axis) for axis in axes]
    tiles = [min(axis) for axis in axes]
    layout = BlockLayout(grid, block_size=tiles) if by_size else BlockLayout(grid, blocks=tiles)
    inputs = make_inputs(layout, seed=seed)
    expected = output_and_gradients(inputs, layout, normalizer=normalizer, backend="naive")
    assert_same(output_and_gradients(inputs, layout, normalizer=normalizer), expected, 1e-10)


@pytest.mark.parametrize(
    "layout, options",
    [
        (BlockLayout((2, 3), blocks=(1, 2)), {"normalizer": "query"}),
        (BlockLayout((2, 3), blocks=(1, 2)), {"normalizer": "none"}),
        (BlockLayout((2, 4), blocks=(1, 2)), {"normalizer": "block_query"}),
        (BlockLayout((5,), block_size=(2,)), {"causal": True}),
    ],
    ids=str,
)
def test_gradcheck(layout, options):
    inputs = {name: tensor[:1] if name != "mixing" else tensor for name, tensor in make_inputs(layout).items()}

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        return mhla_attention(**dict(zip(inputs, tensors)), layout=layout, **options)

    assert torch.autograd.gradcheck(attend, tuple(inputs.values()))


@pytest.mark.parametrize(
    "layout, causal", [(BlockLayout((7,), blocks=(3,)), False), (BlockLayout((7,), block_size=(3,)), True)], ids=str
)
def test_gradients_are_finite_without_eps_on_ragged_blocks(layout, causal):
    inputs, options = make_inputs(layout), {"eps": 0.0, "causal": causal}
    gradients = output_and_gradients(inputs, layout, **options)
    assert all(tensor.isfinite().all() for tensor in gradients.values())
    assert_same(gradients, output_and_gradients(inputs, layout, **options, backend="naive"), 1e-10)


def test_one_block_is_vanilla_linear_attention():
    layout = BlockLayout((5, 7), blocks=(1, 1))
    inputs = make_inputs(layout, rotated=False)
    inputs["mixing"] = torch.ones(1, 1, dtype=torch.float64)
    summary = torch.einsum("bthk,bthv->bhkv", inputs["key"], inputs["value"])
    denominator = torch.einsum("bthk,bhk->bth", inputs["query"], inputs["key"].sum(1))
    expected = torch.einsum("bthk,bhkv->bthv", inputs["query"], summary) / (denominator[..., None] + 1e-6)
    torch.testing.assert_close(mhla_attention(**inputs, layout=layout), expected, rtol=1e-12, atol=1e-12)


def test_equal_weights_are_vanilla_linear_attention_too():
    layout, whole = BlockLayout((7, 11), blocks=(3, 4)), BlockLayout((7, 11), blocks=(1, 1))
    inputs = make_inputs(layout, rotated=False)
    inputs["mixing"] = torch.full((12, 12), 1 / 12, dtype=torch.float64)
    one = {**inputs, "mixing": torch.ones(1, 1, dtype=torch.float64)}
    actual = mhla_attention(**inputs, layout=layout, eps=0.0)
    torch.testing.assert_close(actual, mhla_attention(**one, layout=whole, eps=0.0), rtol=1e-12, atol=1e-12)


CAUSAL = pytest.param(BlockLayout((40,), block_size=(16,)), True, id="causal")


@pytest.mark.parametrize("layout, causal", [CAUSAL, *(pytest.param(*x.values, False, id=x.id) for x in RAGGED[1:])])
def test_constant_values_come_out_constant(layout, causal):
    inputs = make_inputs(layout, rotated=False)
    inputs["value"] = torch.full_like(inputs["value"], 3.0)
    output = mhla_attention(**inputs, layout=layout, causal=causal, eps=0.0)
    torch.testing.assert_close(output, torch.full_like(output, 3.0), rtol=1e-12, atol=0)


def test_constant_values_do_not_under_block_query():
    layout = BlockLayout((8,), blocks=(2,))
    inputs = make_inputs(layout, rotated=False)
    inputs["value"] = torch.full_like(inputs["value"], 3.0)
    output = mhla_attention(**inputs, layout=layout, normalizer="block_query")
    assert (output - 3.0).abs().max() > 0.1


@pytest.mark.parametrize("normalizer", ["query", "block_query"])
def test_half_precision_stays_finite_at_31500_tokens(normalizer):
    layout = BlockLayout((21, 30, 50), blocks=(3, 5, 10))
    generator = torch.Generator().manual_seed(0)
    # Block summaries reach 210 · 16 · 16, far beyond what fp16 holds once they are summed over 150 blocks.
    query, key = (torch.rand(1, 31500, 1, 8, generator=generator).mul(16).half() for _ in range(2))
    value = torch.rand(1, 31500, 1, 8, generator=generator).mul(16).half()
    mixing = torch.full((150, 150), 1.0)
    output = mhla_attention(query, key, value, mixing, layout, normalizer=normalizer)
    assert output.dtype == torch.float16
    assert output.isfinite().all()
    expected = mhla_attention(
        query.double(), key.double(), value.double(), mixing.double(), layout, normalizer=normalizer
    )
    assert ((output.double() - expected).norm() / expected.norm()).item() < 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_loses_only_the_rounding_of_its_output(dtype):
    layout = BlockLayout((7, 11), blocks=(4, 4))
    inputs = {name: tensor.detach().to(dtype) for name, tensor in make_inputs(layout, rotated=False).items()}
    expected = mhla_attention(**{name: t.double() for name, t in inputs.items()}, layout=layout, backend="naive")
    output = mhla_attention(**inputs, layout=layout)
    assert output.dtype == dtype
    error = (output.double() - expected).norm() / expected.norm()
    assert error.item() <= torch.finfo(dtype).eps


def test_autocast_does_not_reach_the_products():
    layout = BlockLayout((63,), blocks=(8,))
    inputs = make_inputs(layout, dtype=torch.float32, rotated=False)
    expected = mhla_attention(**inputs, layout=layout)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = mhla_attention(**inputs, layout=layout)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("layout", [BlockLayout((64,), blocks=(8,)), BlockLayout((7, 11), blocks=(4, 4))], ids=str)
def test_a_bad_query_spoils_its_own_row_only(layout, bad):
    inputs = {name: tensor.detach() for name, tensor in make_inputs(layout, rotated=False).items()}
    clean = mhla_attention(**inputs, layout=layout)
    inputs["query"] = inputs["query"].clone()
    inputs["query"][0, 17, 1, 2] = bad
    output = mhla_attention(**inputs, layout=layout)
    others = torch.ones(output.shape[:3], dtype=torch.bool)
    others[0, 17, 1] = False
    assert not output[0, 17, 1].isfinite().any()
    assert torch.equal(output[others], clean[others])


def test_a_bad_key_stays_in_its_own_sample_and_head():
    layout = BlockLayout((7, 11), blocks=(4, 4))
    inputs = {name: tensor.detach() for name, tensor in make_inputs(layout, rotated=False).items()}
    clean = mhla_attention(**inputs, layout=layout)
    inputs["key"] = inputs["key"].clone()
    inputs["key"][1, 3, 2] = float("nan")
    output = mhla_attention(**inputs, layout=layout)
    others = torch.ones(output.shape[:3], dtype=torch.bool)
    others[1, :, 2] = False
    assert torch.equal(output[others], clean[others])


def _arguments(**changes: object) -> dict[str, object]:
    layout = BlockLayout((4, 6), blocks=(2, 3))
    tensors = {name: tensor.detach() for name, tensor in make_inputs(layout, rotated=False).items()}
    return {**tensors, "layout": layout, **changes}


@pytest.mark.parametrize(
    "name, changes",
    [
        ("eps", {"eps": -1.0}),
        ("query", {"query": torch.rand(2, 24, 5)}),
        ("query", {"layout": BlockLayout((5, 6), blocks=(2, 3))}),
        ("query", {"query": torch.ones(2, 24, 3, 5, dtype=torch.long)}),
        ("value", {"value": torch.rand(2, 24, 2, 4)}),
        ("value", {"value": torch.rand(2, 24, 3, 4, device="meta")}),
        ("normalizer_key", {"normalizer_key": torch.rand(1, 24, 3, 5)}),
        ("eps", {"eps": "small"}),
        ("query", {"query": None}),
        ("key", {"key": [1.0]}),
        ("mixing", {"mixing": None}),
        ("mixing", {"mixing": torch.rand(6, 6, device="meta")}),
        ("mixing", {"mixing": torch.rand(6)}),
        ("mixing", {"mixing": torch.rand(5, 5)}),
        ("mixing", {"mixing": torch.rand(2, 6, 6)}),
        ("causal", {"causal": True}),
        ("block_size", {"causal": True, "layout": BlockLayout((4, 6), block_size=(2, 3))}),
        ("block_size", {"causal": True, "layout": BlockLayout((24,), blocks=(7,)), "mixing": torch.rand(7, 7)}),
        ("block_query", {"layout": BlockLayout((4, 6), blocks=(3, 2)), "normalizer": "block_query"}),
    ],
)
@pytest.mark.parametrize("backend", ["torch", "naive"])
def test_bad_arguments_are_named(name, changes, backend):
    with pytest.raises(ValueError, match=name):
        mhla_attention(**_arguments(**{"backend": backend, **changes}))
