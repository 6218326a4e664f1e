# SPDX-License-Identifier: Apache-2.0
"""Loading and writing models of transformers that a run trains, and finding their teachers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..models.source import Component, read_source
from ..models.weight_files import check_weights, damage_named
from ..utils.files import atomic_directory, path_inside, write_json
from ..utils.json_files import read_json
from ..utils.locations import find_directory, is_hub_id
from ..utils.source_files import list_files
from .config import UNCONVERTED
from .export import RECORD


_RECORDS = ("conversion.json", "training.json")


def find_model(location: str) -> Path:
    """The directory of a model of transformers; a Hub repository is downloaded.

    Raises:
        ValueError: If there is none.
    """
    directory, _ = find_directory(location)
    component_of(directory)
    return directory


def component_of(directory: Path) -> Component:
    """The model in a directory.

    Raises:
        ValueError: If there is none of transformers.
    """
    component = read_source(directory, wanted={}).components[0]
    if not component.is_transformers:
        raise ValueError(f"model: {directory} is not a model of transformers")
    return component


def is_ordinary(directory: Path) -> bool:
    """Whether the model in a directory has its original attention."""
    config = read_json(component_of(directory).folder / "config.json", "the model's configuration")
    return config.get("mhla") is None


def load_model(directory: Path, mhla: dict | str | None = None) -> nn.Module:
    """Loads a model with fp32 weights.

    Args:
        directory: See `find_model`.
        mhla: Options of MHLA to convert an ordinary model on load; None and `none` load it as it is.

    Raises:
        ValueError: If files are damaged, or options come with a converted model.
    """
    import transformers

    component = component_of(directory)
    options: dict[str, Any] = {}
    if isinstance(mhla, dict):
        if not is_ordinary(directory):
            raise ValueError(f"mhla: {directory} is MHLA already; its options are fixed")
        options = {"attn_implementation": "mhla", "mhla": dict(mhla)}
    elif mhla != UNCONVERTED and is_ordinary(directory):
        raise ValueError(
            f"model: {directory} is an ordinary model; say how to convert it (mhla), or convert it first with "
            "`mhla-hf convert`"
        )
    check_weights(component.folder)
    model_class = getattr(transformers, component.class_name, None) or transformers.AutoModel
    with damage_named(component.folder):
        return model_class.from_pretrained(component.folder, dtype=torch.float32, **options)


def find_teacher(directory: Path, teacher: str | None = None) -> Path:
    """The original model behind a directory: what is given, itself, or what its records name.

    A repository on the Hub is downloaded. A directory is looked for beside the one with the record, and nowhere else.

    Raises:
        ValueError: If it is unknown, gone or elsewhere.
    """
    if teacher is not None:
        found = find_model(teacher)
        if not is_ordinary(found):
            raise ValueError(f"teacher: {found} is MHLA itself; it must be an ordinary model")
        return found
    seen: set[Path] = set()
    while not is_ordinary(directory):
        seen.add(directory.resolve())
        source = _recorded_source(directory)
        if source is None:
            raise ValueError(f"teacher must be given: {directory} does not say which model it was converted from")
        try:
            directory = _find_beside(directory, source)
        except (OSError, ValueError):
            directory = Path()
        if directory == Path() or directory.resolve() in seen:
            raise ValueError(
                f"teacher must be given: {source}, which the model comes from, is not there (only Hub repositories "
                "and folders beside it are looked for)"
            )
    return directory


def export_model(source: Path, destination: Path, model: nn.Module, record: dict[str, Any]) -> None:
    """Writes a model directory: everything of the source, with the weights replaced.

    Args:
        source: The directory that training started from.
        destination: Directory to make; written under a temporary name, then moved.
        model: The trained model, without LoRA.
        record: What to say about the training in `training.json`.
    """
    component = component_of(source)
    saving: Any = model
    with atomic_directory(destination) as temporary:
        for path in list_files(source):
            own = (source / path).parent == component.folder
            replaced = own and (path.name == "config.json" or component.names.match(path))
            if replaced or path.name == RECORD or path.parts[0].startswith("."):
                continue
            (temporary / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / path, temporary / path)
        saving.save_pretrained(temporary / component.folder.relative_to(source))
        write_json(temporary / RECORD, record)


def _recorded_source(directory: Path) -> str | None:
    """What the newest record of a directory says it was made from."""
    for name in reversed(_RECORDS):
        if (directory / name).is_file():
            content = read_json(directory / name, "the record", optional={"source": dict})
            location = content.get("source", {}).get("location")
            if location and isinstance(location, str):
                return location
    return None


def _find_beside(owner: Path, source: str) -> Path:
    if is_hub_id(source):
        return find_model(source)
    folder = owner.resolve().parent
    name = str(Path(source).relative_to(folder)) if Path(source).is_absolute() else source
    return find_model(str(path_inside(folder, name, f"the record of {owner}")))
