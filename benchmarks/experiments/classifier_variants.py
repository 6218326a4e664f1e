# SPDX-License-Identifier: Apache-2.0
"""Contestants of the experiments about classification, the sizes of each setting, and what their figures share."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from .experiment import Case


FUNCTION = f"{__package__}.classifier:train_classifiers_case"

TITLES = {
    "softmax": "softmax",
    "linear": "linear",
    "linear-cpe": "linear + CPE",
    "mhla": "MHLA",
    "mhla-4": "MHLA, M = 4",
    "mhla-49": "MHLA, M = 49",
    "mhla-64": "MHLA, M = 64",
    "mhla-frozen": "MHLA, locality, frozen",
    "mhla-uniform": "MHLA, uniform, learned",
    "mhla-cpe": "MHLA + CPE",
    "mhla-gate": "MHLA + gate",
    "mhla-cpe-gate": "MHLA + CPE + gate",
}
"""Contestants. `mhla` has 16 blocks and learns its mixing weights from the locality initialisation; `linear` is one
block with uniform mixing weights that stay as they are, the one of class and distillation token included."""

COLORS = {"softmax": "#444444", "linear": "#d95f02", "mhla": "#1f77b4", "mhla-cpe-gate": "#2ca02c"}

_LINEAR = {"blocks": [1, 1], "mixing_init": "uniform"}
_MHLA: dict[str, dict[str, Any]] = {
    "linear": _LINEAR,
    "linear-cpe": {**_LINEAR, "lepe_kernel": 3},
    "mhla": {"blocks": [4, 4]},
    "mhla-4": {"blocks": [2, 2]},
    "mhla-49": {"blocks": [7, 7]},
    "mhla-64": {"blocks": [8, 8]},
    "mhla-frozen": {"blocks": [4, 4]},
    "mhla-uniform": {"blocks": [4, 4], "mixing_init": "uniform"},
    "mhla-cpe": {"blocks": [4, 4], "lepe_kernel": 3},
    "mhla-gate": {"blocks": [4, 4], "output_gate": True},
    "mhla-cpe-gate": {"blocks": [4, 4], "lepe_kernel": 3, "output_gate": True},
}
_FROZEN = ("linear", "linear-cpe", "mhla-frozen")
# Those whose attention is recorded throughout; of the others at the start and in the end.
_TRACKED = ("softmax", "linear", "mhla")

SIZES: dict[str, dict[str, Any]] = {
    "cpu": {
        "seeds": [0, 1, 2],
        "steps": 240,
        "batch_size": 16,
        "image_size": 56,
        "patch_size": 4,
        "digit_sizes": [40, 44, 48],
        "layers": 3,
        "hidden_size": 64,
        "heads": 2,
        "mlp_ratio": 2.0,
        "matrix_learning_rate": 8e-3,
        "learning_rate": 4e-3,
        "mixing_learning_rate": 3e-2,
        "warmup_steps": 20,
        "held_out_copies": 4,
        "probe_images": 4,
    },
    # DeiT-T, with patches of a size that gives its number of tokens.
    "gpu": {
        "seeds": [0, 1, 2],
        "steps": 4000,
        "batch_size": 128,
        "image_size": 112,
        "patch_size": 8,
        "digit_sizes": [40, 56, 72, 88],
        "layers": 12,
        "hidden_size": 192,
        "heads": 3,
        "mlp_ratio": 4.0,
        "matrix_learning_rate": 2e-3,
        "learning_rate": 1e-3,
        "mixing_learning_rate": 3e-2,
        "warmup_steps": 200,
        "held_out_copies": 8,
        "probe_images": 8,
    },
    "smoke": {
        "seeds": [0],
        "steps": 2,
        "batch_size": 2,
        "image_size": 56,
        "patch_size": 4,
        "digit_sizes": [40],
        "layers": 1,
        "hidden_size": 16,
        "heads": 2,
        "mlp_ratio": 1.0,
        "matrix_learning_rate": 1e-2,
        "learning_rate": 1e-2,
        "mixing_learning_rate": 3e-2,
        "warmup_steps": 1,
        "held_out_copies": 1,
        "probe_images": 1,
    },
}
"""Options of [`train_classifier_case`] by setting, and the seeds. Learning rates were chosen for softmax, and that of
mixing weights, which softmax does not have, for MHLA with 16 blocks."""


def classifier_cases(setting: str, names: Iterable[str]) -> dict[str, Case]:
    """Cases of some contestants by name, each with all seeds of the setting."""
    sizes = SIZES[setting]
    every = max(1, sizes["steps"] // 8)
    return {
        name: Case(
            FUNCTION,
            {
                **sizes,
                "attention": "softmax" if name == "softmax" else "mhla",
                "mhla": _MHLA.get(name),
                "frozen_mixing": name in _FROZEN,
                "track_every": every if name in _TRACKED else sizes["steps"],
            },
        )
        for name in names
    }


def in_order(rows: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Rows of a report, which JSON files hold sorted, in the order of `names`."""
    return {name: rows[name] for name in names if name in rows}


def runs_of(results: Mapping[str, Mapping[str, Any]], name: str) -> list[Mapping[str, Any]]:
    """The runs of a contestant, one for each seed."""
    return results[name]["runs"]


def attention_mean(record: Mapping[str, Any], statistic: str) -> float:
    """Mean of a statistic over the layers of one record of an `AttentionTracker`."""
    return statistics.fmean(layer[statistic] for layer in record["layers"].values())


def common_figures(results: Mapping[str, Mapping[str, Any]], name: str) -> dict[str, Any]:
    """What every experiment reports of a contestant: `accuracy`, a list over the seeds, and number of `parameters`."""
    runs = runs_of(results, name)
    return {"accuracy": [run["accuracy"] for run in runs], "parameters": runs[0]["parameters"]}


def head_width(report: Mapping[str, Any]) -> int:
    """Width of a head in the classifiers of a report, which bounds the rank of linear attention."""
    options = report["cases"]["linear"]["options"]
    return options["hidden_size"] // options["heads"]


def percent(values: Sequence[float]) -> str:
    """Mean and standard deviation of shares, in percent."""
    return spread([100 * value for value in values], "{:.1f}")


def spread(values: Sequence[float], form: str) -> str:
    """Mean and standard deviation, the latter where there are several values."""
    mean = form.format(statistics.fmean(values))
    return mean if len(values) == 1 else f"{mean} ± {form.format(statistics.stdev(values))}"


def draw_accuracies(axis: Any, rows: Mapping[str, Mapping[str, Any]], color: Callable[[str], str]) -> None:
    """Draws a point for each seed and a mean for each contestant, the first at the top."""
    names = list(rows)[::-1]
    for place, name in enumerate(names):
        values = [100 * value for value in rows[name]["accuracy"]]
        axis.barh(place, statistics.fmean(values), color=color(name), alpha=0.35, height=0.65)
        axis.plot(values, [place] * len(values), "o", color=color(name), markersize=5)
        axis.annotate(f"{statistics.fmean(values):.1f}", (max(values), place), (8, -4), textcoords="offset points")
    axis.set_yticks(range(len(names)), [TITLES.get(name, name) for name in names])
    axis.set(xlabel="held-out accuracy, %", xlim=(0, 109))
    axis.grid(alpha=0.3, axis="x")


def color_of(name: str) -> str:
    """Colour of a contestant: those with more than plain MHLA are green, variants of MHLA blue."""
    if name.startswith("linear"):
        return COLORS["linear"]
    return COLORS.get(name, COLORS["mhla-cpe-gate" if "cpe" in name or "gate" in name else "mhla"])
