# SPDX-License-Identifier: Apache-2.0
"""Statistics of attention matrices and mixing weights against separate formulas, and the bound of the rank."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mhla_hf import MHLA, MHLAConfig
from mhla_hf.analysis import (
    attention_statistics,
    effective_rank,
    layer_tokens,
    mixing_summary,
    numerical_rank,
    rank_bound,
    singular_values,
)
from mhla_hf.layers import initial_mixing
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
    found = attention_statistics(rows)
    entropy = [1.5 * math.log(2), -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))]
    assert found["entropy"].item() == pytest.approx(sum(entropy) / 2)
    # A tenth of four tokens is one.
    assert found["top_share"].item() == pytest.approx((0.5 + 0.75) / 2)


@settings(max_examples=30, deadline=None)
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


CONFIGS = {
    "sequence": MHLAConfig(block_size=(8,), grid=(64,), causal=True),
    "nonnegative": MHLAConfig(blocks=(3, 4), mixing_constraint="nonnegative", mixing_heads="per_head"),
    "video": MHLAConfig(grid=(4, 6, 6), blocks=(2, 3, 3), mixing_init="cos"),
    "block-size": MHLAConfig(grid=(7, 9), block_size=(2, 4)),
    "image": MHLAConfig(grid=(6, 6), blocks=(3, 3)),
    "short": MHLAConfig(block_size=(4,), grid=(12,), causal=True),
}


def layer(name: str, prefix: int = 0) -> MHLA:
    return MHLA(CONFIGS[name], hidden_size=8, num_heads=2, head_dim=4, num_prefix_tokens=prefix)


@pytest.mark.parametrize("name", CONFIGS)
def test_fresh_weights_have_not_moved(name):
    module = layer(name)
    summary = mixing_summary(module)
    assert summary.movement == pytest.approx([0.0] * (2 if CONFIGS[name].mixing_heads == "per_head" else 1), abs=1e-6)
    torch.testing.assert_close(summary.mean_matrix, summary.initial)
    assert summary.row_sum == pytest.approx(1, abs=0.05) and summary.negative_share == 0
    assert summary.decay == summary.initial_decay
    assert summary.layout.num_blocks == math.prod(module.blocks)


def test_movement_is_of_effective_weights():
    module = layer("sequence")
    with torch.no_grad():
        # What a causal layer never reads does not count.
        module.mixing.copy_(2 * module.mixing.tril() + torch.ones(8, 8).triu(1))
        module.mixing[0, 0] = -2.0
    summary = mixing_summary(module)
    start = initial_mixing(CONFIGS["sequence"], (8,))
    changed = 2 * start.tril()
    changed[0, 0] = -2.0
    assert summary.movement == pytest.approx([((changed - start).norm() / start.norm()).item()], rel=1e-5)
    assert summary.negative_share == pytest.approx(1 / 36)
    # Rows that were only scaled have the pattern that they had; the first one has turned around.
    assert summary.pattern_movement == pytest.approx([2 / start.norm().item()], rel=1e-5)
    assert summary.decay.mean[1:] == pytest.approx(summary.initial_decay.mean[1:])
    assert not summary.matrix.triu(1).any()


def test_decay_is_a_mean_by_distance():
    module = layer("image", prefix=1)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        module.mixing.copy_(torch.rand(module.mixing.shape, generator=generator))
    summary = mixing_summary(module)
    pattern = module.mixing.detach().double() / module.mixing.detach().double().sum(-1, keepdim=True)
    by_distance: dict[int, list[float]] = {}
    for i in range(9):
        for j in range(9):
            step = round(math.hypot(i // 3 - j // 3, i % 3 - j % 3))
            by_distance.setdefault(step, []).extend(pattern[..., i + 1, j + 1].flatten().tolist())
    assert summary.decay.distance == sorted(by_distance) == [0, 1, 2, 3]
    assert summary.decay.mean == pytest.approx([sum(v) / len(v) for _, v in sorted(by_distance.items())])
