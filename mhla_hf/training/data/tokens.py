# SPDX-License-Identifier: Apache-2.0
"""Tokenised texts: rows of equal length for language models, passages for encoders; cached in one file."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from ...utils.files import atomic_file
from ...utils.messages import shorten_text
from .batches import stable_seed
from .fingerprints import file_fingerprint
from .texts import TextCorpus


logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
)  # fmt: skip
# Pieces of long texts, cut at ends of lines, so that no tokenizer is handed all of a book.
_PIECE_CHARACTERS = 1 << 17
_TEXTS_AT_ONCE = 512


@dataclass(frozen=True, kw_only=True)
class TokenOptions:
    """Options of tokenisation.

    Attributes:
        packed: Rows of exactly `length` tokens, with the tokenizer's end of text between documents, for language
            models. Otherwise passages of at most `length` tokens with the tokenizer's special tokens, each once.
        length: Tokens of a row, or most tokens of a passage.
        samples: Rows or passages wanted; reading stops when they are there.
    """

    packed: bool
    length: int
    samples: int


@dataclass(frozen=True)
class TokenTable:
    """Rows or passages of tokens.

    Attributes:
        tokens: int32, all of them one after another.
        offsets: int64, where each begins, and the end of the last.
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
    corpus: TextCorpus, tokenizer: Any, directory: Path, options: TokenOptions, cache: Path | None = None
) -> TokenTable:
    """Tokenises texts, or reads the table of an earlier call.

    Args:
        corpus: The texts.
        tokenizer: The model's own.
        directory: Where it was loaded from.
        options: Options of tokenisation.
        cache: Folder that keeps the result; `None` keeps nothing.

    Raises:
        ValueError: If there are too few texts, or the tokenizer fails.
    """
    identity = {
        "format_version": FORMAT_VERSION,
        "texts": corpus.identity(),
        "tokenizer": {
            name: file_fingerprint(directory / name) for name in _TOKENIZER_FILES if (directory / name).is_file()
        },
        "options": asdict(options),
    }
    fingerprint = f"{stable_seed(json.dumps(identity, sort_keys=True)):016x}"
    path = None if cache is None else cache / f"tokens-{fingerprint}.safetensors"
    kept = None if path is None else _load(path, fingerprint)
    if kept is not None:
        return kept
    make = _packed_rows if options.packed else _passages
    pieces, lengths = make(corpus, tokenizer, options)
    corpus.report_skipped()
    if len(lengths) < 2:
        unit = f"rows of {options.length} tokens" if options.packed else "passages of text"
        count = sum(len(piece) for piece in pieces)
        raise ValueError(
            f"data: {corpus.data} has {len(lengths)} {unit} ({count:,} tokens in all); at least 2 are needed"
            + (": give more text, or shorter rows (max_length)" if options.packed else "")
        )
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64)
    torch.cumsum(torch.tensor(lengths), 0, out=offsets[1:])
    table = TokenTable(torch.from_numpy(np.concatenate(pieces)), offsets, len(corpus.skipped), fingerprint)
    if path is not None:
        metadata = {"identity": json.dumps(identity, sort_keys=True), "skipped": str(table.skipped)}
        with atomic_file(path) as temporary:
            save_file({"tokens": table.tokens, "offsets": table.offsets}, temporary, metadata=metadata)
    return table


def _load(path: Path, fingerprint: str) -> TokenTable | None:
    """Table in the cache; `None` if there is none or it is damaged."""
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            skipped = int((file.metadata() or {}).get("skipped", "0"))
        tensors = load_file(path)
        tokens, offsets = tensors["tokens"], tensors["offsets"]
        if len(offsets) < 3 or offsets[0] != 0 or offsets[-1] != len(tokens) or (offsets.diff() <= 0).any():
            raise ValueError("offsets do not fit the tokens")
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        logger.warning("data: %s is damaged (%s); tokenising again", path, shorten_text(str(error)))
        return None
    return TokenTable(tokens, offsets, skipped, fingerprint)


def _packed_rows(
    corpus: TextCorpus, tokenizer: Any, options: TokenOptions
) -> tuple[list[np.ndarray[Any, Any]], list[int]]:
    begin = tokenizer("", verbose=False)["input_ids"][:1]
    begin = begin if begin == [tokenizer.bos_token_id] else []
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    wanted = options.samples * options.length
    kept: list[np.ndarray[Any, Any]] = []
    count = 0
    for document in corpus.documents():
        encoded = _encode(tokenizer, list(_pieces(document)), add_special_tokens=False)
        kept.append(np.asarray([*begin, *chain.from_iterable(encoded), *end], np.int32))
        count += len(kept[-1])
        if count >= wanted:
            break
    rows = min(count, wanted) // options.length
    tokens = np.concatenate(kept) if kept else np.zeros(0, np.int32)
    return [tokens[: rows * options.length] if rows else tokens], [options.length] * rows


def _passages(
    corpus: TextCorpus, tokenizer: Any, options: TokenOptions
) -> tuple[list[np.ndarray[Any, Any]], list[int]]:
    # Each once: the same paragraph in both parts would be no held-out one.
    unique = islice(_unique(corpus.passages()), options.samples)
    pieces: list[np.ndarray[Any, Any]] = []
    while texts := list(islice(unique, _TEXTS_AT_ONCE)):
        encoded = _encode(tokenizer, texts, truncation=True, max_length=options.length)
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
        if stop < len(text):
            stop = max(text.rfind("\n", start, stop) + 1, start) or stop
            stop = stop if stop > start else start + _PIECE_CHARACTERS
        yield text[start:stop]
        start = stop


def _encode(tokenizer: Callable[..., Any], texts: list[str], **options: Any) -> list[list[int]]:
    try:
        return tokenizer(texts, return_attention_mask=False, verbose=False, **options)["input_ids"]
    except (TypeError, KeyError) as error:
        raise ValueError(
            f"data: the model's tokenizer cannot read these texts: {shorten_text(str(error), 200)}"
        ) from error
