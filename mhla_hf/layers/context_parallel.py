# SPDX-License-Identifier: Apache-2.0
"""What a layer computes beside attention when its tokens are spread over several processes: LePE's convolution."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn as nn
import torch.nn.functional as F

from ..ops.sharded import TokenShard, tokens_with_neighbors


def sharded_convolution(
    convolution: nn.Module, tokens: torch.Tensor, grid: Sequence[int], shard: TokenShard
) -> torch.Tensor:
    """Convolution over a token grid at the tokens of this process, with those of its neighbours that it reaches.

    Half a kernel of slices along the grid's first axis comes from either side, not the whole sequence.

    Args:
        convolution: Of odd kernels that keeps the size of its input, over as many axes as the grid has.
        tokens: `[B, L, C]`.
        grid: The token grid of all processes.
        shard: Which of its tokens these are.

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
