# SPDX-License-Identifier: Apache-2.0
"""Summaries of mixing weights: movement from the start, and how weights fall off with distance."""

from __future__ import annotations

import math

import pytest
import torch

from mhla_hf import MHLA, BlockLayout, MHLAConfig
from mhla_hf.analysis import distance_decay, mean_distance, mixing_summary, reference_layout, relative_distance
from mhla_hf.layers import initial_mixing


CONFIGS = {
    "sequence": MHLAConfig(block_size=(8,), grid=(64,), causal=True),
    "nonnegative": MHLAConfig(blocks=(3, 4), mixing_constraint="nonnegative", mixing_heads="per_head"),
    "video": MHLAConfig(grid=(4, 6, 6), blocks=(2, 3, 3), mixing_init="cos"),
    "block-size": MHLAConfig(grid=(7, 9), block_size=(2, 4)),
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
    layout = BlockLayout(grid=(6, 6), blocks=(3, 3), num_prefix_tokens=1)
    torch.manual_seed(0)
    mixing = torch.randn(2, 10, 10, dtype=torch.float64)
    decay = distance_decay(mixing, layout)
    by_distance: dict[int, list[float]] = {}
    for i in range(9):
        for j in range(9):
            step = round(math.hypot(i // 3 - j // 3, i % 3 - j % 3))
            by_distance.setdefault(step, []).extend(mixing[:, i + 1, j + 1].tolist())
    assert decay.distance == sorted(by_distance) == [0, 1, 2, 3]
    for step, mean, std, pairs in zip(decay.distance, decay.mean, decay.std, decay.pairs):
        values = torch.tensor(by_distance[step], dtype=torch.float64)
        assert pairs * 2 == len(values)
        assert (mean, std) == pytest.approx((values.mean().item(), values.std(correction=0).item()))


def test_decay_looks_back_only():
    layout = BlockLayout(grid=(12,), block_size=(4,))
    weights = torch.tensor([[1.0, 9.0, 9.0], [0.25, 0.75, 9.0], [0.0, 0.5, 0.5]])
    decay = distance_decay(weights, layout, causal=True)
    assert (decay.distance, decay.mean, decay.pairs) == ([0, 1, 2], [0.75, 0.375, 0.0], [3, 2, 1])
    assert mean_distance(weights.tril(), layout) == pytest.approx((0.25 + 0.5) / 3)
    assert math.isnan(mean_distance(torch.zeros(3, 3), layout))


@pytest.mark.parametrize(("name", "prefix"), [*((name, 0) for name in CONFIGS), ("video", 1), ("nonnegative", 2)])
def test_reference_layout_is_that_of_the_weights(name, prefix):
    module = layer(name, prefix)
    layout = reference_layout(module)
    assert layout.num_blocks == module.mixing.shape[-1]
    if CONFIGS[name].grid is not None:
        assert layout.grid == CONFIGS[name].grid


def test_relative_distance_of_nothing():
    zero = torch.zeros(2, 2)
    assert relative_distance(zero, zero) == 0 and relative_distance(torch.eye(2), zero) == math.inf


def test_errors():
    module = layer("video")
    with torch.no_grad():
        module.mixing[1, 2] = float("nan")
    with pytest.raises(ValueError, match="not finite"):
        mixing_summary(module)
    with pytest.raises(ValueError, match="mixing has shape"):
        distance_decay(torch.eye(3), BlockLayout(grid=(4,), blocks=(4,)))
