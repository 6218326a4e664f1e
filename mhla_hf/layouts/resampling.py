# SPDX-License-Identifier: Apache-2.0
"""Mixing weights for another grid of blocks: linear interpolation over relative block coordinates.

Shape letters: M and M' blocks of the two grids, H heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from . import MAX_BLOCKS
from .blocks import cached, positive_axes


def axis_interpolation(source: int, target: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Linear interpolation over relative coordinates on one axis: float32 `[target, source]`, rows sum to one.

    Block c of n sits at (c + 0.5) / n. Coordinates outside the outermost source centres take the value there; going to
    fewer blocks, the triangle filter is widened so that every source block keeps its say.
    """
    position = ((torch.arange(target, device=device) + 0.5) * (source / target) - 0.5).clamp(0, source - 1)
    distance = (position[:, None] - torch.arange(source, device=device)[None, :]).abs()
    weight = (1 - distance / max(1.0, source / target)).clamp(min=0)
    return weight / weight.sum(dim=1, keepdim=True)


def interpolation_matrix(
    source_blocks: Sequence[int],
    target_blocks: Sequence[int],
    num_prefix_blocks: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """[`axis_interpolation`] between two block grids.

    Args:
        source_blocks: Number of blocks along each axis that weights exist for.
        target_blocks: Number of blocks along each axis wanted.
        num_prefix_blocks: Blocks before those of the grids, which stay.
        device: Device of the matrix.
        dtype: Its dtype; it is computed in float32.

    Returns:
        `[M_target, M_source]`; rows sum to one.
    """
    result = torch.ones(1, 1, device=device)
    for source, target in zip(source_blocks, target_blocks, strict=True):
        result = torch.kron(result, axis_interpolation(source, target, device))
    return torch.block_diag(torch.eye(num_prefix_blocks, device=device), result).to(dtype)


def resample_mixing(
    mixing: torch.Tensor, source_blocks: Sequence[int], target_blocks: Sequence[int], num_prefix_blocks: int = 0
) -> torch.Tensor:
    """Carries a mixing matrix over to another grid of blocks.

    m' = (M / M') R m Rᵀ with R of [`interpolation_matrix`]: both the mixing and the mixed block are interpolated at
    their relative coordinates. The factor turns equal weights 1/M into equal weights 1/M' and keeps other row sums
    to within a few per cent.

    Args:
        mixing: `[M, M]` or `[H, M, M]`.
        source_blocks: Number of blocks along each axis of `mixing`.
        target_blocks: Number of blocks along each axis wanted.
        num_prefix_blocks: 1 where the first row and column are those of the tokens before the grid, whose block stays.

    Returns:
        `[M', M']` or `[H, M', M']`, the dtype of `mixing`.

    Raises:
        ValueError: If `mixing` is not for `source_blocks`, the two have another number of axes, or the target has more
            than `MAX_BLOCKS` blocks.

    Examples:
        >>> import torch
        >>> from mhla_hf import resample_mixing
        >>> wider = resample_mixing(torch.full((6, 6), 1 / 6), source_blocks=(2, 3), target_blocks=(2, 5))
        >>> wider.shape, round(wider.sum(dim=1)[0].item(), 3)
        (torch.Size([10, 10]), 1.0)
    """
    source_blocks = positive_axes("source_blocks", source_blocks)
    target_blocks = positive_axes("target_blocks", target_blocks)
    count = num_prefix_blocks + math.prod(source_blocks)
    fits = mixing.shape[-2:] == (count, count) and len(target_blocks) == len(source_blocks)
    if not fits or math.prod(target_blocks) > MAX_BLOCKS:
        raise ValueError(
            f"mixing {tuple(mixing.shape)}, source_blocks={source_blocks} ({count} blocks) and "
            f"target_blocks={target_blocks} do not fit each other, or make more than {MAX_BLOCKS} blocks."
        )
    if source_blocks == target_blocks:
        return mixing
    options = num_prefix_blocks, mixing.device, mixing.dtype
    matrix = cached(interpolation_matrix, source_blocks, target_blocks, *options)
    return (matrix @ mixing @ matrix.transpose(0, 1)) * (matrix.shape[1] / matrix.shape[0])
