# SPDX-License-Identifier: Apache-2.0
"""Weights of blocks laid out on the tokens of sequences, images and videos."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from ..layouts.blocks import BlockLayout, is_integer
from ..utils.messages import shorten_value


MAX_FRAMES = 6
"""Frames of a video that are drawn at most."""


def middle_block(layout: BlockLayout) -> int:
    """Number of the block in the middle of a layout's block grid."""
    place = tuple(count // 2 for count in layout.blocks)
    return layout.num_prefix_blocks + int(np.ravel_multi_index(place, layout.blocks))


def check_block(block: int, layout: BlockLayout) -> int:
    """Returns `block`.

    Raises:
        ValueError: Unless it is the number of one of the layout's blocks on the token grid.
    """
    if not is_integer(block) or not layout.num_prefix_blocks <= block < layout.num_blocks:
        raise ValueError(
            f"block={shorten_value(block)} must be a block on the token grid: {layout.num_prefix_blocks} to "
            f"{layout.num_blocks - 1}."
        )
    return int(block)


def weights_on_grid(weights: torch.Tensor, layout: BlockLayout) -> torch.Tensor:
    """Gives each token the weight of its block.

    Tokens before the grid have no place on it and are left out.

    Args:
        weights: One weight for each block, `[M]`.
        layout: The layout.

    Returns:
        `[frames, height, width]`; images are one frame, sequences one frame of one row.
    """
    on_tokens = weights[layout.block_of_token.to(weights.device)][layout.num_prefix_tokens :]
    return on_tokens.reshape((1,) * (3 - len(layout.grid)) + layout.grid)


def frames_shown(layout: BlockLayout, block: int, most: int = MAX_FRAMES) -> Sequence[int]:
    """The frames of a layout that are drawn: all, or some of them evenly spaced, with one of the block among them.

    Args:
        layout: The layout; images and sequences have one frame.
        block: Number of the block that is pointed out.
        most: Number of frames at most.
    """
    frames = layout.grid[0] if len(layout.grid) == 3 else 1
    if frames <= most:
        return range(frames)
    chosen = {round(index * (frames - 1) / (most - 1)) for index in range(most)}
    place = (block - layout.num_prefix_blocks) // math.prod(layout.blocks[1:])
    first = sum(layout.tile_lengths[0][:place])
    own = range(first, first + layout.tile_lengths[0][place])
    if not chosen & set(own):
        nearest = min(chosen, key=lambda frame: abs(frame - own[len(own) // 2]))
        chosen = chosen - {nearest} | {own[len(own) // 2]}
    return sorted(chosen)
