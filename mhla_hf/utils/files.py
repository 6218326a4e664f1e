# SPDX-License-Identifier: Apache-2.0
"""Files and directories that are either complete or absent: written under a temporary name, then moved."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from .destinations import TEMPORARY_PREFIX, claim_destination, flush_to_disk, restore_hidden
from .write_errors import clear_write_errors


logger = logging.getLogger(__name__)

# See `destinations`.
_TEMPORARY = re.compile(rf"{re.escape(TEMPORARY_PREFIX)}(lock-|(old-|moving-)?[0-9a-f]{{8}}-)")


@contextmanager
def atomic_directory(destination: Path) -> Iterator[Path]:
    """Yields a temporary directory to fill, and moves it to `destination` when the block ends well.

    What stood at `destination` is replaced then, and kept until that moment. On any exception, Ctrl-C included,
    nothing new is left behind. See [`claim_destination`][mhla_hf.utils.destinations.claim_destination].

    Args:
        destination: The directory to make; its parents are made too.
    """
    with claim_destination(destination, overwrite=True) as claimed, claimed.staging() as temporary:
        yield temporary


@contextmanager
def atomic_file(destination: Path) -> Iterator[Path]:
    """Yields a temporary sibling to write, and moves it to `destination` when the block ends well.

    Args:
        destination: The file to make; its parents are made too. Of a link, what it leads to. The temporary name ends
            like it.
    """
    real = Path(os.path.realpath(destination))
    real.parent.mkdir(parents=True, exist_ok=True)
    temporary = real.with_name(_temporary_sibling(destination).name)
    try:
        with clear_write_errors(destination):
            yield temporary
            flush_to_disk(temporary)
        os.replace(temporary, real)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(destination: Path, value: Any) -> None:
    """Writes indented, sorted JSON with a final newline, atomically."""
    with atomic_file(destination) as temporary:
        write_staged_json(temporary, value, sort_keys=True)


def write_staged_json(destination: Path, value: Any, *, sort_keys: bool = False) -> None:
    """Writes the same in place, for files of a directory that is itself moved when it is complete."""
    destination.write_text(json.dumps(value, indent=2, sort_keys=sort_keys) + "\n", encoding="utf-8")


def path_inside(root: Path, name: Any, where: str) -> Path:
    """The path of a file or folder that a file of others names, which must lie below a folder.

    Links inside are not followed here: the Hub's cache consists of links to files elsewhere.

    Args:
        root: The folder.
        name: The name as read: relative, without `..`, with `/` between its parts.
        where: Name of the file and field that it was read from, for errors.

    Raises:
        ValueError: If it is not such a name.
    """
    if isinstance(name, str) and name and "\0" not in name and "\\" not in name:
        parts = PurePosixPath(name).parts
        # A drive (C:) would make the path absolute on Windows.
        if parts and not name.startswith("/") and ".." not in parts and not PureWindowsPath(name).drive:
            return root.joinpath(*parts)
    shown = repr(name) if len(repr(name)) <= 100 else f"{repr(name)[:100]}..."
    raise ValueError(f"{where} names {shown}, which is no path inside {root}.")


def remove_directory(directory: Path) -> None:
    """Removes a directory so that a kill half-way leaves nothing under its own name."""
    doomed = _temporary_sibling(directory)
    os.replace(directory, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def remove_leftovers(parent: Path) -> None:
    """Removes what killed processes left under temporary names in a directory, and restores what they put aside.

    Only for a process that holds the directory's lock, or nobody else writes to. Other programs have temporary files
    too: only names as this package makes them count.
    """
    if not parent.is_dir():
        return
    kept = restore_hidden(parent)
    leftovers = [path for path in parent.iterdir() if _TEMPORARY.match(path.name) and path not in kept]
    for path in leftovers:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    count = sum(not path.name.startswith(f"{TEMPORARY_PREFIX}lock-") for path in leftovers)
    if count:
        logger.warning("Removed %d temporary files or folders of a killed run from %s.", count, parent)


def _temporary_sibling(path: Path) -> Path:
    """A new name beside a path, another one at every call."""
    return path.with_name(f"{TEMPORARY_PREFIX}{uuid.uuid4().hex[:8]}-{path.name}")


def link_or_copy(source: Path, target: Path) -> None:
    """A second name for a file, which costs no space, or a copy where the disk has no such names."""
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copyfile(source, target)
