# SPDX-License-Identifier: Apache-2.0
"""Geometry of the charts on a page: curves in a plane, and bars beside one another."""

from __future__ import annotations

import colorsys
import math
from collections.abc import Mapping, Sequence
from typing import Any


# Of the plane that curves are drawn in, in units of its view box.
WIDTH, HEIGHT, LEFT, BOTTOM, MARGIN = 640, 300, 58, 36, 12
_TICKS = 5


def curves(lines: Mapping[str, tuple[Sequence[float], Sequence[float]]], dashed: Sequence[str] = ()) -> dict[str, Any]:
    """Places curves, axes and ticks.

    Args:
        lines: Horizontal and vertical coordinates of each curve, by name.
        dashed: Names of the curves that are drawn dashed, in grey.

    Returns:
        Size of the plane, ticks of both axes with their places and labels, and the points of each curve.
    """
    across = [x for xs, _ in lines.values() for x in xs]
    values = [y for _, ys in lines.values() for y in ys]
    low, high = min(0.0, *values), max(values)
    ticks = _nice_ticks(low, high if high > low else low + 1.0)
    low, high = min(low, ticks[0]), max(high, ticks[-1])
    first, last = min(across), max(max(across), min(across) + 1)

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            LEFT + (x - first) / (last - first) * (WIDTH - LEFT - MARGIN),
            HEIGHT - BOTTOM - (y - low) / (high - low) * (HEIGHT - BOTTOM - MARGIN),
        )

    solid = [name for name in lines if name not in dashed]
    steps = max(1, math.ceil((last - first) / 12))
    return {
        "width": WIDTH,
        "height": HEIGHT,
        "left": LEFT,
        "right": WIDTH - MARGIN,
        "bottom": HEIGHT - BOTTOM,
        "horizontal": [(round(place(x, low)[0], 1), x) for x in range(int(first), int(last) + 1, steps)],
        "vertical": [(round(place(first, y)[1], 1), f"{y:.3g}") for y in ticks],
        "lines": [
            {
                "name": name,
                "dashed": name in dashed,
                "color": "currentColor" if name in dashed else color(solid.index(name), len(solid)),
                "points": " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in zip(xs, ys)),
            }
            for name, (xs, ys) in lines.items()
        ],
    }


def bars(rows: Mapping[str, Mapping[str, float | None]], *, digits: int = 2, top: float | None = None) -> list[Any]:
    """Lengths and labels of bars.

    Args:
        rows: Values by the name of the bar, by the name of its row; `None` draws nothing.
        digits: Digits after the point.
        top: Value of the longest bar; the largest value if not given.

    Returns:
        Name of each row, and name, length in percent and label of each of its bars.
    """
    values = [value for row in rows.values() for value in row.values() if value is not None]
    longest = top or max((abs(value) for value in values if math.isfinite(value)), default=0.0) or 1.0
    return [
        (
            name,
            [
                (kind, round(min(100.0, 100 * abs(value) / longest), 2), f"{value:.{digits}f}")
                for kind, value in row.items()
                if value is not None
            ],
        )
        for name, row in rows.items()
    ]


def color(index: int, count: int) -> str:
    """One of `count` colours from violet over green to amber, of a lightness that shows on white and on black."""
    hue = 0.76 - 0.66 * (index / max(1, count - 1))
    red, green, blue = colorsys.hls_to_rgb(hue, 0.48, 0.62)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"


def _nice_ticks(low: float, high: float) -> list[float]:
    """Round values over a range, about five of them."""
    step = (high - low) / _TICKS
    unit = 10.0 ** math.floor(math.log10(step))
    step = unit * next(factor for factor in (1, 2, 2.5, 5, 10) if factor * unit >= step)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]
