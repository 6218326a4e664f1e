# SPDX-License-Identifier: Apache-2.0
"""The files of a data folder: only regular files that lie in it are read, and links to folders are not followed."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from .samples import printable


class DataFolder:
    """A folder of training data.

    Args:
        path: The folder.

    Raises:
        ValueError: If it is not one.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise ValueError(f"data must be an existing folder or 'digits', got {str(path)!r:.300}")
        self.path = path
        self._root = _storage_root(path.resolve())
        # Few folders hold many files.
        self._real_folder = lru_cache(maxsize=1024)(Path.resolve)

    def problem(self, path: Path) -> str | None:
        """Why a path is no file to read, with its name; None if it is one."""
        try:
            status = path.stat()
            if stat.S_ISDIR(status.st_mode):
                return f"{path} is a folder, not a file"
            if not stat.S_ISREG(status.st_mode):
                return f"{path} is not a regular file (a pipe, socket or device)"
            if not self._holds(path):
                return f"{path} is a link out of {self.path}; put the file itself there, by a copy or a hard link"
            path.open("rb").close()
        except FileNotFoundError:
            return f"{path} {'is a link that leads nowhere' if path.is_symlink() else 'does not exist'}"
        except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle, before Python 3.13.
            return f"{path} cannot be read ({getattr(error, 'strerror', None) or 'links in a circle'})"
        return None

    def own_file(self, name: str) -> Path | None:
        """A file with options or captions that the folder may have; None if it has none.

        Raises:
            ValueError: If something else has this name.
        """
        path = self.path / name
        if not os.path.lexists(path):
            return None
        problem = self.problem(path)
        if problem is not None:
            raise ValueError(f"data: {problem}")
        return path

    def subfolders(self) -> list[Path]:
        """The folders directly inside, sorted by name; hidden ones do not count.

        Raises:
            ValueError: If a link leads nowhere, or to a folder elsewhere.
        """
        found = []
        for path in sorted(self.path.iterdir()):
            if path.name.startswith("."):
                continue
            if path.is_dir():
                if not self._holds(path):
                    raise ValueError(f"data: {path} is a link out of {self.path}; put the folder itself there")
                found.append(path)
            elif path.is_symlink() and not path.exists():
                raise ValueError(f"data: {path} is a link that leads nowhere; remove it")
        return found

    def files(self, suffixes: tuple[str, ...], below: Path | None = None) -> list[tuple[Path, str | None]]:
        """The files with some endings in the folder and the folders in it, sorted by path, each with its problem.

        Folders that cannot be listed and links to folders are among them, with the reason why nothing in them is read.

        Args:
            suffixes: What their names end in, in lower case.
            below: A folder inside to list instead.
        """
        return sorted(self._walk(suffixes, self.path if below is None else below))

    def key(self, path: Path) -> str:
        """What identifies a file and changes with its content: name, size and time."""
        status = path.stat()
        return printable(f"{path.relative_to(self.path).as_posix()}:{status.st_size}:{status.st_mtime_ns}")

    def _walk(self, suffixes: tuple[str, ...], top: Path) -> Iterator[tuple[Path, str | None]]:
        # No recursion: folders may lie in each other deeper than Python's limit.
        folders = [top]
        while folders:
            folder = folders.pop()
            try:
                with os.scandir(folder) as listing:
                    entries = list(listing)
            except OSError as error:
                yield folder, f"{folder} cannot be listed ({error.strerror})"
                continue
            for entry in entries:
                path = folder / entry.name
                if entry.is_dir(follow_symlinks=False):
                    folders.append(path)
                elif entry.is_symlink() and path.is_dir():
                    yield path, f"{path} is a link to a folder, which is not followed; put the folder itself there"
                    continue
                if path.suffix.lower() in suffixes:
                    yield path, self.problem(path)

    def _holds(self, path: Path) -> bool:
        parent = path.parent if not path.is_symlink() else path.resolve().parent
        return self._real_folder(parent).is_relative_to(self._root)


def _storage_root(folder: Path) -> Path:
    """The folder, or what the Hub's cache keeps a whole repository in: its snapshots consist of links to `blobs`."""
    for parent in folder.parents:
        if parent.name == "snapshots" and (parent.parent / "blobs").is_dir():
            return parent.parent
    return folder
