# SPDX-License-Identifier: Apache-2.0
"""What the cache step encodes: files with their captions or classes, listed first and read one at a time."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch


METADATA_FILES = ("metadata.jsonl", "metadata.csv")
_FILE_KEYS = ("file_name", "image", "video", "path")
_CAPTION_KEYS = ("caption", "text", "prompt")


class UnusableSampleError(ValueError):
    """A file that has to be left out; the message names it and says why."""


@dataclass(frozen=True)
class DataSample:
    """One video or picture.

    Attributes:
        key: What identifies it; the cache notices by it that a source has changed.
        condition: Its caption, or the number of its class.
        load: Reads it, fp32 in [-1, 1]: `[3, F, H, W]` for a video, `[3, H, W]` for a picture. Raises
            `UnusableSampleError` if it has to be left out.
        class_name: Name of the class, where there is one.
    """

    key: str
    condition: str | int
    load: Callable[[], torch.Tensor]
    class_name: str | None = None


def check_folder(folder: Path) -> None:
    """Checks that `data` is a folder.

    Raises:
        ValueError: If it is not.
    """
    if not folder.is_dir():
        raise ValueError(f"data must be an existing folder or 'digits', got {str(folder)!r}")


def file_key(path: Path, folder: Path) -> str:
    """What identifies a file in a folder and changes with its content: name, size and time."""
    status = path.stat()
    return f"{path.relative_to(folder).as_posix()}:{status.st_size}:{status.st_mtime_ns}"


def captioned_files(folder: Path, suffixes: tuple[str, ...], kind: str) -> list[tuple[Path, str]]:
    """The files of a folder with their captions, in the order of their names or of the metadata file.

    Captions come from `metadata.jsonl` or `metadata.csv` (keys `file_name` or `image` or `video` or `path`; `caption`
    or `text` or `prompt`), or else from a `.txt` file beside each file.

    Args:
        folder: The folder; files of subfolders count too when there is no metadata file.
        suffixes: What the names of the files may end in, in lower case.
        kind: What they are, for errors: "videos", "pictures".

    Raises:
        ValueError: If the folder or a listed file does not exist, a caption is missing, or there is no file.
    """
    check_folder(folder)
    pairs = list(_captioned_files(folder, suffixes))
    if not pairs:
        raise ValueError(f"data: {folder} has no {kind} ({', '.join(suffixes)})")
    for path, _ in pairs:
        if not path.is_file():
            raise ValueError(f"data: {path}, listed in the metadata of {folder}, does not exist")
    return pairs


def _captioned_files(folder: Path, suffixes: tuple[str, ...]) -> Iterator[tuple[Path, str]]:
    for name in METADATA_FILES:
        metadata = folder / name
        if metadata.is_file():
            for number, row in enumerate(_metadata_rows(metadata), start=1):
                file = next((row[key] for key in _FILE_KEYS if row.get(key)), None)
                caption = next((row[key] for key in _CAPTION_KEYS if row.get(key) is not None), None)
                if file is None or caption is None:
                    raise ValueError(
                        f"data: entry {number} of {metadata} needs one of {', '.join(_FILE_KEYS)} and one of "
                        f"{', '.join(_CAPTION_KEYS)}"
                    )
                yield folder / file, str(caption)
            return
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() in suffixes:
            text = path.with_suffix(".txt")
            if not text.is_file():
                raise ValueError(f"data: {path} has no caption: neither {METADATA_FILES[0]} nor {text.name}")
            yield path, text.read_text(encoding="utf-8").strip()


def _metadata_rows(path: Path) -> Iterator[dict]:
    with path.open(encoding="utf-8", newline="") as file:
        if path.suffix == ".csv":
            yield from csv.DictReader(file)
            return
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    yield json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(f"data: line {number} of {path} is not valid JSON: {error}") from error
