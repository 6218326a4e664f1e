# SPDX-License-Identifier: Apache-2.0
"""Initial mixing weights and the nonnegative parametrisation."""

from __future__ import annotations

import math

import pytest
import torch

from mhla_hf import MHLAConfig
from mhla_hf.config import MIXING_INITS
from mhla_hf.layers import effective_mixing, initial_mixing, mixing_parameter_value


@pytest.mark.parametrize("kind", MIXING_INITS)
@pytest.mark.parametrize("blocks", [(1,), (4,), (2, 3), (3, 5, 10)], ids=str)
@pytest.mark.parametrize("reach", [None, 2.0])
def test_rows_sum_to_one_and_the_own_block_leads(kind, blocks, reach):
    mixing = initial_mixing(MHLAConfig(mixing_init=kind, mixing_range=reach), blocks)
    count = math.prod(blocks)
    assert mixing.shape == (count, count)
    torch.testing.assert_close(mixing.sum(1), torch.ones(count))
    assert mixing.min() >= 0
    assert (mixing.diagonal() >= mixing.amax(1) - 1e-7).all()


def test_the_papers_locality_bias():
    mixing = initial_mixing(MHLAConfig(), (4,))
    # Distances of row 1 are 1, 0, 1, 2 and its farthest is 2; of row 0 they are 0, 1, 2, 3.
    torch.testing.assert_close(mixing[1], torch.tensor([0.5, 1.0, 0.5, 0.0]) / 2)
    torch.testing.assert_close(mixing[0], torch.tensor([1.0, 2 / 3, 1 / 3, 0.0]) / 2)


def test_a_range_lets_the_bias_bottom_out():
    mixing = initial_mixing(MHLAConfig(mixing_range=2.0), (6,))
    torch.testing.assert_close(mixing[0] / mixing[0, 0], torch.tensor([1.0, 0.5, 0.01, 0.01, 0.01, 0.01]))


def test_uniform_and_local():
    assert torch.equal(initial_mixing(MHLAConfig(mixing_init="uniform"), (2, 2)), torch.full((4, 4), 0.25))
    assert torch.equal(initial_mixing(MHLAConfig(mixing_init="local"), (2, 2)), torch.full((4, 4), 0.25))
    local = initial_mixing(MHLAConfig(mixing_init="local"), (4,))
    torch.testing.assert_close(local[0], torch.tensor([0.5, 0.5, 0.0, 0.0]))


@pytest.mark.parametrize("kind", MIXING_INITS)
def test_causal_rows_look_back_only(kind):
    mixing = initial_mixing(MHLAConfig(mixing_init=kind, causal=True, block_size=4), (5,))
    assert torch.equal(mixing, mixing.tril())
    torch.testing.assert_close(mixing.sum(1), torch.ones(5))
    if kind == "uniform":
        torch.testing.assert_close(mixing[3], torch.tensor([0.25, 0.25, 0.25, 0.25, 0.0]))


@pytest.mark.parametrize("blocks", [(1,), (4,), (3, 5, 10)], ids=str)
def test_nonnegative_weights_start_the_same_and_none_is_dead(blocks):
    config = MHLAConfig(mixing_constraint="nonnegative")
    weights = initial_mixing(config, blocks)
    count = weights.shape[0]
    parameter = mixing_parameter_value(config, weights).requires_grad_()
    effective = effective_mixing(config, parameter)
    torch.testing.assert_close(effective, weights.clamp(min=0.01 / count), rtol=1e-4, atol=1e-5 / count)
    effective.sum().backward()
    # The farthest pair starts at zero in the paper's bias and must learn as well.
    assert parameter.grad.min() > 0.09
    far_below = effective_mixing(config, torch.full((2, 2), -1.0))
    assert (far_below >= 0).all()


@pytest.mark.parametrize(
    "options, blocks",
    [
        ({"causal": True, "block_size": 4, "mixing_init": "uniform"}, (200,)),
        ({"mixing_init": "local", "mixing_range": 0.5}, (3, 5, 10)),
    ],
)
def test_nonnegative_weights_far_above_the_mean_stay_finite(options, blocks):
    config = MHLAConfig(mixing_constraint="nonnegative", **options)
    weights = initial_mixing(config, blocks)
    effective = effective_mixing(config, mixing_parameter_value(config, weights))
    torch.testing.assert_close(effective, weights.clamp(min=0.01 / weights.shape[0]), rtol=1e-4, atol=1e-6)


def test_without_a_constraint_the_parameter_is_the_matrix():
    config, weights = MHLAConfig(), torch.randn(3, 3)
    assert mixing_parameter_value(config, weights) is weights
    assert effective_mixing(config, weights) is weights
