# SPDX-License-Identifier: Apache-2.0
"""Files and directories that are either complete or absent: written under a temporary name, then moved."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


TEMPORARY_PREFIX = ".tmp-"


@contextmanager
def atomic_directory(destination: Path) -> Iterator[Path]:
    """Gives a temporary sibling to fill, and moves it to `destination` when the block ends well.

    What stood at `destination` is replaced. If the block raises, the temporary directory is removed and the old
    content stays.

    Args:
        destination: The directory to make.
    """
    destination.parent.mkdir(parents=True, exist_ok=True)
    temporary = destination.parent / f"{TEMPORARY_PREFIX}{destination.name}-{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        for path in temporary.rglob("*"):
            if path.is_file():
                _flush_to_disk(path)
        if destination.exists():
            remove_directory(destination)
        os.replace(temporary, destination)
        _flush_to_disk(destination.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


@contextmanager
def atomic_file(destination: Path) -> Iterator[Path]:
    """Gives a temporary sibling to write, and moves it to `destination` when the block ends well."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    temporary = destination.parent / f"{TEMPORARY_PREFIX}{os.getpid()}-{destination.name}"
    try:
        yield temporary
        os.replace(temporary, destination)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(destination: Path, value: Any) -> None:
    """Writes a JSON file atomically."""
    with atomic_file(destination) as temporary:
        temporary.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def remove_directory(directory: Path) -> None:
    """Removes a directory so that a kill half-way leaves nothing under its own name."""
    doomed = directory.parent / f"{TEMPORARY_PREFIX}removed-{directory.name}-{os.getpid()}"
    os.replace(directory, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def remove_leftovers(parent: Path) -> None:
    """Removes what killed processes left under temporary names in a directory."""
    for path in parent.glob(f"{TEMPORARY_PREFIX}*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
