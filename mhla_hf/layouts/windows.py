# SPDX-License-Identifier: Apache-2.0
"""Options of the softmax window beside MHLA: which blocks a query sees exactly, and how large they are."""

from __future__ import annotations

import math

from ..utils.messages import shorten_value


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


def check_window(window: str | None, size: tuple[int, ...] | None, axes: int | None) -> None:
    """Checks the options of the window against each other and against the axes of the token grid.

    Args:
        window: One of [`WINDOWS`], or `None` for no window.
        size: Tokens of a block of the window along each axis; `None` for the default.
        axes: Number of axes of the token grid; `None` where it is not known.

    Raises:
        ValueError: If they do not fit; the message names the option.
    """
    if window is None:
        if size is not None:
            raise ValueError(
                f"window_size={shorten_value(size)} needs window, one of {', '.join(map(repr, WINDOWS))}."
            )
        return
    if size is not None and math.prod(size) > MAX_WINDOW_TOKENS:
        raise ValueError(f"window_size={shorten_value(size)} has more than {MAX_WINDOW_TOKENS} tokens in a block.")
    if axes is None:
        axes = None if size is None else len(size)
    if size is not None and len(size) != axes:
        raise ValueError(f"window_size={size} must have one entry for each axis of the layout, which has {axes}.")
    if window == "cross" and axes not in (None, 3):
        raise ValueError(
            f"window='cross' needs the three axes of a video (frames, height, width), but the layout has {axes}: "
            "use 'adjacent' or 'block'."
        )


def default_window_size(window: str, axes: int) -> tuple[int, ...]:
    """Tokens of a block of the window along each axis that make about 200 tokens that a query sees."""
    return _DEFAULT_SIZES[window, axes]
