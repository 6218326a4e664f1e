# SPDX-License-Identifier: Apache-2.0
"""What the convolution of the values (CPE) and the output gate add to MHLA, and the former to linear attention."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mhla_hf.utils.figures import new_figure, save_figure

from .classifier_variants import (
    TITLES,
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


NAMES = ("softmax", "linear", "linear-cpe", "mhla", "mhla-cpe", "mhla-gate", "mhla-cpe-gate")
# Losses are means of ten steps each.
_STEPS_OF_A_LOSS = 10
_LAST_LOSSES = 3


def cases(setting: str) -> dict[str, Case]:
    """Softmax, linear and MHLA, with and without auxiliary modules."""
    return classifier_cases(setting, NAMES)


def summarize(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Accuracy, parameters and loss of each contestant."""
    found = {}
    for name in NAMES:
        losses = [run["losses"] for run in runs_of(results, name)]
        found[name] = {
            **common_figures(results, name),
            "losses": [statistics.fmean(values) for values in zip(*losses, strict=True)],
            "last_loss": [statistics.fmean(values[-_LAST_LOSSES:]) for values in losses],
        }
    return found


def plot(report: Mapping[str, Any], path: Path) -> None:
    """Draws accuracies, and losses over training."""
    summary = in_order(report["summary"], NAMES)
    figure = new_figure(10, 3.8)
    accuracies, losses = figure.subplots(1, 2)
    draw_accuracies(accuracies, summary, color_of)
    for name, row in summary.items():
        line = {"mhla-cpe": "--", "linear-cpe": "--", "mhla-gate": ":"}.get(name, "-")
        steps = [_STEPS_OF_A_LOSS * (index + 0.5) for index in range(len(row["losses"]))]
        losses.plot(steps, row["losses"], line, color=color_of(name), label=TITLES[name])
    losses.set(xlabel="training step", ylabel="training loss")
    losses.grid(alpha=0.3)
    losses.legend(frameon=False, fontsize=8)
    save_figure(figure, path)


def tables(report: Mapping[str, Any]) -> dict[str, str]:
    """The table of `docs/results/classifier.md`."""
    summary = in_order(report["summary"], NAMES)
    base = summary["softmax"]["parameters"]
    rows = [
        [
            TITLES[name],
            percent(row["accuracy"]),
            spread(row["last_loss"], "{:.2f}"),
            f"{row['parameters']:,}",
            f"+{100 * (row['parameters'] / base - 1):.1f} %",
        ]
        for name, row in summary.items()
    ]
    header = ["attention", "held-out accuracy, %", "training loss in the end", "parameters", "over softmax"]
    return {"auxiliary": markdown_table(header, rows)}


EXPERIMENT = Experiment(title="Auxiliary modules", cases=cases, summarize=summarize, plot=plot, tables=tables)
