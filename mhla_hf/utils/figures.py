# SPDX-License-Identifier: Apache-2.0
"""Matplotlib figures without a display, written as complete files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .files import atomic_file


def new_figure(width: float, height: float) -> Any:
    """Makes an empty matplotlib figure, width and height in inches."""
    # A figure without pyplot needs no display and leaves a notebook's backend alone.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, path: Path) -> None:
    """Writes a figure as a PNG file, complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as temporary:
        figure.savefig(temporary, dpi=120, format="png", facecolor="white")
