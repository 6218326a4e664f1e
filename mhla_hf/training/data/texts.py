# SPDX-License-Identifier: Apache-2.0
"""Texts and chats for language models and encoders: files and records, their tokens, and batches of these.

A folder of plain text needs no further library; JSONL, parquet and data sets of the Hub are read by `datasets`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jinja2 import TemplateError
from safetensors.torch import load_file, save_file
from torch import nn

from ...utils.files import atomic_file
from ...utils.locations import check_data, is_hub_id
from ...utils.messages import import_extra, one_line, shorten_list, shorten_text
from ..config import GENERATED
from ..layers import Batch, mhla_layers
from ..stages.transformers import IGNORED
from .batches import BatchSource, chunks, drawn_held_out, last_held_out
from .folders import DataFolder, UnusableSampleError, log_problems, printable
from .order import model_fingerprint, stable_seed


ROW_LENGTH, PASSAGE_LENGTH = 512, 128
"""Default tokens of a row for language models, and most tokens of a passage for encoders."""

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
RECORD_SUFFIXES = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
"""Files of records, and how `datasets` names their format."""

# Far longer than anything that people wrote; files of gigabytes are better given as JSONL.
_LONGEST_FILE = 1 << 28
# Long texts are tokenised in pieces, cut at ends of lines.
_PIECE_CHARACTERS = 1 << 17
_TEXTS_AT_ONCE = 512
# Batches whose passages are sorted by length together.
_BATCHES_TOGETHER = 32
_ROWS_AT_ONCE = 8
_PLAIN = {"return_attention_mask": False, "verbose": False}
# Fields of chats, as TRL reads them; keys of ShareGPT and roles, as templates call them.
_CHATS = ("messages", "conversations")
_KEYS = {"from": "role", "value": "content"}
_ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}
# Records without text at the beginning of a data set after which it is refused.
_MOST_USELESS = 1000


@dataclass
class TextCorpus:
    """Source of texts.

    Attributes:
        data: A folder, a `.jsonl` or `.parquet` file, or the id of a data set, `owner/name` or
            `owner/name:configuration`.
        text_field: The field with the text or chat, in files of records and data sets. `None`: `messages` or
            `conversations` where there are any and the tokenizer has a chat template, else `text`.
        tokenizer: Makes the tokens of chats by its chat template; `None` refuses them.
        skipped: Files and records that were left out while reading, each with the reason.

    Raises:
        ValueError: If the source does not exist, a folder has no text files, `datasets` is not installed, or no record
            has a text or chat.
    """

    data: str
    text_field: str | None = None
    tokenizer: Any = None
    skipped: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.path = Path(self.data).expanduser()
        self.files: list[Path] = []
        suffix = self.path.suffix.lower()
        if self.path.exists():
            check_data(self.data)
        if self.path.is_dir():
            folder = DataFolder(self.path)
            # Only a part of a large folder is read: it must not be the beginning of the alphabet.
            self.files = sorted(folder.files(TEXT_SUFFIXES), key=self._place)
            self.skipped += folder.problems
        is_records = suffix in RECORD_SUFFIXES if self.path.is_file() else is_hub_id(self.data.partition(":")[0])
        if not self.files and (self.path.is_dir() or not is_records):
            raise ValueError(
                f"data: {shorten_text(self.data)} is neither a folder of {', '.join(TEXT_SUFFIXES)} files, a .jsonl "
                "or .parquet file, nor the id of a data set (owner/name)"
            )

    def documents(self) -> Iterator[str | np.ndarray[Any, Any]]:
        """Yield the complete texts, one file or record after another.

        Chats are int32 tokens, those that the assistant does not say with all bits flipped.
        """
        return self._read_files() if self.files else self._records()

    def passages(self, minimum_words: int = 5) -> Iterator[str]:
        """Yield passages for sentence encoders: the paragraphs of text files; a record is one passage.

        Args:
            minimum_words: Paragraphs with fewer words are left out: headings, lists of names.
        """
        if not self.files:
            yield from (" ".join(text.split()) for text in self._records() if isinstance(text, str))
        for text in self._read_files():
            for paragraph in text.split("\n\n"):
                words = " ".join(paragraph.split())
                # Prose has letters mostly; tables, rulers and examples of code do not.
                prose = 2 * sum(map(str.isalpha, words)) > len(words) and ">>>" not in words
                if prose and words.count(" ") + 1 >= minimum_words:
                    yield words

    def _place(self, path: Path) -> int:
        return stable_seed(printable(path.relative_to(self.path).as_posix()))

    def _read_files(self) -> Iterator[str]:
        for path in self.files:
            if path.stat().st_size > _LONGEST_FILE:
                self.skipped.append(f"{path} is longer than {_LONGEST_FILE:,} bytes: split it")
                continue
            try:
                text = path.read_text(encoding="utf-8-sig")
            except UnicodeDecodeError as error:
                self.skipped.append(f"{path} is not UTF-8 text (byte {error.start})")
                continue
            if "\0" in text:
                self.skipped.append(f"{path} is binary: it holds zero bytes")
            elif text.strip():
                yield text

    def _records(self) -> Iterator[str | np.ndarray[Any, Any]]:
        number, row = 0, dict[str, Any]()
        for number, row in enumerate(self._rows(), start=1):
            try:
                yield self._document(row)
            except UnusableSampleError as error:
                self.skipped.append(f"record {number} of {self.data} has {error}")
                if len(self.skipped) == number == _MOST_USELESS:
                    break
        if len(self.skipped) == number:
            problem = self.skipped[0] if number else f"{self.data} has no records"
            fields = f"; its fields are {shorten_list(map(str, row))}: name the one with the text (--text-field)"
            raise ValueError(f"data: {problem}{fields if number else ''}")

    def _document(self, row: Mapping[str, Any]) -> str | np.ndarray[Any, Any]:
        """Return the text of a record, or the tokens of its chat.

        Raises:
            UnusableSampleError: If it has neither.
        """
        has_template = bool(getattr(self.tokenizer, "chat_template", None))
        default = (*_CHATS, "text") if has_template else ("text", *_CHATS)
        names = default if self.text_field is None else (self.text_field,)
        name = next((name for name in names if row.get(name) is not None), names[-1 if has_template else 0])
        value, field = row.get(name), shorten_text(name)
        if isinstance(value, str) and value.strip():
            return value
        if name not in row:
            raise UnusableSampleError(f"no field {field!r}")
        if value is None or isinstance(value, str):
            raise UnusableSampleError(f"no text in {field!r}")
        if not isinstance(value, list) or not value or not all(isinstance(message, Mapping) for message in value):
            raise UnusableSampleError(f"a value of type {type(value).__name__} in {field!r}, no text or chat")
        if not has_template:
            raise UnusableSampleError(f"a chat in {field!r}, which language models with a chat template read alone")
        try:
            tokens, mask = _chat_tokens(self.tokenizer, value)
        except (TemplateError, TypeError, ValueError, LookupError) as error:
            raise UnusableSampleError(f"no chat in {field!r} that can be read: {one_line(error, 200)}") from error
        return np.where(mask, tokens, ~np.asarray(tokens, np.int32))

    def _rows(self) -> Iterator[Any]:
        datasets = import_extra("datasets", f"data: records, such as {self.data},", "train")
        name, _, configuration = self.data.partition(":")
        source: dict[str, Any] = {"path": name, "name": configuration or None}
        if self.path.is_file():
            source = {"path": RECORD_SUFFIXES[self.path.suffix.lower()], "data_files": str(self.path)}
        try:
            # As a stream: a part of it is enough.
            yield from datasets.load_dataset(**source, split="train", streaming=True)
        # `datasets` raises StopIteration for an empty file.
        except (ValueError, OSError, StopIteration, datasets.exceptions.DatasetsError) as error:
            problem = shorten_text(str(error), 250) or "it is empty"
            raise ValueError(f"data: {self.data} cannot be read: {problem}") from error


def _chat_tokens(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[int]]:
    """Return the tokens of a chat, and a mask of those that the assistant says.

    Templates that do not mark these are asked for the chat up to each turn. A turn that they write otherwise when the
    chat goes on, as Qwen3's does, is not among them.

    Raises:
        ValueError: If it is no chat, or the assistant says nothing.
        Exception: By the template, if it refuses the chat.
    """
    chat = [{_KEYS.get(key, key): each for key, each in message.items() if each is not None} for message in messages]
    chat = [{**message, "role": _ROLES.get(str(message.get("role")))} for message in chat]
    if not all(each["role"] and isinstance(each.get("content"), str) and not each.get("tool_calls") for each in chat):
        raise ValueError("messages need a role (system, user or assistant) and content, a text, and no calls of tools")
    render = partial(tokenizer.apply_chat_template, return_dict=True)
    if tokenizer.is_fast and re.search(r"{%-?\s*generation\s*-?%}", tokenizer.get_chat_template()):
        made = render(chat, return_assistant_tokens_mask=True)
        tokens, mask = made["input_ids"], made["assistant_masks"]
    else:
        tokens = render(chat)["input_ids"]
        mask = [0] * len(tokens)
        for turn in range(1, len(chat)):
            if chat[turn]["role"] == "assistant":
                before = render(chat[:turn], add_generation_prompt=True)["input_ids"]
                after = render(chat[: turn + 1])["input_ids"]
                if tokens[: len(after)] == after and after[: len(before)] == before:
                    mask[len(before) : len(after)] = [1] * (len(after) - len(before))
    if not any(mask):
        raise ValueError("the assistant says nothing in it")
    return tokens, mask


@dataclass(frozen=True)
class TokenTable:
    """Rows or passages of tokens.

    Attributes:
        tokens: int32, concatenated.
        offsets: int64, where each row begins, and the end of the last.
        skipped: Number of files and records left out.
        fingerprint: Hash that identifies them.
        learned: True for the tokens to fine-tune on; `None` for all.
    """

    tokens: torch.Tensor
    offsets: torch.Tensor
    skipped: int
    fingerprint: str
    learned: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> torch.Tensor:
        """The tokens of a row or passage, int64."""
        first, last = self.offsets[index : index + 2].tolist()
        return self.tokens[first:last].long()


def tokenize(corpus: TextCorpus, tokenizer: Any, *, packed: bool, length: int, samples: int) -> TokenTable:
    """Tokenise texts.

    Args:
        corpus: The texts.
        tokenizer: The model's own.
        packed: Rows of exactly `length` tokens, with the tokenizer's end of text between documents, for language
            models. Otherwise passages of at most `length` tokens with the tokenizer's special tokens, each once.
        length: Tokens per row, or at most per passage.
        samples: Rows or passages wanted; reading stops when they are there.

    Raises:
        ValueError: If there are too few texts, or no record has one.
    """
    make = _packed_rows if packed else _passages
    pieces, lengths = make(corpus, tokenizer, length, samples)
    log_problems(corpus.skipped)
    if len(lengths) < 2:
        unit = f"rows of {length} tokens" if packed else "passages of text"
        count = sum(len(piece) for piece in pieces)
        raise ValueError(
            f"data: {corpus.data} has {len(lengths)} {unit} ({count:,} tokens in all); at least 2 are needed"
            + (": give more text, or shorter rows (--max-length)" if packed else "")
            + (f"; left out: {corpus.skipped[0]}" if corpus.skipped else "")
        )
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    marked = np.concatenate(pieces)
    tokens = np.maximum(marked, ~marked)
    learned = None if (marked >= 0).all() else torch.from_numpy(marked >= 0)
    fingerprint = hashlib.sha256(tokens.tobytes() + offsets.numpy().tobytes()).hexdigest()[:16]
    return TokenTable(torch.from_numpy(tokens), offsets, len(corpus.skipped), fingerprint, learned)


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
        if isinstance(document, str):
            encoded = tokenizer(list(_pieces(document)), add_special_tokens=False, **_PLAIN)["input_ids"]
            document = np.asarray([*begin, *chain.from_iterable(encoded), *end], np.int32)
        kept.append(document)
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


class PackedText(BatchSource):
    """Rows of one length for language models: `input_ids` `[B, L]`, no padding.

    Fine-tuning on chats also gets `labels`, -100 for what the assistant does not say.

    Args:
        table: The rows; the last of them are held out.
        held_out: Most rows to hold out.
        seed: Seed of their order.
        decode: Makes the text of tokens, for `held_out_bytes`.

    Attributes:
        held_out_bytes: UTF-8 bytes of the held-out rows, without the first token of each, which no model predicts.
    """

    kind = "text in packed rows"

    def __init__(
        self, table: TokenTable, held_out: int, seed: int = 0, decode: Callable[[list[int]], str] | None = None
    ) -> None:
        super().__init__(seed, table.fingerprint, *last_held_out(len(table), held_out))
        self.table, self.facts = table, {"length": len(table[0]), "left_out": table.skipped}
        rows = (table[index][1:].tolist() for index in self.held_out_indices)
        self.held_out_bytes = sum(len(decode(row).encode()) for row in rows) if decode is not None else 0

    def batch(self, stage: str, step: int, batch_size: int, rank: int = 0, world_size: int = 1) -> Batch:
        indices = self.batch_indices(stage, step, batch_size, rank, world_size)
        batch, learned = {**self._make(indices)}, self.table.learned
        if stage == "finetune" and learned is not None:
            rows = learned.view(-1, len(self.table[0]))
            batch["labels"] = batch["input_ids"].where(rows[list(indices)], IGNORED)
        return batch

    def _make(self, indices: Sequence[int]) -> Batch:
        return {"input_ids": torch.stack([self.table[index] for index in indices])}


class Passages(BatchSource):
    """Passages for encoders, padded: `input_ids` and `attention_mask` `[B, L]`.

    A batch has passages of similar length: the passages of 32 successive batches are sorted by length, cut into
    batches, and these are shuffled.

    Args:
        table: The passages; some of them, all over it, are held out.
        held_out: Most passages to hold out.
        padding: Token for padding.
        seed: Seed of their order.
    """

    kind = "passages of text"

    def __init__(self, table: TokenTable, held_out: int, padding: int, seed: int = 0) -> None:
        indices, held_out_indices = drawn_held_out(len(table), held_out)
        self.table, self.padding, self.lengths = table, padding, table.offsets.diff().tolist()
        super().__init__(seed, table.fingerprint, indices, sorted(held_out_indices, key=self.lengths.__getitem__))
        self.facts = {"length": max(self.lengths), "left_out": table.skipped}
        self._together = lru_cache(maxsize=4)(self._make_together)

    def batch_indices(
        self, stage: str, step: int, batch_size: int, rank: int = 0, world_size: int = 1
    ) -> Sequence[int]:
        group, place = divmod(step, _BATCHES_TOGETHER)
        indices = self._together(stage, group, batch_size * world_size)[place]
        return indices[rank * batch_size : (rank + 1) * batch_size]

    def _make_together(self, stage: str, group: int, batch_size: int) -> list[Sequence[int]]:
        """Return the batches of all processes for a group of successive steps."""
        order = self._order(stage, batch_size)
        steps = range(group * _BATCHES_TOGETHER, (group + 1) * _BATCHES_TOGETHER)
        numbers = [number for step in steps for number in order.sample_numbers(step)]
        chosen = sorted(
            (self.indices[order.dataset_index(number)] for number in numbers), key=self.lengths.__getitem__
        )
        generator = torch.Generator().manual_seed(stable_seed(self.seed, stage, "lengths", group))
        batches = chunks(chosen, batch_size)
        return [batches[place] for place in torch.randperm(len(batches), generator=generator).tolist()]

    def _make(self, indices: Sequence[int]) -> Batch:
        rows = [self.table[index] for index in indices]
        padded = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=self.padding)
        ones = [torch.ones_like(row) for row in rows]
        return {"input_ids": padded, "attention_mask": nn.utils.rnn.pad_sequence(ones, batch_first=True)}


def text_batches(
    model: nn.Module,
    directory: Path,
    data: str,
    *,
    samples: int,
    held_out: int = 192,
    length: int | None = None,
    text_field: str | None = None,
    seed: int = 0,
) -> BatchSource:
    """Open text for a language model or an encoder.

    Args:
        model: The converted model; rows for causal attention, passages otherwise.
        directory: Where its tokenizer is.
        data: A folder of .txt, .md, .rst or .py files, a JSONL or parquet file, or the id of a data set.
        samples: Maximum number of rows or passages to train on.
        held_out: Rows or passages to hold out, a fifth of all at most.
        length: Tokens per row, or at most per passage. `None`: 512 for language models, 128 for encoders, or
            what the model takes if that is less.
        text_field: See [`TextCorpus`].
        seed: Seed of their order.

    Raises:
        ValueError: If there are no such data, the tokenizer does not fit the model, or it takes no texts.
        OSError: From transformers, if there is no tokenizer; it may be a `ValueError`, too.
    """
    packed = any(layer.mhla.config.causal for layer in mhla_layers(model))
    table, tokenizer = open_texts(model.config, directory, data, packed, samples + held_out, length, text_field)
    if packed:
        return PackedText(table, held_out, seed, tokenizer.decode)
    return Passages(table, held_out, tokenizer.pad_token_id or 0, seed)


def open_texts(
    config: Any, directory: Path, data: str, packed: bool, samples: int, length: int | None, text_field: str | None
) -> tuple[TokenTable, Any]:
    """Tokenise texts for a model; other arguments and errors are those of [`text_batches`].

    Args:
        config: The model's configuration, converted or not.
        packed: See [`tokenize`].
        samples: Rows or passages wanted; two are needed at least, and tell whether the data can be used.

    Returns:
        The rows or passages, and the tokenizer.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    corpus = TextCorpus(data, text_field, tokenizer if packed else None)
    # Tokenizers without a limit have one of 10**30. Some models count positions from more than 0, and take fewer.
    text_config = config.get_text_config()
    longest = min(getattr(text_config, "max_position_embeddings", None) or 1 << 20, tokenizer.model_max_length)
    if length is not None and not 2 <= length <= longest:
        raise ValueError(f"max_length must be from 2 to {longest:,} for this model, got {length}")
    length = length or min(ROW_LENGTH if packed else PASSAGE_LENGTH, longest)
    table = tokenize(corpus, tokenizer, packed=packed, length=length, samples=samples)
    if (largest := int(table.tokens.max())) >= (size := text_config.vocab_size):
        raise ValueError(f"the tokenizer of {directory} makes token {largest}, but the model has {size}")
    return table, tokenizer


@torch.no_grad()
def generate_text(model: Any, folder: Path, *, rows: int, length: int, seed: int = 0) -> TokenTable:
    """Sample texts of a language model as rows of tokens, from the beginning of a text.

    Existing rows are kept, so an interrupted call can be repeated.

    Args:
        model: The model, with its original attention.
        folder: Folder that keeps them.
        rows: Number of rows.
        length: Tokens of each.
        seed: Seed of sampling; the seed of each batch is derived from it.

    Raises:
        ValueError: If the model generates no text, or has no token that texts begin with.
    """
    config = model.config
    first = config.eos_token_id if config.bos_token_id is None else config.bos_token_id
    if not model.can_generate() or first is None:
        raise ValueError(
            f"data='generated' needs a model that generates text from a token of its own, and {type(model).__name__} "
            "does not: give a folder of texts or images"
        )
    fingerprint = f"{stable_seed(model_fingerprint(model), rows, length, seed):016x}"
    folder = folder / f"generated-{fingerprint}"
    folder.mkdir(parents=True, exist_ok=True)
    start = torch.full((_ROWS_AT_ONCE, 1), first, device=model.device)
    # Plain sampling past ends of texts, without the model's own defaults.
    options: dict[str, Any] = {"max_length": length, "do_sample": True, "eos_token_id": None, "pad_token_id": first}
    options |= {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
    pieces = []
    model.eval()
    for number in range(0, rows, _ROWS_AT_ONCE):
        path = folder / f"rows-{number:08d}.safetensors"
        if not path.is_file():
            with torch.random.fork_rng(), atomic_file(path) as temporary:
                torch.manual_seed(stable_seed(seed, GENERATED, number))
                drawn = model.generate(start, attention_mask=torch.ones_like(start), **options)
                save_file({"tokens": drawn.int().cpu()}, temporary)
        pieces.append(load_file(path)["tokens"])
    tokens = torch.cat(pieces)[:rows].flatten()
    return TokenTable(tokens, torch.arange(0, rows * length + 1, length), 0, fingerprint)
