# SPDX-License-Identifier: Apache-2.0
"""Texts and their tokens: rows of equal length for language models, passages for encoders; cached in one file.

A folder of plain text needs no further library; JSONL, parquet and data sets of the Hub are read by `datasets`.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ...utils.files import atomic_file
from ...utils.locations import is_hub_id
from ...utils.messages import how_to_install, shorten_list, shorten_text
from .batches import stable_seed
from .fingerprints import file_fingerprint
from .folders import DataFolder, printable


logger = logging.getLogger(__name__)

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
RECORD_SUFFIXES = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
"""Files of records, and how `datasets` names their format."""

# Far longer than anything that people wrote; files of gigabytes are better given as JSONL.
_LONGEST_FILE = 1 << 28
# Named in full in the log; further ones are counted.
_NAMED = 20
_FORMAT_VERSION = 2
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
)  # fmt: skip
# Long texts are tokenised in pieces, cut at ends of lines.
_PIECE_CHARACTERS = 1 << 17
_TEXTS_AT_ONCE = 512
_PLAIN = {"return_attention_mask": False, "verbose": False}


@dataclass
class TextCorpus:
    """Source of texts.

    Attributes:
        data: A folder, a `.jsonl` or `.parquet` file, or the id of a data set, `owner/name` or
            `owner/name:configuration`.
        text_field: The field with the text, in files of records and data sets.
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
        suffix = self.path.suffix.lower()
        if self.path.is_dir():
            self._folder = DataFolder(self.path)
            # Of a large folder only a part is read: it must not be the beginning of the alphabet.
            self.files = sorted(self._folder.files(TEXT_SUFFIXES), key=lambda entry: self._place(entry[0]))
        is_records = suffix in RECORD_SUFFIXES if self.path.is_file() else is_hub_id(self.data.partition(":")[0])
        if not self.files and (self.path.is_dir() or not is_records):
            raise ValueError(
                f"data: {shorten_text(self.data)} is neither a folder of {', '.join(TEXT_SUFFIXES)} files, a .jsonl "
                "or .parquet file, nor the id of a data set (owner/name)"
            )
        if not self.files and importlib.util.find_spec("datasets") is None:
            raise ValueError(f"data: {self.data} is no folder; records need datasets: {how_to_install('train')}")

    def identity(self) -> dict[str, Any]:
        """Identity of the texts as plain JSON values."""
        if self.files:
            keys = sorted(self._folder.key(path) for path, problem in self.files if problem is None)
            return {"data": str(self.path.resolve()), "files": stable_seed(*keys)}
        if self.path.is_file():
            return {"data": file_fingerprint(self.path), "text_field": self.text_field}
        return {"data": self.data, "text_field": self.text_field}

    def documents(self) -> Iterator[str]:
        """Yield the complete texts, one file or record after another."""
        return (text for _, text in self._read_files()) if self.files else self._records()

    def passages(self, minimum_words: int = 5) -> Iterator[str]:
        """Yield passages for sentence encoders: paragraphs of text files, and of the docstrings in Python files.

        A record is one passage.

        Args:
            minimum_words: Paragraphs with fewer words are left out: headings, lists of names.
        """
        if not self.files:
            yield from (" ".join(text.split()) for text in self._records())
        for path, text in self._read_files():
            parts = self._docstrings(path, text) if path.suffix.lower() == ".py" else [text]
            for part in parts:
                for paragraph in part.split("\n\n"):
                    words = " ".join(paragraph.split())
                    if words.count(" ") + 1 >= minimum_words and _is_prose(words):
                        yield words

    def report_skipped(self) -> None:
        """Log what was left out."""
        for problem in self.skipped[:_NAMED]:
            logger.warning("data: left out: %s", problem)
        if len(self.skipped) > _NAMED:
            logger.warning("data: %d more files or records were left out", len(self.skipped) - _NAMED)

    def _place(self, path: Path) -> int:
        return stable_seed(printable(path.relative_to(self.path).as_posix()))

    def _read_files(self) -> Iterator[tuple[Path, str]]:
        for path, listed in self.files:
            text, problem = _read(path) if listed is None else ("", listed)
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
        for number, row in enumerate(self._rows(), start=1):
            if self.text_field not in row:
                raise ValueError(
                    f"data: record {number} of {self.data} has no field {shorten_text(self.text_field)!r}, but "
                    f"{shorten_list(map(str, row))}: name the one with the text (text_field)"
                )
            text = row[self.text_field]
            if isinstance(text, str) and text.strip():
                yield text
            else:
                self.skipped.append(f"record {number} of {self.data} has no text in {self.text_field!r:.100}")

    def _rows(self) -> Iterator[Any]:
        import datasets

        name, _, configuration = self.data.partition(":")
        source: dict[str, Any] = {"path": name, "name": configuration or None}
        if self.path.is_file():
            source = {"path": RECORD_SUFFIXES[self.path.suffix.lower()], "data_files": str(self.path)}
        try:
            # As a stream: a part of it is enough.
            yield from datasets.load_dataset(**source, split="train", streaming=True)
        except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
            raise ValueError(f"data: {self.data} cannot be read: {shorten_text(str(error), 250)}") from error


def _read(path: Path) -> tuple[str, str | None]:
    """Text of a file, or the reason why it is left out."""
    try:
        size = path.stat().st_size
        if size > _LONGEST_FILE:
            return "", f"{path} has {size:,} bytes; text files may have {_LONGEST_FILE:,}, so split it"
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        return "", f"{path} is not UTF-8 text (byte {error.start})"
    except OSError as error:
        return "", f"{path} cannot be read ({error.strerror})"
    if "\0" in text:
        return "", f"{path} is binary: it holds zero bytes"
    # Empty `__init__.py` files are normal.
    return text, None if text.strip() or path.name == "__init__.py" else f"{path} is empty"


def _is_prose(text: str) -> bool:
    """`True` if most characters are letters, which excludes tables, rulers and symbols."""
    return 2 * sum(map(str.isalpha, text)) > len(text) and ">>>" not in text


@dataclass(frozen=True)
class TokenTable:
    """Rows or passages of tokens.

    Attributes:
        tokens: int32, concatenated.
        offsets: int64, where each row begins, and the end of the last.
        skipped: Number of files and records left out.
        fingerprint: Hash of the texts, the tokenizer and the options.
    """

    tokens: torch.Tensor
    offsets: torch.Tensor
    skipped: int
    fingerprint: str

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> torch.Tensor:
        """The tokens of a row or passage, int64."""
        first, last = self.offsets[index : index + 2].tolist()
        return self.tokens[first:last].long()

    def lengths(self) -> torch.Tensor:
        """Number of tokens of each."""
        return self.offsets.diff()


def tokenize(
    corpus: TextCorpus,
    tokenizer: Any,
    directory: Path,
    *,
    packed: bool,
    length: int,
    samples: int,
    cache: Path | None = None,
) -> TokenTable:
    """Tokenise texts, or read the table of an earlier call.

    Args:
        corpus: The texts.
        tokenizer: The model's own.
        directory: Where it was loaded from.
        packed: Rows of exactly `length` tokens, with the tokenizer's end of text between documents, for language
            models. Otherwise passages of at most `length` tokens with the tokenizer's special tokens, each once.
        length: Tokens of a row, or most tokens of a passage.
        samples: Rows or passages wanted; reading stops when they are there.
        cache: Folder that keeps the result; `None` keeps nothing.

    Raises:
        ValueError: If there are too few texts.
    """
    files = [directory / name for name in _TOKENIZER_FILES if (directory / name).is_file()]
    identity = {
        "format_version": _FORMAT_VERSION,
        "texts": corpus.identity(),
        "tokenizer": {path.name: file_fingerprint(path) for path in files},
        "options": {"packed": packed, "length": length, "samples": samples},
    }
    fingerprint = f"{stable_seed(json.dumps(identity, sort_keys=True)):016x}"
    path = None if cache is None else cache / f"tokens-{fingerprint}.safetensors"
    if path is not None and path.is_file():
        with safe_open(path, framework="pt") as file:
            skipped = int(file.metadata()["skipped"])
            return TokenTable(file.get_tensor("tokens"), file.get_tensor("offsets"), skipped, fingerprint)
    make = _packed_rows if packed else _passages
    pieces, lengths = make(corpus, tokenizer, length, samples)
    corpus.report_skipped()
    if len(lengths) < 2:
        unit = f"rows of {length} tokens" if packed else "passages of text"
        count = sum(len(piece) for piece in pieces)
        raise ValueError(
            f"data: {corpus.data} has {len(lengths)} {unit} ({count:,} tokens in all); at least 2 are needed"
            + (": give more text, or shorter rows (max_length)" if packed else "")
        )
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    table = TokenTable(torch.from_numpy(np.concatenate(pieces)), offsets, len(corpus.skipped), fingerprint)
    if path is not None:
        with atomic_file(path) as temporary:
            tensors = {"tokens": table.tokens, "offsets": table.offsets}
            save_file(tensors, temporary, metadata={"skipped": str(table.skipped)})
    return table


Pieces = tuple[list[np.ndarray[Any, Any]], list[int]]
"""Tokens, and the lengths of the rows or passages that they make up."""


def _packed_rows(corpus: TextCorpus, tokenizer: Any, length: int, samples: int) -> Pieces:
    begin = tokenizer("", verbose=False)["input_ids"][:1]
    begin = begin if begin == [tokenizer.bos_token_id] else []
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    wanted = samples * length
    kept: list[np.ndarray[Any, Any]] = [np.zeros(0, np.int32)]
    count = 0
    for document in corpus.documents():
        encoded = tokenizer(list(_pieces(document)), add_special_tokens=False, **_PLAIN)["input_ids"]
        kept.append(np.asarray([*begin, *chain.from_iterable(encoded), *end], np.int32))
        count += len(kept[-1])
        if count >= wanted:
            break
    rows = min(count, wanted) // length
    tokens = np.concatenate(kept)
    return [tokens[: rows * length] if rows else tokens], [length] * rows


def _passages(corpus: TextCorpus, tokenizer: Any, length: int, samples: int) -> Pieces:
    # Each once: a held-out passage must not be one of those trained on.
    unique = islice(_unique(corpus.passages()), samples)
    pieces: list[np.ndarray[Any, Any]] = []
    while texts := list(islice(unique, _TEXTS_AT_ONCE)):
        encoded = tokenizer(texts, truncation=True, max_length=length, **_PLAIN)["input_ids"]
        pieces += [np.asarray(ids, np.int32) for ids in encoded if ids]
    return pieces, [len(piece) for piece in pieces]


def _unique(texts: Iterator[str]) -> Iterator[str]:
    seen: set[int] = set()
    for text in texts:
        # Not the built-in `hash`: it differs from process to process, and collisions drop texts.
        key = stable_seed(text)
        if key not in seen:
            seen.add(key)
            yield text


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        stop = start + _PIECE_CHARACTERS
        line_end = text.rfind("\n", start, stop) + 1
        stop = line_end if stop < len(text) and line_end > start else stop
        yield text[start:stop]
        start = stop
