# SPDX-License-Identifier: Apache-2.0
"""Small pictures for pages: heat maps as PNG files with one cell for each number, and their addresses in HTML."""

from __future__ import annotations

import base64
import io

import numpy as np


MAX_CELLS = 256
"""Rows and columns of a heat map at most; of larger ones, cells are averaged."""
# Anchors of the colours below zero, at zero and above: those of matplotlib's RdBu_r.
_ANCHORS = np.array(
    [(5, 48, 97), (67, 147, 195), (146, 197, 222), (247, 247, 247), (244, 165, 130), (214, 96, 77), (103, 0, 31)],
    dtype=float,
)
# Four greys of blocks, the chosen one, and lines.
_TILES = np.array(
    [(176, 190, 206), (210, 219, 229), (143, 160, 180), (228, 233, 239), (214, 69, 65), (255, 255, 255)],
    dtype=np.uint8,
)
# The last entry of the palette is that of outlines.
_SHADES = 255
_OUTLINE = _SHADES
_OUTLINE_COLOR = (17, 17, 17)


def palette() -> np.ndarray:
    """Colours from the lowest value to the highest, then that of outlines: uint8 `[256, 3]`."""
    places = np.linspace(0, len(_ANCHORS) - 1, _SHADES)
    shades = [np.interp(places, range(len(_ANCHORS)), channel) for channel in _ANCHORS.T]
    return np.concatenate([np.stack(shades, axis=1), [_OUTLINE_COLOR]]).round().astype(np.uint8)


def heat_map(
    values: np.ndarray, limit: float | None = None, *, scale: int = 1, outlined: np.ndarray | None = None
) -> bytes:
    """Draws numbers as a PNG picture: blue below zero, white at zero, red above.

    Args:
        values: `[rows, columns]`.
        limit: Absolute value with the darkest colour; the largest one if not given.
        scale: Pixels of a cell along each side.
        outlined: Mask of cells `[rows, columns]` whose rectangle gets a border; needs a scale of 3 at least.

    Returns:
        The file's contents.
    """
    values = _reduced(np.asarray(values, dtype=float))
    limit = (float(np.abs(values).max()) if limit is None else limit) or 1.0
    shades = ((values / limit).clip(-1, 1) * ((_SHADES - 1) / 2) + (_SHADES - 1) / 2).round().astype(np.uint8)
    shades = shades.repeat(scale, axis=0).repeat(scale, axis=1)
    if outlined is not None and outlined.any() and scale > 2:
        rows, columns = (np.flatnonzero(outlined.any(axis=axis)) for axis in (1, 0))
        top, bottom = int(rows[0]) * scale, (int(rows[-1]) + 1) * scale - 1
        left, right = int(columns[0]) * scale, (int(columns[-1]) + 1) * scale - 1
        for width in range(2 if scale > 5 else 1):
            shades[top + width, left : right + 1] = shades[bottom - width, left : right + 1] = _OUTLINE
            shades[top : bottom + 1, left + width] = shades[top : bottom + 1, right - width] = _OUTLINE
    return _png(shades, palette())


def tiles(numbers: np.ndarray, chosen: int | None = None, *, scale: int = 1) -> bytes:
    """Draws which block each cell belongs to: neighbouring blocks differ in their grey, the chosen one is red.

    Cells are told apart by thin lines where there is room for them.

    Args:
        numbers: Shade of each cell's block, from 0 to 3, and its number: `[2, rows, columns]`.
        chosen: Number of the block to point out.
        scale: Pixels of a cell along each side.

    Returns:
        The contents of a PNG file.
    """
    shades, blocks = numbers
    picture = np.where(blocks == chosen, 4, shades % 4).astype(np.uint8)
    picture = picture.repeat(scale, axis=0).repeat(scale, axis=1)
    if scale > 4:
        picture[scale - 1 :: scale] = picture[:, scale - 1 :: scale] = len(_TILES) - 1
    return _png(picture, _TILES)


def data_uri(png: bytes) -> str:
    """The address of a PNG picture that holds the picture itself."""
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def _reduced(values: np.ndarray) -> np.ndarray:
    """Averages neighbouring cells of large pictures."""
    for axis in (0, 1):
        length = values.shape[axis]
        if length > MAX_CELLS:
            edges = np.linspace(0, length, MAX_CELLS + 1).astype(int)
            sums = np.add.reduceat(values, edges[:-1], axis=axis)
            shape = [-1 if other == axis else 1 for other in (0, 1)]
            values = sums / np.diff(edges).reshape(shape)
    return values


def _png(indices: np.ndarray, colors: np.ndarray) -> bytes:
    from PIL import Image

    picture = Image.fromarray(indices, mode="P")
    picture.putpalette(colors.tobytes())
    file = io.BytesIO()
    picture.save(file, format="PNG", optimize=True)
    return file.getvalue()
