# SPDX-License-Identifier: Apache-2.0
"""Failure signatures: each way to fail is provoked in a short training and named; a sound training shows none."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mhla_hf.analysis.signatures import SIGNATURES
from mhla_hf.utils.figures import new_figure, save_figure

from .documentation import markdown_table
from .experiment import Case, Experiment


_CLASSIFIER = "benchmarks.experiments.signatures_cases:train_classifier"
_LANGUAGE_MODEL = "benchmarks.experiments.signatures_cases:train_language_model"

_BLOCKS = {"blocks": [5, 5]}
_TEXT = {"block_size": 16, "grid": [128], "window": None}
_FAILURES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "classifier, sound": (_CLASSIFIER, {"mhla": _BLOCKS}, ()),
    "frozen uniform mixing weights": (
        _CLASSIFIER,
        {"mhla": {**_BLOCKS, "mixing_init": "uniform"}, "frozen_mixing": True},
        ("uniform-mixing",),
    ),
    "one block": (_CLASSIFIER, {"mhla": {"blocks": [1, 1]}}, ("too-few-blocks",)),
    "mixing weights at a rate of 10": (
        _CLASSIFIER,
        {"mhla": _BLOCKS, "mixing_learning_rate": 10.0},
        ("exploding-mixing",),
    ),
    "features that can be negative": (
        _CLASSIFIER,
        {"mhla": {**_BLOCKS, "feature_map": "identity"}},
        ("unstable-normalizer",),
    ),
    "queries of one head below zero": (_CLASSIFIER, {"mhla": _BLOCKS, "query_shift": 8.0}, ("dead-features",)),
    "language model, sound": (_LANGUAGE_MODEL, {"mhla": _TEXT}, ()),
    "no normaliser, texts 8 times as long": (
        _LANGUAGE_MODEL,
        {"mhla": {**_TEXT, "normalizer": "none", "mixing_init": "uniform"}},
        ("unstable-normalizer",),
    ),
}
"""What is provoked: function, options, and the signatures that must be reported."""

_SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "cpu": {
        _CLASSIFIER: {
            "steps": 120, "track_every": 20, "batch_size": 16, "image_size": 40, "digit_sizes": [36, 38, 40],
        },
        _LANGUAGE_MODEL: {"steps": 120, "track_every": 30, "batch_size": 8, "length": 128, "longer": 8},
    },
    "gpu": {
        _CLASSIFIER: {
            "steps": 2000, "track_every": 100, "batch_size": 64, "image_size": 40, "digit_sizes": [24, 28, 32],
        },
        _LANGUAGE_MODEL: {"steps": 2000, "track_every": 100, "batch_size": 32, "length": 128, "longer": 16},
    },
    "smoke": {
        _CLASSIFIER: {"steps": 2, "track_every": 1, "batch_size": 2, "image_size": 40, "digit_sizes": [40]},
        _LANGUAGE_MODEL: {"steps": 2, "track_every": 1, "batch_size": 2, "length": 128, "longer": 8},
    },
}  # fmt: skip
_SEEDS = {"cpu": (0, 1), "gpu": (0, 1, 2, 3), "smoke": (0,)}
_COLOR = "#1f77b4"


def cases(setting: str) -> dict[str, Case]:
    """The trainings, one for each failure and seed."""
    return {
        f"{label}, seed {seed}": Case(function, {**options, **_SIZES[setting][function], "seed": seed})
        for label, (function, options, _) in _FAILURES.items()
        for seed in _SEEDS[setting]
    }


def summarize(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """For each failure: the signatures that are expected and those found, with their first step, and the effect."""
    summary = {}
    for label, (function, _, expected) in _FAILURES.items():
        figures = [result for name, result in results.items() if name.rpartition(", seed ")[0] == label]
        reports = [[(each["name"], each["step"]) for each in result["signatures"]] for result in figures]
        names = sorted({name for report in reports for name, _ in report}, key=list(SIGNATURES).index)
        measures = ("accuracy",) if function == _CLASSIFIER else ("bits_per_byte", "bits_per_byte_longer")
        summary[label] = {
            "expected": list(expected),
            "missed": sum(name not in {found for found, _ in report} for name in expected for report in reports),
            "found": {
                name: {
                    "runs": sum(name in {found for found, _ in report} for report in reports),
                    "first_step": min(step for report in reports for found, step in report if found == name),
                    "layers": len(
                        {each["layer"] for result in figures for each in result["signatures"] if each["name"] == name}
                    ),
                }
                for name in names
            },
            "runs": len(figures),
            **{measure: [result[measure] for result in figures] for measure in measures},
        }
    return summary


def plot(report: Mapping[str, Any], path: Path) -> None:
    """Draws when each signature was first reported, and what became of the model."""
    summary = report["summary"]
    labels = [label for label in _FAILURES if label in summary]
    figure = new_figure(8.6, 4.0)
    left, middle, right = figure.subplots(1, 3, sharey=True, width_ratios=[3, 2, 2])
    names = [name for name in SIGNATURES if any(name in entry["found"] for entry in summary.values())]
    for place, label in enumerate(labels):
        entry = summary[label]
        for name, found in entry["found"].items():
            column, share = names.index(name), found["runs"] / entry["runs"]
            left.scatter(column, place, s=230, color=_COLOR, alpha=0.35 + 0.65 * share, linewidths=0)
            left.annotate(
                f"{found['first_step']}", (column, place), color="white", ha="center", va="center", fontsize=7
            )
    left.set_xticks(range(len(names)), names, rotation=30, ha="right", fontsize=8)
    left.set_yticks(range(len(labels)), labels, fontsize=8)
    left.set(xlim=(-0.6, max(1, len(names)) - 0.4), ylim=(len(labels) - 0.5, -0.5))
    left.set_title("first report, training step", fontsize=9)
    _bars(middle, summary, labels, {"accuracy": _COLOR})
    middle.set(title="accuracy", xlim=(0, 1))
    _bars(right, summary, labels, {"bits_per_byte": "#9ecae1", "bits_per_byte_longer": _COLOR})
    right.set_title("bits per byte", fontsize=9)
    middle.title.set_fontsize(9)
    values = [value for entry in summary.values() for value in entry.get("bits_per_byte_longer", ())]
    right.set_xlim(0, 1.15 * max(values))
    right.legend(
        handles=[
            _patch("#9ecae1", "length of training"),
            _patch(_COLOR, "end of longer texts"),
        ],
        fontsize=7,
        loc="upper right",
        frameon=False,
    )
    for axes in (left, middle, right):
        axes.grid(axis="y" if axes is left else "x", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    save_figure(figure, path)


def tables(report: Mapping[str, Any]) -> dict[str, str]:
    """The table of the documentation."""
    rows = []
    for label in _FAILURES:
        entry = report["summary"][label]
        reported = {name: entry["found"][name] for name in SIGNATURES if name in entry["found"]}
        found = [
            f"`{name}`" + ("" if facts["runs"] == entry["runs"] else f" ({facts['runs']} of {entry['runs']} runs)")
            for name, facts in reported.items()
        ]
        steps = [str(facts["first_step"]) for facts in reported.values()]
        effect = f"accuracy {_spread(entry['accuracy'], percent=True)}" if "accuracy" in entry else ""
        if "bits_per_byte" in entry:
            short, long = (_spread(entry[name]) for name in ("bits_per_byte", "bits_per_byte_longer"))
            effect = f"{short} bits per byte, {long} at the end of longer texts"
        rows.append([label, ", ".join(found) or "none", ", ".join(steps) or "–", effect])
    return {"signatures": markdown_table(["training", "reported", "first at step", "outcome"], rows)}


def _bars(
    axes: Any, summary: Mapping[str, Mapping[str, Any]], labels: Sequence[str], colors: Mapping[str, str]
) -> None:
    height = 0.7 / len(colors)
    for place, label in enumerate(labels):
        for index, (measure, color) in enumerate(colors.items()):
            values = summary[label].get(measure)
            if values:
                y = place + (index - (len(colors) - 1) / 2) * height
                axes.barh(y, statistics.fmean(values), height=0.9 * height, color=color)
                axes.scatter(values, [y] * len(values), s=9, color="#222222", zorder=3)


def _patch(color: str, label: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=color, label=label)


def _spread(values: Sequence[float], *, percent: bool = False) -> str:
    scale, digits, unit = (100.0, 1, " %") if percent else (1.0, 2, "")
    mean = f"{scale * statistics.fmean(values):.{digits}f}"
    deviation = f" ± {scale * statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean}{deviation}{unit}"


EXPERIMENT = Experiment(title="Failure signatures", cases=cases, summarize=summarize, plot=plot, tables=tables)
