# SPDX-License-Identifier: Apache-2.0
"""Text data: a folder of text files, a JSONL file, or a dataset of the Hub."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...utils.locations import is_hub_id
from ...utils.messages import shorten_list, shorten_text
from .fingerprints import file_fingerprint
from .folders import DataFolder, UnusableSampleError, json_rows, text_lines


logger = logging.getLogger(__name__)

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
# Far longer than anything that people wrote; files of gigabytes are better given as JSONL.
_LONGEST_FILE = 1 << 28
# Named in full in the log; beyond that they are counted.
_NAMED = 20


@dataclass
class TextCorpus:
    """Source of texts.

    Attributes:
        data: A folder, a `.jsonl` file, or the id of a data set, `owner/name` or `owner/name:configuration`.
        text_field: The field with the text, in JSONL files and data sets.
        skipped: Files and records that were left out while reading, each with the reason.

    Raises:
        ValueError: If the source does not exist, a folder has no text files, or `datasets` is not installed.
    """

    data: str
    text_field: str = "text"
    skipped: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.path = Path(self.data).expanduser()
        self.files: list[tuple[Path, str | None]] = []
        if self.path.is_dir():
            self._folder = DataFolder(self.path)
            # Of a large folder only a part is read: it must not be the beginning of the alphabet.
            self.files = sorted(self._folder.files(TEXT_SUFFIXES), key=lambda entry: self._place(entry[0]))
            if not self.files:
                raise ValueError(f"data: {self.path} has no text files ({', '.join(TEXT_SUFFIXES)})")
        elif self.path.is_file():
            if self.path.suffix.lower() not in (".jsonl", ".json"):
                raise ValueError(
                    f"data: {self.path} must be a folder of {', '.join(TEXT_SUFFIXES)} files, a .jsonl file, or the "
                    "id of a data set"
                )
        elif not is_hub_id(self.data.partition(":")[0]) or self.path.suffix.lower() in (".jsonl", ".json"):
            raise ValueError(
                f"data: {shorten_text(self.data)} is neither a folder, a .jsonl file, nor the id of a data set "
                "(owner/name)"
            )
        elif importlib.util.find_spec("datasets") is None:
            raise ValueError(
                f"data: {self.data} is no folder here, and data sets of the Hub need: pip install datasets"
            )

    @property
    def is_folder(self) -> bool:
        """`True` for a folder of files, `False` for records."""
        return bool(self.files)

    def identity(self) -> dict[str, Any]:
        """Identity of the texts as plain JSON values."""
        identity: dict[str, Any] = {"data": self.data, "text_field": self.text_field}
        if self.is_folder:
            keys = sorted(self._folder.key(path) for path, problem in self.files if problem is None)
            identity = {"data": str(self.path.resolve()), "files": _digest("\n".join(keys))}
        elif self.path.is_file():
            identity = {**identity, "data": str(self.path.resolve()), "file": file_fingerprint(self.path)}
        return identity

    def documents(self) -> Iterator[str]:
        """The texts, one file or record after another, whole."""
        if self.is_folder:
            for _, text in self._read_files():
                yield text
        else:
            yield from self._records()

    def passages(self, minimum_words: int = 5) -> Iterator[str]:
        """Passages for sentence encoders: paragraphs of text files, and of the docstrings in Python files.

        Records are taken as they are.

        Args:
            minimum_words: Paragraphs with fewer words are left out: headings, lists of names.
        """
        if not self.is_folder:
            for text in self._records():
                yield " ".join(text.split())
            return
        for path, text in self._read_files():
            parts = self._docstrings(path, text) if path.suffix.lower() == ".py" else [text]
            for part in parts:
                for paragraph in part.split("\n\n"):
                    words = " ".join(paragraph.split())
                    if words.count(" ") + 1 >= minimum_words and _is_prose(words):
                        yield words

    def report_skipped(self) -> None:
        """Logs what was left out."""
        for problem in self.skipped[:_NAMED]:
            logger.warning("data: left out: %s", problem)
        if len(self.skipped) > _NAMED:
            logger.warning("data: %d more files or records were left out", len(self.skipped) - _NAMED)

    def _place(self, path: Path) -> str:
        return _digest(path.relative_to(self.path).as_posix())

    def _read_files(self) -> Iterator[tuple[Path, str]]:
        for path, problem in self.files:
            text = ""
            if problem is None:
                try:
                    text = _read(path)
                except UnusableSampleError as error:
                    problem = str(error)
            if problem is None and not text.strip():
                # Empty `__init__.py` files are normal.
                problem = None if path.name == "__init__.py" else f"{path} is empty"
            if problem is not None:
                self.skipped.append(problem)
            elif text.strip():
                yield path, text

    def _docstrings(self, path: Path, text: str) -> Iterator[str]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SyntaxWarning)
                tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            self.skipped.append(f"{path} is not valid Python ({shorten_text(str(error))})")
            return
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                found = ast.get_docstring(node)
                if found:
                    yield found

    def _records(self) -> Iterator[str]:
        if self.path.is_file():
            rows: Iterator[tuple[str, Any]] = (
                (f"record {number} of {self.path}", row)
                for number, row in enumerate(json_rows(self.path, text_lines(self.path)), start=1)
            )
        else:
            rows = ((f"record {number} of {self.data}", row) for number, row in enumerate(self._hub_rows(), start=1))
        for where, row in rows:
            if self.text_field not in row:
                raise ValueError(
                    f"data: {where} has no field {self.text_field!r:.100}, but {shorten_list(map(str, row))}: name "
                    "the one with the text (text_field)"
                )
            text = row[self.text_field]
            if not isinstance(text, str) or not text.strip():
                self.skipped.append(f"{where} has no text in {self.text_field!r:.100}")
            else:
                yield text

    def _hub_rows(self) -> Iterator[Any]:
        import datasets

        name, _, configuration = self.data.partition(":")
        try:
            # As a stream: a part of it is enough.
            rows = datasets.load_dataset(name, configuration or None, split="train", streaming=True)
            yield from rows
        except (ValueError, OSError) as error:
            raise ValueError(
                f"data: the data set {self.data} cannot be read: {shorten_text(str(error), 250)}"
            ) from error


def _read(path: Path) -> str:
    try:
        size = path.stat().st_size
        if size > _LONGEST_FILE:
            raise UnusableSampleError(f"{path} has {size:,} bytes; text files may have {_LONGEST_FILE:,}, so split it")
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UnusableSampleError(f"{path} is not UTF-8 text (byte {error.start})") from error
    except OSError as error:
        raise UnusableSampleError(f"{path} cannot be read ({error.strerror})") from error
    if "\0" in text:
        raise UnusableSampleError(f"{path} is binary: it holds zero bytes")
    return text


def _is_prose(text: str) -> bool:
    """`True` if most characters are letters, which excludes tables, rulers and symbols."""
    return 2 * sum(map(str.isalpha, text)) > len(text) and ">>>" not in text


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
