# SPDX-License-Identifier: Apache-2.0
"""Needle retrieval: what a model finds in a long context, by depth and by length, also beyond the training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mhla_hf.utils.figures import new_figure, save_figure

from .documentation import markdown_table
from .experiment import Case, Experiment
from .recall_models import (
    ATTENTION,
    LABELS,
    build_model,
    correct_answers,
    number_of_seeds,
    percentages,
    smoothed,
    train_model,
)
from .recall_tasks import Questions, generator_for, needle_questions, size_of_step


NAMES = ("softmax", "hybrid", "window", "mhla", "hedgehog", "linear")
_SETTINGS: dict[str, dict[str, Any]] = {
    "cpu": {
        "seeds": 1,
        "needles": 8,
        "lengths": [64, 128, 256],
        "test_lengths": [128, 256, 512, 1024, 2048],
        "width": 64,
        "heads": 2,
        "steps": 300,
        "step_tokens": 2048,
        "test_sequences": 64,
    },
    "gpu": {
        "seeds": 5,
        "needles": 8,
        "lengths": [128, 256, 512, 1024],
        "test_lengths": [512, 1024, 2048, 4096, 8192],
        "width": 128,
        "heads": 2,
        "steps": 4000,
        "step_tokens": 32768,
        "test_sequences": 128,
    },
    "smoke": {
        "seeds": 1,
        "needles": 2,
        "lengths": [32],
        "test_lengths": [32, 64],
        "width": 16,
        "heads": 2,
        "steps": 2,
        "step_tokens": 64,
        "test_sequences": 2,
    },
}
# Apart from the seeds of the training.
_TEST_SEED = 2000
# Sequences of a test go through the model in parts of so many tokens.
_PART_TOKENS = 16384


def train_needle_case(
    *,
    mhla: Mapping[str, Any] | None,
    frozen_mixing: bool,
    seed: int,
    needles: int,
    lengths: Sequence[int],
    test_lengths: Sequence[int],
    width: int,
    heads: int,
    steps: int,
    step_tokens: int,
    test_sequences: int,
    device: torch.device,
) -> dict[str, Any]:
    """Trains one model on short contexts first and then on all lengths in turn, and tests it on longer ones too.

    Args:
        mhla: Options of MHLA; `None` for softmax.
        frozen_mixing: Whether the mixing weights stay as they are.
        seed: Of weights and data.
        needles: Needles of a context; in tests one in each part of it.
        lengths: Tokens of a context in training, ascending.
        test_lengths: Tokens of a context in tests.
        width: Width of the model.
        heads: Its attention heads.
        steps: Steps of the training.
        step_tokens: Tokens of a step.
        test_sequences: Contexts of the test for each length.
        device: Device to run on.

    Returns:
        `accuracy`, for each test length one for each depth, from the start of the context to its end, and `losses`,
        steps and mean losses before them.
    """
    model = build_model(
        mhla, frozen_mixing=frozen_mixing, width=width, heads=heads, longest=max(lengths), seed=seed
    ).to(device)

    def questions(step: int) -> Questions:
        length = size_of_step(lengths, step, steps)
        return needle_questions(max(1, step_tokens // length), needles, length, generator_for(seed, step))

    losses = train_model(model, questions, steps, device)
    accuracy = []
    for length in test_lengths:
        generator = generator_for(_TEST_SEED, length)
        size, right = max(1, _PART_TOKENS // length), []
        for start in range(0, test_sequences, size):
            count = min(size, test_sequences - start)
            test = needle_questions(count, needles, length, generator, by_depth=True)
            right.append(correct_answers(model.eval(), test.to(device)))
        accuracy.append(torch.cat(right).double().mean(dim=0).tolist())
    return {"accuracy": accuracy, "losses": smoothed(losses)}


def _cases(setting: str) -> Mapping[str, Case]:
    options = dict(_SETTINGS[setting])
    seeds = options.pop("seeds")
    function = f"{__name__}:{train_needle_case.__name__}"
    return {
        f"{name}/{seed}": Case(function, {**ATTENTION[name], **options, "seed": seed})
        for seed in range(seeds)
        for name in NAMES
    }


def _summarize(results: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """For each kind of attention `accuracy` by test length and depth; `mean`, `lowest` and `highest` by length."""
    summary = {}
    for name in NAMES:
        runs = np.array([figures["accuracy"] for label, figures in results.items() if label.split("/")[0] == name])
        by_length = runs.mean(axis=2)
        summary[name] = {
            "accuracy": runs.mean(axis=0).tolist(),
            "mean": by_length.mean(axis=0).tolist(),
            "lowest": by_length.min(axis=0).tolist(),
            "highest": by_length.max(axis=0).tolist(),
        }
    return summary


def _options(report: Mapping[str, Any]) -> Mapping[str, Any]:
    return next(iter(report["cases"].values()))["options"]


def _plot(report: Mapping[str, Any], path: Path) -> None:
    options = _options(report)
    lengths, needles, trained = options["test_lengths"], options["needles"], max(options["lengths"])
    figure = new_figure(11, 7)
    panels = figure.subplots(2, 3, sharex=True, sharey=True)
    image = None
    for panel, name in zip(panels.flat, NAMES, strict=True):
        accuracy = np.array(report["summary"][name]["accuracy"]).T
        image = panel.imshow(accuracy, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        for (row, column), value in np.ndenumerate(accuracy):
            color = "white" if value < 0.6 else "black"
            panel.text(column, row, f"{100 * value:.0f}", ha="center", va="center", fontsize=8, color=color)
        panel.axvline(sum(length <= trained for length in lengths) - 0.5, color="red", linewidth=1.5)
        panel.set_title(LABELS[name], fontsize=10)
        panel.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
        panel.set_yticks(range(needles), [f"{100 * (index + 0.5) / needles:.0f} %" for index in range(needles)])
    for panel in panels[1]:
        panel.set_xlabel("tokens of the context")
    for panel in panels[:, 0]:
        panel.set_ylabel("depth of the needle")
    figure.colorbar(image, ax=panels, label="accuracy", shrink=0.8)
    figure.suptitle(f"Needles found, in % (red: longest context of the training, {trained:,} tokens)", fontsize=11)
    save_figure(figure, path)


def _tables(report: Mapping[str, Any]) -> Mapping[str, str]:
    options = _options(report)
    trained = max(options["lengths"])
    seeds = number_of_seeds(report)
    rows = [[LABELS[name], *percentages(report["summary"][name], seeds)] for name in NAMES]
    lengths = [
        f"{length:,} tokens" + (f", {length // trained} × training" if length > trained else "")
        for length in options["test_lengths"]
    ]
    spread = f", {seeds} seeds and half their range" if seeds > 1 else ""
    return {"needle": markdown_table([f"needles found in %{spread}", *lengths], rows)}


EXPERIMENT = Experiment(title="Needle retrieval", cases=_cases, summarize=_summarize, plot=_plot, tables=_tables)
