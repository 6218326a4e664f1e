# SPDX-License-Identifier: Apache-2.0
"""The number of blocks M: accuracy, rank, time and memory of a training step, on both sides of M² = N."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mhla_hf.bench import peak_memory, time_in_rounds
from mhla_hf.utils.figures import new_figure, save_figure

from .classifier import NUM_CLASSES, make_classifier, training_loss
from .classifier_variants import (
    COLORS,
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


NAMES = {"linear": 1, "mhla-4": 4, "mhla": 16, "mhla-49": 49, "mhla-64": 64}
"""Blocks of each contestant, without the one of class and distillation token."""

_PATCH = 4
_SIZES: dict[str, dict[str, Any]] = {
    "cpu": {"layers": 3, "hidden_size": 64, "heads": 2, "mlp_ratio": 2.0, "seconds": 8.0},
    "gpu": {"layers": 12, "hidden_size": 192, "heads": 3, "mlp_ratio": 4.0, "seconds": 20.0},
    "smoke": {"layers": 1, "hidden_size": 16, "heads": 2, "mlp_ratio": 1.0, "seconds": 0.02},
}
# Side of the token grid, blocks along it, and images of a step.
_MEASURED: dict[str, list[tuple[int, list[int], int]]] = {
    "cpu": [(14, [1, 2, 4, 7, 8, 14], 8), (32, [1, 2, 4, 8, 16], 2), (64, [1, 2, 4, 8, 16], 1)],
    "gpu": [(14, [1, 2, 4, 7, 8, 14], 128), (32, [1, 2, 4, 8, 16], 32), (64, [1, 2, 4, 8, 16], 8)],
    "smoke": [(4, [1, 2], 1), (8, [1, 2], 1)],
}
_TIMING = "time"


def cases(setting: str) -> dict[str, Case]:
    """Trainings with each number of blocks, and one measurement of time and memory at all lengths."""
    timing = Case(f"{__name__}:step_times_case", {"measured": _MEASURED[setting], **_SIZES[setting]})
    return {**classifier_cases(setting, ["softmax", *NAMES]), _TIMING: timing}


def step_times_case(
    *,
    measured: Sequence[tuple[int, Sequence[int], int]],
    layers: int,
    hidden_size: int,
    heads: int,
    mlp_ratio: float,
    seconds: float,
    device: torch.device,
) -> dict[str, Any]:
    """Time and memory of forward and backward pass of the classifier, softmax and each number of blocks in turns.

    Args:
        measured: Tokens along each side of an image, numbers of blocks along it, and images of a step.
        layers: See [`make_classifier`], like the other sizes.
        seconds: Approximate time for each entry of `measured`.
        device: Device to run on.

    Returns:
        By the number of tokens, then by the total number of blocks or `"softmax"`, what [`time_in_rounds`] gives and
        `peak_memory_bytes`.

    Raises:
        RuntimeError: If one cannot run.
    """
    found = {}
    for side, blocks, batch_size in measured:
        options: dict[str, dict[str, Any] | None] = {"softmax": None}
        options |= {str(count**2): {"blocks": [count, count]} for count in blocks}
        image_size = _PATCH * side
        images = torch.randn(batch_size, 1, image_size, image_size, device=device)
        labels = torch.arange(batch_size, device=device) % NUM_CLASSES
        runs = {}
        for name, mhla in options.items():
            model = make_classifier(
                seed=0,
                mhla=mhla,
                layers=layers,
                hidden_size=hidden_size,
                heads=heads,
                image_size=image_size,
                patch_size=_PATCH,
                mlp_ratio=mlp_ratio,
            )
            runs[name] = partial(_step, model.to(device), images, labels)
        rows: dict[str, dict[str, Any]] = {}
        for name, figures in time_in_rounds(runs, device, seconds=seconds).items():
            if isinstance(figures, str):
                raise RuntimeError(f"{side} x {side} tokens, {name}: {figures}")
            rows[name] = {**figures, "peak_memory_bytes": peak_memory(runs[name], device)}
        found[str(side * side)] = rows
    return found


def _step(model: Any, images: torch.Tensor, labels: torch.Tensor) -> None:
    training_loss(model, images, labels).backward()


def summarize(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Accuracy and rank by number of blocks, and time and memory by number of tokens and of blocks."""
    trained = {}
    for name in (name for name in ("softmax", *NAMES) if name in results):
        last = [run["attention"][-1] for run in runs_of(results, name)]
        trained[name] = {
            **common_figures(results, name),
            "effective_rank": [attention_mean(record, "effective_rank") for record in last],
            "rank": [attention_mean(record, "rank") for record in last],
            "rank_bound": next(iter(last[0]["layers"].values()))["rank_bound"],
        }
    return {
        "trained": trained,
        "steps": {
            tokens: {
                name: {key: figures[key] for key in ("milliseconds", "peak_memory_bytes")}
                for name, figures in rows.items()
            }
            for tokens, rows in results[_TIMING].items()
        },
    }


def plot(report: Mapping[str, Any], path: Path) -> None:
    """Draws accuracy and effective rank over the number of blocks, and time and memory over it for each length."""
    trained, steps = _ordered(report)
    counts = {name: count for name, count in NAMES.items() if name in trained}
    figure = new_figure(10, 6.6)
    (accuracies, ranks), (times, memory) = figure.subplots(2, 2)
    for axis, key, scale, label in (
        (accuracies, "accuracy", 100, "held-out accuracy, %"),
        (ranks, "effective_rank", 1, "effective rank, mean of layers"),
    ):
        values = {name: [scale * value for value in trained[name][key]] for name in trained}
        means = [statistics.fmean(values[name]) for name in counts]
        axis.plot(list(counts.values()), means, color=COLORS["mhla"], label="MHLA (M = 1: linear)")
        for name, count in counts.items():
            color = COLORS["linear" if count == 1 else "mhla"]
            axis.plot([count] * len(values[name]), values[name], "o", color=color, markersize=5, alpha=0.7)
        axis.axhline(statistics.fmean(values["softmax"]), color=COLORS["softmax"], linestyle="--", label="softmax")
        axis.set(xlabel="blocks M", ylabel=label, xscale="log")
        axis.set_ylim(bottom=0)
        axis.legend(frameon=False, loc="lower right")
    shades = ("#9ecae1", "#4292c6", "#08519c")
    for axis, key, label in (
        (times, "milliseconds", "time of a step / with M = 1"),
        (memory, "peak_memory_bytes", "memory of a step / with M = 1"),
    ):
        for (tokens, rows), color in zip(steps.items(), shades, strict=False):
            measured = sorted(int(name) for name in rows if name != "softmax")
            ratios = [rows[str(count)][key] / rows["1"][key] for count in measured]
            axis.plot(measured, ratios, "o-", color=color, markersize=4, label=f"N = {int(tokens):,}")
            axis.axvline(math.sqrt(int(tokens)), color=color, linestyle=":", linewidth=1.2)
        axis.set(xlabel="blocks M (dotted: M² = N)", ylabel=label, xscale="log", yscale="log")
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if str(value)[0] in "25" else "")
    times.legend(frameon=False)
    for axis in (accuracies, ranks, times, memory):
        axis.set_xticks([1, 4, 16, 64, 256] if axis in (times, memory) else list(counts.values()))
        axis.minorticks_off() if axis in (accuracies, ranks) else axis.set_xticks([], minor=True)
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.grid(alpha=0.3)
    save_figure(figure, path)


def tables(report: Mapping[str, Any]) -> dict[str, str]:
    """The tables of `docs/results/classifier.md`."""
    trained, steps = _ordered(report)
    rows = []
    for name, row in trained.items():
        count = NAMES.get(name)
        rows.append(
            [
                "softmax" if count is None else f"{count}" + (" (linear)" if count == 1 else ""),
                percent(row["accuracy"]),
                spread(row["rank"], "{:.0f}"),
                "–" if count is None else str(head_width(report) if count == 1 else row["rank_bound"]),
                spread(row["effective_rank"], "{:.0f}"),
                f"{row['parameters']:,}",
            ]
        )
    header = ["blocks M", "held-out accuracy, %", "rank", "bound", "effective rank", "parameters"]
    counts = sorted({int(name) for measured in steps.values() for name in measured if name != "softmax"})
    compared = ["softmax", *map(str, counts)]
    cost = [
        [f"{int(tokens):,} ({math.isqrt(int(tokens))})", *(_cost(measured, name) for name in compared)]
        for tokens, measured in steps.items()
    ]
    cost_header = ["tokens N (√N)", "softmax", *(f"M = {count}" for count in counts)]
    return {"blocks": markdown_table(header, rows), "blocks-cost": markdown_table(cost_header, cost)}


def _ordered(report: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What was trained, fewest blocks first, and what was measured, fewest tokens first."""
    summary = report["summary"]
    return in_order(summary["trained"], ["softmax", *NAMES]), in_order(
        summary["steps"], sorted(summary["steps"], key=int)
    )


def _cost(measured: Mapping[str, Mapping[str, float]], name: str) -> str:
    if name not in measured:
        return "–"
    row = measured[name]
    return f"{row['milliseconds']:.0f} ms, {row['peak_memory_bytes'] / 2**20:.0f} MiB"


EXPERIMENT = Experiment(title="Number of blocks", cases=cases, summarize=summarize, plot=plot, tables=tables)
