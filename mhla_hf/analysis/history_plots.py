# SPDX-License-Identifier: Apache-2.0
"""Figures of how attention changed through a training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..utils.figures import new_figure, save_figure


STATISTICS = {
    "rank": "numerical rank",
    "effective_rank": "effective rank",
    "relative_entropy": "entropy, relative to equal weights",
}
"""Statistics that are drawn, and how they are called."""


def plot_history(history: Sequence[Mapping[str, Any]], path: str | Path) -> None:
    """Draws rank and entropy of each layer over the steps of a training, as a PNG file, complete or not at all.

    Layers go from dark (the first) to light; softmax layers are dashed, linear ones dotted. Crosses mark the first
    report of a failure signature, in the panel of the ranks.

    Args:
        history: `history` of an [`AttentionTracker`][mhla_hf.analysis.AttentionTracker].
        path: File to write.

    Raises:
        ValueError: If the history is empty.
    """
    if not history:
        raise ValueError("history has no rows: record something first.")
    from matplotlib import colormaps

    names = list(dict.fromkeys(name for row in history for name in row["layers"]))
    figure = new_figure(4.0 * len(STATISTICS), 3.6)
    styles = {"softmax": "--", "linear": ":", "mhla": "-"}
    reported = {(each["name"], each["layer"]): row for row in reversed(history) for each in row.get("signatures", ())}
    for axes, (statistic, title) in zip(figure.subplots(1, len(STATISTICS), squeeze=False)[0], STATISTICS.items()):
        for index, name in enumerate(names):
            color = colormaps["viridis"](0.9 * index / max(1, len(names) - 1))
            rows = [row for row in history if row["layers"].get(name, {}).get(statistic) is not None]
            values = [row["layers"][name][statistic] for row in rows]
            style = styles[next(row for row in history if name in row["layers"])["layers"][name]["kind"]]
            marker = "o" if len(rows) == 1 else None
            axes.plot([row["step"] for row in rows], values, style, color=color, marker=marker, label=name)
            places = [row for (_, layer), row in reported.items() if layer == name and statistic == "rank"]
            for row in places:
                value = row["layers"][name][statistic]
                if value is not None:
                    axes.plot(row["step"], value, "x", color="#d62728", markersize=8, markeredgewidth=2)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("step")
        axes.margins(y=0.08)
        axes.set_ylim(bottom=0)
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    shown = names if len(names) <= 12 else [names[0], names[-1]]
    handles, labels = axes.get_legend_handles_labels()
    chosen = [handles[labels.index(name)] for name in shown]
    figure.legend(chosen, shown, loc="outside lower center", ncols=min(3, len(shown)), fontsize=8, frameon=False)
    save_figure(figure, Path(path))
