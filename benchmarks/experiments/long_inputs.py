# SPDX-License-Identifier: Apache-2.0
"""Very long inputs: what attention costs as tokens grow in number, how exact it stays, and where it breaks down."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mhla_hf.utils.figures import new_figure, save_figure

from .documentation import markdown_table
from .experiment import Case, Experiment


_CASE = "all"
_FUNCTION = "benchmarks.experiments.long_inputs_cases:measure"
_MANY_BLOCKS = [[1, 1, 1], [2, 2, 2], [4, 4, 4], [4, 4, 8], [4, 8, 8], [8, 8, 8], [8, 8, 16], [8, 16, 16]]
_SCALES = [1.0, 1e-2, 1e-3, 1e-4, 1e-5]
_OPTIONS: dict[str, dict[str, Any]] = {
    "cpu": {
        "times": {
            "lengths": [1024 * 2**power for power in range(10)],
            "heads": 1,
            "width": 64,
            "dtype": "float32",
            "seconds": 0.6,
            "longest_seconds": 12.0,
        },
        "errors": {
            "lengths": [1024, 8192, 65536],
            "width": 64,
            "dtypes": ["float32", "bfloat16", "float16"],
            "num_rows": 32,
        },
        "breakdown": {
            "lengths": [1024, 4096, 16384, 65536],
            "width": 64,
            "block_tokens": 16384,
            "scales": _SCALES,
            "many_blocks": _MANY_BLOCKS,
            "seconds": 2.0,
        },
    },
    "gpu": {
        "times": {
            "lengths": [1024 * 2**power for power in range(10)],
            "heads": 12,
            "width": 128,
            "dtype": "bfloat16",
            "seconds": 20.0,
            "longest_seconds": 60.0,
        },
        "errors": {
            "lengths": [1024, 8192, 32768, 131072],
            "width": 128,
            "dtypes": ["float32", "bfloat16", "float16"],
            "num_rows": 256,
        },
        "breakdown": {
            "lengths": [1024, 4096, 16384, 65536, 131072],
            "width": 128,
            "block_tokens": 16384,
            "scales": _SCALES,
            "many_blocks": _MANY_BLOCKS,
            "seconds": 10.0,
        },
    },
    "smoke": {
        "times": {
            "lengths": [256, 512],
            "heads": 1,
            "width": 8,
            "dtype": "float32",
            "seconds": 0.02,
            "longest_seconds": 1.0,
        },
        "errors": {"lengths": [256], "width": 8, "dtypes": ["float32", "bfloat16"], "num_rows": 4},
        "breakdown": {
            "lengths": [256, 512],
            "width": 8,
            "block_tokens": 512,
            "scales": [1.0, 1e-4],
            "many_blocks": [[1, 1, 1], [2, 4, 4]],
            "seconds": 0.02,
        },
    },
}

_COLORS = {
    "softmax": "#444444",
    "linear": "#d95f02",
    "mhla": "#1f77b4",
    "mhla_fixed": "#9467bd",
    "mhla_chunk": "#2ca02c",
}
_LABELS = {
    "softmax": "softmax",
    "linear": "linear",
    "mhla": "MHLA, M = √N",
    "mhla_fixed": "MHLA, M = 64",
    "mhla_chunk": "MHLA, blocks of 64, M = 32",
}
_TIMES = ("forward_milliseconds", "forward_backward_milliseconds")
_DIRECTIONS = ("bidirectional", "causal")
_MARKERS = {"float32": "o", "bfloat16": "s", "float16": "^"}
# Short inputs are dominated by what a call costs.
_SLOPE_FROM = 16384
# An overflown normaliser makes outputs zero: finite, and as wrong as infinite ones.
_OVERFLOWN = 0.05


def _cases(setting: str) -> Mapping[str, Case]:
    return {_CASE: Case(_FUNCTION, _OPTIONS[setting])}


def _summarize(results: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """`rows`, `errors`, `magnitudes`, `eps` and `many_blocks` as measured, and `slopes` of time in logarithms."""
    result = results[_CASE]
    rows = result["times"]["rows"]
    slopes = []
    for direction in _DIRECTIONS:
        for name in _LABELS:
            chosen = [row for row in rows if (row["attention"], row["direction"]) == (name, direction)]
            if chosen:
                slope = {field.removesuffix("_milliseconds"): _slope(chosen, field) for field in _TIMES}
                slopes.append({"attention": name, "direction": direction, **slope})
    return {"rows": rows, "slopes": slopes, "errors": result["errors"]["rows"], **result["breakdown"]}


def _slope(rows: Sequence[Mapping[str, Any]], field: str) -> float | None:
    """Exponent p of time ∝ Nᵖ over the long inputs, by least squares of the logarithms."""
    points = [(row["tokens"], row[field]) for row in rows if row[field] is not None]
    points = [point for point in points if point[0] >= _SLOPE_FROM]
    if len(points) < 2:
        return None
    tokens, times = np.log(np.array(points)).T
    return float(np.polyfit(tokens, times, 1)[0])


def _plot(report: Mapping[str, Any], path: Path) -> None:
    summary = report["summary"]
    figure = new_figure(10.5, 11.5)
    panels = figure.subplots(3, 2)
    for panel, direction in zip(panels[0], _DIRECTIONS):
        _plot_times(panel, summary, direction)
    _plot_memory(panels[1][0], summary)
    _plot_errors(panels[1][1], summary)
    _plot_blocks(panels[2][0], summary)
    _plot_magnitudes(panels[2][1], summary)
    save_figure(figure, path)


def _plot_times(panel: Any, summary: Mapping[str, Any], direction: str) -> None:
    slopes = {row["attention"]: row["forward"] for row in summary["slopes"] if row["direction"] == direction}
    for name, label in _LABELS.items():
        rows = [row for row in summary["rows"] if (row["attention"], row["direction"]) == (name, direction)]
        for field, style in (("forward_milliseconds", "-"), ("forward_backward_milliseconds", ":")):
            points = [(row["tokens"], row[field]) for row in rows if row[field] is not None]
            if points:
                slope = slopes.get(name)
                text = label if slope is None else f"{label}: slope {slope:.2f}"
                panel.plot(
                    *zip(*points), style, color=_COLORS[name], marker="o", markersize=3.5,
                    label=text if style == "-" else None,
                )  # fmt: skip
    _axes(panel, summary["rows"], f"{direction}: forward (solid), with backward (dotted)", "ms")


def _plot_memory(panel: Any, summary: Mapping[str, Any]) -> None:
    for name, label in _LABELS.items():
        direction = "causal" if name == "mhla_chunk" else "bidirectional"
        rows = [row for row in summary["rows"] if (row["attention"], row["direction"]) == (name, direction)]
        points = [(row["tokens"], row["memory_bytes"] / 1e6) for row in rows if row["memory_bytes"]]
        if points:
            panel.plot(*zip(*points), "-", color=_COLORS[name], marker="o", markersize=3.5, label=label)
    _axes(
        panel,
        summary["rows"],
        "peak memory of the forward pass; causal: blocks of 64",
        "MB beyond inputs and output",
    )


def _plot_errors(panel: Any, summary: Mapping[str, Any]) -> None:
    rows = [row for row in summary["errors"] if row["direction"] == "bidirectional"]
    for name in dict.fromkeys(row["attention"] for row in rows):
        for dtype in dict.fromkeys(row["dtype"] for row in rows):
            chosen = [row for row in rows if (row["attention"], row["dtype"]) == (name, dtype)]
            points = [(row["tokens"], row["error"]) for row in chosen if row["error"] is not None]
            if points:
                panel.plot(
                    *zip(*points), "-", color=_COLORS[name], marker=_MARKERS[dtype], markersize=5,
                    label=f"{dtype}" if name == "softmax" else None,
                )  # fmt: skip
    _axes(panel, rows, "error against float64, by type of the inputs", "relative error")


def _plot_blocks(panel: Any, summary: Mapping[str, Any]) -> None:
    rows = [row for row in summary["many_blocks"] if row["forward_milliseconds"] is not None]
    tokens = rows[0]["tokens"]
    times = [row["forward_milliseconds"] for row in rows]
    panel.plot([row["blocks"] for row in rows], times, "-o", color=_COLORS["mhla"], markersize=4, label="MHLA")
    panel.axvline(math.sqrt(tokens), color="#888888", linestyle="--", linewidth=1, label="M² = N")
    _axes(panel, rows, f"forward pass of {tokens:,} tokens by number of blocks", "ms", "blocks")


def _plot_magnitudes(panel: Any, summary: Mapping[str, Any]) -> None:
    rows = summary["magnitudes"]
    for name in ("mhla", "mhla_fixed", "mhla_chunk"):
        points = [(row["tokens"], row["output"]) for row in rows if row["attention"] == name]
        panel.plot(*zip(*points), "-o", color=_COLORS[name], markersize=4, label=_LABELS[name])
    panel.axhline(65504, color="#888888", linestyle="--", linewidth=1, label="largest float16")
    _axes(panel, rows, 'values of 1 without a normaliser ("none")', "output")


def _axes(panel: Any, rows: Sequence[Mapping[str, Any]], title: str, unit: str, key: str = "tokens") -> None:
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_title(title, fontsize=10)
    panel.set_xlabel(key, fontsize=9)
    panel.set_ylabel(unit, fontsize=9)
    ticks = sorted({row[key] for row in rows})
    panel.set_xticks(ticks, [f"{tick // 1024}K" if tick >= 1024 else str(tick) for tick in ticks])
    panel.set_xticks([], minor=True)
    panel.grid(alpha=0.25)
    panel.legend(fontsize=8)


def _tables(report: Mapping[str, Any]) -> Mapping[str, str]:
    summary = report["summary"]
    return {
        "long-inputs": _time_table(summary),
        "long-inputs-errors": _error_table(summary),
        "long-inputs-eps": _eps_table(summary),
    }


def _time_table(summary: Mapping[str, Any]) -> str:
    rows = summary["rows"]
    lengths = sorted({row["tokens"] for row in rows})
    shown = [tokens for tokens in lengths if tokens in (lengths[0], 8192, 32768, 131072, lengths[-1])]
    lines = []
    for direction in _DIRECTIONS:
        for name, label in _LABELS.items():
            chosen = {row["tokens"]: row for row in rows if (row["attention"], row["direction"]) == (name, direction)}
            if not chosen:
                continue
            cells = [
                " / ".join(
                    "failed" if value is None and "failed" in chosen[tokens] else _number(value)
                    for value in (chosen[tokens][field] for field in _TIMES)
                )
                for tokens in shown
            ]
            slope = next(
                row["forward"]
                for row in summary["slopes"]
                if (row["attention"], row["direction"]) == (name, direction)
            )
            lines.append([f"{label}, {direction}", *cells, "–" if slope is None else f"{slope:.2f}"])
    header = ["ms, forward / with backward", *(f"{tokens:,} tokens" for tokens in shown), "slope, forward"]
    return markdown_table(header, lines)


def _error_table(summary: Mapping[str, Any]) -> str:
    rows = summary["errors"]
    lengths = sorted({row["tokens"] for row in rows})
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    errors = {(row["attention"], row["direction"], row["tokens"], row["dtype"]): row["error"] for row in rows}
    ends = sorted({lengths[0], lengths[-1]})
    lines = []
    for direction in _DIRECTIONS:
        for name, label in _LABELS.items():
            if (name, direction, lengths[0], dtypes[0]) in errors:
                cells = [
                    "overflow" if error is None or error > _OVERFLOWN else f"{error:.0e}"
                    for error in (errors[name, direction, tokens, dtype] for dtype in dtypes for tokens in ends)
                ]
                lines.append([f"{label}, {direction}", *cells])
    return markdown_table(["relative error", *(f"{dtype}, {n:,}" for dtype in dtypes for n in ends)], lines)


def _eps_table(summary: Mapping[str, Any]) -> str:
    lines = [[f"{row['scale']:g}", f"{row['output']:.4f}"] for row in summary["eps"]]
    return markdown_table(["scale of queries and keys", "output for values of 1"], lines)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


EXPERIMENT = Experiment(title="Very long inputs", cases=_cases, summarize=_summarize, plot=_plot, tables=_tables)
