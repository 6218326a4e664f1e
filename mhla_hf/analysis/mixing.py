# SPDX-License-Identifier: Apache-2.0
"""What mixing weights have learned: how they fall off with distance, and how far they moved.

Shape letters: H heads, M blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..layers.mhla import MHLA
from ..layers.mixing import effective_mixing
from ..layouts.blocks import BlockLayout
from ..utils.messages import shorten_value


@dataclass(frozen=True)
class DistanceDecay:
    """Mean mixing weight by the distance of the two blocks.

    Attributes:
        distance: Distances between block centres, in blocks, rounded to whole numbers and ascending.
        mean: Mean weight at each, over pairs of blocks and heads.
        std: Standard deviation there.
        pairs: Pairs of blocks there.
    """

    distance: list[int]
    mean: list[float]
    std: list[float]
    pairs: list[int]


@dataclass(frozen=True)
class MixingSummary:
    """What one layer's mixing weights have learned.

    Attributes:
        matrix: Effective weights at their reference blocks, float32 on the CPU, `[M, M]` or `[H, M, M]`.
        initial: The weights that the layer's options start from, `[M, M]`.
        layout: Blocks and token grid that the weights were made for.
        movement: ‖W − W₀‖ / ‖W₀‖ (Frobenius) of each head; one number where the heads share their weights.
        pattern_movement: The same of weights whose rows are scaled to an absolute sum of 1. The scale of a row has no
            effect under a normaliser that divides by what the row weighs.
        negative_share: Share of the weights below zero.
        row_sum: Mean over the rows of their sum, which starts at 1.
        decay: Mean weight by distance, of rows scaled to an absolute sum of 1.
        initial_decay: The same of the initial weights.
        grid: The tokens of `layout`; `None` where no options or samples tell them, and a block there counts as one.
    """

    matrix: torch.Tensor
    initial: torch.Tensor
    layout: BlockLayout
    movement: list[float]
    pattern_movement: list[float]
    negative_share: float
    row_sum: float
    decay: DistanceDecay
    initial_decay: DistanceDecay
    grid: tuple[int, ...] | None = None

    @property
    def mean_matrix(self) -> torch.Tensor:
        """The weights, averaged over heads: `[M, M]`."""
        return self.matrix.mean(0) if self.matrix.dim() == 3 else self.matrix


def reference_layout(mhla: MHLA) -> BlockLayout:
    """Blocks and tokens that a layer's mixing weights were made for.

    Where its options name no token grid, a block counts as one token.

    Args:
        mhla: The layer.
    """
    config, prefix = mhla.config, mhla.num_prefix_tokens
    if config.is_sequence:
        assert config.block_size is not None
        return BlockLayout((mhla.blocks[0] * config.block_size[0],), block_size=config.block_size)
    if config.grid is not None:
        layout = mhla.layout_for(config.grid)
        if tuple(layout.blocks) == tuple(mhla.blocks):
            return layout
    return BlockLayout(mhla.blocks, blocks=mhla.blocks, num_prefix_tokens=prefix)


@torch.no_grad()
def mixing_summary(mhla: MHLA) -> MixingSummary:
    """Summarises the mixing weights of a layer, at the blocks that they were made for.

    Args:
        mhla: The layer. Its initial weights are computed anew from its options.

    Raises:
        ValueError: If a weight is not finite.
    """
    config = mhla.config
    initial = effective_mixing(config, mhla.initial_tensor("mixing").double())
    matrix = effective_mixing(config, mhla.mixing.detach().cpu().double())
    if config.causal:
        initial, matrix = initial.tril(), matrix.tril()
    if not torch.isfinite(matrix).all():
        raise ValueError("the mixing weights hold numbers that are not finite.")
    layout = reference_layout(mhla)
    visible = _visible_pairs(layout.num_blocks, config.causal)
    pattern, initial_pattern = _scaled_rows(matrix), _scaled_rows(initial)
    return MixingSummary(
        matrix=matrix.float(),
        initial=(initial[0] if initial.dim() == 3 else initial).float(),
        layout=layout,
        movement=relative_distance(matrix, initial).reshape(-1).tolist(),
        pattern_movement=relative_distance(pattern, initial_pattern).reshape(-1).tolist(),
        negative_share=(matrix[..., visible] < 0).double().mean().item(),
        row_sum=matrix.sum(-1).mean().item(),
        decay=distance_decay(pattern, layout, causal=config.causal),
        initial_decay=distance_decay(initial_pattern, layout, causal=config.causal),
        grid=layout.grid if config.is_sequence or layout.grid == config.grid else None,
    )


def relative_distance(matrix: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """‖A − B‖ / ‖B‖, by the Frobenius norm of the last two axes.

    Args:
        matrix: A `[..., M, M]`.
        reference: B, of the same shape.

    Returns:
        `[...]`; where B is zero, 0 if A is too and else infinity.

    Examples:
        >>> import torch
        >>> from mhla_hf.analysis import relative_distance
        >>> relative_distance(3 * torch.eye(4), torch.eye(4))
        tensor(2.)
    """
    difference = torch.linalg.matrix_norm(matrix - reference)
    return torch.where(difference > 0, difference / torch.linalg.matrix_norm(reference), 0.0)


def distance_decay(mixing: torch.Tensor, layout: BlockLayout, *, causal: bool = False) -> DistanceDecay:
    """Mean mixing weight by the distance of the two blocks on the block grid.

    A block of tokens before the grid has no place there and is left out.

    Args:
        mixing: `[M, M]` or `[H, M, M]`.
        layout: The blocks.
        causal: Leave out pairs whose key block lies ahead.

    Raises:
        ValueError: If the layout has another number of blocks.

    Examples:
        >>> import torch
        >>> from mhla_hf import BlockLayout
        >>> from mhla_hf.analysis import distance_decay
        >>> distance_decay(torch.eye(3), BlockLayout(grid=(3,), blocks=(3,))).mean
        [1.0, 0.0, 0.0]
    """
    if mixing.dim() not in (2, 3) or tuple(mixing.shape[-2:]) != (layout.num_blocks, layout.num_blocks):
        raise ValueError(
            f"mixing has shape {shorten_value(tuple(mixing.shape))}, but the layout has {layout.num_blocks} blocks."
        )
    first = layout.num_prefix_blocks
    visible = _visible_pairs(layout.num_blocks - first, causal)
    distance = torch.cdist(layout.centers, layout.centers).round().long()[visible]
    weights = mixing.detach().cpu().double()[..., first:, first:][..., visible].reshape(-1, len(distance))
    found, means, deviations, pairs = [], [], [], []
    for step in range(int(distance.max()) + 1):
        there = weights[:, distance == step]
        if there.numel():
            found.append(step)
            means.append(there.mean().item())
            deviations.append(there.std(correction=0).item())
            pairs.append(there.shape[1])
    return DistanceDecay(found, means, deviations, pairs)


def mean_distance(mixing: torch.Tensor, layout: BlockLayout) -> float:
    """Mean distance of the blocks that blocks attend to, in blocks, weighted by absolute mixing weights.

    Args:
        mixing: `[M, M]` or `[H, M, M]`; weights that are not used are zero.
        layout: The blocks; one of tokens before the grid is left out.
    """
    first = layout.num_prefix_blocks
    weights = mixing.detach().cpu().double()[..., first:, first:].abs()
    centers = layout.centers.double()
    total = weights.sum()
    return ((weights * torch.cdist(centers, centers)).sum() / total).item() if total > 0 else math.nan


def _scaled_rows(matrix: torch.Tensor) -> torch.Tensor:
    total = matrix.abs().sum(-1, keepdim=True)
    return matrix / torch.where(total > 0, total, 1.0)


def _visible_pairs(num_blocks: int, causal: bool) -> torch.Tensor:
    every = torch.ones(num_blocks, num_blocks, dtype=torch.bool)
    return every.tril() if causal else every
