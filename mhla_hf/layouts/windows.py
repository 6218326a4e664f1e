# SPDX-License-Identifier: Apache-2.0
"""Options of the softmax window beside MHLA: which blocks a query sees exactly, and how large they are."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ..utils.messages import shorten_value


if TYPE_CHECKING:
    from ..config import MHLAConfig


WINDOWS = ("block", "adjacent", "cross")
WINDOW_GAINS = ("per_head", "per_channel")
MAX_WINDOW_TOKENS = 2**14
"""Tokens of one block of a window: each of them attends to all of them."""

# About 200 tokens in the window of a query, which is what a window of a large model needs to matter. Own blocks reach
# over the 21 latent frames of Wan, since those that do were the better ones.
_DEFAULT_SIZES = {
    ("block", 1): (192,),
    ("block", 2): (14, 14),
    ("block", 3): (21, 3, 3),
    ("adjacent", 1): (64,),
    ("adjacent", 2): (5, 5),
    ("adjacent", 3): (2, 2, 2),
    ("cross", 3): (1, 3, 3),
}


def check_window(config: MHLAConfig) -> None:
    """Checks the options of the window against each other and against the layout's axes, as far as those are known.

    Raises:
        ValueError: If they do not fit; the message names the option.
    """
    size = config.window_size
    if config.window is None:
        if size is not None:
            raise ValueError(
                f"window_size={shorten_value(size)} needs window, one of {', '.join(map(repr, WINDOWS))}."
            )
        return
    if size is not None and math.prod(size) > MAX_WINDOW_TOKENS:
        raise ValueError(f"window_size={shorten_value(size)} has more than {MAX_WINDOW_TOKENS} tokens in a block.")
    given = (config.blocks, config.block_size, config.grid)
    axes = 1 if config.is_sequence else next((len(value) for value in given if value is not None), None)
    check_window_axes(config, axes if axes is not None or size is None else len(size))


def check_window_axes(config: MHLAConfig, axes: int | None) -> None:
    """Checks the options of the window against the number of axes of the token grid; `None` where it is not known.

    Raises:
        ValueError: If they do not fit.
    """
    if config.window is None or axes is None:
        return
    if config.window_size is not None and len(config.window_size) != axes:
        raise ValueError(
            f"window_size={config.window_size} must have one entry for each axis of the layout, which has {axes}."
        )
    if config.window == "cross" and axes != 3:
        raise ValueError(
            f"window='cross' needs the three axes of a video (frames, height, width), but the layout has {axes}: "
            "use 'adjacent' or 'block'."
        )


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
    check_window_axes(config, axes)
    if config.window is None or config.window_size is not None:
        return config.window_size
    if config.is_sequence:
        return config.block_size
    return _DEFAULT_SIZES[config.window, axes]


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
