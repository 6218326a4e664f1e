# SPDX-License-Identifier: Apache-2.0
"""Folders of training data: files, captions, and samples that are read one at a time."""

from __future__ import annotations

import csv
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...utils.files import allowed_roots, check_fields, parse_json, path_inside
from ...utils.messages import shorten_text


logger = logging.getLogger(__name__)

METADATA_FILES = ("metadata.jsonl", "metadata.csv")
_FILE_KEYS = ("file_name", "image", "video", "path")
_CAPTION_KEYS = ("caption", "text", "prompt")
_TEXT_FIELDS = dict.fromkeys((*_FILE_KEYS, *_CAPTION_KEYS), (str, type(None)))
# Captions have hundreds of bytes; a file of zeros would be read as one line.
_LONGEST_LINE = 1 << 20
# Files named in full in the log; further ones are counted.
_NAMED = 20


class UnusableSampleError(ValueError):
    """A file that has to be left out; the message names it and says why."""


@dataclass(frozen=True)
class DataSample:
    """One video or image.

    Attributes:
        key: Identity of the source; if it changes, the cache encodes the sample again.
        condition: Its caption, or the number of its class.
        load: Reads it, fp32 in [-1, 1]: `[3, F, H, W]` for a video, `[3, H, W]` for an image. Raises
            `UnusableSampleError` if it has to be left out.
        class_name: Name of the class, for class-conditional models.
    """

    key: str
    condition: str | int
    load: Callable[[], torch.Tensor]
    class_name: str | None = None


def printable(text: str) -> str:
    """Escape what UTF-8 cannot represent: file names may hold any bytes, captions half a character."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def log_problems(problems: Sequence[str]) -> None:
    """Log what was left out of the data."""
    for problem in problems[:_NAMED]:
        logger.warning("data: left out: %s", printable(problem))
    if len(problems) > _NAMED:
        logger.warning("data: %d more files or records were left out", len(problems) - _NAMED)


class DataFolder:
    """Folder of training data: only regular files inside it are read, and links to folders are not followed.

    Args:
        path: The folder.

    Attributes:
        problems: What was left out, and why.

    Raises:
        ValueError: If the path is not a folder.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise ValueError(f"data must be an existing folder or 'digits', got {shorten_text(str(path), 300)!r}")
        self.path = path
        self.problems: list[str] = []
        self._roots = allowed_roots(path)

    def problem(self, path: Path) -> str | None:
        """Return why a path cannot be read as a file of this folder, or `None`."""
        try:
            if not self._holds(path):
                return f"{path} is a link out of {self.path}; put the file itself there, by a copy or a hard link"
            if not path.is_file():
                return f"{path} does not exist or is not a regular file"
            path.open("rb").close()
        except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle, before Python 3.13.
            return f"{path} cannot be read ({getattr(error, 'strerror', None) or 'links in a circle'})"
        return None

    def own_file(self, name: str) -> Path | None:
        """Path of an optional file with captions or class numbers; `None` if it does not exist.

        Raises:
            ValueError: If the name belongs to something other than a readable file.
        """
        path = self.path / name
        problem = self.problem(path) if os.path.lexists(path) else None
        if problem is not None:
            raise ValueError(f"data: {problem}")
        return path if os.path.lexists(path) else None

    def subfolders(self) -> list[Path]:
        """List the folders directly inside, sorted by name, without hidden ones.

        Raises:
            ValueError: If a link leads nowhere, or to a folder elsewhere: the numbers of classes would change.
        """
        found = []
        for path in sorted(self.path.iterdir()):
            if path.is_dir() and not path.name.startswith("."):
                found.append(path)
            if path.is_symlink() and (not self._holds(path) if path.is_dir() else not path.exists()):
                raise ValueError(f"data: {path} is a link out of {self.path} or to nothing; put the folder there")
        return found

    def files(self, suffixes: tuple[str, ...], below: Path | None = None) -> list[Path]:
        """List files with the given suffixes in the folder and its subfolders, sorted by path.

        Files that cannot be read, folders that cannot be listed and links to folders go to `problems`.

        Args:
            suffixes: File name suffixes in lower case.
            below: Subfolder to list instead of the folder.
        """
        found = []

        def unlisted(error: OSError) -> None:
            self.problems.append(f"{error.filename} cannot be listed ({error.strerror})")

        for folder, subfolders, names in os.walk(below or self.path, onerror=unlisted):
            links = [os.path.join(folder, name) for name in subfolders if os.path.islink(os.path.join(folder, name))]
            self.problems += [f"{link} is a link to a folder, which is not followed" for link in links]
            for path in (Path(folder, name) for name in names):
                if path.suffix.lower() in suffixes:
                    problem = self.problem(path)
                    if problem is None:
                        found.append(path)
                    else:
                        self.problems.append(problem)
        return sorted(found)

    def key(self, path: Path) -> str:
        """Identity of a file: name, size and modification time."""
        status = path.stat()
        return printable(f"{path.relative_to(self.path).as_posix()}:{status.st_size}:{status.st_mtime_ns}")

    def _holds(self, path: Path) -> bool:
        return any(map(path.resolve().is_relative_to, self._roots))


def captioned_samples(
    folder: Path, suffixes: tuple[str, ...], kind: str, load: Callable[[Path], torch.Tensor]
) -> list[DataSample]:
    """List the files of a folder with their captions, in the order of their names or of the metadata file.

    Captions come from `metadata.jsonl` or `metadata.csv` (keys `file_name` or `image` or `video` or `path`; `caption`
    or `text` or `prompt`), or else from a `.txt` file beside each file. All are UTF-8.

    Args:
        folder: The folder; files of subfolders count too when there is no metadata file.
        suffixes: File name suffixes in lower case.
        kind: Kind of files named in errors, "videos" or "images".
        load: Reads one file.

    Returns:
        The samples; entries without a caption or a file that can be read are left out with a warning.

    Raises:
        ValueError: If the metadata file is damaged, there is no file, or none can be used.
    """
    data = DataFolder(folder)
    metadata = next(filter(None, map(data.own_file, METADATA_FILES)), None)
    if metadata is None:
        found = [partial(_with_text_file, data, path) for path in data.files(suffixes)]
    else:
        rows = enumerate(_rows(metadata), start=1)
        found = [partial(_listed, data, row, f"entry {number} of {metadata}") for number, row in rows]
    samples = []
    for read in found:
        try:
            path, caption = read()
            samples.append(DataSample(data.key(path), caption, partial(load, path)))
        except ValueError as error:
            data.problems.append(str(error))
    log_problems(data.problems)
    if not samples:
        why = data.problems[0] if data.problems else ", ".join(suffixes)
        raise ValueError(f"data: {folder} has no {kind} that can be used ({why})")
    return samples


def _listed(folder: DataFolder, row: dict[Any, Any], where: str) -> tuple[Path, str]:
    """File and caption of an entry of a metadata file."""
    check_fields(row, where, optional=_TEXT_FIELDS)
    name = next((row[key] for key in _FILE_KEYS if row.get(key)), "")
    caption = next((row[key] for key in _CAPTION_KEYS if row.get(key) is not None), None)
    path = path_inside(folder.path, name, where)
    problem = folder.problem(path)
    if None in row:
        problem = "has more fields than the header; put texts with commas in quotes"
    if problem is not None or caption is None:
        problem = problem or f"needs one of {', '.join(_CAPTION_KEYS)}"
        raise UnusableSampleError(shorten_text(f"{where}: {problem}", 500))
    return path, printable(caption)


def _with_text_file(folder: DataFolder, path: Path) -> tuple[Path, str]:
    """File and caption, without metadata file."""
    text = path.with_suffix(".txt")
    problem = folder.problem(text)
    if problem is None:
        try:
            with text.open(encoding="utf-8-sig") as file:
                return path, file.read(_LONGEST_LINE).strip()
        except UnicodeDecodeError as error:
            problem = f"it is not UTF-8 text (byte {error.start})"
    raise UnusableSampleError(f"{path} has no caption in {METADATA_FILES[0]} or {text.name}: {problem}")


def _rows(path: Path) -> Iterator[dict[Any, Any]]:
    """The entries of a metadata file."""
    number = 0
    try:
        with path.open(encoding="utf-8-sig", newline="" if path.suffix == ".csv" else None) as file:
            lines = iter(lambda: file.readline(_LONGEST_LINE), "")
            if path.suffix == ".csv":
                # Strict: an unclosed quote would make the rest of the file one caption.
                reader = csv.DictReader(lines, strict=True)
                for row in reader:
                    number = reader.line_num
                    yield row
            else:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        where = f"data: line {number} of {path}"
                        yield check_fields(parse_json(line, where), where)
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"data: {path} cannot be read after line {number} ({error}); save it as UTF-8") from error
