# SPDX-License-Identifier: Apache-2.0
"""The report of a recovery, its main figure, and a plot of it."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from .. import __version__
from ..utils.figures import new_figure, save_figure
from ..utils.files import read_json


REPORT, PLOT = "report.json", "report.png"
TITLES = {
    "softmax": "softmax (original)",
    "converted": "converted",
    "calibrate": "calibrated",
    "match": "matched",
    "distill": "distilled",
    "finetune": "fine-tuned",
}
"""Names of a model's states, in their order."""

LABELS = {
    "above_softmax_percent": "above softmax, %",
    "cosine": "cosine to the original",
    "loss": "loss",
    "bits_per_byte": "bits per byte",
    "agreement": "same class as the original",
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
        content = read_json(path or output / REPORT, "the report")
        known = {item.name: content[item.name] for item in fields(cls) if item.name in content}
        # Files are sorted by name.
        figures = {name: content["figures"][name] for name in TITLES if name in content["figures"]}
        return cls(output, **{**known, "figures": figures})

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, without `output` and the fingerprint."""
        names = [item.name for item in fields(self) if item.name not in ("output", "fingerprint")]
        content = {name: getattr(self, name) for name in names}
        return {**content, "version": __version__}


def rows(report: Mapping[str, Any]) -> list[tuple[str, dict[str, float], float | None]]:
    """Title, figures and CPU seconds of every state of the model, in order."""
    figures, seconds = report["figures"], report["seconds"]
    return [
        (TITLES[name], dict(figures[name]), seconds.get(name, {}).get("cpu_seconds"))
        for name in TITLES
        if name in figures
    ]


def write_plot(directory: Path, report: Mapping[str, Any]) -> Path | None:
    """Draw the main figure over the CPU seconds of the stages; nothing without matplotlib.

    Args:
        directory: Where to write `report.png`.
        report: Content of `report.json`.
    """
    found = report["figures"].get("converted", {})
    name = next((name for name in ("above_softmax_percent", "cosine") if name in found), None)
    if name is None or importlib.util.find_spec("matplotlib") is None:
        return None
    states = [state for state in rows(report) if name in state[1]]
    elapsed, points = 0.0, []
    for title, figures, seconds in states:
        elapsed += 0.0 if title == TITLES["converted"] else seconds or 0.0
        points.append((elapsed, figures[name], title))
    figure = new_figure(6, 3.5)
    axes = figure.subplots()
    axes.plot([x for x, _, _ in points], [y for _, y, _ in points], marker="o")
    for x, y, title in points:
        axes.annotate(title, (x, y), textcoords="offset points", xytext=(6, 6), fontsize=8)
    axes.set_xlabel("CPU seconds")
    axes.set_ylabel(LABELS[name])
    axes.grid(alpha=0.3)
    save_figure(figure, directory / PLOT)
    return directory / PLOT
