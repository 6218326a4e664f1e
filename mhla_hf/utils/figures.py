# SPDX-License-Identifier: Apache-2.0
"""Matplotlib figures without a display: as complete files, or SVG for web pages."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

from .files import atomic_file
from .messages import import_extra


def new_figure(width: float, height: float) -> Any:
    """Make an empty matplotlib figure, width and height in inches.

    Raises:
        ValueError: If matplotlib is not installed.
    """
    # A figure without pyplot needs no display and leaves a notebook's backend alone.
    return import_extra("matplotlib.figure", "Figures", "report").Figure((width, height), layout="constrained")


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure as a PNG file, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as temporary:
        figure.savefig(temporary, dpi=120, format="png", facecolor="white")


def figure_svg(figure: Any) -> str:
    """Draw a figure as an `<svg>` element, with text as text."""
    from matplotlib import rc_context

    file = StringIO()
    with rc_context({"svg.fonttype": "none"}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    content = file.getvalue()
    return content[content.index("<svg") :]
