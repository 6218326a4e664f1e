# SPDX-License-Identifier: Apache-2.0
"""What a directory holds: classes, MHLA layers, blocks, types and sizes, read off configurations and headers."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..models.source import Component
from ..utils.files import named_file
from ..utils.json_files import read_json
from ..utils.locations import PIPELINE_INDEX
from ..utils.tensor_files import FLOAT_TYPES, check_safetensors


LAYER_COUNTS = ("num_layers", "num_hidden_layers", "n_layer", "n_layers", "depth")
"""Entries of configurations that hold the number of layers."""

_AXES = ("blocks", "block_size", "grid")
_MHLA_LAYER = re.compile(r"(.+)\.mhla\.")


@dataclass(frozen=True)
class ModelDescription:
    """One model of a directory.

    Attributes:
        name: Name of the component; `"model"` for a directory of one model.
        class_name: Its class.
        mhla_layers: Number of attention layers with MHLA weights.
        num_layers: Number of layers by the configuration; `None` where it has no such entry.
        options: The stored MHLA options; `None` for a softmax model.
        parameters: Number of values in its tensors.
        dtypes: Number of tensors by type.
        nbytes: Size of its tensors, in bytes.
    """

    name: str
    class_name: str
    mhla_layers: int
    num_layers: int | None
    options: dict[str, Any] | None
    parameters: int
    dtypes: dict[str, int]
    nbytes: int

    @property
    def blocks(self) -> str:
        """Number or size of the blocks, as far as the options give it."""
        options = self.options or {}
        axes = {name: "×".join(map(str, options[name])) for name in _AXES if isinstance(options.get(name), list)}
        if "blocks" in axes:
            grid = f" on {axes['grid']} tokens" if "grid" in axes else ""
            return f"{axes['blocks']}{grid}"
        return f"of {axes['block_size']} tokens" if "block_size" in axes else ""


@dataclass(frozen=True)
class DirectoryDescription:
    """A pipeline or model directory.

    Attributes:
        class_name: Class of the pipeline or model; empty where it cannot be read.
        models: Its models, as far as they can be read.
    """

    class_name: str
    models: tuple[ModelDescription, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON values."""
        return dataclasses.asdict(self)


def describe_directory(root: Path) -> DirectoryDescription:
    """Describes a directory of a pipeline or model, damaged ones as far as possible.

    What is wrong with it is for [`check_directory`][mhla_hf.hub.checks.check_directory] to say: links that lead out
    of it are not followed here either.

    Args:
        root: The directory, whose links were checked.
    """
    index = root / PIPELINE_INDEX
    if not index.is_file():
        model = _describe("model", root)
        return DirectoryDescription("" if model is None else model.class_name, () if model is None else (model,))
    try:
        content = read_json(index, "the pipeline's index")
    except ValueError:
        return DirectoryDescription("", ())
    models = []
    for name, entry in content.items():
        if not isinstance(entry, list) or name.startswith("_"):
            continue
        try:
            folder = named_file(root, name, str(index))
        except ValueError:
            continue
        models.append(_describe(name, folder))
    return DirectoryDescription(str(content.get("_class_name", "")), tuple(model for model in models if model))


def _describe(name: str, folder: Path) -> ModelDescription | None:
    """One model; None for a folder without a model that can be read."""
    try:
        config = read_json(folder / "config.json", "the configuration")
        class_name = Component(name, folder, config).class_name
    except (ValueError, KeyError, TypeError, IndexError):
        return None
    # Those of the main set alone: variants hold the same tensors again.
    stem = Component(name, folder, config).names
    paths = [path for path in sorted(folder.glob("*.safetensors")) if stem.match(path)]
    tensors: dict[str, Mapping[str, Any]] = {}
    for path in paths:
        try:
            header = check_safetensors(path)[0]
        except ValueError:
            continue
        for tensor, entry in header.items():
            tensors.setdefault(tensor, entry)
    layers = {match[1] for match in map(_MHLA_LAYER.match, tensors) if match}
    counts = [config[field] for field in LAYER_COUNTS if isinstance(config.get(field), int)]
    options = config.get("mhla")
    return ModelDescription(
        name=name,
        class_name=str(class_name),
        mhla_layers=len(layers),
        num_layers=counts[0] if counts else None,
        options=options if isinstance(options, dict) else None,
        parameters=sum(math.prod(entry["shape"]) for entry in tensors.values()),
        dtypes=dict(Counter(_type_name(entry["dtype"]) for entry in tensors.values()).most_common()),
        nbytes=sum(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in tensors.values()),
    )


def _type_name(name: str) -> str:
    """The name in torch of a floating-point type in a header."""
    return str(FLOAT_TYPES.get(name, name)).removeprefix("torch.")
