# SPDX-License-Identifier: Apache-2.0
"""Figures of mixing matrices, drawn by matplotlib: for sequences, images and videos."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..layouts.blocks import BlockLayout
from ..utils.figures import new_figure, save_figure
from ..utils.messages import shorten_value
from .grids import check_block, frames_shown, middle_block, weights_on_grid


# Colours of weights: blue below zero, red above.
COLOR_MAP = "RdBu_r"


def plot_mixing(
    path: Path, matrices: Mapping[int, torch.Tensor], layout: BlockLayout, *, block: int | None = None
) -> None:
    """Writes [`mixing_figure`][mhla_hf.analysis.mixing_figure] as a PNG file, complete or not at all.

    Args:
        path: File to write.
        matrices: As there, like `layout` and `block`.

    Raises:
        ValueError: As there.
    """
    save_figure(mixing_figure(matrices, layout, block=block), path)


def mixing_figure(matrices: Mapping[int, torch.Tensor], layout: BlockLayout, *, block: int | None = None) -> Any:
    """Draws each layer's mixing matrix, and one of its rows laid out on the token grid.

    The row holds the weight of each block's summary for the queries of one block, which is outlined. It is drawn on
    the tokens of a sequence, of an image, or of the frames of a video; of long videos on some of the frames.

    Args:
        matrices: Effective mixing `[M, M]` by layer; of `[H, M, M]` the mean over heads is drawn.
        layout: Their layout, of one to three axes.
        block: The block whose row is laid out; by default the one in the middle.

    Returns:
        A matplotlib `Figure`.

    Raises:
        ValueError: If there is no matrix, a matrix is not one of the layout's, or there is no such block.
    """
    if not matrices:
        raise ValueError("matrices has no entry: there is nothing to draw.")
    block = middle_block(layout) if block is None else check_block(block, layout)
    frames = frames_shown(layout, block)
    wide = len(layout.grid) == 1
    widths = [1.4] + [3.2 if wide else 1.0] * len(frames)
    figure = new_figure(1.6 * sum(widths) + 0.6, 1.9 * len(matrices) + 0.6)
    grid = figure.subplots(len(matrices), len(widths), squeeze=False, width_ratios=widths)
    own = weights_on_grid(torch.eye(layout.num_blocks)[block], layout)
    for axes, (layer, matrix) in zip(grid, matrices.items()):
        weights = _mean_over_heads(matrix, layout)
        limit = float(np.abs(weights).max()) or 1.0
        axes[0].imshow(weights, cmap=COLOR_MAP, vmin=-limit, vmax=limit, interpolation="nearest")
        axes[0].set_ylabel(f"layer {layer}")
        limit = float(np.abs(weights[block]).max()) or 1.0
        on_tokens = weights_on_grid(torch.from_numpy(weights[block]), layout)
        for axis, frame in zip(axes[1:], frames):
            image = axis.imshow(
                on_tokens[frame].numpy(),
                cmap=COLOR_MAP,
                vmin=-limit,
                vmax=limit,
                interpolation="nearest",
                aspect="auto" if wide else "equal",
            )
            _outline(axis, own[frame].numpy())
        figure.colorbar(image, ax=list(axes[1:]), fraction=0.02)
        for axis in axes:
            axis.set(xticks=[], yticks=[])
    grid[0][0].set_title(f"mixing matrix, {layout.num_blocks} × {layout.num_blocks}", fontsize=9)
    if len(layout.grid) == 3:
        for axis, frame in zip(grid[0][1:], frames):
            axis.set_title(f"latent frame {frame}", fontsize=9)
    tokens = " × ".join(map(str, layout.grid[-2:])) + (" tokens a frame" if len(layout.grid) == 3 else " tokens")
    figure.suptitle(f"Weights of all blocks for the queries of one (outlined), on {tokens}")
    return figure


def _mean_over_heads(matrix: torch.Tensor, layout: BlockLayout) -> np.ndarray:
    if matrix.dim() not in (2, 3) or tuple(matrix.shape[-2:]) != (layout.num_blocks, layout.num_blocks):
        raise ValueError(
            f"matrices has one of shape {shorten_value(tuple(matrix.shape))}, but the layout has "
            f"{layout.num_blocks} blocks."
        )
    matrix = matrix.detach().float().cpu()
    return (matrix.mean(dim=0) if matrix.dim() == 3 else matrix).numpy()


def _outline(axis: Any, inside: np.ndarray) -> None:
    """Draws the border of a rectangle of ones."""
    from matplotlib.patches import Rectangle

    rows, columns = inside.nonzero()
    if len(rows):
        corner = (columns.min() - 0.5, rows.min() - 0.5)
        size = (np.ptp(columns) + 1, np.ptp(rows) + 1)
        axis.add_patch(Rectangle(corner, *size, fill=False, edgecolor="black", linewidth=1.8))
