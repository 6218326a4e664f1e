# SPDX-License-Identifier: Apache-2.0
"""LePE: a depthwise convolution of the values over the token grid, with its tokens on one process or several."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from ..layouts.blocks import BlockLayout
from ..ops.sharded import TokenShard, tokens_with_neighbors
from ..ops.tables import repeat_heads


_CONVOLUTIONS: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


def depthwise_convolution(axes: int, channels: int, kernel: int) -> nn.Conv1d | nn.Conv2d | nn.Conv3d:
    """A depthwise convolution over a grid of so many axes that keeps its size; `kernel` is odd."""
    return _CONVOLUTIONS[axes](channels, channels, kernel, padding=kernel // 2, groups=channels)


def convolved_values(
    convolution: nn.Module, value: torch.Tensor, layout: BlockLayout, num_heads: int, shard: TokenShard | None
) -> torch.Tensor:
    """Convolution of the values over the token grid, zero for tokens before it.

    Args:
        convolution: As [`depthwise_convolution`] makes it, for `num_heads` heads of channels.
        value: `[B, T, H_kv, V]`.
        layout: Layout of the tokens of all processes.
        num_heads: H.
        shard: The tokens of this process under context parallelism; `None` for all tokens.

    Returns:
        `[B, T, H, V]`.
    """
    value = repeat_heads(value, num_heads, 2)
    if shard is not None:
        return sharded_convolution(convolution, value.flatten(2), layout.grid, shard).unflatten(-1, value.shape[2:])
    image = value[:, layout.num_prefix_tokens :].flatten(2).transpose(1, 2).unflatten(2, layout.grid)
    tokens = convolution(image).flatten(2).transpose(1, 2).unflatten(-1, (num_heads, -1))
    return F.pad(tokens, (0, 0, 0, 0, layout.num_prefix_tokens, 0))


def sharded_convolution(
    convolution: nn.Module, tokens: torch.Tensor, grid: Sequence[int], shard: TokenShard
) -> torch.Tensor:
    """Convolution over a token grid at the tokens of this process, with those of its neighbours that it reaches.

    Half a kernel of slices along the grid's first axis comes from either side, not the whole sequence.

    Args:
        convolution: Of odd kernels that keeps the size of its input, over as many axes as the grid has.
        tokens: `[B, L, C]`.
        grid: The token grid of all processes.
        shard: The tokens of this process.

    Returns:
        `[B, L, C]`.
    """
    start, stop = shard.run
    margins = [size // 2 for size in convolution.kernel_size]  # type: ignore[union-attr, arg-type]
    reach = sum(margin * math.prod(grid[axis + 1 :]) for axis, margin in enumerate(margins))
    nearby, first = tokens_with_neighbors(tokens, shard, reach)
    # Whole slices along the first axis, those that begin or end outside of what is needed filled up with zeros.
    size = math.prod(grid[1:])
    before = first % size
    count = math.ceil((before + nearby.shape[1]) / size)
    padded = F.pad(nearby, (0, 0, before, count * size - before - nearby.shape[1]))
    image = padded.transpose(1, 2).unflatten(2, (count, *grid[1:]))
    begin = start - first + before
    return convolution(image).flatten(2).transpose(1, 2)[:, begin : begin + stop - start]
