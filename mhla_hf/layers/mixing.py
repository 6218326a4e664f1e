# SPDX-License-Identifier: Apache-2.0
"""Mixing weights: how they start, and how they are stored under a constraint.

Distances are between block centres on the block grid, in blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from ..config import MHLAConfig
from ..layouts.blocks import block_centers, check_count


# Under a finite `mixing_range` the bias bottoms out here instead of at 0, relative to the block's own weight.
RANGE_FLOOR = 0.01
# Blocks within reach under `local` (the own one and its neighbours, diagonal ones too) and of `exp`'s decay.
LOCAL_RANGE = 1.5
EXPONENTIAL_RANGE = 9.0
# Smallest stored weight under the nonnegative constraint, relative to the equal weight 1/M.
NONNEGATIVE_FLOOR = 0.01
# Steepness of the softplus in units of 1/M: weights of 1/M then learn as fast as unconstrained ones, and the floor
# still receives a tenth of the gradient.
NONNEGATIVE_SHARPNESS = 10.0


def initial_mixing(config: MHLAConfig, blocks: Sequence[int], num_prefix_blocks: int = 0) -> torch.Tensor:
    """Initial mixing weights; rows sum to one.

    `linear` is the paper's locality bias m_ij ∝ 1 - d_ij / max_k d_ik (section 3). The others have the shapes of
    the authors' code, over a range r that is the row's farthest distance or `mixing_range`: `cos` cos(π d / 4r),
    `gaussian` exp(-(3 d / r)² / 2), `exp` exp(-3 d / r) with r = 9 blocks unless `mixing_range` is given, `local`
    1 for d ≤ 1.5 (or `mixing_range`) and 0 beyond, `uniform` 1.

    Args:
        config: Gives `mixing_init`, `mixing_range` and `causal`. For causal layouts only the lower triangle is kept
            before rows are normalised: `uniform` becomes 1 / (i + 1).
        blocks: Number of blocks along each axis.
        num_prefix_blocks: 1 to add a block of tokens before the grid as the first one. It is equally far from every
            block: it gets the mean of a row's other weights, and gives equal weights itself.

    Returns:
        float32 `[M, M]`.
    """
    check_count("num_prefix_blocks", num_prefix_blocks, minimum=0)
    centers = block_centers(blocks).double()
    distance = (centers[:, None] - centers[None, :]).square().sum(-1).sqrt()
    if config.causal:
        distance = distance.tril()
    weights = _locality(config, distance)
    if config.causal:
        weights = weights.tril()
    if num_prefix_blocks:
        weights = torch.cat([weights.mean(dim=1, keepdim=True), weights], dim=1)
        weights = torch.cat([torch.ones_like(weights[:1]), weights])
    return (weights / weights.sum(dim=1, keepdim=True)).float()


def _locality(config: MHLAConfig, distance: torch.Tensor) -> torch.Tensor:
    if config.mixing_init == "uniform":
        return torch.ones_like(distance)
    if config.mixing_init == "local":
        return (distance <= (config.mixing_range or LOCAL_RANGE)).double()
    if config.mixing_range is not None:
        reach = torch.full_like(distance[:, :1], config.mixing_range)
    elif config.mixing_init == "exp":
        reach = torch.full_like(distance[:, :1], EXPONENTIAL_RANGE)
    else:
        # A single block is its own farthest one; any positive range will do.
        reach = distance.amax(dim=1, keepdim=True)
        reach = torch.where(reach > 0, reach, 1.0)
    relative = distance / reach
    if config.mixing_init == "linear":
        weights = 1 - relative
    elif config.mixing_init == "cos":
        weights = torch.cos(relative.clamp(max=2) * (math.pi / 4))
    elif config.mixing_init == "exp":
        weights = torch.exp(-3 * relative)
    else:
        weights = torch.exp(-0.5 * (3 * relative).square())
    floor = 0.0 if config.mixing_range is None else RANGE_FLOOR
    return weights.clamp(min=floor)


def mixing_parameter_value(config: MHLAConfig, weights: torch.Tensor) -> torch.Tensor:
    """The stored form of mixing weights under `config.mixing_constraint`.

    Args:
        config: Gives `mixing_constraint`.
        weights: `[M, M]` or `[H, M, M]`.

    Returns:
        `weights` itself for `"none"`. For `"nonnegative"` the inverse softplus of the weights; weights below a
        hundredth of 1/M are lifted to that first.
    """
    if config.mixing_constraint == "none":
        return weights
    count = weights.shape[-1]
    floored = weights.double().clamp(min=NONNEGATIVE_FLOOR / count)
    sharpness = NONNEGATIVE_SHARPNESS * count
    # log(expm1(x)) without the overflow of expm1 for weights far above 1/M.
    scaled = sharpness * floored
    return ((scaled + torch.log(-torch.expm1(-scaled))) / sharpness).to(weights.dtype)


def effective_mixing(config: MHLAConfig, parameter: torch.Tensor) -> torch.Tensor:
    """The mixing weights that a stored parameter stands for; differentiable, in the parameter's dtype."""
    if config.mixing_constraint == "none":
        return parameter
    return F.softplus(parameter, beta=NONNEGATIVE_SHARPNESS * parameter.shape[-1], threshold=30.0)
