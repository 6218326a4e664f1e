# SPDX-License-Identifier: Apache-2.0
"""Number of blocks of a layer's mixing weights, layout of a token grid, and size of a window."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..config import MAX_LEPE_WEIGHTS, MHLAConfig
from ..layouts import MAX_BLOCKS
from ..layouts.blocks import BlockLayout, choose_blocks, positive_axes
from ..layouts.tables import cached
from ..layouts.windows import check_window, default_window_size


def layout_at(
    config: MHLAConfig, blocks: Sequence[int], grid: Sequence[int], num_prefix_tokens: int = 0
) -> BlockLayout:
    """The layout used on a token grid, following `config.resize`.

    An axis with fewer tokens than blocks gets one block for each token.

    Args:
        config: The options.
        blocks: Block counts that the mixing weights are made for.
        grid: Number of tokens along each axis.
        num_prefix_tokens: Tokens before those of the grid.

    Raises:
        ValueError: If the grid has another number of axes than the blocks.
    """
    grid = positive_axes("grid", grid)
    if len(grid) != len(blocks):
        raise ValueError(
            f"grid={grid} has {len(grid)} axes, but this layer's blocks {tuple(blocks)} have more or fewer."
        )
    if config.is_sequence:
        return cached(BlockLayout, grid, None, config.block_size, num_prefix_tokens)
    if config.grid is not None and (grid == config.grid or _keeps_block_size(config, grid, config.grid)):
        if config.block_size is not None:
            return cached(BlockLayout, grid, None, config.block_size, num_prefix_tokens)
        # Balanced tiles of the reference's mean length; they need not be a whole number of tokens there.
        counts = [round(n * count / reference) for n, count, reference in zip(grid, blocks, config.grid)]
        counts = [max(1, min(count, n)) for count, n in zip(counts, grid)]
    else:
        counts = [min(count, n) for count, n in zip(blocks, grid)]
    return cached(BlockLayout, grid, tuple(counts), None, num_prefix_tokens)


def _keeps_block_size(config: MHLAConfig, grid: Sequence[int], reference_grid: Sequence[int]) -> bool:
    if config.resize != "auto":
        return config.resize == "block_size"
    return any(n >= 2 * reference or 2 * n <= reference for n, reference in zip(grid, reference_grid))


def check_block_sizes(config: MHLAConfig, blocks: Sequence[int]) -> None:
    """Checks what [`MHLAConfig`] cannot while it does not know the grid.

    Raises:
        ValueError: If there are too many blocks, or the convolution of that many axes is too large.
    """
    if math.prod(blocks) > MAX_BLOCKS:
        raise ValueError(f"The mhla options make {tuple(blocks)} blocks, which are more than {MAX_BLOCKS}.")
    if config.lepe_kernel is not None and config.lepe_kernel ** len(blocks) > MAX_LEPE_WEIGHTS:
        raise ValueError(
            f"lepe_kernel={config.lepe_kernel} has more than {MAX_LEPE_WEIGHTS} weights for each channel over "
            f"{len(blocks)} axes."
        )


def reference_blocks(config: MHLAConfig, default_grid: Sequence[int] | None = None) -> tuple[int, ...]:
    """The block counts that the stored mixing weights are made for.

    Args:
        config: Gives `blocks`, or `block_size` and `grid`.
        default_grid: Stands in for a missing `config.grid`.

    Raises:
        ValueError: If there is neither `blocks` nor a grid.
    """
    if config.blocks is not None:
        return config.blocks
    grid = config.grid or (None if default_grid is None else tuple(default_grid))
    if grid is None:
        raise ValueError("The mhla options need blocks, or a grid to derive the number of blocks from.")
    if config.block_size is not None:
        return BlockLayout(grid=grid, block_size=config.block_size).blocks
    return choose_blocks(grid)


def resolve_blocks(config: MHLAConfig, default_grid: Sequence[int]) -> MHLAConfig:
    """Returns a config whose blocks and window are pinned, so that they survive a change of defaults.

    Args:
        config: Options as given by the user.
        default_grid: The model's usual token grid.

    Returns:
        `config` itself if it has `blocks`; otherwise a copy with `grid` filled in, and with the chosen `blocks` if
        there was no `block_size` either. The size of a window is filled in too.

    Raises:
        ValueError: If the options are for a grid with another number of axes than the model's.
    """
    axes = config.blocks or config.block_size or config.grid
    if axes is not None and len(axes) != len(default_grid):
        raise ValueError(
            f"The mhla options are for {len(axes)} axes, but this model's token grid has {len(default_grid)}."
        )
    config = with_window_size(config, len(default_grid))
    if config.blocks is not None:
        return config
    grid = config.grid or tuple(default_grid)
    if config.block_size is not None:
        return config.replace(grid=grid)
    return config.replace(grid=grid, blocks=choose_blocks(grid))


def window_size_for(config: MHLAConfig, axes: int) -> tuple[int, ...] | None:
    """Tokens of a block of the window along each axis: `window_size`, or its default.

    The default for sequences is MHLA's own block size; elsewhere it makes about 200 tokens that a query sees.

    Args:
        config: The options.
        axes: Number of axes of the token grid.

    Returns:
        One number for each axis; `None` without a window.

    Raises:
        ValueError: If the options do not fit that number of axes.
    """
    check_window(config.window, config.window_size, axes)
    if config.window is None or config.window_size is not None:
        return config.window_size
    return config.block_size if config.is_sequence else default_window_size(config.window, axes)


def with_window_size(config: MHLAConfig, axes: int) -> MHLAConfig:
    """Returns the options with the size of the window's blocks filled in, so that it survives a change of defaults.

    Args:
        config: The options; returned as they are where there is nothing to fill in.
        axes: Number of axes of the token grid.

    Raises:
        ValueError: If the options do not fit that number of axes.
    """
    size = window_size_for(config, axes)
    return config if size == config.window_size else config.replace(window_size=size)
