# SPDX-License-Identifier: Apache-2.0
"""Associative recall (MQAR): how many pairs a model remembers, by kind of attention."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mhla_hf.utils.figures import new_figure, save_figure

from .documentation import markdown_table
from .experiment import Case, Experiment
from .recall_models import (
    ATTENTION,
    COLORS,
    LABELS,
    build_model,
    correct_answers,
    number_of_seeds,
    percentages,
    smoothed,
    train_model,
)
from .recall_tasks import Questions, generator_for, recall_questions, size_of_step


MAIN = ("softmax", "hybrid", "window", "mhla", "hedgehog", "linear")
ABLATION = ("mhla", "mhla-locality", "mhla-per-head", "mhla-rope-before", "hybrid-mhla-first")
_SIZES = [[4, 64], [8, 64], [16, 128], [32, 256], [64, 256]]
_SETTINGS: dict[str, dict[str, Any]] = {
    "cpu": {
        "seeds": 2,
        "sizes": _SIZES,
        "width": 64,
        "heads": 2,
        "steps": 300,
        "step_tokens": 2048,
        "test_tokens": 16384,
    },
    "gpu": {
        "seeds": 5,
        "sizes": [*_SIZES, [128, 512]],
        "width": 128,
        "heads": 2,
        "steps": 4000,
        "step_tokens": 32768,
        "test_tokens": 131072,
    },
    "smoke": {
        "seeds": 1,
        "sizes": [[2, 32], [4, 32]],
        "width": 16,
        "heads": 2,
        "steps": 2,
        "step_tokens": 64,
        "test_tokens": 128,
    },
}
# Apart from the seeds of the training.
_TEST_SEED = 1000


def train_recall_case(
    *,
    mhla: Mapping[str, Any] | None,
    frozen_mixing: bool,
    seed: int,
    sizes: Sequence[Sequence[int]],
    width: int,
    heads: int,
    steps: int,
    step_tokens: int,
    test_tokens: int,
    device: torch.device,
) -> dict[str, Any]:
    """Trains one model on few pairs first and then on all numbers of pairs in turn, and tests it on each.

    Args:
        mhla: Options of MHLA; `None` for softmax.
        frozen_mixing: Whether the mixing weights stay as they are.
        seed: Of weights and data.
        sizes: Numbers of pairs, ascending, each with the tokens of a sequence.
        width: Width of the model.
        heads: Its attention heads.
        steps: Steps of the training.
        step_tokens: Tokens of a step.
        test_tokens: Tokens of the test for each number of pairs.
        device: Device to run on.

    Returns:
        `accuracy`, one for each number of pairs, and `losses`, steps and mean losses before them.
    """
    longest = max(length for _, length in sizes)
    model = build_model(mhla, frozen_mixing=frozen_mixing, width=width, heads=heads, longest=longest, seed=seed)
    model.to(device)

    def questions(step: int) -> Questions:
        pairs, length = size_of_step(sizes, step, steps)
        return recall_questions(max(1, step_tokens // length), pairs, length, generator_for(seed, step))

    losses = train_model(model, questions, steps, device)
    accuracy = []
    for index, (pairs, length) in enumerate(sizes):
        test = recall_questions(max(1, test_tokens // length), pairs, length, generator_for(_TEST_SEED, index))
        accuracy.append(correct_answers(model.eval(), test.to(device)).double().mean().item())
    return {"accuracy": accuracy, "losses": smoothed(losses)}


def _cases(setting: str) -> Mapping[str, Case]:
    options = dict(_SETTINGS[setting])
    seeds = options.pop("seeds")
    names = dict.fromkeys((*MAIN, *ABLATION))
    function = f"{__name__}:{train_recall_case.__name__}"
    return {
        f"{name}/{seed}": Case(function, {**ATTENTION[name], **options, "seed": seed})
        for seed in range(seeds)
        for name in names
    }


def _summarize(results: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """For each kind of attention, `accuracy` by number of pairs (`mean`, `lowest`, `highest` over seeds) and the mean
    `losses`."""
    summary = {}
    for name in dict.fromkeys(label.partition("/")[0] for label in results):
        runs = [figures for label, figures in results.items() if label.partition("/")[0] == name]
        by_pairs = list(zip(*(run["accuracy"] for run in runs), strict=True))
        losses = zip(*(run["losses"] for run in runs), strict=True)
        summary[name] = {
            "mean": [statistics.fmean(values) for values in by_pairs],
            "lowest": [min(values) for values in by_pairs],
            "highest": [max(values) for values in by_pairs],
            "losses": [[points[0][0], statistics.fmean(point[1] for point in points)] for points in losses],
        }
    return summary


def _pairs(report: Mapping[str, Any]) -> list[int]:
    return [pairs for pairs, _ in next(iter(report["cases"].values()))["options"]["sizes"]]


def _plot(report: Mapping[str, Any], path: Path) -> None:
    figure = new_figure(11, 7.6)
    panels = figure.subplots(2, 2)
    for column, names, title in ((0, MAIN, "kinds of attention"), (1, ABLATION, "variants")):
        for name in names:
            curve, color = report["summary"][name], COLORS[name]
            panels[0][column].plot(_pairs(report), curve["mean"], "-o", color=color, markersize=4, label=LABELS[name])
            panels[0][column].fill_between(_pairs(report), curve["lowest"], curve["highest"], color=color, alpha=0.15)
            panels[1][column].plot(*zip(*curve["losses"]), color=color, linewidth=1.3)
        panels[0][column].set_xscale("log", base=2)
        panels[0][column].set_xticks(_pairs(report), [str(pairs) for pairs in _pairs(report)])
        panels[0][column].set(title=title, xlabel="pairs", ylabel="accuracy", ylim=(-0.03, 1.03))
        panels[0][column].legend(fontsize=8, loc="lower left")
        panels[1][column].set(xlabel="step, from few pairs to many", ylabel="loss")
    for panel in panels.flat:
        panel.grid(alpha=0.25)
    save_figure(figure, path)


def _tables(report: Mapping[str, Any]) -> Mapping[str, str]:
    rows, seeds = [], number_of_seeds(report)
    for name in dict.fromkeys((*MAIN, *ABLATION)):
        label = f"MHLA, {LABELS[name]}" if name.startswith("mhla-") else LABELS[name]
        rows.append([label, *percentages(report["summary"][name], seeds)])
    spread = f", {seeds} seeds and half their range" if seeds > 1 else ""
    header = [f"accuracy in %{spread}", *(f"{pairs} pairs" for pairs in _pairs(report))]
    return {"recall": markdown_table(header, rows)}


EXPERIMENT = Experiment(title="Recall", cases=_cases, summarize=_summarize, plot=_plot, tables=_tables)
