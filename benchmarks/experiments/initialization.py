# SPDX-License-Identifier: Apache-2.0
"""Mixing weights that start local or uniform, and stay so or learn."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mhla_hf.analysis.plots import COLOR_MAP
from mhla_hf.utils.figures import new_figure, save_figure

from .classifier_variants import (
    attention_mean,
    classifier_cases,
    color_of,
    common_figures,
    draw_accuracies,
    in_order,
    percent,
    runs_of,
    spread,
)
from .documentation import markdown_table
from .experiment import Case, Experiment


TITLES = {
    "linear": "uniform, frozen (linear attention)",
    "mhla-uniform": "uniform, learned",
    "mhla-frozen": "locality, frozen",
    "mhla": "locality, learned",
}
_LEARNED = {"mhla-uniform": "uniform at the start", "mhla": "local at the start"}


def cases(setting: str) -> dict[str, Case]:
    """Both initialisations, frozen and learned.

    Uniform weights divide out, so that frozen ones make linear attention whatever the number of blocks is.
    """
    return classifier_cases(setting, TITLES)


def summarize(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Accuracy and effective rank of each contestant, and what its mixing weights have learned, layer by layer."""
    found = {}
    for name in TITLES:
        runs = runs_of(results, name)
        found[name] = {
            **common_figures(results, name),
            "effective_rank": [attention_mean(run["attention"][-1], "effective_rank") for run in runs],
        }
        if name != "linear":
            for key in ("movement", "mean_distance", "initial_mean_distance", "negative_share"):
                found[name][key] = [[layer[key] for layer in run["mixing"]] for run in runs]
    return found


def plot(report: Mapping[str, Any], path: Path) -> None:
    """Draws accuracies, and the learned mixing weights of the first seed."""
    summary = in_order(report["summary"], TITLES)
    # Without the block of class and distillation token, which has no place on the grid.
    shown = {
        name: [np.array(layer["matrix"])[1:, 1:] for layer in report["cases"][name]["figures"]["runs"][0]["mixing"]]
        for name in _LEARNED
    }
    figure = new_figure(10, 3.8)
    left, right = figure.subfigures(1, 2, width_ratios=(1.15, 1))
    axis = left.subplots()
    draw_accuracies(axis, {TITLES[name]: row for name, row in summary.items()}, lambda title: color_of(_NAMES[title]))
    grid = right.subplots(len(_LEARNED), len(shown["mhla"]), squeeze=False)
    limit = max(float(np.abs(matrix).max()) for matrices in shown.values() for matrix in matrices)
    for layer, axis in enumerate(grid[0]):
        axis.set_title(f"layer {layer}", fontsize=9)
    for row, (name, title) in zip(grid, _LEARNED.items(), strict=True):
        for axis, matrix in zip(row, shown[name], strict=True):
            image = axis.imshow(matrix, cmap=COLOR_MAP, vmin=-limit, vmax=limit, interpolation="nearest")
            axis.set_xticks([])
            axis.set_yticks([])
        row[0].set_ylabel(title, fontsize=9)
    right.colorbar(image, ax=grid, shrink=0.8)
    save_figure(figure, path)


def tables(report: Mapping[str, Any]) -> dict[str, str]:
    """The table of `docs/results/classifier.md`."""
    rows = []
    for name, row in in_order(report["summary"], TITLES).items():
        cells = [TITLES[name], percent(row["accuracy"]), spread(row["effective_rank"], "{:.0f}")]
        if name == "linear":
            cells += ["–", "–", "–"]
        else:
            first, last = (_over_layers(row[key]) for key in ("initial_mean_distance", "mean_distance"))
            cells += [
                spread(_over_layers(row["movement"]), "{:.2f}"),
                f"{statistics.fmean(first):.2f} → {spread(last, '{:.2f}')}",
                percent(_over_layers(row["negative_share"])),
            ]
        rows.append(cells)
    header = [
        "mixing weights", "held-out accuracy, %", "effective rank", "moved by", "mean distance, blocks",
        "negative weights, %",
    ]  # fmt: skip
    return {"initialization": markdown_table(header, rows)}


def _over_layers(values: list[list[float]]) -> list[float]:
    return [statistics.fmean(layers) for layers in values]


_NAMES = {title: name for name, title in TITLES.items()}

EXPERIMENT = Experiment(
    title="Initialisation of the mixing weights", cases=cases, summarize=summarize, plot=plot, tables=tables
)
