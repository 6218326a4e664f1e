# SPDX-License-Identifier: Apache-2.0
"""Numbers that describe attention: rank and entropy of its matrices, and what mixing weights have learned.

Shape letters: R query tokens, T tokens, H heads, M blocks; `...` any further axes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..layers.mhla import MHLA
from ..layers.mixing import effective_mixing
from ..layouts.blocks import BlockLayout, is_integer
from ..utils.messages import shorten_value


TOLERANCE = 1e-4
"""Singular values below this share of the largest one do not count towards the numerical rank."""
TOP_SHARE = 0.1
"""Share of the tokens whose weights `top_share` adds up."""
# Matrices this many times as wide as high are reduced to products of their rows first.
_WIDE = 2


def singular_values(matrix: torch.Tensor) -> torch.Tensor:
    """Compute singular values in descending order, in float64.

    For a matrix with far more columns than rows they are the roots of the eigenvalues of its R × R Gram matrix, exact
    to about 1e-8 of the largest one.

    Args:
        matrix: `[..., R, T]`.

    Returns:
        `[..., min(R, T)]`, float64.
    """
    matrix = matrix.double()
    if matrix.shape[-1] < _WIDE * matrix.shape[-2]:
        return torch.linalg.svdvals(matrix)
    return torch.linalg.eigvalsh(matrix @ matrix.mT).clamp_min(0.0).sqrt().flip(-1)


def numerical_rank(singular: torch.Tensor, tolerance: float = TOLERANCE) -> torch.Tensor:
    """Count singular values above `tolerance` times the largest one.

    Args:
        singular: Singular values in descending order, `[..., N]`.
        tolerance: At least 1e-7, the precision of [`singular_values`][mhla_hf.analysis.singular_values].

    Returns:
        LongTensor `[...]`; 0 for a matrix of zeros.

    Examples:
        >>> import torch
        >>> from mhla_hf.analysis import numerical_rank, singular_values
        >>> numerical_rank(singular_values(torch.ones(8, 8)))
        tensor(1)
    """
    return (singular > tolerance * singular[..., :1]).sum(-1)


def effective_rank(singular: torch.Tensor) -> torch.Tensor:
    """Compute the exponential of the entropy of the normalised singular values (Roy and Vetterli, 2007).

    It is 1 for a matrix of rank one, N if all N singular values are equal, and needs no tolerance.

    Args:
        singular: Singular values, `[..., N]`.

    Returns:
        `[...]`; 0 for a matrix of zeros.

    Examples:
        >>> import torch
        >>> from mhla_hf.analysis import effective_rank, singular_values
        >>> effective_rank(singular_values(torch.eye(8)))
        tensor(8.0000, dtype=torch.float64)
    """
    entropy = torch.special.entr(normalized(singular)).sum(-1)
    return torch.where(singular.sum(-1) > 0, entropy.exp(), 0.0)


def attention_statistics(matrix: torch.Tensor, *, visible: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """Compute rank, entropy and concentration of attention matrices; rows are averaged.

    Args:
        matrix: `[..., R, T]`: R of T query tokens, or all. Negative weights count by their absolute value.
        visible: Number of tokens that each row can see, `[R]`, for causal attention; `None` for all T.

    Returns:
        Values of shape `[...]` by name: `rank` and `effective_rank` (at most R), `entropy` in nats,
        `relative_entropy` (divided by the logarithm of the tokens that a row sees; rows that see one are left out) and
        `top_share` (weight of a row's largest tenth).

    Raises:
        ValueError: If the matrix holds numbers that are not finite.

    Examples:
        >>> import torch
        >>> from mhla_hf.analysis import attention_statistics
        >>> uniform = attention_statistics(torch.full((16, 16), 1 / 16))
        >>> round(uniform["effective_rank"].item(), 3), round(uniform["relative_entropy"].item(), 3)
        (1.0, 1.0)
    """
    if not torch.isfinite(matrix).all():
        raise ValueError("matrix holds numbers that are not finite.")
    matrix = matrix.double()
    seen = torch.as_tensor(matrix.shape[-1] if visible is None else visible, device=matrix.device).double()
    seen = seen.expand(matrix.shape[-2])
    singular, weights = singular_values(matrix), normalized(matrix.abs())
    entropy = torch.special.entr(weights).sum(-1)
    several = seen > 1
    relative = entropy[..., several] / seen[several].log() if several.any() else torch.ones_like(entropy)
    cumulative = weights.sort(dim=-1, descending=True).values.cumsum(-1)
    last = (TOP_SHARE * seen).ceil().long().clamp(min=1) - 1
    top = cumulative.gather(-1, last.expand(matrix.shape[:-1]).unsqueeze(-1)).squeeze(-1)
    return {
        "rank": numerical_rank(singular).double(),
        "effective_rank": effective_rank(singular),
        "entropy": entropy.mean(-1),
        "relative_entropy": relative.mean(-1),
        "top_share": top.mean(-1),
    }


def rank_bound(layout: BlockLayout, features: int) -> int:
    """Bound the rank of a bidirectional MHLA matrix: min(N, Σ_b min(n_b, d)).

    The columns of block b are a product with the d features of its n_b keys, so their rank is at most min(n_b, d).
    One block gives the bound min(N, d) of linear attention.

    Args:
        layout: The blocks.
        features: d, width of the feature-mapped keys of a head.

    Examples:
        >>> from mhla_hf import BlockLayout
        >>> from mhla_hf.analysis import rank_bound
        >>> rank_bound(BlockLayout(grid=(64,), blocks=(1,)), 8), rank_bound(BlockLayout(grid=(64,), blocks=(4,)), 8)
        (8, 32)
    """
    return min(layout.num_tokens, int(layout.block_tokens.clamp(max=features).sum()))


@dataclass(frozen=True)
class DistanceDecay:
    """Mean mixing weight by the distance of two block centres, in blocks, rounded and ascending."""

    distance: list[int]
    mean: list[float]


@dataclass(frozen=True)
class MixingSummary:
    """What the mixing weights of one layer have learned.

    Attributes:
        matrix: Effective weights at their reference blocks, float32 on the CPU, `[M, M]` or `[H, M, M]`.
        initial: Weights at initialisation, `[M, M]`.
        layout: Blocks and token grid that the weights were made for.
        movement: ‖W − W₀‖ / ‖W₀‖ (Frobenius) of each head; one number if the heads share their weights.
        pattern_movement: The same after scaling each row to an absolute sum of 1. Normalisers that divide by the
            weights of a row cancel its scale.
        negative_share: Share of the weights below zero.
        row_sum: Mean sum of a row, 1 at initialisation.
        decay: Mean weight by distance, of rows scaled to an absolute sum of 1.
        initial_decay: The same for the initial weights.
        grid: The token grid of `layout`; `None` if unknown, when `layout` counts each block as one token.
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
    """Return the blocks and tokens that a layer's mixing weights were made for.

    If the layer's options name no token grid, each block counts as one token.
    """
    config = mhla.config
    if config.is_sequence:
        assert config.block_size is not None
        return BlockLayout((mhla.blocks[0] * config.block_size[0],), block_size=config.block_size)
    if config.grid is not None:
        layout = mhla.layout_for(config.grid)
        if tuple(layout.blocks) == tuple(mhla.blocks):
            return layout
    return BlockLayout(mhla.blocks, blocks=mhla.blocks, num_prefix_tokens=mhla.num_prefix_tokens)


def middle_block(layout: BlockLayout) -> int:
    """Return the number of the block in the middle of a layout's block grid."""
    place = tuple(count // 2 for count in layout.blocks)
    return layout.num_prefix_blocks + int(np.ravel_multi_index(place, layout.blocks))


def check_block(block: int | None, layout: BlockLayout) -> int:
    """Return `block`, or the middle one for `None`.

    Raises:
        ValueError: Unless it is the number of one of the layout's blocks on the token grid.
    """
    if block is None:
        return middle_block(layout)
    first, last = layout.num_prefix_blocks, layout.num_blocks - 1
    if not is_integer(block) or not first <= block <= last:
        raise ValueError(f"block={shorten_value(block)} must be a block on the token grid: {first} to {last}.")
    return int(block)


@torch.no_grad()
def mixing_summary(mhla: MHLA) -> MixingSummary:
    """Compare the mixing weights of a layer with their initial values, at the blocks that they were made for.

    Args:
        mhla: The layer. Its initial weights are recomputed from its options.

    Raises:
        ValueError: If a weight is not finite.
    """
    config, layout = mhla.config, reference_layout(mhla)
    initial = effective_mixing(config, mhla.initial_tensor("mixing").double())
    matrix = effective_mixing(config, mhla.mixing.detach().cpu().double())
    if config.causal:
        initial, matrix = initial.tril(), matrix.tril()
    if not torch.isfinite(matrix).all():
        raise ValueError("the mixing weights are not finite.")
    visible = torch.ones(matrix.shape[-2:], dtype=torch.bool)
    visible = visible.tril() if config.causal else visible
    pattern, initial_pattern = normalized(matrix), normalized(initial)
    return MixingSummary(
        matrix=matrix.float(),
        initial=(initial[0] if initial.dim() == 3 else initial).float(),
        layout=layout,
        movement=_relative_change(matrix, initial),
        pattern_movement=_relative_change(pattern, initial_pattern),
        negative_share=(matrix[..., visible] < 0).double().mean().item(),
        row_sum=matrix.sum(-1).mean().item(),
        decay=_decay(pattern, layout, visible),
        initial_decay=_decay(initial_pattern, layout, visible),
        grid=layout.grid if config.is_sequence or layout.grid == config.grid else None,
    )


def mean_distance(mixing: torch.Tensor, layout: BlockLayout) -> float:
    """Average the distance of attended blocks, in blocks, weighted by absolute mixing weights.

    Args:
        mixing: `[M, M]` or `[H, M, M]`; zero where unused, as above the diagonal of causal weights.
        layout: The blocks; a block of prefix tokens is left out.

    Returns:
        The mean distance; NaN if all weights are zero.
    """
    first = layout.num_prefix_blocks
    weights = mixing.detach().cpu().double()[..., first:, first:].abs()
    centers = layout.centers.double()
    return ((weights * torch.cdist(centers, centers)).sum() / weights.sum()).item()


def mean_and_std(values: torch.Tensor) -> dict[str, float]:
    """Return mean and standard deviation (0 for one value) of values of any shape."""
    flat = values.double().flatten()
    return {"mean": flat.mean().item(), "std": flat.std().item() if len(flat) > 1 else 0.0}


def _decay(mixing: torch.Tensor, layout: BlockLayout, visible: torch.Tensor) -> DistanceDecay:
    # A block of prefix tokens has no place on the grid.
    first = layout.num_prefix_blocks
    visible = visible[first:, first:]
    distance = torch.cdist(layout.centers, layout.centers).round().long()[visible]
    weights = mixing[..., first:, first:][..., visible].reshape(-1, len(distance)).mean(0)
    steps, index = distance.unique(return_inverse=True)
    means = torch.zeros(len(steps), dtype=torch.double).index_add(0, index, weights) / index.bincount()
    return DistanceDecay(steps.tolist(), means.tolist())


def _relative_change(matrix: torch.Tensor, initial: torch.Tensor) -> list[float]:
    difference = torch.linalg.matrix_norm(matrix - initial)
    change = torch.where(difference > 0, difference / torch.linalg.matrix_norm(initial), 0.0)
    return change.reshape(-1).tolist()


def normalized(weights: torch.Tensor) -> torch.Tensor:
    """Divide rows by their absolute sums; those of zeros stay zero."""
    total = weights.abs().sum(-1, keepdim=True)
    return weights / torch.where(total > 0, total, 1.0)
