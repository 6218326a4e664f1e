# SPDX-License-Identifier: Apache-2.0
"""Files of a directory that others made: regular ones that lie in it, and nothing that links or names lead to."""

from __future__ import annotations

import os
import stat
from collections import Counter
from pathlib import Path
from typing import Any

from .files import path_inside
from .json_files import read_json


IGNORED_FOLDERS = {".git", ".cache", "__pycache__", ".ipynb_checkpoints"}
MAX_VISITS = 16
"""Most links to the same folder: folders that link to each other can stand for any number of files."""


def list_files(root: Path) -> list[Path]:
    """Every file below `root`, relative to it, in order; version control and download caches left out.

    Links are followed to where [`check_entry`] allows.

    Raises:
        ValueError: If a link leads out of `root`, nowhere or to a folder that it is in, too many lead to the same
            folder, or something is neither file nor folder.
    """
    found: list[Path] = []
    visits: Counter[str] = Counter()
    # Each folder with the real paths of those it was reached through.
    waiting: list[tuple[Path, tuple[str, ...]]] = [(root, (os.path.realpath(root),))]
    while waiting:
        folder, ancestors = waiting.pop()
        folders = []
        for name in sorted(os.listdir(folder)):
            path = folder / name
            if name in IGNORED_FOLDERS and path.is_dir():
                continue
            if not stat.S_ISDIR(check_entry(path, root).st_mode):
                found.append(path.relative_to(root))
                continue
            real = os.path.realpath(path)
            if real in ancestors:
                raise ValueError(f"{path} is a link to a folder that it is in ({real}); remove the link.")
            visits[real] += 1
            if visits[real] > MAX_VISITS:
                raise ValueError(f"{path} is one of more than {MAX_VISITS} links to the same folder ({real}).")
            folders.append((path, (*ancestors, real)))
        waiting += reversed(folders)
    return found


def check_entry(path: Path, root: Path) -> os.stat_result:
    """Checks that a path is a regular file or folder, and a link on the way stays inside a directory.

    Args:
        path: The path, below `root`.
        root: The directory. In the Hub's cache, links to the blobs of the same repository are inside.

    Returns:
        The status of what is there.

    Raises:
        ValueError: If it is a link to somewhere else or to nothing, or no file and no folder.
    """
    real = Path(os.path.realpath(path))
    roots = _allowed_roots(root)
    if not any(real == allowed or allowed in real.parents for allowed in roots):
        raise ValueError(f"{path} leads by a link to {real}, outside {root}; put a copy there or remove the link.")
    try:
        status = path.stat()
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist or is a link to nothing ({real}).") from None
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        raise ValueError(f"{path} is neither a regular file nor a folder; remove it.")
    return status


def named_file(root: Path, name: Any, where: str) -> Path:
    """The path of a file or folder that a file of others names, as [`list_files`] finds it.

    Args:
        root: The directory that the name is relative to.
        name: The name as read.
        where: Name of the file and field that it was read from, for errors.

    Raises:
        ValueError: If it is no such path, see [`path_inside`][mhla_hf.utils.files.path_inside], or lies in a folder
            that is left out.
    """
    path = path_inside(root, name, where)
    ignored = IGNORED_FOLDERS.intersection(path.relative_to(root).parts)
    if ignored:
        raise ValueError(f"{where} names {name!r}, but nothing is read from {ignored.pop()}.")
    return path


def read_weight_map(index: Path) -> list[Path]:
    """The files that the index of a sharded checkpoint lists.

    Args:
        index: The file, `*.safetensors.index.json` or one like it.

    Returns:
        Their paths, sorted, each once. They may be missing.

    Raises:
        ValueError: If the index has no `weight_map`, or one that names anything but files beside or below it.
    """
    weight_map = read_json(index, "the index").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"the index {index} has no weight_map.")
    names = {name if isinstance(name, str) else repr(name): name for name in weight_map.values()}
    return [named_file(index.parent, names[name], f"weight_map of {index}") for name in sorted(names)]


def _allowed_roots(root: Path) -> list[Path]:
    real = Path(os.path.realpath(root))
    for folder in (real, *real.parents):
        # A snapshot of the Hub's cache consists of links to ../../blobs.
        blobs = folder.parent.parent / "blobs"
        if folder.parent.name == "snapshots" and blobs.is_dir() and not blobs.is_symlink():
            return [real, blobs]
    return [real]
