# SPDX-License-Identifier: Apache-2.0
"""Facts about the compared models, as Markdown for the page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import __version__
from ..config import MHLAConfig
from ..hub.checks import check_directory
from ..hub.markdown import code, plain
from ..recovery.report import TITLES
from ..training.matching.layers import mhla_layers
from ..utils.machine import machine_facts
from .generation import Generator
from .limits import Limits
from .models import Comparison


_MOST_PROBLEMS = 10


def notice(comparison: Comparison) -> str:
    """What a visitor must know before the first answer; an empty string for a model that was recovered."""
    if comparison.is_recovered or comparison.attention != "softmax attention":
        return ""
    calibrated = " and calibrated" if comparison.record.get("calibration") else ""
    return (
        f"**Not recovered.** This model was converted{calibrated}, but not trained afterwards, so its samples are "
        "worse than those of a recovered model (`mhla-hf recover`)."
    )


def facts(comparison: Comparison, generator: Generator, limits: Limits) -> str:
    """Model, options, quality and checks of a comparison, and the machine and limits of this application."""
    sections = [
        _model(comparison),
        _options(comparison),
        _recovery(comparison.record),
        _checks(comparison),
        _machine(comparison, generator, limits),
    ]
    return "\n\n".join(section for section in sections if section)


def _model(comparison: Comparison) -> str:
    rows = {"MHLA model": code(comparison.name), "Original": f"{code(comparison.base)}, {comparison.attention}"}
    for name, model in comparison.mhla_models().items():
        layers = mhla_layers(model)
        blocks = sorted({" × ".join(map(str, layer.mhla.blocks)) for layer in layers})
        shown = name if len(comparison.components) > 1 else "Class"
        rows[shown] = code(type(model).__name__)
        rows["MHLA layers"] = f"{len(layers)}: {', '.join(code(layer.name) for layer in layers)}"
        rows["Blocks"] = ", ".join(blocks)
    return "### Model\n\n" + _table(rows)


def _options(comparison: Comparison) -> str:
    """Options that are not the defaults."""
    defaults = MHLAConfig().to_dict()
    rows: dict[str, str] = {}
    for model in comparison.mhla_models().values():
        for layer in mhla_layers(model):
            options = layer.mhla.config.to_dict()
            rows |= {code(name): code(value) for name, value in options.items() if value != defaults[name]}
    return "### Options of MHLA\n\n" + _table(rows) if rows else ""


def _recovery(record: Mapping[str, Any]) -> str:
    """Measured losses after each stage, as far as the record has them."""
    recovery = record.get("recovery")
    figures = recovery.get("figures") if isinstance(recovery, Mapping) else None
    rows = {}
    for stage, title in TITLES.items():
        figure = figures.get(stage) if isinstance(figures, Mapping) else None
        above = figure.get("above_softmax_percent") if isinstance(figure, Mapping) else None
        if isinstance(above, (int, float)):
            rows[title.capitalize()] = f"{above:+.1f} %"
    return "### Held-out loss above the original's\n\n" + _table(rows) if rows else ""


def _checks(comparison: Comparison) -> str:
    # Weights were read when they were loaded; their values are not read again.
    problems = check_directory(comparison.source.root, values=False)
    if not problems:
        return "### Checks\n\nFiles, keys, shapes and types are in order (`mhla-hf doctor`)."
    lines = [f"- {problem.level}: {plain(problem.message, 200)}" for problem in problems]
    return "### Checks\n\n" + "\n".join(lines[:_MOST_PROBLEMS])


def _machine(comparison: Comparison, generator: Generator, limits: Limits) -> str:
    machine = machine_facts(comparison.device)
    bounds = [f"{field.most:g} {field.label.lower()}" for field in generator.fields if _is_bound(field.name)]
    rows = {
        "Device": machine["device"] if machine["cuda"] else f"{machine['device']} (threads: {machine['threads']})",
        "Versions": f"mhla-hf {__version__}, torch {machine['torch']}",
        "Limits": f"{', '.join(bounds)}; {limits.prompt:,} characters; {limits.seconds:g} seconds for each model; "
        f"{limits.queue} requests in the queue",
    }
    return "### This application\n\n" + _table(rows)


def _is_bound(name: str) -> bool:
    return name in ("steps", "num_frames", "frames", "new_tokens")


def _table(rows: Mapping[str, str]) -> str:
    return "| | |\n|---|---|\n" + "\n".join(f"| {name} | {value} |" for name, value in rows.items())
