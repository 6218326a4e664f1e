# SPDX-License-Identifier: Apache-2.0
"""Matplotlib figures without a display, written as complete files."""

from __future__ import annotations

from io import BytesIO
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


def figure_image(figure: Any, dpi: int = 110) -> Any:
    """Draws a figure as a PIL image."""
    from PIL import Image

    with BytesIO() as file:
        figure.savefig(file, dpi=dpi, format="png", facecolor="white")
        return Image.open(file).convert("RGB")
