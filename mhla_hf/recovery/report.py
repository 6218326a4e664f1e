# SPDX-License-Identifier: Apache-2.0
"""The report of a recovery, the names of its figures, and a plot of them."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from .. import __version__
from ..utils.figures import new_figure, save_figure
from ..utils.files import read_json
from .recipes import STAGES, present_name


REPORT, PLOT = "report.json", "report.png"
TITLES = {
    "softmax": "softmax (original)",
    "converted": "converted",
    **{name: stage.title for name, stage in STAGES.items()},
}
"""Names of a model's states, in their order."""

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
        seconds: Of each stage: `seconds` by the clock and `cpu_seconds`.
        stages: Details of each stage.
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
    seconds: dict[str, dict[str, float]] = field(default_factory=dict)
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)
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
        figures = {name: content["figures"][name] for name in TITLES if name in content["figures"]}
        return cls(output, **{**known, "figures": figures})

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, without `output` and the fingerprint."""
        names = [item.name for item in fields(self) if item.name not in ("output", "fingerprint")]
        content = {name: getattr(self, name) for name in names}
        return {**content, "version": __version__}


def write_plot(path: Path, report: RecoveryReport) -> None:
    """Draw the main figure after the conversion and each stage over CPU seconds; nothing without matplotlib."""
    converted = report.figures.get("converted", {})
    label = next((label for label in LABELS if label in converted), None)
    if label is None or importlib.util.find_spec("matplotlib") is None:
        return
    figure = new_figure(6, 3.5)
    axes, elapsed, points = figure.subplots(), 0.0, []
    for name in (name for name in report.figures if name != "softmax"):
        elapsed += 0.0 if name == "converted" else report.seconds[name]["cpu_seconds"]
        points.append((elapsed, report.figures[name][label]))
        axes.annotate(TITLES[name], points[-1], textcoords="offset points", xytext=(6, 6), fontsize=8)
    axes.plot(*zip(*points), marker="o")
    axes.set_xlabel("CPU seconds")
    axes.set_ylabel(LABELS[label])
    axes.grid(alpha=0.3)
    save_figure(figure, path)
