# SPDX-License-Identifier: Apache-2.0
"""Plots of the reports of `benchmarks.training` and `benchmarks.decode`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mhla_hf.utils.figures import new_figure, save_figure


_STYLES = {"ordinary": ("#444444", "o"), "mhla-torch": ("#1f77b4", "o"), "mhla-triton": ("#0b3d91", "s")}


def plot_report(report: Mapping[str, Any], path: Path) -> None:
    """Plot a report into a PNG file.

    Raises:
        ValueError: If no row of the report has figures.
    """
    if all(row.get("reason") is not None for row in report["results"]):
        raise ValueError(f"plot={str(path)!r} would be empty: nothing could be measured.")
    save_figure({"train": _models, "decode": _decoding}[report["benchmark"]](report), path)


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
