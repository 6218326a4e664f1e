# SPDX-License-Identifier: Apache-2.0
"""The small JSON files of a pipeline directory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ..utils.json_files import Types, read_json
from ..utils.locations import PIPELINE_INDEX


_NULL = type(None)
_INDEX_FIELDS: dict[str, Types] = {"id2label": (dict, _NULL), "boundary_ratio": (float, _NULL)}
_SCHEDULER_NUMBERS = ("flow_shift", "shift", "beta_start", "beta_end")
_SCHEDULER_FIELDS: dict[str, Types] = {
    "_class_name": str,
    "prediction_type": str,
    "beta_schedule": str,
    "num_train_timesteps": int,
    "trained_betas": (list, _NULL),
    **dict.fromkeys(_SCHEDULER_NUMBERS, (float, _NULL)),
}
_MOST_TIMESTEPS = 100_000
# Shifts are below a hundred and betas below one.
_LARGEST = 10**6


def read_index(directory: Path) -> dict[str, Any]:
    """Reads `model_index.json` of a pipeline directory.

    Raises:
        ValueError: If it is missing, not valid, or a field that training uses has a value it cannot have.
    """
    path = directory / PIPELINE_INDEX
    index = read_json(path, "the pipeline's index", required={"_class_name": str}, optional=_INDEX_FIELDS)
    boundary = index.get("boundary_ratio")
    if boundary is not None and not 0 <= boundary <= 1:
        raise ValueError(f"the pipeline's index {path}: 'boundary_ratio' must be from 0 to 1, and is {boundary}.")
    for number, names in (index.get("id2label") or {}).items():
        if not (number.isascii() and number.isdecimal() and len(number) < 10 and isinstance(names, str)):
            raise ValueError(f"the pipeline's index {path}: 'id2label' must map numbers of classes to their names.")
    return index


def scheduler_config(directory: Path) -> dict[str, Any]:
    """Reads the configuration of a pipeline's scheduler; empty if it has none.

    Raises:
        ValueError: If it is not valid, or a field that training uses has a value it cannot have.
    """
    path = directory / "scheduler" / "scheduler_config.json"
    # A link that leads nowhere is an error, and no missing file.
    if not os.path.lexists(path):
        return {}
    config = read_json(path, "the scheduler's configuration", optional=_SCHEDULER_FIELDS)
    where = f"the scheduler's configuration {path}"
    numbers = {name: [config[name]] for name in _SCHEDULER_NUMBERS if config.get(name) is not None}
    numbers["trained_betas"] = config.get("trained_betas") or []
    for name, values in numbers.items():
        if not all(_is_usable(value) for value in values):
            raise ValueError(f"{where}: {name!r} must be from 0 to {_LARGEST:,}.")
    timesteps = config.get("num_train_timesteps")
    if timesteps is not None and not 1 <= timesteps <= _MOST_TIMESTEPS:
        raise ValueError(f"{where}: 'num_train_timesteps' must be from 1 to {_MOST_TIMESTEPS:,}.")
    return config


def _is_usable(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, (int, float)) and 0 <= value <= _LARGEST
