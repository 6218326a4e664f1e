# SPDX-License-Identifier: Apache-2.0
"""Captions of the files in a data folder: from a metadata file, or from a text file beside each."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...utils.files import path_inside
from ...utils.json_files import check_fields, parse_json
from .data_folder import DataFolder


METADATA_FILES = ("metadata.jsonl", "metadata.csv")
_FILE_KEYS = ("file_name", "image", "video", "path")
_CAPTION_KEYS = ("caption", "text", "prompt")
_TEXT_FIELDS = dict.fromkeys((*_FILE_KEYS, *_CAPTION_KEYS), (str, type(None)))
# Captions have hundreds of bytes; a file of zeros would be read as one line.
_LONGEST_LINE = 1 << 20
_LONGEST_NAME = 1000


@dataclass(frozen=True)
class CaptionedFile:
    """A file and its caption, or the reason why it has to be left out."""

    path: Path
    caption: str = ""
    problem: str | None = None


def captioned_files(folder: DataFolder, suffixes: tuple[str, ...], kind: str) -> list[CaptionedFile]:
    """The files of a folder with their captions, in the order of their names or of the metadata file.

    Captions come from `metadata.jsonl` or `metadata.csv` (keys `file_name` or `image` or `video` or `path`; `caption`
    or `text` or `prompt`), or else from a `.txt` file beside each file. All are UTF-8.

    Args:
        folder: The folder; files of subfolders count too when there is no metadata file.
        suffixes: What the names of the files may end in, in lower case.
        kind: What they are, for errors: "videos", "pictures".

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
