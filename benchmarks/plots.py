# SPDX-License-Identifier: Apache-2.0
"""Plots of the reports of `mhla-hf bench op`, `benchmarks.training` and `benchmarks.decode`.

python -m benchmarks.plots REPORT.json PLOT.png
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mhla_hf.utils.figures import new_figure, save_figure
from mhla_hf.utils.files import read_json


_STYLES = {"ordinary": ("#444444", "o"), "mhla-torch": ("#1f77b4", "o"), "mhla-triton": ("#0b3d91", "s")}


def plot_report(report: Mapping[str, Any], path: Path) -> None:
    """Plot a report into a PNG file.

    Raises:
        ValueError: If no row of the report has figures.
    """
    if all(row.get("reason") is not None for row in report["results"]):
        raise ValueError(f"plot={str(path)!r} would be empty: nothing could be measured.")
    plots = {"op": _operator, "train": _models, "decode": _decoding}
    save_figure(plots[report["benchmark"]](report), path)


def _operator(report: Mapping[str, Any]) -> Any:
    """Bars of softmax's time over MHLA's, by length, where outputs are divided by the normaliser."""
    rows = [row for row in report["results"] if row["contestant"] == "mhla-torch" and row["normalizer"] == "query"]
    # Causal shapes have a length of their blocks.
    kinds = {"images and videos": lambda row: row["chunk"] is None, "causal": lambda row: row["chunk"] is not None}
    groups = {kind: sorted(filter(chosen, rows), key=lambda row: row["tokens"]) for kind, chosen in kinds.items()}
    figure = new_figure(10.5, 4.6)
    counts = [len({row["shape"] for row in group}) for group in groups.values()]
    for axis, (kind, group) in zip(figure.subplots(1, 2, width_ratios=counts, sharey=True), groups.items()):
        shapes = {row["shape"]: row["tokens"] for row in group}
        for offset, (direction, color) in enumerate((("forward", "#1f77b4"), ("fwd+bwd", "#9ecae1"))):
            ratios = [
                next(
                    row["speedup_over_softmax"]
                    for row in group
                    if (row["shape"], row["direction"]) == (name, direction)
                )
                for name in shapes
            ]
            places = [place + 0.4 * (offset - 0.5) for place in range(len(shapes))]
            label = {"forward": "forward", "fwd+bwd": "forward and backward"}[direction]
            # From the line of equal times, so that what is slower hangs below it.
            bars = axis.bar(places, [ratio - 1 for ratio in ratios], 0.4, bottom=1, color=color, label=label)
            for bar, ratio in zip(bars, ratios):
                below = ratio < 1
                axis.annotate(
                    f"{ratio:.1f}",
                    (bar.get_x() + bar.get_width() / 2, ratio),
                    xytext=(0, -3 if below else 3),
                    textcoords="offset points",
                    ha="center",
                    va="top" if below else "bottom",
                    fontsize=10,
                )
        names = [f"{tokens:,}\n{name.removesuffix('-small')}" for name, tokens in shapes.items()]
        axis.set_xticks(range(len(shapes)), names, fontsize=9)
        axis.axhline(1, color="#444444", linewidth=1)
        axis.set(yscale="log", title=kind, xlabel="tokens, shape")
        axis.set_yticks([0.5, 1, 2, 5, 10, 20, 50], ["0.5", "1", "2", "5", "10", "20", "50"])
        axis.set_yticks([], minor=True)
        axis.set_ylim(0.5, 50)
        axis.grid(axis="y", alpha=0.3)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("time of softmax / time of MHLA")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    threads = report["machine"]["threads"]
    figure.suptitle(
        f"{_title(report)}, {threads} thread{'s' if threads != 1 else ''}; above 1, MHLA is faster", fontsize=11
    )
    return figure


def _models(report: Mapping[str, Any]) -> Any:
    """Bars of time and memory beside the ordinary model's (or the first contestant's), a group for each model."""
    measured = [row for row in report["results"] if row["reason"] is None]
    models = list(dict.fromkeys(row["model"] for row in measured))
    names = [name for name in _STYLES if any(row["contestant"] == name for row in measured)]
    figure = new_figure(max(8.0, 2.2 * len(models) + 4), 4.2)
    units = (("milliseconds", 1.0, "time", "ms"), ("peak_memory_bytes", 1e6, "memory beyond weights and inputs", "MB"))
    panels = figure.subplots(1, len(units))
    for panel, (key, scale, title, unit) in zip(panels, units, strict=True):
        known = [row for row in measured if row.get(key)]
        # The ordinary model's row comes first.
        first = {row["model"]: row[key] for row in reversed(known)}
        for offset, name in enumerate(names):
            rows = [row for row in known if row["contestant"] == name]
            places = [models.index(row["model"]) + (offset - (len(names) - 1) / 2) * 0.8 / len(names) for row in rows]
            heights = [row[key] / first[row["model"]] for row in rows]
            bars = panel.bar(places, heights, width=0.8 / len(names), color=_STYLES[name][0], label=name)
            panel.bar_label(bars, [f"{row[key] / scale:,.3g} {unit}" for row in rows], fontsize=7)
        panel.set_xticks(range(len(models)), models, fontsize=9)
        panel.set_title(title, fontsize=10)
        panel.set_ylabel(f"relative to {names[0]}")
        panel.margins(y=0.12)
        panel.grid(True, axis="y", alpha=0.3)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(names))
    figure.suptitle(_title(report))
    return figure


def _decoding(report: Mapping[str, Any]) -> Any:
    """Seconds for a token and bytes of the cache against the context, a line for each dtype and kind of cache."""
    figure = new_figure(11, 4.4)
    panels = figure.subplots(1, 2)
    keys = (("seconds_per_token", 1e3, "ms for a token"), ("cache_bytes", 1 / 1e6, "MB of cache"))
    kinds = {"mhla": _STYLES["mhla-torch"], "softmax": _STYLES["ordinary"]}
    dashes = ("-", "--", ":")
    for panel, (key, scale, unit) in zip(panels, keys, strict=True):
        for dtype, dash in zip(report["options"]["dtypes"], dashes):
            rows = [row for row in report["results"] if row["dtype"] == dtype]
            contexts = [row["context"] for row in rows]
            for kind, (color, marker) in kinds.items():
                values = [row[kind][key] * scale for row in rows]
                panel.plot(contexts, values, color=color, marker=marker, linestyle=dash, label=f"{kind}, {dtype}")
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        ticks = sorted({row["context"] for row in report["results"]})
        panel.set_xticks(ticks, [f"{tokens:,}" for tokens in ticks])
        panel.set_xticks([], minor=True)
        panel.yaxis.set_major_formatter(lambda value, _: f"{value:,.12g}")
        panel.set(title=unit, xlabel="tokens of context", ylabel=unit)
        panel.grid(True, which="major", alpha=0.3)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize=9)
    figure.suptitle(f"{report['machine']['device']}, {report['machine']['date']}, {report['options']['cache']} caches")
    return figure


def _title(report: Mapping[str, Any]) -> str:
    machine, options = report["machine"], report["options"]
    return f"{machine['device']}, {options['dtype']}, torch {machine['torch']}, {machine['date']}"


def main(arguments: list[str] | None = None) -> None:
    """Plots a report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="JSON file that a benchmark wrote")
    parser.add_argument("plot", type=Path, help="PNG file to write")
    options = parser.parse_args(arguments)
    plot_report(read_json(options.report, "the report of a benchmark:"), options.plot)


if __name__ == "__main__":
    main()
