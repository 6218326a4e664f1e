# SPDX-License-Identifier: Apache-2.0
"""Files and directories that are either complete or absent: written under a temporary name, then moved."""

from __future__ import annotations

import errno
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from safetensors import SafetensorError


TEMPORARY_PREFIX = ".tmp-"


@contextmanager
def atomic_directory(destination: Path) -> Iterator[Path]:
    """Gives a temporary sibling to fill, and moves it to `destination` when the block ends well.

    What stood at `destination` is replaced then, and kept until that moment. On any exception, Ctrl-C included,
    nothing new is left behind.

    Args:
        destination: The directory to make; its parents are made too.
    """
    destination = destination.absolute()
    destination.parent.mkdir(parents=True, exist_ok=True)
    temporary, retired = _temporary_sibling(destination), _temporary_sibling(destination)
    temporary.mkdir()
    try:
        with clear_write_errors(destination):
            yield temporary
            for path in temporary.rglob("*"):
                if path.is_file():
                    _flush_to_disk(path)
        if destination.exists():
            os.replace(destination, retired)
        try:
            os.replace(temporary, destination)
        except BaseException:
            if retired.exists():
                os.replace(retired, destination)
            raise
        _flush_to_disk(destination.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(retired, ignore_errors=True)


@contextmanager
def atomic_file(destination: Path) -> Iterator[Path]:
    """Gives a temporary sibling to write, and moves it to `destination` when the block ends well.

    Args:
        destination: The file to make; its parents are made too. The temporary name ends like it.
    """
    destination.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary_sibling(destination)
    try:
        with clear_write_errors(destination):
            yield temporary
        os.replace(temporary, destination)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(destination: Path, value: Any) -> None:
    """Writes a JSON file atomically."""
    with atomic_file(destination) as temporary:
        temporary.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@contextmanager
def clear_write_errors(destination: Path) -> Iterator[None]:
    """Says in one line that there is no room for a file, whatever the library that wrote it raises.

    Safetensors and PyTorch have exceptions of their own for it, which name neither the file nor what to do.

    Args:
        destination: What is written, for the error.

    Raises:
        OSError: If the disk or a quota is full, or the system limits the size of files.
    """
    try:
        yield
    except Exception as error:
        reason = _no_room(error, destination.parent)
        if reason is None:
            raise
        raise OSError(
            f"{destination} cannot be written: {reason}. Make room and run the same command again; what was complete "
            "before is still there."
        ) from error


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
    """Removes what killed processes left under temporary names in a directory."""
    for path in parent.glob(f"{TEMPORARY_PREFIX}*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _temporary_sibling(path: Path) -> Path:
    """A new name beside a path, another one at every call."""
    return path.with_name(f"{TEMPORARY_PREFIX}{uuid.uuid4().hex[:8]}-{path.name}")


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_NO_ROOM = {
    errno.ENOSPC: "no space is left on the disk",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file is larger than the system allows",
}


def _no_room(error: Exception, directory: Path) -> str | None:
    """Why there is no room, if that is what an exception comes from."""
    if isinstance(error, OSError) and error.errno is not None:
        return _NO_ROOM.get(error.errno)
    if not isinstance(error, OSError | RuntimeError | SafetensorError):
        return None
    for number, reason in _NO_ROOM.items():
        # As safetensors puts it, and copies of whole directories.
        if f"(os error {number})" in str(error) or f"[Errno {number}]" in str(error):
            return reason
    # PyTorch's zip files, and programs that files are written by, do not say.
    with suppress(OSError):
        if shutil.disk_usage(directory).free < 2**16:
            return _NO_ROOM[errno.ENOSPC]
    return "the disk may be full" if "inline_container" in str(error) else None
