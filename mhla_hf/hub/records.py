# SPDX-License-Identifier: Apache-2.0
"""What the files of a model's directory say about it, for its card: configurations, headers of weights and records.

Records may come from earlier versions or from strangers. They are reduced here to the fields that the card reads, in
the types that it expects; a field that is missing or has another type counts as not recorded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import MHLAConfig
from ..models.registry import MHLA_CLASSES, TRANSFORMERS_FAMILIES
from ..models.source import CONVERSION_RECORD, TRAINING_RECORD, Component, Source, read_source
from ..recovery.report import REPORT
from ..utils.files import read_json
from ..utils.messages import one_line, shorten_text
from .checks import LAYER_COUNTS


LONGEST = 120
"""Longest text that is taken from a record."""

_MOST = 10**15
_MACHINE = {"device": str, "threads": int, "cuda": str, "torch": str, "date": str}
_STAGE = {"steps": int, "batch_size": int, "learning_rate": float, "mhla_learning_rate": float}
_STAGES = ("calibrate", "match", "distill", "finetune")
_CONVERSION = {
    "command": str,
    "source": {"location": str},
    "calibration": dict,
    "recovery": dict,
    "components": {...: {"mhla_layers": [int], "num_layers": int}},
}
RECOVERY = {
    "family": str,
    "seed": int,
    "data": {"kind": str, "origin": str, "samples": int, "held_out": int, "draws": int, "length": int, "shape": [int]},
    "figures": {...: {...: float}},
    "stages": {...: {"steps": int}},
    "recipe": {"data": dict, "mhla": {"blocks": [int], "window": str}, **dict.fromkeys(_STAGES, _STAGE)},
    "seconds": {...: {"seconds": float, "cpu_seconds": float}},
    "machine": _MACHINE,
}
_COUNTS = ("transfer_steps", "distill_steps", "max_steps", "batch_size", "gradient_accumulation_steps", "seed")
_RATES = [f"{name}learning_rate" for name in ("", "mhla_", "transfer_", "distill_", "finetune_")]
_TEXTS = ("train", "mixed_precision", "teacher")
_TRAINING = {
    "source": {"location": str},
    "config": {**dict.fromkeys(_COUNTS, int), **dict.fromkeys(_RATES, float), **dict.fromkeys(_TEXTS, str)},
    "world_size": int,
    "dataset_size": int,
    "final_losses": {...: float},
}
_NAMES = ("dtype", "model", "contestant", "attention", "shape", "direction", "normalizer", "reason")
BENCHMARK = {
    "benchmark": str,
    "task": str,
    "machine": _MACHINE,
    "options": {"model": str, "layers": int, "hidden_size": int, "cache": str, "dtype": str},
    "results": [
        {
            **dict.fromkeys(_NAMES, str),
            **dict.fromkeys(("context", "tokens", "parameters"), int),
            **dict.fromkeys(("seconds", "milliseconds", "peak_memory_bytes", "speedup_over_ordinary"), float),
            **dict.fromkeys(("mhla", "softmax"), {"cache_bytes": float, "seconds_per_token": float}),
        }
    ],
}
"""Reports of benchmarks; see [`known`]."""

_ROTARY = ("rope_parameters", "rope_theta", "rope_scaling", "rotary_dim", "rotary_pct")
_MOST_LAYERS = 10**5


@dataclass(frozen=True)
class Tower:
    """Layers of a model that share their options.

    Attributes:
        name: Key in the configuration of a model with several towers, else empty.
        options: Their MHLA options.
        layers: Indices of the MHLA layers; empty if unknown.
        num_layers: Number of layers; `None` if unknown.
        has_rotary: Whether the attention has rotary embeddings.
    """

    name: str
    options: MHLAConfig
    layers: list[int]
    num_layers: int | None
    has_rotary: bool


@dataclass(frozen=True)
class ModelPart:
    """An MHLA model of the directory.

    Attributes:
        component: Its folder and configuration.
        family: Name of its family.
        kind: Kind of model in words, such as `"video model"`.
        towers: Its layers; a single entry except for models with several towers.
        parameters: Number of its parameters; 0 if the weights cannot be read.
        new_parameters: Number of those that the conversion added.
    """

    component: Component
    family: str
    kind: str
    towers: list[Tower]
    parameters: int
    new_parameters: int


@dataclass(frozen=True)
class Records:
    """Everything known about a model.

    Attributes:
        source: The directory.
        parts: Its MHLA models.
        conversion: `conversion.json`, see [`known`].
        recovery: `report.json` of a recovery.
        training: `training.json`.
        is_converted: Whether a conversion is on record.
        is_trained: Whether a training after the conversion is on record.
        is_calibrated: Whether a calibration is on record.
    """

    source: Source
    parts: list[ModelPart]
    conversion: dict[str, Any]
    recovery: dict[str, Any]
    training: dict[str, Any]
    is_converted: bool
    is_trained: bool
    is_calibrated: bool


def known(value: Any, shape: Any) -> Any:
    """Reduce JSON to the fields and types of a shape.

    Args:
        value: The JSON.
        shape: `str`, `int` (at least 0), `float` (finite) or `dict` (any object); a list with the shape of its
            entries; or a dict with the shape of each field, where the key `...` stands for any name.

    Returns:
        JSON of that shape. Missing values are `""`, `None`, `[]` and `{}`.
    """
    if isinstance(shape, dict):
        given = value if isinstance(value, dict) else {}
        if ... in shape:
            return {one_line(name, LONGEST): known(entry, shape[...]) for name, entry in given.items()}
        return {name: known(given.get(name), inner) for name, inner in shape.items()}
    if isinstance(shape, list):
        return [known(entry, shape[0]) for entry in value] if isinstance(value, list) else []
    if shape is str:
        return one_line(value, LONGEST) if isinstance(value, str) else ""
    if shape is dict:
        return value if isinstance(value, dict) else {}
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if shape is int:
        return value if isinstance(value, int) and 0 <= value < _MOST else None
    return value if -_MOST < value < _MOST else None


def read_records(directory: Path) -> Records:
    """Read the records of a directory.

    Raises:
        ValueError: If it has no MHLA model, or a file is damaged; the message names it.
    """
    source = read_source(directory)
    if not source.mhla_components:
        raise ValueError(f"{directory} has no MHLA model; convert it first (mhla-hf convert).")
    files = {name: directory / name for name in (CONVERSION_RECORD, REPORT, TRAINING_RECORD)}
    contents = {name: read_json(path, "the record") if path.is_file() else {} for name, path in files.items()}
    conversion, training = known(contents[CONVERSION_RECORD], _CONVERSION), known(contents[TRAINING_RECORD], _TRAINING)
    recovery = known(contents[REPORT], RECOVERY)
    if not is_recovery(recovery):
        recovery = known(conversion["recovery"], RECOVERY)
    stages = set(recovery["figures"]) if is_recovery(recovery) else set()
    return Records(
        source,
        [_read_part(part, conversion["components"].get(part.name, {})) for part in source.mhla_components],
        conversion,
        recovery,
        training,
        is_converted=bool(contents[CONVERSION_RECORD]),
        is_trained=bool(contents[TRAINING_RECORD]) or bool(stages & {"match", "distill", "finetune"}),
        is_calibrated=bool(conversion["calibration"]) or "calibrate" in stages,
    )


def is_recovery(report: Mapping[str, Any]) -> bool:
    """Return whether JSON of the shape `RECOVERY` is the report of a recovery."""
    return bool(report["family"] and report["figures"])


def _read_part(component: Component, record: dict[str, Any]) -> ModelPart:
    if component.is_transformers:
        family = str(component.config["model_type"])
        kind = TRANSFORMERS_FAMILIES[family].kind if family in TRANSFORMERS_FAMILIES else ""
        kind = kind if kind not in ("", "vision", "multi-modal") else f"{kind} model".strip()
    else:
        own = MHLA_CLASSES[component.class_name]
        family, kind = own.name, f"{own.kind} model"
    try:
        sizes = {entry.name: math.prod(entry.shape) for entry in component.weight_sets()[0].entries()}
    # Damaged weights are reported by the checks.
    except (OSError, ValueError):
        sizes = {}
    new = sum(size for name, size in sizes.items() if ".mhla." in name)
    return ModelPart(component, family, kind, _read_towers(component, record, family), sum(sizes.values()), new)


def _read_towers(component: Component, record: dict[str, Any], family: str) -> list[Tower]:
    config = component.config
    configs = {name: value for name, value in config.items() if isinstance(value, dict) and "mhla" in value}
    if isinstance(config.get("mhla"), dict) or not configs:
        configs = {"": config}
    towers = []
    for name, own in configs.items():
        try:
            options = MHLAConfig.from_dict(own.get("mhla") or {})
        except (TypeError, ValueError) as error:
            where = component.folder / "config.json"
            raise ValueError(f"{where}: mhla: {shorten_text(str(error), 300)}") from None
        total = next((own[key] for key in LAYER_COUNTS if isinstance(own.get(key), int)), None)
        layers = list(options.layers) if isinstance(options.layers, tuple) else []
        if len(configs) == 1:
            # The record also knows which layers cannot be MHLA, such as those with sliding windows.
            layers, total = layers or record.get("mhla_layers", []), record.get("num_layers") or total
        if not layers and not record and total is not None and not component.is_transformers:
            layers = list(range(total)) if total < _MOST_LAYERS else []
        if None in layers or (total is not None and max(layers, default=-1) >= total):
            layers, total = [], None
        has_rotary = family in ("wan", "sana-video") or any(own.get(key) is not None for key in _ROTARY)
        towers.append(Tower(name, options, layers, total, has_rotary))
    return towers
