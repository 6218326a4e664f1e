# SPDX-License-Identifier: Apache-2.0
"""Statistics of attention matrices against formulas of their own, and the bound of the rank."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mhla_hf import MHLA, BlockLayout, MHLAConfig
from mhla_hf.analysis import (
    attention_statistics,
    effective_rank,
    layer_tokens,
    linear_matrix,
    mhla_matrix,
    numerical_rank,
    rank_bound,
    row_entropy,
    singular_values,
    top_share,
)
from mhla_hf.analysis.statistics import spread
from mhla_hf.layers.fused import PairwiseRotary


def with_singular_values(values: list[float], rows: int = 12, columns: int = 15) -> torch.Tensor:
    torch.manual_seed(0)
    left = torch.linalg.qr(torch.randn(rows, rows, dtype=torch.float64)).Q[:, : len(values)]
    right = torch.linalg.qr(torch.randn(columns, columns, dtype=torch.float64)).Q[:, : len(values)]
    return left * torch.tensor(values, dtype=torch.float64) @ right.T


@pytest.mark.parametrize("columns", (15, 60), ids=("decomposed", "from-products"))
def test_ranks_of_known_singular_values(columns):
    values = [4.0, 2.0, 1.0, 0.5, 2e-4]
    singular = singular_values(with_singular_values(values, columns=columns))
    torch.testing.assert_close(singular[:5], torch.tensor(values, dtype=torch.float64), atol=1e-9, rtol=0)
    assert [numerical_rank(singular, t).item() for t in (1e-5, 1e-4, 0.2, 0.6)] == [5, 4, 3, 1]
    shares = [value / sum(values) for value in values]
    expected = math.exp(-sum(share * math.log(share) for share in shares))
    assert effective_rank(singular).item() == pytest.approx(expected, rel=1e-5)


def test_extremes():
    for count in (1, 7, 32):
        identity = attention_statistics(torch.eye(count))
        assert identity["rank"] == count and identity["effective_rank"].item() == pytest.approx(count)
        assert identity["entropy"] == 0 and identity["top_share"] == 1
        uniform = attention_statistics(torch.full((count, count), 1 / count))
        assert uniform["rank"] == 1 and uniform["effective_rank"].item() == pytest.approx(1, abs=1e-5)
        assert uniform["entropy"].item() == pytest.approx(math.log(count), abs=1e-6)
        assert uniform["top_share"].item() == pytest.approx(math.ceil(0.1 * count) / count, abs=1e-6)
    assert attention_statistics(torch.eye(1))["relative_entropy"] == 1
    zeros = attention_statistics(torch.zeros(4, 4))
    assert all(math.isfinite(value) for value in zeros.values())
    assert zeros["rank"] == zeros["effective_rank"] == 0


def test_rows_by_hand():
    rows = torch.tensor([[0.5, 0.25, 0.25, 0.0], [0.0, -3.0, 1.0, 0.0]])
    expected = [1.5 * math.log(2), -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))]
    assert row_entropy(rows).tolist() == pytest.approx(expected)
    assert top_share(rows, 0.25).tolist() == pytest.approx([0.5, 0.75])
    assert top_share(rows, 0.26).tolist() == pytest.approx([0.75, 1.0])
    assert attention_statistics(rows)["negative_share"].item() == pytest.approx(3 / 5)


def test_rows_that_see_less():
    # Every row spreads evenly over what it sees: as even as can be.
    lower = torch.ones(6, 6).tril()
    lower = lower / lower.sum(-1, keepdim=True)
    visible = torch.arange(1, 7)
    found = attention_statistics(lower, visible=visible)
    assert found["relative_entropy"].item() == pytest.approx(1)
    assert found["top_share"].item() == pytest.approx(sum(1 / n for n in range(1, 7)) / 6)
    assert attention_statistics(lower)["relative_entropy"].item() < 0.9
    heads = attention_statistics(torch.stack([lower, lower.flip(0)]), visible=visible)
    assert all(value.shape == (2,) for value in heads.values())


@settings(max_examples=60, deadline=None)
@given(
    height=st.integers(1, 8),
    width=st.integers(1, 8),
    rows=st.integers(1, 4),
    columns=st.integers(1, 4),
    features=st.integers(1, 9),
    normalizer=st.sampled_from(("query", "none")),
    seed=st.integers(0, 2**16),
)
def test_rank_is_bounded(height, width, rows, columns, features, normalizer, seed):
    """rank ≤ min(N, Σ_b min(n_b, d)), and min(N, d) for one block."""
    layout = BlockLayout(grid=(height, width), blocks=(min(rows, height), min(columns, width)))
    torch.manual_seed(seed)
    query, key = (torch.rand(1, layout.num_tokens, 1, features, dtype=torch.float64) + 0.01 for _ in range(2))
    mixing = torch.randn(layout.num_blocks, layout.num_blocks, dtype=torch.float64)
    mixing = mixing.abs() if normalizer == "query" else mixing
    singular = singular_values(mhla_matrix(query, key, mixing, layout, normalizer=normalizer))[0, 0]
    bound = rank_bound(layout, features)
    counts = layout.block_of_token.bincount().tolist()
    assert bound == min(layout.num_tokens, sum(min(count, features) for count in counts))
    assert numerical_rank(singular, 1e-7) <= bound
    linear = singular_values(linear_matrix(query, key, normalizer=normalizer))[0, 0]
    one = BlockLayout(grid=layout.grid, blocks=(1, 1))
    assert numerical_rank(linear, 1e-7) <= rank_bound(one, features) == min(layout.num_tokens, features)


@settings(max_examples=40, deadline=None)
@given(
    grid=st.one_of(
        st.tuples(st.integers(5, 40)),
        st.tuples(st.integers(2, 7), st.integers(2, 7)),
        st.tuples(st.integers(2, 4), st.integers(2, 4), st.integers(2, 4)),
    ),
    counts=st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 3)),
    prefix=st.integers(0, 3),
    features=st.integers(1, 6),
    feature_map=st.sampled_from(("relu", "elu", "identity")),
    mixing_heads=st.sampled_from(("shared", "per_head")),
    rope=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_rank_of_layers_is_bounded(grid, counts, prefix, features, feature_map, mixing_heads, rope, seed):
    """Of real layers with ragged blocks, tokens before the grid, weights of both signs, and rotary embedding."""
    blocks = tuple(min(count, length) for count, length in zip(counts, grid))
    config = MHLAConfig(
        blocks=blocks, grid=grid, feature_map=feature_map, mixing_heads=mixing_heads, normalizer="none"
    )
    width = 2 * features
    layer = MHLA(config, hidden_size=8, num_heads=2, head_dim=width, num_prefix_tokens=prefix)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        layer.mixing.copy_(torch.randn(layer.mixing.shape, generator=generator))
    tokens = math.prod(grid) + prefix
    query, key, value = (torch.randn(1, tokens, 2, width, generator=generator) for _ in range(3))
    angles = torch.rand(1, tokens, 1, features, generator=generator)
    rotary = PairwiseRotary(angles.cos(), angles.sin()) if rope else None
    (sample,) = layer_tokens(layer, query, key, value, grid=grid, rotary=rotary)
    sizes = sample.layout.block_of_token.bincount().tolist()
    assert sum(sizes) == tokens and len(sizes) == sample.layout.num_blocks
    bound = min(tokens, sum(min(size, width) for size in sizes))
    assert rank_bound(sample.layout, sample.num_features) == bound
    ranks = numerical_rank(singular_values(sample.matrix("mhla")), 1e-7)
    assert ranks.shape == (2,) and (ranks <= bound).all()
    assert (numerical_rank(singular_values(sample.matrix("linear")), 1e-7) <= min(tokens, width)).all()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("grid", "blocks", "features"),
    [((48,), (4,), 3), ((47,), (5,), 4), ((7, 9), (2, 3), 5), ((3, 5, 4), (1, 2, 2), 6), ((6, 6), (6, 6), 8)],
)
def test_bound_is_reached_by_random_features(grid, blocks, features, seed):
    """On grids that the blocks do not divide, too; linear attention stays at d."""
    layout = BlockLayout(grid=grid, blocks=blocks)
    generator = torch.Generator().manual_seed(seed)
    shape = (1, layout.num_tokens, 2, features)
    query, key = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    mixing = torch.randn(2, layout.num_blocks, layout.num_blocks, generator=generator, dtype=torch.float64)
    matrix = mhla_matrix(query, key, mixing, layout, normalizer="none")[0]
    assert numerical_rank(singular_values(matrix), 1e-7).tolist() == [rank_bound(layout, features)] * 2
    linear = linear_matrix(query, key, normalizer="none")[0]
    assert numerical_rank(singular_values(linear), 1e-7).tolist() == [features] * 2


def test_bound_is_reached():
    """Blocks raise the rank above that of linear attention, up to the bound."""
    layout = BlockLayout(grid=(48,), blocks=(4,))
    torch.manual_seed(0)
    query, key = (torch.randn(1, 48, 1, 3, dtype=torch.float64).relu() + 0.1 for _ in range(2))
    mixing = torch.eye(4, dtype=torch.float64)
    ranks = [
        numerical_rank(singular_values(matrix), 1e-7).item()
        for matrix in (mhla_matrix(query, key, mixing, layout), linear_matrix(query, key))
    ]
    assert ranks == [rank_bound(layout, 3), 3] == [12, 3]


def test_spread():
    assert spread(torch.tensor([1.0, 3.0])) == {"mean": 2.0, "std": pytest.approx(math.sqrt(2))}
    assert spread(torch.tensor(4.0)) == {"mean": 4.0, "std": 0.0}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: attention_statistics(torch.ones(4)), "matrix must be a tensor"),
        (lambda: attention_statistics(torch.full((2, 2), float("nan"))), "not finite"),
        (lambda: attention_statistics(torch.ones(2, 2), tolerance=0.0), "tolerance=0.0 must be from 1e-07"),
        (lambda: attention_statistics(torch.ones(2, 2), share=2), "share=2 must be above 0 and at most 1"),
        (lambda: attention_statistics(torch.ones(2, 2), visible=torch.ones(3)), r"visible has shape \(3,\)"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
