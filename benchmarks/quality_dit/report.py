# SPDX-License-Identifier: Apache-2.0
"""Summary of the runs: means over seeds, differences within seeds, and plots."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from mhla_hf.utils.figures import new_figure, save_figure

from .gated import VARIANT as GATED


METRICS = ("held_out_loss", "frechet_distance", "class_accuracy", "nearest_distance")
"""Figures of a run that are summed up; the first two are better when smaller, the last is best at 1."""

BASELINES = ("softmax", "linear")
"""Baseline of every other variant."""

# Points that a curve of losses is kept with.
CURVE_POINTS = 50

TITLES = {
    "softmax": "softmax",
    "linear": "linear\n(1 block)",
    "mhla": "MHLA",
    "mhla_cpe_gate": "MHLA,\nCPE, gate",
    GATED: "gated linear\n(after DiG)",
}
COLORS = {"softmax": "#444444", "linear": "#d95f02", "mhla": "#1f77b4", "mhla_cpe_gate": "#2ca02c", GATED: "#9467bd"}


def curve(losses: Sequence[float]) -> dict[str, list[float]]:
    """Means of consecutive losses, `loss`, and the steps that they end at, `step`; at most `CURVE_POINTS`."""
    window = -(-len(losses) // CURVE_POINTS)
    ends = [min(end + window, len(losses)) for end in range(0, len(losses), window)]
    means = [statistics.fmean(losses[start:end]) for start, end in zip([0, *ends], ends)]
    return {"step": [float(end) for end in ends], "loss": means}


def summarize(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sums up the runs of all variants and seeds.

    Args:
        runs: Each with `variant`, `seed` and `METRICS`.

    Returns:
        `summary[variant][metric]` with `mean` and `standard_deviation` over seeds, and
        `differences[variant][baseline][metric]` with the `mean` of the variant's figure less the baseline's of the
        same seed, and its `standard_error`. With one seed deviations and errors are None.
    """
    variants = _variants(runs)
    figures = {
        (variant, metric): [run[metric] for run in sorted(runs, key=_seed) if run["variant"] == variant]
        for variant in variants
        for metric in METRICS
    }
    summary = {
        variant: {metric: _mean_and_deviation(figures[variant, metric]) for metric in METRICS} for variant in variants
    }
    differences = {
        variant: {
            baseline: {metric: _paired(figures[variant, metric], figures[baseline, metric]) for metric in METRICS}
            for baseline in BASELINES
            if baseline != variant
        }
        for variant in variants
    }
    return {"summary": summary, "differences": differences}


def _variants(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(run["variant"] for run in runs))


def _seed(run: Mapping[str, Any]) -> int:
    return run["seed"]


def _mean_and_deviation(values: Sequence[float]) -> dict[str, float | None]:
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "standard_deviation": deviation}


def _paired(values: Sequence[float], baselines: Sequence[float]) -> dict[str, float | None]:
    figures = _mean_and_deviation([value - baseline for value, baseline in zip(values, baselines, strict=True)])
    deviation = figures["standard_deviation"]
    error = None if deviation is None else deviation / math.sqrt(len(values))
    return {"mean": figures["mean"], "standard_error": error}


def table_rows(report: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the table in the documentation."""
    header = ["attention", "parameters", "held-out loss", "above softmax", "Fréchet distance", "class seen", "nearest"]
    softmax = report["summary"]["softmax"]["held_out_loss"]["mean"]
    rows = []
    for variant in _variants(report["runs"]):
        figures = report["summary"][variant]
        parameters = next(run["parameters"] for run in report["runs"] if run["variant"] == variant)
        above = (figures["held_out_loss"]["mean"] / softmax - 1) * 100
        rows.append(
            [
                TITLES[variant].replace("\n", " "),
                f"{parameters:,}",
                with_deviation(figures["held_out_loss"], "{:.4f}"),
                "" if variant == "softmax" else f"{above:+.1f} %".replace("-", "−"),
                with_deviation(figures["frechet_distance"], "{:.3f}"),
                with_deviation(figures["class_accuracy"], "{:.1%}"),
                with_deviation(figures["nearest_distance"], "{:.2f}"),
            ]
        )
    real = report["classifier"]
    floor = f"{real['frechet_distance_of_held_out_digits']:.3f}"
    rows.append(["*held-out digits*", "", "", "", floor, f"{real['held_out_accuracy']:.1%}", "1"])
    return header, rows


def with_deviation(figures: Mapping[str, float | None], form: str) -> str:
    """A mean and its standard deviation, where there is one."""
    deviation = figures["standard_deviation"]
    return form.format(figures["mean"]) + ("" if deviation is None else f" ± {form.format(deviation)}")


def plot_report(path: Path, report: Mapping[str, Any]) -> None:
    """Plots held-out losses and Fréchet distances: means, and a dot for each seed.

    Args:
        path: PNG file to write.
        report: As `measure_quality` returns it.
    """
    figure = new_figure(9, 3.8)
    variants = _variants(report["runs"])
    panels = {
        "held_out_loss": ("Held-out loss (lower is better)", None),
        "frechet_distance": (
            "Fréchet distance of samples (lower is better)",
            report["classifier"]["frechet_distance_of_held_out_digits"],
        ),
    }
    for axis, (metric, (title, real)) in zip(figure.subplots(1, 2), panels.items()):
        for place, variant in enumerate(variants):
            values = [run[metric] for run in report["runs"] if run["variant"] == variant]
            mean = statistics.fmean(values)
            axis.bar(place, mean, 0.7, color=COLORS[variant], alpha=0.85)
            axis.plot([place] * len(values), values, "o", color="black", markersize=3)
            label = {"xytext": (0, 7), "textcoords": "offset points", "ha": "center", "color": "white"}
            axis.annotate(f"{mean:.3f}", (place, 0), fontweight="bold", **label)
        axis.set_xticks(range(len(variants)), [TITLES[variant] for variant in variants])
        axis.set_title(title, fontsize=11)
        # Room for the legend above the bars.
        axis.set_ylim(top=1.22 * max(run[metric] for run in report["runs"]))
        axis.spines[["top", "right"]].set_visible(False)
        if real is not None:
            axis.axhline(real, color="black", linestyle=":", linewidth=1.5, label="real held-out digits")
            axis.legend(loc="upper right", frameon=False)
    options, machine = report["options"], report["machine"]
    seeds = len(options["seeds"])
    figure.suptitle(
        f"{report['setting']} setting, {options['steps']:,} steps of {options['batch_size']} images, "
        f"{seeds} seed{'s' if seeds > 1 else ''}; {machine['device']}, {machine['date']}",
        fontsize=10,
    )
    save_figure(figure, path)


def plot_samples(path: Path, samples: Mapping[str, torch.Tensor], columns: int) -> None:
    """Lays out images, a strip for each name, from top to bottom, under the numbers of the columns.

    Args:
        path: PNG file to write.
        samples: Images `[N, 1, S, S]` in [-1, 1] by variant or other name; N is a multiple of `columns`.
        columns: Images in a row.
    """
    strips = {name: _mosaic(images, columns) for name, images in samples.items()}
    heights = [strip.shape[0] for strip in strips.values()]
    length = next(iter(strips.values())).shape[1]
    width = 11.0
    figure = new_figure(width, (width - 1.5) / length * sum(heights) + 0.12 * len(heights) + 0.3)
    axes = figure.subplots(len(strips), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axis, (name, strip) in zip(axes, strips.items()):
        axis.imshow(strip, cmap="gray", vmin=-1, vmax=1, interpolation="nearest")
        axis.set(xticks=[], yticks=[])
        axis.set_ylabel(TITLES.get(name, name), rotation=0, ha="right", va="center", labelpad=8, fontsize=12)
    axes[0].xaxis.tick_top()
    axes[0].tick_params(length=0, labelsize=14)
    axes[0].set_xticks([(number + 0.5) * length / columns - 0.5 for number in range(columns)], range(columns))
    # The layout underestimates labels of two lines.
    figure.get_layout_engine().set(rect=(0.02, 0, 0.98, 1))
    save_figure(figure, path)


def _mosaic(images: torch.Tensor, columns: int) -> np.ndarray:
    # Digits fill their images: without a frame they would run into each other.
    framed = F.pad(images.squeeze(1), (1, 1, 1, 1), value=1.0)
    return framed.unflatten(0, (-1, columns)).permute(0, 2, 1, 3).flatten(2, 3).flatten(0, 1).numpy()
