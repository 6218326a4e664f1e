# SPDX-License-Identifier: Apache-2.0
"""Texts and chats for language models and encoders: files and records, their tokens, and batches of these.

A folder of plain text needs no further library; JSONL, parquet and data sets of the Hub are read by `datasets`.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ...utils.files import atomic_file
from ...utils.locations import check_data, is_hub_id
from ...utils.messages import import_extra, shorten_list, shorten_text
from ..config import GENERATED
from ..matching.layers import Batch, mhla_layers
from ..stages.transformers import IGNORED
from .batches import BatchSource, chunks, drawn_held_out, last_held_out, model_fingerprint, stable_seed
from .folders import DataFolder, log_problems, printable


logger = logging.getLogger(__name__)

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
# The field of chats in data sets, which stands in for the default one.
_DEFAULT_FIELD, _CHAT_FIELD = "text", "messages"

Chat = list[dict[str, str]]
"""Messages, each with a `role` and a `content`."""


@dataclass
class TextCorpus:
    """Source of texts.

    Attributes:
        data: A folder, a `.jsonl` or `.parquet` file, or the id of a data set, `owner/name` or
            `owner/name:configuration`.
        text_field: The field with the text or the chat, in files of records and data sets; `messages` in records
            without `text`.
        skipped: Files and records that were left out while reading, each with the reason.

    Raises:
        ValueError: If the source does not exist, a folder has no text files, or `datasets` is not installed.
    """

    data: str
    text_field: str = _DEFAULT_FIELD
    skipped: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.path = Path(self.data).expanduser()
        if self.path.exists():
            check_data(self.data)
        self.files: list[Path] = []
        suffix = self.path.suffix.lower()
        if self.path.is_dir():
            folder = DataFolder(self.path)
            # Of a large folder only a part is read: it must not be the beginning of the alphabet.
            self.files = sorted(folder.files(TEXT_SUFFIXES), key=self._place)
            self.skipped += folder.problems
        is_records = suffix in RECORD_SUFFIXES if self.path.is_file() else is_hub_id(self.data.partition(":")[0])
        if not self.files and (self.path.is_dir() or not is_records):
            raise ValueError(
                f"data: {shorten_text(self.data)} is neither a folder of {', '.join(TEXT_SUFFIXES)} files, a .jsonl "
                "or .parquet file, nor the id of a data set (owner/name)"
            )

    def documents(self) -> Iterator[str | Chat]:
        """Yield the complete texts and chats, one file or record after another."""
        return self._read_files() if self.files else self._records()

    def passages(self, minimum_words: int = 5) -> Iterator[str]:
        """Yield passages for sentence encoders: the paragraphs of text files; a record is one passage.

        Args:
            minimum_words: Paragraphs with fewer words are left out: headings, lists of names.

        Raises:
            ValueError: If the records are chats.
        """
        for text in self._records() if not self.files else ():
            if not isinstance(text, str):
                raise ValueError(f"data: {self.data} holds chats, which are for language models: name another field")
            yield " ".join(text.split())
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

    def _records(self) -> Iterator[str | Chat]:
        found = False
        for number, row in enumerate(self._rows(), start=1):
            where, name = f"record {number} of {self.data}", self.text_field
            if name == _DEFAULT_FIELD not in row and _CHAT_FIELD in row:
                name = _CHAT_FIELD
            fields = f"{shorten_list(map(str, row))}: name the one with the text (--text-field of mhla-hf recover)"
            if name not in row:
                raise ValueError(f"data: {where} has no field {shorten_text(name)!r}, but {fields}")
            text = row[name]
            if not text or (isinstance(text, str) and not text.strip()):
                self.skipped.append(f"{where} has no text in {name!r:.100}")
                continue
            if not isinstance(text, str) and not _is_chat(text):
                kind = f"{type(text).__name__}, not text"
                if isinstance(text, list):
                    kind = "a list, but not of messages with the texts 'role' and 'content'"
                if not found:
                    raise ValueError(f"data: {shorten_text(name)!r} of {where} holds {kind}; its fields are {fields}")
                self.skipped.append(f"{where} holds {kind} in {name!r:.100}")
                continue
            found = True
            yield text

    def _rows(self) -> Iterator[Any]:
        datasets = import_extra("datasets", f"data: records, such as {self.data},", "train")
        name, _, configuration = self.data.partition(":")
        source: dict[str, Any] = {"path": name, "name": configuration or None}
        if self.path.is_file():
            source = {"path": RECORD_SUFFIXES[self.path.suffix.lower()], "data_files": str(self.path)}
        try:
            # As a stream: a part of it is enough.
            yield from datasets.load_dataset(**source, split="train", streaming=True)
        except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
            raise ValueError(f"data: {self.data} cannot be read: {shorten_text(str(error), 250)}") from error


@dataclass(frozen=True)
class TokenTable:
    """Rows or passages of tokens.

    Attributes:
        tokens: int32, concatenated.
        offsets: int64, where each row begins, and the end of the last.
        skipped: Files and records left out, each with the reason.
        fingerprint: Hash that identifies them.
        answers: BoolTensor like `tokens`, which of them an assistant says in a chat; `None` without chats.
    """

    tokens: torch.Tensor
    offsets: torch.Tensor
    skipped: Sequence[str]
    fingerprint: str
    answers: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> torch.Tensor:
        """The tokens of a row or passage, int64."""
        return self.tokens[self._place(index)].long()

    def labels(self, index: int) -> torch.Tensor:
        """The tokens of a row that an assistant says, -100 for the others, int64."""
        assert self.answers is not None
        return self[index].masked_fill(~self.answers[self._place(index)], IGNORED)

    def _place(self, index: int) -> slice:
        return slice(*self.offsets[index : index + 2].tolist())


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
        ValueError: If there are too few texts, or chats that the tokenizer has no template for.
    """
    make = _packed_rows if packed else _passages
    pieces, lengths, answers = make(corpus, tokenizer, length, samples)
    if len(lengths) < 2:
        unit = f"rows of {length} tokens" if packed else "passages of text"
        count = sum(len(piece) for piece in pieces)
        raise ValueError(
            f"data: {corpus.data} has {len(lengths)} {unit} ({count:,} tokens in all); at least 2 are needed"
            + (": give more text, or shorter rows (--max-length of mhla-hf recover)" if packed else "")
            + (f"; left out: {shorten_list(corpus.skipped)}" if corpus.skipped else "")
        )
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    tokens = np.concatenate(pieces)
    fingerprint = hashlib.sha256(tokens.tobytes() + offsets.numpy().tobytes()).hexdigest()[:16]
    said = torch.from_numpy(np.concatenate(answers)[: len(tokens)]) if any(map(np.any, answers)) else None
    return TokenTable(torch.from_numpy(tokens), offsets, corpus.skipped, fingerprint, said)


Array = np.ndarray[Any, Any]
Pieces = tuple[list[Array], list[int], list[Array]]
"""Tokens, the lengths of the rows or passages that they make up, and which tokens are an assistant's."""


def _packed_rows(corpus: TextCorpus, tokenizer: Any, length: int, samples: int) -> Pieces:
    begin = tokenizer("", verbose=False)["input_ids"][:1]
    begin = begin if begin == [tokenizer.bos_token_id] else []
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    wanted = samples * length
    kept: list[Array] = [np.zeros(0, np.int32)]
    answers: list[Array] = []
    count = chats = 0
    for document in corpus.documents():
        if isinstance(document, str):
            encoded = tokenizer(list(_pieces(document)), add_special_tokens=False, **_PLAIN)["input_ids"]
            ids = [*begin, *chain.from_iterable(encoded), *end]
            said: Array = np.zeros(len(ids), bool)
        else:
            try:
                ids, said = chat_tokens(tokenizer, document)
            except jinja2.TemplateError as error:
                reason = shorten_text(str(error))
                corpus.skipped.append(f"a chat of {corpus.data}, which the template refuses: {reason}")
                continue
            chats += 1
        kept.append(np.asarray(ids, np.int32))
        answers.append(said)
        count += len(ids)
        if count >= wanted:
            break
    if chats and not any(map(np.any, answers)):
        logger.warning("data: the chat template shows no turn of an assistant: fine-tuning learns all of the chats")
    rows = min(count, wanted) // length
    tokens = np.concatenate(kept)
    return [tokens[: rows * length] if rows else tokens], [length] * rows, answers


def chat_tokens(tokenizer: Any, chat: Chat) -> tuple[list[int], Array]:
    """Make the tokens of a chat by the tokenizer's template, which writes special tokens itself.

    A turn of the assistant is what follows the template's own prompt for it. Turns that the template writes in another
    way once others follow, as those that cut earlier thoughts do, count as given.

    Args:
        tokenizer: The model's own.
        chat: The messages.

    Returns:
        The tokens, and whether the assistant says each.

    Raises:
        ValueError: If the tokenizer has no template, or does not tell where its tokens begin.
        jinja2.TemplateError: If its template refuses the chat.
    """
    if tokenizer.chat_template is None or not tokenizer.is_fast:
        raise ValueError(
            "data: the records are chats, which need a fast tokenizer with a chat template, and the model has none: "
            "name a field of text (--text-field of mhla-hf recover)"
        )
    render = partial(tokenizer.apply_chat_template, tokenize=False)
    whole = render(chat)
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, **_PLAIN)
    begins = np.asarray(encoded["offset_mapping"]).reshape(-1, 2)[:, 0]
    said: Array = np.zeros(len(begins), bool)
    for number, message in enumerate(chat):
        if message["role"] == "assistant" and number:
            before, after = render(chat[:number], add_generation_prompt=True), render(chat[: number + 1])
            if after.startswith(before) and whole.startswith(after):
                said |= (len(before) <= begins) & (begins < len(after))
    return encoded["input_ids"], said


def _is_chat(value: Any) -> bool:
    """Return whether a value is a list of messages, each a role and a text."""
    return isinstance(value, list) and all(
        isinstance(message, Mapping) and all(isinstance(message.get(name), str) for name in ("role", "content"))
        for message in value
    )


def _passages(corpus: TextCorpus, tokenizer: Any, length: int, samples: int) -> Pieces:
    # Each once: a held-out passage must not be one of those trained on.
    unique = islice(_unique(corpus.passages()), samples)
    pieces: list[Array] = []
    while texts := list(islice(unique, _TEXTS_AT_ONCE)):
        encoded = tokenizer(texts, truncation=True, max_length=length, **_PLAIN)["input_ids"]
        pieces += [np.asarray(ids, np.int32) for ids in encoded if ids]
    return pieces, [len(piece) for piece in pieces], []


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

    Batches for fine-tuning on chats also have `labels` `[B, L]`, of what the assistant says.

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
        self.table, self.facts = table, {"length": len(table[0]), "left_out": len(table.skipped)}
        rows = (table[index][1:].tolist() for index in self.held_out_indices)
        self.held_out_bytes = sum(len(decode(row).encode()) for row in rows) if decode is not None else 0

    def batch(self, stage: str, step: int, batch_size: int, rank: int = 0, world_size: int = 1) -> Batch:
        indices = self.batch_indices(stage, step, batch_size, rank, world_size)
        batch = dict(self._make(indices))
        if stage == "finetune" and self.table.answers is not None:
            batch["labels"] = torch.stack([self.table.labels(index) for index in indices])
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
        self.facts = {"length": max(self.lengths), "left_out": len(table.skipped)}
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
    text_field: str = _DEFAULT_FIELD,
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
        ValueError: If there are no such data, or too few, or the tokenizer does not fit the model or them.
        OSError: From transformers, if there is no tokenizer; it may be a `ValueError`, too.
    """
    packed = any(layer.mhla.config.causal for layer in mhla_layers(model))
    source: dict[str, Any] = {"packed": packed, "length": length, "text_field": text_field}
    table, tokenizer = read_texts(model.config, directory, data, samples=samples + held_out, **source)
    log_problems(table.skipped)
    if packed:
        return PackedText(table, held_out, seed, tokenizer.decode)
    return Passages(table, held_out, tokenizer.pad_token_id or 0, seed)


def read_texts(
    config: Any,
    directory: Path,
    data: str,
    *,
    packed: bool,
    samples: int = 2,
    length: int | None = None,
    text_field: str = _DEFAULT_FIELD,
) -> tuple[TokenTable, Any]:
    """Read texts by the tokenizer of a model; other arguments and errors are those of [`text_batches`].

    Args:
        config: The model's configuration, converted or not.
        packed: Whether to make rows, for a language model, or passages.
        samples: Rows or passages wanted; by default as few as there must be.

    Returns:
        The rows or passages, and the tokenizer.
    """
    from transformers import AutoTokenizer

    corpus = TextCorpus(data, text_field)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    # Tokenizers without a limit have one of 10**30. Some models count positions from more than 0, and take fewer.
    positions = getattr(config.get_text_config(), "max_position_embeddings", None) or 1 << 20
    longest = min(positions, tokenizer.model_max_length)
    if length is not None and not 2 <= length <= longest:
        raise ValueError(f"max_length must be from 2 to {longest:,} for this model, got {length}")
    length = length or min(ROW_LENGTH if packed else PASSAGE_LENGTH, longest)
    table = tokenize(corpus, tokenizer, packed=packed, length=length, samples=samples)
    vocabulary = config.get_text_config().vocab_size
    if int(table.tokens.max()) >= vocabulary:
        raise ValueError(
            f"the tokenizer of {directory} makes token {int(table.tokens.max())}, but the model has {vocabulary}"
        )
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
    # Plain sampling, whatever the model's own defaults are, past ends of texts.
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
    return TokenTable(tokens, torch.arange(0, rows * length + 1, length), (), fingerprint)
