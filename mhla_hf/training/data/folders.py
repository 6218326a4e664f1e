# SPDX-License-Identifier: Apache-2.0
"""Folders of training data: safe listing of their files, captions, and samples that are read one at a time."""

from __future__ import annotations

import csv
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from ...utils.files import path_inside
from ...utils.json_files import check_fields, parse_json


METADATA_FILES = ("metadata.jsonl", "metadata.csv")
_FILE_KEYS = ("file_name", "image", "video", "path")
_CAPTION_KEYS = ("caption", "text", "prompt")
_TEXT_FIELDS = dict.fromkeys((*_FILE_KEYS, *_CAPTION_KEYS), (str, type(None)))
# Captions have hundreds of bytes; a file of zeros would be read as one line.
_LONGEST_LINE = 1 << 20
_LONGEST_NAME = 1000


class UnusableSampleError(ValueError):
    """A file that has to be left out; the message names it and says why."""


@dataclass(frozen=True)
class DataSample:
    """One video or image.

    Attributes:
        key: Identity of the source; a change of it makes the cache encode the sample again.
        condition: Its caption, or the number of its class.
        load: Reads it, fp32 in [-1, 1]: `[3, F, H, W]` for a video, `[3, H, W]` for an image. Raises
            `UnusableSampleError` if it has to be left out.
        class_name: Name of the class, for class-conditional models.
    """

    key: str
    condition: str | int
    load: Callable[[], torch.Tensor]
    class_name: str | None = None


def unusable_sample(problem: str, condition: str | int = "", class_name: str | None = None) -> DataSample:
    """Placeholder that raises when it is read, so that the other samples keep their numbers.

    Args:
        problem: Reason with the name of the file. It is also the key, so a repaired file is encoded again.
        condition: See `DataSample`.
        class_name: See `DataSample`.
    """

    def load() -> torch.Tensor:
        raise UnusableSampleError(problem)

    return DataSample(printable(problem), condition, load, class_name)


def printable(text: str) -> str:
    """Text with the bytes that UTF-8 cannot represent escaped: file names may hold any bytes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


class DataFolder:
    """Folder of training data: only regular files inside it are read, and links to folders are not followed.

    Args:
        path: The folder.

    Raises:
        ValueError: If the path is not a folder.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise ValueError(f"data must be an existing folder or 'digits', got {str(path)!r:.300}")
        self.path = path
        self._root = _storage_root(path.resolve())
        # Few folders hold many files.
        self._real_folder = lru_cache(maxsize=1024)(Path.resolve)

    def problem(self, path: Path) -> str | None:
        """Reason why a path cannot be read as a file, with its name; `None` for readable files."""
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
        """Path of an optional file with captions or class numbers; `None` if it does not exist.

        Raises:
            ValueError: If the name belongs to something other than a readable file.
        """
        path = self.path / name
        if not os.path.lexists(path):
            return None
        problem = self.problem(path)
        if problem is not None:
            raise ValueError(f"data: {problem}")
        return path

    def subfolders(self) -> list[Path]:
        """The folders directly inside, sorted by name, without hidden ones.

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
        """Files with the given suffixes in the folder and its subfolders, sorted by path, with their problems.

        Folders that cannot be listed and links to folders are included with the reason why they are skipped.

        Args:
            suffixes: File name suffixes in lower case.
            below: Subfolder to list instead of the whole folder.
        """
        return sorted(self._walk(suffixes, self.path if below is None else below))

    def key(self, path: Path) -> str:
        """Identity of a file: name, size and modification time."""
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


@dataclass(frozen=True)
class CaptionedFile:
    """File with its caption, or the reason why it is left out."""

    path: Path
    caption: str = ""
    problem: str | None = None


def captioned_files(folder: DataFolder, suffixes: tuple[str, ...], kind: str) -> list[CaptionedFile]:
    """The files of a folder with their captions, in the order of their names or of the metadata file.

    Captions come from `metadata.jsonl` or `metadata.csv` (keys `file_name` or `image` or `video` or `path`; `caption`
    or `text` or `prompt`), or else from a `.txt` file beside each file. All are UTF-8.

    Args:
        folder: The folder; files of subfolders count too when there is no metadata file.
        suffixes: File name suffixes in lower case.
        kind: Kind of files named in errors, "videos" or "images".

    Raises:
        ValueError: If the metadata file is damaged, there is no file, or none can be used.
    """
    metadata = next(filter(None, map(folder.own_file, METADATA_FILES)), None)
    if metadata is not None:
        found = [_listed(folder, row, f"entry {number} of {metadata}") for number, row in _rows(metadata)]
    else:
        found = [_with_text_file(folder, path, problem) for path, problem in folder.files(suffixes)]
    if not found:
        raise ValueError(f"data: {folder.path} has no {kind} ({', '.join(suffixes)})")
    if all(file.problem is not None for file in found):
        raise ValueError(f"data: none of the {len(found)} {kind} of {folder.path} can be used: {found[0].problem}")
    return found


def _listed(folder: DataFolder, row: dict[Any, Any], where: str) -> CaptionedFile:
    """One entry of a metadata file."""
    nowhere = folder.path
    if None in row:
        return CaptionedFile(
            nowhere, problem=f"{where} has more fields than the header; put texts with commas in quotes"
        )
    try:
        check_fields(row, where, optional=_TEXT_FIELDS)
        name = next((row[key] for key in _FILE_KEYS if row.get(key)), None)
        caption = next((row[key] for key in _CAPTION_KEYS if row.get(key) is not None), None)
        if name is None or caption is None:
            raise ValueError(f"{where} needs one of {', '.join(_FILE_KEYS)} and one of {', '.join(_CAPTION_KEYS)}")
        if len(name) > _LONGEST_NAME:
            raise ValueError(f"{where} names a file by {len(name):,} characters")
        path = path_inside(folder.path, name, where)
        caption.encode("utf-8")
    except UnicodeEncodeError:
        return CaptionedFile(nowhere, problem=f"{where} has a caption with half a character (a lone surrogate)")
    except ValueError as error:
        return CaptionedFile(nowhere, problem=str(error))
    found = folder.problem(path)
    return CaptionedFile(path, caption, found and f"{found} ({where})")


def _with_text_file(folder: DataFolder, path: Path, problem: str | None) -> CaptionedFile:
    """One file without metadata file."""
    text = path.with_suffix(".txt")
    if problem is None:
        problem = folder.problem(text)
        if problem is not None:
            problem = f"{path} has no caption: neither {METADATA_FILES[0]} nor {text.name} ({problem})"
    if problem is not None:
        return CaptionedFile(path, problem=problem)
    size = text.stat().st_size
    if size > _LONGEST_LINE:
        return CaptionedFile(path, problem=f"caption {text} has {size:,} bytes; it may have {_LONGEST_LINE:,}")
    try:
        return CaptionedFile(path, text.read_text(encoding="utf-8-sig").strip())
    except UnicodeDecodeError as error:
        problem = f"caption {text} is not UTF-8 text (byte {error.start}); save it as UTF-8"
        return CaptionedFile(path, problem=problem)


def _rows(path: Path) -> Iterator[tuple[int, dict[Any, Any]]]:
    """The entries of a metadata file, with their numbers."""
    lines = text_lines(path)
    rows = _csv_rows(path, (line for _, line in lines)) if path.suffix == ".csv" else json_rows(path, lines)
    return enumerate(rows, start=1)


def json_rows(path: Path, lines: Iterable[tuple[int, str]]) -> Iterator[dict[Any, Any]]:
    """The objects of a JSONL file, from its numbered lines; empty lines do not count.

    Raises:
        ValueError: If a line is not a JSON object; the message names it.
    """
    for number, line in lines:
        if line.strip():
            where = f"data: line {number} of {path}"
            yield check_fields(parse_json(line, where), where)


def _csv_rows(path: Path, lines: Iterable[str]) -> Iterator[dict[Any, Any]]:
    # Strict: an unclosed quote would make the rest of the file one caption.
    reader = csv.DictReader(lines, strict=True)
    try:
        yield from reader
    except csv.Error as error:
        where = f"data: line {reader.reader.line_num} of {path}"
        raise ValueError(f"{where} is not valid CSV ({error}); check the quotes around captions") from error


def text_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a UTF-8 file with their numbers; a byte-order mark is skipped."""
    number = 0
    with path.open("rb") as file:
        while block := file.readline(_LONGEST_LINE + 1):
            if len(block) > _LONGEST_LINE:
                raise ValueError(f"data: line {number + 1} of {path} has more than {_LONGEST_LINE:,} bytes")
            # Lines may end in a carriage return alone.
            for line in block.splitlines(keepends=True):
                number += 1
                try:
                    yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    raise ValueError(
                        f"data: line {number} of {path} is not UTF-8 text (byte {error.start}); save it as UTF-8"
                    ) from error
