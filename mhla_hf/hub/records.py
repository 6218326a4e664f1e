# SPDX-License-Identifier: Apache-2.0
"""What the files of a model's directory record about it: configurations, conversion, recovery and training.

Records may be of earlier versions or of others: fields that are missing, or of another type, count as not recorded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path, PureWindowsPath
from typing import Any

from ..config import MHLAConfig
from ..models.registry import MHLA_CLASSES, TRANSFORMERS_FAMILIES
from ..models.source import CONVERSION_RECORD, TRAINING_RECORD, Component, Source, read_source
from ..recovery.report import REPORT
from ..utils.json_files import read_json
from ..utils.locations import is_hub_id
from ..utils.messages import shorten_text
from .description import LAYER_COUNTS


# Families whose own attention is linear already.
_ADJECTIVES = ("vision", "multi-modal")
_ROTARY = ("rope_parameters", "rope_theta", "rope_scaling", "rotary_dim", "rotary_pct")


@dataclass(frozen=True)
class Tower:
    """Layers of a model that share their options.

    Attributes:
        name: Key in the configuration of a model with several towers, else empty.
        options: Their MHLA options.
        layers: Indices of the MHLA layers, or `None` where they are not known.
        num_layers: Number of layers, or `None`.
        has_rotary: Whether the attention has rotary embeddings.
    """

    name: str
    options: MHLAConfig
    layers: list[int] | None
    num_layers: int | None
    has_rotary: bool


@dataclass(frozen=True)
class ModelPart:
    """A model in the directory that is MHLA.

    Attributes:
        component: Its folder and configuration.
        family: Name of its family.
        kind: Kind of model in words, such as `"video model"`.
        towers: Its layers; one entry for all but models with several towers.
        parameters: Number of its parameters, or `None`.
        new_parameters: Number of those that the conversion added, or `None`.
    """

    component: Component
    family: str
    kind: str
    towers: list[Tower]
    parameters: int | None
    new_parameters: int | None

    @property
    def original_attention(self) -> str:
        """Kind of the attention that MHLA replaced."""
        return self.component.original_attention


@dataclass(frozen=True)
class Records:
    """All that is known about a model.

    Attributes:
        source: The directory.
        parts: Its models that are MHLA.
        conversion: Content of `conversion.json`, or empty.
        recovery: Content of `report.json` of a recovery, or empty.
        training: Content of `training.json`, or empty.
    """

    source: Source
    parts: list[ModelPart]
    conversion: dict[str, Any] = field(default_factory=dict)
    recovery: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)

    @property
    def is_trained(self) -> bool:
        """Whether weights were trained after the conversion, as far as that is recorded."""
        stages = {"match", "distill", "finetune"}
        return bool(self.training) or bool(stages & set(entry(self.recovery, "figures")))

    @property
    def is_calibrated(self) -> bool:
        """Whether weights were calibrated after the conversion, as far as that is recorded."""
        return bool(entry(self.conversion, "calibration")) or "calibrate" in entry(self.recovery, "figures")


def read_records(directory: Path) -> Records:
    """Reads the records of a directory.

    Raises:
        ValueError: If it has no MHLA model, or a file is damaged; the message names it.
    """
    source = read_source(directory)
    conversion = _optional(directory / CONVERSION_RECORD, "the record")
    components = source.mhla_components
    if not components:
        raise ValueError(f"{directory} has no MHLA model; convert it first (mhla-hf convert).")
    recovery = _optional(directory / REPORT, "the report")
    if not is_recovery(recovery):
        recovery = entry(conversion, "recovery")
    return Records(
        source,
        [_read_part(part, entry(conversion, "components", part.name)) for part in components],
        conversion,
        recovery if is_recovery(recovery) else {},
        _optional(directory / TRAINING_RECORD, "the record"),
    )


def is_recovery(content: Any) -> bool:
    """Whether JSON is the report of a recovery."""
    return isinstance(content, dict) and isinstance(content.get("family"), str) and bool(entry(content, "figures"))


def entry(content: Any, *path: str, kind: Any = dict) -> Any:
    """A value of nested objects, or the empty value of its kind where there is none of that kind."""
    for name in path:
        content = content.get(name) if isinstance(content, dict) else None
    if isinstance(content, kind) and not (isinstance(content, bool) and kind is not bool):
        return content
    return kind()


def public_location(location: str) -> str:
    """A Hub id, or the last part of a path: the rest is private."""
    return location if is_hub_id(location) else PureWindowsPath(location).name


def _optional(path: Path, what: str) -> dict[str, Any]:
    return read_json(path, what) if path.is_file() else {}


def _read_part(component: Component, record: dict[str, Any]) -> ModelPart:
    if component.is_transformers:
        family = str(component.config["model_type"])
        known = TRANSFORMERS_FAMILIES.get(family)
        kind = (
            "model" if known is None else {name: f"{name} model" for name in _ADJECTIVES}.get(known.kind, known.kind)
        )
    else:
        own = MHLA_CLASSES[component.class_name]
        family, kind = own.name, f"{own.kind} model"
    added = [_volume(tensor) for tensor in entry(record, "initialised").values()]
    new = None if None in added or not record else sum(filter(None, added))
    copied = next(
        (entry(item, "copied_parameters", kind=int) for item in entry(record, "weight_sets", kind=list)),
        0,
    )
    total = copied + new if copied and new is not None else _stored_parameters(component)
    return ModelPart(component, family, kind, _read_towers(component, record, family), total, new)


def _stored_parameters(component: Component) -> int | None:
    """Number of parameters in the first set of weights; `None` where there is none that can be read."""
    try:
        readers = component.weight_sets()[0].open(floats_only=False)
        return sum(math.prod(shape) for reader in readers for shape in reader.shapes.values()) or None
    # The card is not the place to say what is wrong with weights.
    except (OSError, ValueError, IndexError):
        return None


def _volume(tensor: Any) -> int | None:
    shape = entry(tensor, "shape", kind=list)
    if not all(isinstance(length, int) and 0 <= length < 2**32 for length in shape) or len(shape) > 8:
        return None
    return math.prod(shape)


def _read_towers(component: Component, record: dict[str, Any], family: str) -> list[Tower]:
    where = component.folder / "config.json"
    config = component.config
    configs = {"": config} if isinstance(config.get("mhla"), dict) else {}
    configs = configs or {
        name: value
        for name, value in config.items()
        if isinstance(value, dict) and isinstance(value.get("mhla"), dict)
    }
    # Converted without options of its own.
    configs = configs or {"": {**config, "mhla": {}}}
    towers = []
    for name, own in configs.items():
        recorded = entry(record, "mhla", name) if name else entry(record, "mhla")
        try:
            options = MHLAConfig.from_dict({**(recorded if _is_options(recorded) else {}), **own["mhla"]})
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}: mhla: {shorten_text(str(error), 300)}") from None
        towers.append(Tower(name, options, *_layers(options, own, record, len(configs) == 1), _rotary(own, family)))
    return towers


def _is_options(content: dict[str, Any]) -> bool:
    return bool(content) and not any(isinstance(value, dict) for value in content.values())


def _layers(
    options: MHLAConfig, config: dict[str, Any], record: dict[str, Any], is_only: bool
) -> tuple[list[int] | None, int | None]:
    """Indices of the MHLA layers and number of layers."""
    total = next((config[name] for name in LAYER_COUNTS if isinstance(config.get(name), int)), None)
    # Models keep indices; a fraction can only be of another's making.
    layers = list(options.layers) if isinstance(options.layers, tuple) else None
    if is_only:
        # The record also knows which layers of its own accord stay softmax, those with sliding windows for instance.
        recorded = entry(record, "mhla_layers", kind=list)
        if recorded and all(isinstance(index, int) and not isinstance(index, bool) for index in recorded):
            layers = layers or recorded
        total = entry(record, "num_layers", kind=int) or total
    if layers is None and not record and total is not None and "_class_name" in config:
        layers = list(range(total))
    if total is not None and not (0 < total < 10**5 and (layers is None or all(0 <= i < total for i in layers))):
        return None, None
    return layers, total


def _rotary(config: dict[str, Any], family: str) -> bool:
    return family in ("wan", "sana-video") or any(config.get(name) is not None for name in _ROTARY)
