# SPDX-License-Identifier: Apache-2.0
"""The report of a recovery, the names of its figures, and a plot of them."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from .. import __version__
from ..utils.figures import new_figure, save_figure
from ..utils.files import read_json
from .recipes import STAGES, present_name


REPORT, PLOT = "report.json", "report.png"
CONVERTED = "converted"
TITLES = {
    "softmax": "softmax (original)",
    CONVERTED: "converted",
    **{name: stage.title for name, stage in STAGES.items()},
}
"""Names of a model's states, in their order."""
BESIDE = {
    "window": "window, no MHLA",
    "linear": "linear, converted",
    "linear_calibrated": "linear, calibrated",
}
"""Names of what is measured beside the states."""

# Parts of a report with an entry for each stage.
_BY_STAGE = ("figures", "seconds", "stages", "recipe")

LABELS = {
    "above_softmax_percent": "above softmax, %",
    "cosine": "cosine to the original",
    "loss": "loss",
    "bits_per_byte": "bits per byte",
    "agreement": "same class as the original",
    "recall_bits": "recall, bits per token",
}

HIGHER_IS_BETTER = ("cosine", "agreement")
"""The figures of which that is true."""


def main_figure(figures: Mapping[str, float]) -> str | None:
    """Return the name of the figure that a model is judged by; `None` where there is none."""
    return next((name for name in LABELS if name in figures), None)


def is_worse(figures: Mapping[str, float], before: Mapping[str, float]) -> bool:
    """Return whether a model is worse than another by the main figure; one that is not a number is."""
    name = main_figure(before)
    if name is None or math.isnan(before[name]):
        return False
    sign = -1 if name in HIGHER_IS_BETTER else 1
    return not sign * figures[name] <= sign * before[name]


def kept_figures(content: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return the figures of the model that there was after each state: of a discarded stage those from before it."""
    found: dict[str, dict[str, float]] = {}
    kept: dict[str, float] = {}
    for name in TITLES:
        if name in content["figures"]:
            kept = kept if name in content.get("discarded", ()) else content["figures"][name]
            found[name] = kept
    return found


def with_present_names(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a report, or of a part of it, with the present names of stages."""
    return {
        present_name(name): with_present_names(value) if name in _BY_STAGE and isinstance(value, dict) else value
        for name, value in content.items()
    }


@dataclass
class RecoveryReport:
    """Result of a recovery, written as `report.json`.

    Attributes:
        output: The directory written.
        family: See `recipes.FAMILIES`.
        figures: Quality on held-out data: of the original under `softmax`, after the conversion under `converted`,
            and after each stage under its name. The main figure comes last, or is `cosine`.
        beside: The same figures of what the model is without MHLA: `window` of the softmax window alone, with the
            weights of the original; `linear` and `linear_calibrated` of linear attention, which is MHLA with equal
            mixing weights, before the stages and after calibration.
        seconds: Of each stage: `seconds` by the clock and `cpu_seconds`.
        stages: Details of each stage.
        discarded: Stages that ended worse than they began, whose result was left out.
        data: Description of the training data; `origin` is the id of a data set on the Hub, `digits` or `generated`,
            and is left out for files of the user's.
        recipe: The recipe that was followed.
        seed: Seed of everything random.
        machine: Date, device and versions when it began.
        fingerprint: Fingerprint of the data while the recovery runs.
    """

    output: Path
    family: str
    figures: dict[str, dict[str, float]] = field(default_factory=dict)
    beside: dict[str, dict[str, float]] = field(default_factory=dict)
    seconds: dict[str, dict[str, float]] = field(default_factory=dict)
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)
    discarded: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)
    seed: int | None = None
    machine: dict[str, Any] = field(default_factory=dict)
    fingerprint: str | None = None

    @classmethod
    def read(cls, output: Path, path: Path | None = None) -> RecoveryReport:
        """Read the report of an output directory, or that of a stage of it."""
        content = with_present_names(read_json(path or output / REPORT, "the report"))
        known = {item.name: content[item.name] for item in fields(cls) if item.name in content}
        # Files are sorted by name.
        for part, names in (("figures", TITLES), ("beside", BESIDE)):
            known[part] = {name: content[part][name] for name in names if name in content.get(part, {})}
        return cls(output, **known)

    @property
    def kept(self) -> str:
        """The state whose weights are the model's."""
        return [name for name in self.figures if name not in self.discarded][-1]

    def notes(self) -> list[str]:
        """A sentence on each stage whose result was discarded."""
        notes, kept = [], CONVERTED
        for name, figures in self.figures.items():
            if name in self.discarded:
                label = main_figure(figures) or ""
                change = f"{LABELS[label]} {figures[label]:.4g} after {self.figures[kept][label]:.4g}"
                notes.append(f"{name} ended worse ({change}): its result was discarded")
            else:
                kept = name
        return notes

    def left_alone(self, stage: str) -> str | None:
        """How many layers or blocks a stage left as they were, as `"3 of 12"`; `None` where it does not tell."""
        details = self.stages.get(stage, {}) if stage in STAGES else {}
        parts = details.get("layers") or details.get("blocks") or {}
        if isinstance(parts, list):
            stayed = [not layer["changed"] for layer in parts]
        else:
            pairs = [(each.get("held_out_before"), each.get("held_out_after")) for each in parts.values()]
            stayed = [not after < before for before, after in pairs if None not in (before, after)]
        return f"{sum(stayed)} of {len(stayed)}" if stayed else None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, without `output` and the fingerprint, and with `notes`."""
        names = [item.name for item in fields(self) if item.name not in ("output", "fingerprint")]
        content = {name: getattr(self, name) for name in names}
        return {**content, "notes": self.notes(), "version": __version__}


def write_plot(path: Path, report: RecoveryReport) -> None:
    """Draw the main figure after the conversion and each stage over CPU seconds; nothing without matplotlib."""
    converted = report.figures.get(CONVERTED, {})
    label = main_figure(converted)
    if label is None or importlib.util.find_spec("matplotlib") is None:
        return
    figure = new_figure(6, 3.5)
    axes, elapsed, points = figure.subplots(), 0.0, []
    for name in (name for name in report.figures if name != "softmax"):
        elapsed += 0.0 if name == CONVERTED else report.seconds[name]["cpu_seconds"]
        points.append((elapsed, report.figures[name][label]))
        axes.annotate(TITLES[name], points[-1], textcoords="offset points", xytext=(6, 6), fontsize=8)
    axes.plot(*zip(*points), marker="o")
    axes.set_xlabel("CPU seconds")
    axes.set_ylabel(LABELS[label])
    axes.grid(alpha=0.3)
    save_figure(figure, path)
