# SPDX-License-Identifier: Apache-2.0
"""Pictures of a report: losses, distances, and samples side by side."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from mhla_hf.utils.figures import new_figure, save_figure

from .options import VARIANTS


TITLES = {
    "softmax": "softmax",
    "linear": "linear\n(1 block)",
    "mhla": "MHLA",
    "mhla_cpe_gate": "MHLA,\nCPE, gate",
}
COLORS = {"softmax": "#444444", "linear": "#d95f02", "mhla": "#1f77b4", "mhla_cpe_gate": "#2ca02c"}


def plot_report(path: Path, report: Mapping[str, Any]) -> None:
    """Plots losses over the steps (means over seeds), held-out losses and Fréchet distances (a dot for each seed).

    Args:
        path: PNG file to write.
        report: As `measure_quality` returns it.
    """
    figure = new_figure(14, 4.2)
    axes = figure.subplots(1, 3)
    for variant in VARIANTS:
        curves = [run["curve"] for run in report["runs"] if run["variant"] == variant]
        mean = np.mean([curve["loss"] for curve in curves], axis=0)
        axes[0].plot(curves[0]["step"], mean, color=COLORS[variant], label=TITLES[variant].replace("\n", " "))
    axes[0].set(title="Training", xlabel="step", ylabel="noise-prediction loss", yscale="log")
    axes[0].legend(frameon=False)
    panels = {"held_out_loss": "Held-out noise-prediction loss", "frechet_distance": "Fréchet distance of samples"}
    for axis, (metric, title) in zip(axes[1:], panels.items()):
        for place, variant in enumerate(VARIANTS):
            values = [run[metric] for run in report["runs"] if run["variant"] == variant]
            bars = axis.bar(place, np.mean(values), 0.7, color=COLORS[variant], alpha=0.75)
            axis.plot([place] * len(values), values, "o", color="black", markersize=3)
            axis.bar_label(bars, fmt="%.4g", fontsize=9, label_type="center", color="white")
        axis.set_xticks(range(len(VARIANTS)), [TITLES[variant] for variant in VARIANTS], fontsize=9)
        axis.set(title=title)
    floor = report["classifier"]["frechet_distance_of_held_out_digits"]
    axes[2].axhline(floor, color="black", linestyle=":", linewidth=1, label=f"held-out digits: {floor:.3g}")
    axes[2].legend(frameon=False)
    options, machine = report["options"], report["machine"]
    figure.suptitle(
        f"{report['setting']} setting, {options['steps']:,} steps, {len(options['seeds'])} seeds; "
        f"{machine['device']}, {machine['date']}",
        fontsize=10,
    )
    save_figure(figure, path)


def plot_samples(path: Path, samples: Mapping[str, torch.Tensor], columns: int) -> None:
    """Lays out pictures, a strip for each name, from top to bottom.

    Args:
        path: PNG file to write.
        samples: Pictures `[N, 1, S, S]` in [-1, 1] by variant or other name; N is a multiple of `columns`.
        columns: Pictures in a row.
    """
    strips = {name: _mosaic(images, columns) for name, images in samples.items()}
    heights = [strip.shape[0] for strip in strips.values()]
    width = 11.0
    scale = (width - 1.5) / next(iter(strips.values())).shape[1]
    figure = new_figure(width, scale * sum(heights) + 0.12 * len(heights))
    axes = figure.subplots(len(strips), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axis, (name, strip) in zip(axes, strips.items()):
        axis.imshow(strip, cmap="gray", vmin=-1, vmax=1, interpolation="nearest")
        axis.set(xticks=[], yticks=[])
        axis.set_ylabel(TITLES.get(name, name), rotation=0, ha="right", va="center", labelpad=8)
    # Labels of two lines reach farther than the layout thinks.
    figure.get_layout_engine().set(rect=(0.02, 0, 0.98, 1))
    save_figure(figure, path)


def _mosaic(images: torch.Tensor, columns: int) -> np.ndarray:
    # Digits fill their pictures: without a frame one could not be told from the next.
    framed = F.pad(images.squeeze(1), (1, 1, 1, 1), value=1.0)
    return framed.unflatten(0, (-1, columns)).permute(0, 2, 1, 3).flatten(2, 3).flatten(0, 1).numpy()
