# SPDX-License-Identifier: Apache-2.0
"""Python source of the standard library and the installed packages, as tokens to train language models on.

Nothing is downloaded. Files are held out as a whole, duplicates are removed, and order and split follow hashes of
paths and contents, so that they are the same in every process.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from mhla_hf.utils.destinations import atomic_directory, take_lock
from mhla_hf.utils.files import read_json, write_staged_json


END = "<|endoftext|>"
"""Special token before every file; its id is 0."""

HELD_OUT_SHARE = 50
"""One of so many files is held out."""

SMALLEST_FILE = 200
"""Files of fewer bytes are left out."""

_VERSION = 1
_COPIES = frozenset({"site-packages", "_vendor", "_vendored", "vendored", "externals", "__pycache__"})
# As long as the tokens of a few hundred megabytes take to make.
_PATIENCE_SECONDS = 1800.0


@dataclass(frozen=True, kw_only=True)
class CorpusOptions:
    """What a corpus is made of.

    Args:
        megabytes: Text to train on; `None` for all that is found.
        held_out_megabytes: Text that is held out; there may be less.
        vocabulary: Number of tokens of the tokenizer.
        tokenizer_megabytes: Training text that the tokenizer is made from.
    """

    megabytes: float | None
    held_out_megabytes: float = 4.0
    vocabulary: int = 1024
    tokenizer_megabytes: float = 4.0


@dataclass(frozen=True)
class Corpus:
    """Tokens of a corpus, read from its directory.

    Args:
        directory: Where `tokenizer.json`, the arrays and `facts.json` are.
    """

    directory: Path

    @cached_property
    def facts(self) -> dict[str, Any]:
        """How much was found, held out and made into tokens."""
        return read_json(self.directory / "facts.json", "the facts of a corpus:")

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Byte-level BPE."""
        return Tokenizer.from_file(str(self.directory / "tokenizer.json"))

    @cached_property
    def training(self) -> np.ndarray:
        """Tokens of the training files one after another, uint16, each file after an `END`."""
        return np.load(self.directory / "training.npy", mmap_mode="r")

    @cached_property
    def held_out(self) -> list[np.ndarray]:
        """Tokens of each held-out file, uint16, without `END`."""
        offsets = np.load(self.directory / "held_out_offsets.npy")
        return np.split(np.load(self.directory / "held_out.npy"), offsets[1:-1])

    @cached_property
    def token_bytes(self) -> np.ndarray:
        """Bytes of text that each token stands for, int64 `[vocabulary]`; 0 for `END`."""
        return token_bytes(self.tokenizer)

    def held_out_text(self) -> list[str]:
        """Contents of the held-out files."""
        return [self.tokenizer.decode(tokens.tolist()) for tokens in self.held_out]


def load_corpus(directory: Path, options: CorpusOptions, files: Sequence[tuple[str, Path]] | None = None) -> Corpus:
    """Reads a corpus, and makes it first if it is not there; other processes wait for the one that does.

    Args:
        directory: Directory of corpora.
        options: What it is made of.
        files: Names and paths of its files; `None` for [`source_files`].

    Raises:
        ValueError: If there are not enough files, or another process has been making it for half an hour.
    """
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps([_VERSION, asdict(options)], sort_keys=True)
    target = directory / f"corpus-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    if not target.is_dir():
        taken = f"{target} is being made by another process; wait for it, or remove {target}.lock."
        with take_lock(target.with_name(f"{target.name}.lock"), taken, _PATIENCE_SECONDS) or nullcontext():
            if not target.is_dir():
                with atomic_directory(target) as temporary:
                    _make(temporary, options, source_files() if files is None else files)
    return Corpus(target)


def source_files() -> list[tuple[str, Path]]:
    """Names and paths of the Python files of the standard library and of installed packages, in an order by hash.

    Copies of other packages inside a package are left out.
    """
    found: dict[str, Path] = {}
    for root in dict.fromkeys(sysconfig.get_path(kind) for kind in ("stdlib", "purelib")):
        for folder, folders, names in os.walk(root):
            folders[:] = [name for name in folders if name not in _COPIES]
            prefix = os.path.relpath(folder, root).replace(os.sep, "/")
            for name in names:
                if name.endswith(".py"):
                    found.setdefault(name if prefix == "." else f"{prefix}/{name}", Path(folder, name))
    return sorted(found.items(), key=lambda item: _digest(item[0].encode()))


def is_held_out(name: str) -> bool:
    """Whether the file with this name is one of those that are not trained on."""
    return int.from_bytes(_digest(f"held out: {name}".encode())[:8], "big") % HELD_OUT_SHARE == 0


def unique_texts(files: Iterable[tuple[str, Path]], seen: set[bytes]) -> Iterator[str]:
    """Contents of files, but small ones, those that are not UTF-8, and those that were seen before.

    Args:
        files: Names and paths.
        seen: Hashes of contents; those of these files are added.
    """
    for _, path in files:
        content = path.read_bytes()
        digest = _digest(content)
        if len(content) < SMALLEST_FILE or digest in seen:
            continue
        seen.add(digest)
        try:
            yield content.decode("utf-8")
        except UnicodeDecodeError:
            continue


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """Byte-level BPE, which any text survives unchanged."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def token_bytes(tokenizer: Tokenizer) -> np.ndarray:
    """Bytes of text that each token of a byte-level tokenizer stands for, int64 `[vocabulary]`."""
    # In the alphabet of byte-level BPE every character is one byte.
    lengths = {index: len(token) for token, index in tokenizer.get_vocab().items()}
    lengths[tokenizer.token_to_id(END)] = 0
    return np.array([lengths[index] for index in range(len(lengths))], dtype=np.int64)


def _make(directory: Path, options: CorpusOptions, files: Sequence[tuple[str, Path]]) -> None:
    seen: set[bytes] = set()
    held_out = _first(unique_texts((file for file in files if is_held_out(file[0])), seen), options.held_out_megabytes)
    training = _first(unique_texts((file for file in files if not is_held_out(file[0])), seen), options.megabytes)
    if not held_out or not training:
        raise ValueError(f"{len(files)} Python files are too few for text to train on and text to hold out.")
    tokenizer = train_tokenizer(_first(training, options.tokenizer_megabytes), options.vocabulary)
    end = tokenizer.token_to_id(END)
    tokens = [np.concatenate([[end], part]) for part in _encode(tokenizer, training)]
    parts = list(_encode(tokenizer, held_out))
    np.save(directory / "training.npy", np.concatenate(tokens).astype(np.uint16))
    np.save(directory / "held_out.npy", np.concatenate(parts).astype(np.uint16))
    np.save(directory / "held_out_offsets.npy", np.cumsum([0, *map(len, parts)]))
    tokenizer.save(str(directory / "tokenizer.json"))
    facts = {
        "files_found": len(files),
        "megabytes_found": round(sum(path.stat().st_size for _, path in files) / 1e6, 3),
        "training_files": len(training),
        "training_megabytes": round(_size(training) / 1e6, 3),
        "training_tokens": sum(map(len, tokens)),
        "held_out_files": len(held_out),
        "held_out_megabytes": round(_size(held_out) / 1e6, 3),
        "held_out_tokens": sum(map(len, parts)),
        "bytes_per_token": round(_size(held_out) / sum(map(len, parts)), 4),
        "vocabulary": tokenizer.get_vocab_size(),
    }
    write_staged_json(directory / "facts.json", facts)


def _first(texts: Iterable[str], megabytes: float | None) -> list[str]:
    """As many of the texts as make so many megabytes."""
    chosen, size = [], 0
    for text in texts:
        if megabytes is not None and size >= megabytes * 1e6:
            break
        chosen.append(text)
        size += len(text.encode())
    return chosen


def _encode(tokenizer: Tokenizer, texts: Sequence[str], batch: int = 256) -> Iterator[np.ndarray]:
    for start in range(0, len(texts), batch):
        for encoding in tokenizer.encode_batch(texts[start : start + batch], add_special_tokens=False):
            yield np.array(encoding.ids, dtype=np.uint16)


def _size(texts: Iterable[str]) -> int:
    return sum(len(text.encode()) for text in texts)


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()
