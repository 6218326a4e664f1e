# SPDX-License-Identifier: Apache-2.0
"""Class numbers of a class-conditional model, from the names of class folders."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ...utils.json_files import read_json
from .folders import DataFolder


if TYPE_CHECKING:
    from ..loading import PipelineSource

logger = logging.getLogger(__name__)

CLASSES_FILE = "classes.json"


def pipeline_labels(source: PipelineSource) -> dict[str, int]:
    """Class names of a pipeline with their numbers; empty if it has none."""
    from diffusers import DiTPipeline

    names = source.index.get("id2label")
    # The pipeline splits lists of synonyms.
    return DiTPipeline(transformer=None, vae=None, scheduler=None, id2label=names).labels


def folder_labels(folder: Path, names: Iterable[str], known: Mapping[str, int], num_classes: int) -> dict[str, int]:
    """The number of every class of a data folder.

    The first of these rules that applies gives all of them: what `classes.json` in the folder says; numbers that the
    names are themselves; numbers of the pipeline, if it knows the names (with `_` for spaces, too); 0, 1, 2, ... in
    the order of the names. A warning says so where the model has more classes, since a pretrained one knows others by
    these numbers.

    Args:
        folder: The folder of data.
        names: The classes.
        known: See `pipeline_labels`.
        num_classes: Number of classes of the model.

    Raises:
        ValueError: If `classes.json` is not valid or lacks a class, the pipeline knows some of the names only, or the
            model has too few classes.
    """
    names = sorted(names)
    numbers = _labels_by_rule(folder, names, known, num_classes)
    wrong = {name: number for name, number in numbers.items() if not 0 <= number < num_classes}
    if wrong:
        name, number = next(iter(wrong.items()))
        raise ValueError(
            f"data: class {name!r} of {folder} has number {number}, but the model has {num_classes} classes "
            f"(0 to {num_classes - 1})"
        )
    by_number: dict[int, str] = {}
    for name, number in numbers.items():
        if by_number.setdefault(number, name) != name:
            raise ValueError(f"data: classes {by_number[number]!r} and {name!r} of {folder} both have number {number}")
    return numbers


def find_label(name: str, known: Mapping[str, int], num_classes: int) -> int:
    """Class number for a name or a number given by the user.

    Raises:
        ValueError: If there is no such class.
    """
    if name in known:
        return known[name]
    number = _number(name)
    if number is not None and number < num_classes:
        return number
    names = ", ".join(list(known)[:20]) + (", ..." if len(known) > 20 else "")
    raise ValueError(
        f"validation_prompts must be classes, by number (0 to {num_classes - 1})"
        + (f" or by name ({names})" if known else "")
        + f", got {name!r:.100}"
    )


def _labels_by_rule(folder: Path, names: list[str], known: Mapping[str, int], num_classes: int) -> dict[str, int]:
    stored = DataFolder(folder).own_file(CLASSES_FILE)
    if stored is not None:
        return _stored_labels(stored, names)
    numbers = {name: _number(name) for name in names}
    if None not in numbers.values():
        return {name: number for name, number in numbers.items() if number is not None}
    found = {name: known.get(name, known.get(name.replace("_", " "))) for name in names}
    unknown = [name for name, number in found.items() if number is None]
    if len(unknown) == len(names):
        if len(names) < num_classes:
            logger.warning(
                "data: the pipeline knows no class of %s by its name; they are numbered 0 to %d in the order of the "
                "names. If the model was trained on other classes by these numbers, give the numbers in %s.",
                folder, len(names) - 1, CLASSES_FILE,
            )  # fmt: skip
        return {name: number for number, name in enumerate(names)}
    if unknown:
        raise ValueError(
            f"data: the pipeline knows {len(names) - len(unknown)} of the {len(names)} classes of {folder}, but not "
            f"{', '.join(unknown[:10])}; rename them, or give all classes their numbers in {CLASSES_FILE}"
        )
    return {name: number for name, number in found.items() if number is not None}


def _stored_labels(path: Path, names: list[str]) -> dict[str, int]:
    stored = read_json(path, "data:")
    if not all(type(number) is int for number in stored.values()):
        raise ValueError(f"data: {path} must be a JSON object of class names and their numbers")
    missing = [name for name in names if name not in stored]
    if missing:
        raise ValueError(f"data: {path} has no number for {', '.join(missing[:10])}")
    return {name: stored[name] for name in names}


def _number(name: str) -> int | None:
    """Value of a decimal name; `None` for other names."""
    # Python refuses to convert thousands of digits; names of folders are shorter.
    return int(name) if name.isdecimal() and len(name) < 256 else None
