# SPDX-License-Identifier: Apache-2.0
"""From what a user calls a pipeline, a path or a Hub id, to a directory."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from .json_files import read_json
from .source_files import named_file, read_weight_map


PIPELINE_INDEX = "model_index.json"

# A first part of dots alone is a path.
_HUB_ID = re.compile(r"(?!\.+/)[\w.-]+/[\w.-]+")


class SourceNotFoundError(OSError, ValueError):
    """A location at which there is nothing to read: a mistake of the user, and a missing file."""


def local_directory(location: str | os.PathLike[str], argument: str) -> Path | None:
    """The directory that a location means, or `None` for the id of a Hub repository.

    Args:
        location: A directory (`~` is the home directory), or a Hub id `owner/name`. A directory goes first.
        argument: What the user calls the location, for the error.

    Raises:
        SourceNotFoundError: If it is neither.
    """
    path = Path(location).expanduser()
    if path.is_dir():
        return path
    if not is_hub_id(os.fspath(location)):
        raise SourceNotFoundError(f"{argument} {location} is neither a directory nor a Hub id (owner/name).")
    return None


def find_pipeline(location: str | os.PathLike[str], argument: str, **options: Any) -> Path:
    """The directory of a pipeline; of a Hub repository, the files that the pipeline consists of are downloaded.

    Args:
        location: A directory or a Hub id.
        argument: What the user calls the location, for the error.
        **options: For `DiffusionPipeline.download`, safetensors unless `use_safetensors` says otherwise.

    Raises:
        SourceNotFoundError: If it is neither, or a directory without `model_index.json`.
        ValueError: If names of components or weight files lead out of the directory.
        OSError: If there is no such repository.
    """
    directory = local_directory(location, argument)
    if directory is None:
        return download_pipeline(os.fspath(location), **options)
    if not (directory / PIPELINE_INDEX).exists():
        raise SourceNotFoundError(f"{argument} {directory} has no {PIPELINE_INDEX}: it is not a pipeline directory.")
    _check_names(directory)
    return directory


def download_pipeline(repository: str, **options: Any) -> Path:
    """The directory of a Hub repository's pipeline; arguments and errors as in [`find_pipeline`]."""
    from diffusers import DiffusionPipeline

    directory = Path(DiffusionPipeline.download(repository, **{"use_safetensors": True, **options}))
    _check_names(directory)
    return directory


def is_hub_id(location: str) -> bool:
    """Whether a location reads like the id of a Hub repository, `owner/name`."""
    return _HUB_ID.fullmatch(location) is not None


def _check_names(directory: Path) -> None:
    """Checks that the components of a pipeline, and the weight files that they list, are inside its directory."""
    path = directory / PIPELINE_INDEX
    for name, entry in read_json(path, "the pipeline's index").items():
        if isinstance(entry, list):
            folder = named_file(directory, name, str(path))
            for pattern in ("*.safetensors.index*.json", "*.bin.index*.json"):
                for index in sorted(folder.glob(pattern)):
                    read_weight_map(index)
