# SPDX-License-Identifier: Apache-2.0
"""Rank and entropy of attention through training, beside accuracy: softmax, linear and MHLA."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mhla_hf.utils.figures import new_figure, save_figure

from .classifier_variants import (
    COLORS,
    TITLES,
    attention_mean,
    classifier_cases,
    common_figures,
    head_width,
    in_order,
    percent,
    runs_of,
    spread,
)
from .documentation import markdown_table
from .experiment import Case, Experiment


NAMES = ("softmax", "linear", "mhla")
STATISTICS = ("effective_rank", "rank", "relative_entropy", "top_share")


def cases(setting: str) -> dict[str, Case]:
    """Softmax, linear and MHLA."""
    return classifier_cases(setting, NAMES)


def summarize(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Curves of each contestant, one for each seed, means over layers, heads and probe images."""
    found = {}
    for name in NAMES:
        runs = runs_of(results, name)
        layers = [list(run["attention"][-1]["layers"].values()) for run in runs]
        found[name] = {
            **common_figures(results, name),
            "steps": [record["step"] for record in runs[0]["attention"]],
            "accuracies": [[point["accuracy"] for point in run["accuracies"]] for run in runs],
            **{
                statistic: [[attention_mean(record, statistic) for record in run["attention"]] for run in runs]
                for statistic in STATISTICS
            },
            "rank_by_layer": [[layer["rank"] for layer in run] for run in layers],
            "rank_bound": layers[0][0]["rank_bound"],
            "tokens": layers[0][0]["tokens"],
        }
    return found


def plot(report: Mapping[str, Any], path: Path) -> None:
    """Draws the statistics and accuracy over the steps, and the rank by layer in the end."""
    summary, bound = in_order(report["summary"], NAMES), head_width(report)
    figure = new_figure(11, 6.2)
    (ranks, effective, entropies), (accuracies, shares, by_layer) = figure.subplots(2, 3)
    panels = (
        (ranks, "rank", 1, "numerical rank"),
        (effective, "effective_rank", 1, "effective rank"),
        (entropies, "relative_entropy", 1, "entropy of a row / log N"),
        (accuracies, "accuracies", 100, "held-out accuracy, %"),
        (shares, "top_share", 100, "weight on the top tenth, %"),
    )
    for axis, key, scale, label in panels:
        for name, row in summary.items():
            points = [[scale * value for value in values] for values in zip(*row[key], strict=True)]
            axis.plot(row["steps"], [statistics.fmean(at) for at in points], color=COLORS[name], label=TITLES[name])
            lows, highs = [min(at) for at in points], [max(at) for at in points]
            axis.fill_between(row["steps"], lows, highs, color=COLORS[name], alpha=0.2, linewidth=0)
        axis.set(xlabel="training step", ylabel=label)
        axis.grid(alpha=0.3)
        if axis is not entropies:
            axis.set_ylim(bottom=0)
    ranks.axhline(bound, color=COLORS["linear"], linestyle=":", linewidth=1)
    note = f"bound of linear attention, {bound}"
    ranks.annotate(note, (0, bound), (2, 3), textcoords="offset points", fontsize=8, color=COLORS["linear"])
    accuracies.legend(frameon=False)
    width = 0.8 / len(summary)
    for place, (name, row) in enumerate(summary.items()):
        for layer, values in enumerate(zip(*row["rank_by_layer"], strict=True)):
            left = layer + (place - (len(summary) - 1) / 2) * width
            by_layer.bar(left, statistics.fmean(values), width, color=COLORS[name], alpha=0.5)
            by_layer.plot([left] * len(values), values, ".", color=COLORS[name])
    by_layer.axhline(bound, color=COLORS["linear"], linestyle=":", linewidth=1)
    by_layer.set_xticks(range(len(summary["mhla"]["rank_by_layer"][0])))
    by_layer.set(xlabel="layer", ylabel="numerical rank in the end")
    by_layer.grid(alpha=0.3, axis="y")
    save_figure(figure, path)


def tables(report: Mapping[str, Any]) -> dict[str, str]:
    """The table of `docs/results/classifier.md`."""
    header = [
        "attention",
        "rank",
        "bound",
        "effective rank: first",
        "last",
        "entropy / log N",
        "on the top tenth, %",
        "held-out accuracy, %",
    ]
    rows = []
    for name, row in in_order(report["summary"], NAMES).items():
        last = {statistic: [values[-1] for values in row[statistic]] for statistic in STATISTICS}
        cells = [
            TITLES[name],
            spread(last["rank"], "{:.0f}"),
            str({"softmax": row["tokens"], "linear": head_width(report)}.get(name, row["rank_bound"])),
            spread([values[0] for values in row["effective_rank"]], "{:.0f}"),
            spread(last["effective_rank"], "{:.0f}"),
            spread(last["relative_entropy"], "{:.2f}"),
            percent(last["top_share"]),
            percent(row["accuracy"]),
        ]
        rows.append(cells)
    return {"rank": markdown_table(header, rows)}


EXPERIMENT = Experiment(title="Rank over training", cases=cases, summarize=summarize, plot=plot, tables=tables)
