# SPDX-License-Identifier: Apache-2.0
"""Plots of the reports: time and memory against the number of tokens, and of whole models side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from ..utils.figures import new_figure, save_figure
from .contestants import CONTESTANTS
from .models import VARIANTS


Row = Mapping[str, Any]

# One colour for a family, shades and markers for its members; dashed and hollow without a normaliser.
_STYLES = {
    "mhla-torch": ("#1f77b4", "o"),
    "mhla-triton": ("#0b3d91", "s"),
    "mhla-compiled": ("#7fb3e0", "^"),
    "softmax": ("#444444", "o"),
    "softmax-flash": ("#777777", "s"),
    "softmax-cudnn": ("#111111", "^"),
    "softmax-math": ("#aaaaaa", "v"),
    "linear": ("#d95f02", "o"),
    "fla-linear": ("#e6a23c", "s"),
    "fla-simple-gla": ("#b04a3f", "^"),
    "mhla-path-torch": ("#1f77b4", "D"),
    "mhla-path-triton": ("#7fb3e0", "D"),
    "mhla-path-fused": ("#0b3d91", "D"),
    "softmax-path": ("#444444", "D"),
    "ordinary": ("#444444", "o"),
}
_FLOOR = {"color": "#2ca02c", "linestyle": ":", "linewidth": 1.5, "label": "floor (copy)"}
# A logarithmic axis cannot show zero; less memory than this for each head is negligible.
_LEAST_BYTES = 100.0


def plot_report(report: Mapping[str, Any], path: Path) -> None:
    """Plots the report of any of the benchmarks.

    Args:
        report: Report of a benchmark.
        path: PNG file to write, complete or not at all.

    Raises:
        ValueError: If no row of the report has figures.
    """
    if report["benchmark"] != "decode" and all(row["reason"] is not None for row in report["results"]):
        raise ValueError(f"plot={str(path)!r} would be empty: nothing could be measured.")
    draw = {"op": _operator, "model": _models, "train": _models, "decode": _decoding}[report["benchmark"]]
    save_figure(draw(report), path)


def _operator(report: Mapping[str, Any]) -> Any:
    """A column for each group of shapes; rows are time and memory, forward and with backward, for one head.

    Whole paths, which compute more, are left out unless nothing else was measured.
    """
    shapes = report["shapes"]
    groups = list(dict.fromkeys(shape["group"] for shape in shapes.values()))
    measured = [row for row in report["results"] if row["reason"] is None]
    measured = [row for row in measured if not CONTESTANTS[row["contestant"]].whole_path] or measured
    directions = list(dict.fromkeys(row["direction"] for row in measured))
    figure = new_figure(4.4 * max(2, len(groups)), 3.3 * 2 * len(directions))
    panels = figure.subplots(2 * len(directions), len(groups), squeeze=False)
    for column, group in enumerate(groups):
        inside = [row for row in measured if shapes[row["shape"]]["group"] == group]
        for index, direction in enumerate(directions):
            rows = [row for row in inside if row["direction"] == direction]
            _curves(panels[index][column], rows, shapes, lambda row: row["milliseconds"])
            floor = {row["tokens"]: row["floor_milliseconds"] / _heads(shapes[row["shape"]]) for row in rows}
            panels[index][column].plot(*zip(*sorted(floor.items())), marker="_", markersize=12, **_FLOOR)
            _label(panels[index][column], rows, f"{group}, {direction}", "ms for one head")
            memory = panels[len(directions) + index][column]
            rows = [row for row in rows if row.get("peak_memory_bytes") is not None]
            _curves(memory, rows, shapes, lambda row: max(row["peak_memory_bytes"], _LEAST_BYTES) / 1e6)
            _label(memory, rows, f"{group}, {direction}", "MB for one head, beyond inputs and outputs")
    handles = {
        label: handle
        for panel in panels.flat
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=6, fontsize=9)
    figure.suptitle(_title(report))
    return figure


def _curves(panel: Any, rows: Sequence[Row], shapes: Mapping[str, Any], value: Callable[[Row], float]) -> None:
    for name in CONTESTANTS:
        for normalizer in dict.fromkeys(row["normalizer"] for row in rows if row["contestant"] == name):
            # Shapes that differ in the number of heads alone are one point.
            points: dict[int, list[float]] = {}
            for row in rows:
                if (row["contestant"], row["normalizer"]) == (name, normalizer):
                    points.setdefault(row["tokens"], []).append(value(row) / _heads(shapes[row["shape"]]))
            tokens = sorted(points)
            color, marker = _STYLES[name]
            panel.plot(
                tokens,
                [fmean(points[count]) for count in tokens],
                color=color,
                marker=marker,
                markersize=5,
                markerfacecolor="white" if normalizer == "none" else color,
                linewidth=1.2,
                linestyle="--" if normalizer == "none" else "-",
                label=name if normalizer is None else f"{name}, normaliser {normalizer}",
            )


def _heads(shape: Mapping[str, Any]) -> int:
    return shape["batch"] * shape["heads"]


def _label(panel: Any, rows: Sequence[Row], title: str, unit: str, key: str = "tokens") -> None:
    from matplotlib.ticker import LogLocator

    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_title(title, fontsize=10)
    panel.set_xlabel("tokens", fontsize=9)
    panel.set_ylabel(unit, fontsize=8)
    ticks = sorted({row[key] for row in rows})
    panel.set_xticks(ticks, [f"{tokens:,}" for tokens in ticks])
    panel.set_xticks([], minor=True)
    panel.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:,.12g}")
    panel.yaxis.set_minor_formatter(lambda *_: "")
    panel.tick_params(labelsize=8)
    panel.grid(True, which="major", alpha=0.3)


def _models(report: Mapping[str, Any]) -> Any:
    """Bars of time and memory beside the ordinary model's (or the first contestant's), a group for each model."""
    measured = [row for row in report["results"] if row["reason"] is None]
    models = list(dict.fromkeys(row["model"] for row in measured))
    names = [name for name in VARIANTS if any(row["contestant"] == name for row in measured)]
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
    kinds = {"mhla": _STYLES["mhla-torch"], "softmax": _STYLES["softmax"]}
    dashes = ("-", "--", ":")
    for panel, (key, scale, unit) in zip(panels, keys, strict=True):
        for dtype, dash in zip(report["options"]["dtypes"], dashes):
            rows = [row for row in report["results"] if row["dtype"] == dtype]
            contexts = [row["context"] for row in rows]
            for kind, (color, marker) in kinds.items():
                values = [row[kind][key] * scale for row in rows]
                panel.plot(contexts, values, color=color, marker=marker, linestyle=dash, label=f"{kind}, {dtype}")
        _label(panel, report["results"], unit, unit, "context")
        panel.set_xlabel("tokens of context", fontsize=9)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize=9)
    figure.suptitle(f"{report['machine']['device']}, {report['machine']['date']}, {report['options']['cache']} caches")
    return figure


def _title(report: Mapping[str, Any]) -> str:
    machine, options = report["machine"], report["options"]
    return f"{machine['device']}, {options['dtype']}, torch {machine['torch']}, {machine['date']}"
