# SPDX-License-Identifier: Apache-2.0
"""Batches for every kind of model: text, images, or cached latents of diffusion models; and what `--data` opens.

A batch holds keyword arguments of the model's `forward`. Which samples it has is a pure function of (seed, stage,
step), so a resumed stage sees the same batches as an uninterrupted one, and two processes with batch size 2
see the samples of one process with batch size 4.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import nn
from torch.utils.data import Subset

from ...utils.messages import shorten_text
from ..config import DIGITS
from ..evaluation import evaluation_batches
from ..families import Objective
from ..matching.layers import Batch, mhla_layers
from .batches import Batch as LatentBatch
from .batches import DataOrder, LatentSamples, make_batch, stable_seed
from .fingerprints import samples_fingerprint
from .folders import DataFolder, UnusableSampleError, printable
from .images import IMAGE_SUFFIXES, read_image
from .texts import TextCorpus, TokenTable, tokenize


logger = logging.getLogger(__name__)

ROW_LENGTH, PASSAGE_LENGTH = 512, 128
# Unusable images named in the log.
_NAMED = 20
# At most this share of the samples is held out.
_HELD_OUT_SHARE = 5
# Batches whose passages are sorted by length together.
_BATCHES_TOGETHER = 32
# Noise draws of held-out latents in all, and of each sample at most.
_DRAWS, _MOST_DRAWS = 96, 16


class BatchSource:
    """Samples of one data set, in batches.

    Args:
        seed: Seed of their order.
        fingerprint: Hash that identifies the samples.
        indices: Indices of the samples to train on.
        held_out_indices: Indices of the others.

    Attributes:
        kind: Kind of the data, for `describe`.
    """

    kind: ClassVar[str]

    def __init__(
        self, seed: int, fingerprint: str, indices: Sequence[int] = (), held_out_indices: Sequence[int] = ()
    ) -> None:
        self.seed, self.fingerprint = seed, fingerprint
        self.indices, self.held_out_indices = indices, held_out_indices

    def __len__(self) -> int:
        """Number of samples to train on."""
        return len(self.indices)

    def batch(self, stage: str, step: int, batch_size: int, rank: int = 0, world_size: int = 1) -> Batch:
        """Return the batch of a step, on the CPU; a pure function of the seed and the arguments.

        Args:
            stage: Name of the stage; the order depends on it.
            step: From 0.
            batch_size: Samples of this process.
            rank: Number of this process.
            world_size: Number of processes.
        """
        order = self._order(stage, batch_size, rank, world_size)
        return self._make([self.indices[order.dataset_index(number)] for number in order.sample_numbers(step)])

    def held_out(self, batch_size: int) -> list[Batch]:
        """Return all held-out samples, always in the same batches."""
        return [self._make(part) for part in _parts(self.held_out_indices, batch_size)]

    def describe(self) -> dict[str, Any]:
        """Describe the data as plain JSON values."""
        return {"kind": self.kind, "samples": len(self), "held_out": len(self.held_out_indices)}

    def batches(self, stage: str, count: int, batch_size: int) -> list[Batch]:
        """Return the first batches of a stage."""
        return [self.batch(stage, step, batch_size) for step in range(count)]

    def _make(self, indices: Sequence[int]) -> Batch:
        """A batch of some samples; not needed where `batch` and `held_out` make theirs otherwise."""
        raise NotImplementedError

    def _order(self, stage: str, batch_size: int, rank: int, world_size: int) -> DataOrder:
        return DataOrder(
            dataset_size=len(self),
            batch_size=batch_size,
            seed=self.seed,
            stage=stage,
            rank=rank,
            world_size=world_size,
        )


class PackedText(BatchSource):
    """Rows of one length for language models: `input_ids` `[B, L]`, no padding.

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
        super().__init__(seed, table.fingerprint, *_last_held_out(len(table), held_out))
        self.table = table
        rows = (table[index][1:].tolist() for index in self.held_out_indices)
        self.held_out_bytes = sum(len(decode(row).encode()) for row in rows) if decode is not None else 0

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "length": len(self.table[0]), "left_out": self.table.skipped}

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
        indices, held_out_indices = _drawn_held_out(len(table), held_out)
        self.table, self.padding, self.lengths = table, padding, table.lengths().tolist()
        super().__init__(seed, table.fingerprint, indices, sorted(held_out_indices, key=self._length))
        self._together = lru_cache(maxsize=4)(self._make_together)

    def batch(self, stage: str, step: int, batch_size: int, rank: int = 0, world_size: int = 1) -> Batch:
        group, place = divmod(step, _BATCHES_TOGETHER)
        indices = self._together(stage, group, batch_size * world_size)[place]
        return self._make(indices[rank * batch_size : (rank + 1) * batch_size])

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "length": max(self.lengths), "left_out": self.table.skipped}

    def _make_together(self, stage: str, group: int, batch_size: int) -> list[Sequence[int]]:
        """Return the batches of all processes for a group of successive steps."""
        order = self._order(stage, batch_size, 0, 1)
        steps = range(group * _BATCHES_TOGETHER, (group + 1) * _BATCHES_TOGETHER)
        numbers = [number for step in steps for number in order.sample_numbers(step)]
        chosen = sorted((self.indices[order.dataset_index(number)] for number in numbers), key=self._length)
        generator = torch.Generator().manual_seed(stable_seed(self.seed, stage, "lengths", group))
        batches = _parts(chosen, batch_size)
        return [batches[place] for place in torch.randperm(len(batches), generator=generator).tolist()]

    def _length(self, index: int) -> int:
        return self.lengths[index]

    def _make(self, indices: Sequence[int]) -> Batch:
        rows = [self.table[index] for index in indices]
        padded = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=self.padding)
        ones = [torch.ones_like(row) for row in rows]
        return {"input_ids": padded, "attention_mask": nn.utils.rnn.pad_sequence(ones, batch_first=True)}


class Images(BatchSource):
    """Images for vision models, as their image processor makes them: `pixel_values` `[B, C, H, W]`.

    Args:
        images: uint8 `[H, W, 3]` each, by a function that reads one.
        processor: The model's own.
        held_out: Most images to hold out.
        fingerprint: Hash that identifies the samples.
        seed: Seed of their order.
        left_out: Number of files that could not be read.
    """

    kind = "images"

    def __init__(
        self, images: Sequence[Any], processor: Any, held_out: int, fingerprint: str, seed: int = 0, left_out: int = 0
    ) -> None:
        super().__init__(seed, fingerprint, *_drawn_held_out(len(images), held_out))
        self.images, self.processor, self.left_out = images, processor, left_out

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "left_out": self.left_out}

    def _make(self, indices: Sequence[int]) -> Batch:
        made = self.processor(images=[self.images[index]() for index in indices], return_tensors="pt")
        return {name: tensor for name, tensor in made.items() if isinstance(tensor, torch.Tensor)}


class Latents(BatchSource):
    """Noisy latents with their conditions, as a diffusion model's objective hands them to it.

    Args:
        dataset: The samples, of a cache for instance; some of them are held out.
        objective: Draws noise levels, adds noise and knows the arguments of `forward`.
        model: The transformer; its configuration alone counts, and the type of its weights.
        held_out: Most samples to hold out, or a data set of such.
        seed: Seed of their order, of noise and noise levels.
        condition_dropout: Share of samples that lose their caption or class, where the data set has `null_condition`.
        draws: Noise draws of each held-out sample that quality is measured on; by default so many that there are 96,
            and 16 of a sample at most.
    """

    kind = "latents"

    def __init__(
        self,
        dataset: LatentSamples,
        objective: Objective,
        model: nn.Module,
        held_out: int | LatentSamples,
        seed: int = 0,
        condition_dropout: float = 0.1,
        draws: int | None = None,
    ) -> None:
        fingerprint = getattr(dataset, "fingerprint", None)
        identity = fingerprint() if callable(fingerprint) else samples_fingerprint(dataset)
        self.null_condition = getattr(dataset, "null_condition", None)
        objective.check_data(model, dataset[0], self.null_condition)
        self.objective, self.model = objective, model
        self.condition_dropout = condition_dropout if self.null_condition is not None else 0.0
        self.samples: LatentSamples
        self.held_out_samples: LatentSamples
        if isinstance(held_out, int):
            parts = _drawn_held_out(len(dataset), held_out)
            self.samples, self.held_out_samples = (Subset(cast(Any, dataset), part) for part in parts)
        else:
            self.samples, self.held_out_samples = dataset, held_out
        super().__init__(seed, identity, range(len(self.samples)), range(len(self.held_out_samples)))
        self.draws = draws or min(_MOST_DRAWS, math.ceil(_DRAWS / len(self.held_out_samples)))

    def batch(self, stage: str, step: int, batch_size: int, rank: int = 0, world_size: int = 1) -> Batch:
        return self.inputs(self.latent_batch(stage, step, batch_size, rank, world_size))

    def latent_batch(self, stage: str, step: int, batch_size: int, rank: int = 0, world_size: int = 1) -> LatentBatch:
        """Return the batch of a step before noise is added, as the training loop takes it; arguments as in `batch`."""
        order = self._order(stage, batch_size, rank, world_size)
        return make_batch(self.samples, order, step, 0, self.objective, self.condition_dropout, self.null_condition)

    def held_out(self, batch_size: int) -> list[Batch]:
        """Held-out samples with noise levels that cover their distribution evenly."""
        return [self.inputs(batch) for batch in self.held_out_latents(batch_size)]

    def held_out_latents(self, batch_size: int, draws: int = 1) -> list[LatentBatch]:
        """The held-out samples before noise is added.

        Args:
            batch_size: Samples of a batch.
            draws: Noise draws of each sample.
        """
        return evaluation_batches(self.held_out_samples, self.objective, batch_size=batch_size, draws_per_sample=draws)

    def inputs(self, batch: LatentBatch) -> Batch:
        """Return the arguments of the model's `forward` for a batch."""
        return self.objective.inputs_of(self.model, batch, cast(Any, self.model).dtype)

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "shape": list(self.samples[0]["latents"].shape), "draws": self.draws}


class RecordedCalls(BatchSource):
    """Recorded calls of a diffusion model while its pipeline generated samples; a batch is always one call.

    Args:
        calls: Keyword arguments of the model's `forward`, of all calls.
        held_out: Most calls to hold out; the last ones.
        seed: Seed of their order.
    """

    kind = "calls of the pipeline's model"

    def __init__(self, calls: Sequence[Batch], held_out: int, seed: int = 0) -> None:
        tensors = [value for value in calls[-1].values() if isinstance(value, torch.Tensor)]
        sums = [f"{tensor.double().sum().item():.6g}" for tensor in tensors]
        fingerprint = f"{stable_seed(len(calls), *sums):016x}"
        super().__init__(seed, fingerprint, *_last_held_out(len(calls), held_out))
        self.calls = calls

    def batch(self, stage: str, step: int, batch_size: int, rank: int = 0, world_size: int = 1) -> Batch:
        return super().batch(stage, step, 1, rank, world_size)

    def held_out(self, batch_size: int) -> list[Batch]:
        return super().held_out(1)

    def _make(self, indices: Sequence[int]) -> Batch:
        return self.calls[indices[0]]


def _held_out(count: int, wanted: int) -> int:
    """Number of samples to hold out: at least one, and at least one remains for training."""
    return max(1, min(wanted, count // _HELD_OUT_SHARE))


def _last_held_out(count: int, wanted: int) -> tuple[Sequence[int], Sequence[int]]:
    """Indices of the samples to train on, and of the last ones, which are held out."""
    first = count - _held_out(count, wanted)
    return range(first), range(first, count)


def _drawn_held_out(count: int, wanted: int) -> tuple[Sequence[int], Sequence[int]]:
    """Indices of the samples to train on, in a drawn order, and of those held out, from all over the data set."""
    # By a fixed draw: data sets are often in the order of names or classes, and files may be anywhere.
    shuffled = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
    first = _held_out(count, wanted)
    return shuffled[first:], shuffled[:first]


def _parts(indices: Sequence[int], size: int) -> list[Sequence[int]]:
    return [indices[start : start + size] for start in range(0, len(indices), size)]


def text_batches(
    model: nn.Module,
    directory: Path,
    data: str,
    *,
    samples: int,
    held_out: int = 192,
    length: int | None = None,
    text_field: str = "text",
    seed: int = 0,
    cache: Path | None = None,
) -> BatchSource:
    """Open text for a language model or an encoder.

    Args:
        model: The converted model; rows for causal attention, passages otherwise.
        directory: Where its tokenizer is.
        data: A folder of .txt, .md, .rst or .py files, a JSONL or parquet file, or the id of a data set.
        samples: Rows or passages to train on, if there are so many.
        held_out: Rows or passages to hold out, a fifth of all at most.
        length: Tokens of a row, or most tokens of a passage. `None`: 512 for language models, 128 for encoders, or
            what the model takes if that is less.
        text_field: The field with the text, in JSONL files and data sets.
        seed: Seed of their order.
        cache: Folder that keeps the tokens.

    Raises:
        ValueError: If there are no such data, the model has no tokenizer, or it takes no texts.
    """
    config: Any = model.config
    packed = is_causal(model)
    corpus, tokenizer, longest = open_texts(config, directory, data, length, text_field)
    length = length or min(ROW_LENGTH if packed else PASSAGE_LENGTH, longest)
    amount = samples + held_out
    table = tokenize(corpus, tokenizer, directory, packed=packed, length=length, samples=amount, cache=cache)
    vocabulary = config.get_text_config().vocab_size
    if int(table.tokens.max()) >= vocabulary:
        raise ValueError(
            f"the tokenizer of {directory} makes token {int(table.tokens.max())}, but the model has {vocabulary}"
        )
    if packed:
        return PackedText(table, held_out, seed, tokenizer.decode)
    return Passages(table, held_out, tokenizer.pad_token_id or 0, seed)


def open_texts(
    config: Any, directory: Path, data: str, length: int | None = None, text_field: str = "text"
) -> tuple[TextCorpus, Any, int]:
    """Open texts and the tokenizer of a model; arguments and errors are those of [`text_batches`].

    Args:
        config: The model's configuration, converted or not.

    Returns:
        The texts, none of which is read yet, the tokenizer, and the most tokens that the model takes.
    """
    from transformers import AutoTokenizer

    corpus = TextCorpus(data, text_field)
    tokenizer = _load_processor(AutoTokenizer, directory, "tokenizer")
    # Tokenizers without a limit have one of 10**30. Some models count positions from more than 0, and take fewer.
    positions = getattr(config.get_text_config(), "max_position_embeddings", None) or 1 << 20
    longest = min(positions, tokenizer.model_max_length)
    if length is not None and not 2 <= length <= longest:
        raise ValueError(f"max_length must be from 2 to {longest:,} for this model, got {length}")
    return corpus, tokenizer, longest


def image_batches(
    model: nn.Module, directory: Path, data: str, *, samples: int, held_out: int = 192, seed: int = 0
) -> BatchSource:
    """Open images for a vision model.

    Args:
        model: The model.
        directory: Where its image processor is.
        data: A folder of images, with or without folders in it, or `digits`: the scans that scikit-learn has.
        samples: Images to train on, if there are so many.
        held_out: Images to hold out, a fifth of all at most.
        seed: Seed of their order.

    Raises:
        ValueError: If there are no such data, or the model has no image processor.
    """
    processor, images, keys, problems = open_images(model.config, directory, data, samples + held_out)
    for problem in problems[:_NAMED]:
        logger.warning("data: left out: %s", problem)
    fingerprint = f"{stable_seed(*keys):016x}"
    return Images(images, processor, held_out, fingerprint, seed, len(problems))


def open_images(
    config: Any, directory: Path, data: str, count: int = 2
) -> tuple[Any, list[Any], list[str], list[str]]:
    """Open images and the image processor of a model; arguments and errors are those of [`image_batches`].

    Args:
        config: The model's configuration, converted or not.
        count: Number of images to look for.

    Returns:
        The image processor, functions that read images, the identity of each, and the problems of files left out.
    """
    from transformers import AutoImageProcessor

    processor = _load_processor(AutoImageProcessor, directory, "image processor")
    images, keys, problems = _find_images(data, count, _image_side(config))
    if len(images) < 2:
        problem = f" ({problems[0]})" if problems else ""
        raise ValueError(f"data: {data} has {len(images)} images that can be read; at least 2 are needed{problem}")
    return processor, images, keys, problems


def _load_processor(auto_class: Any, directory: Path, kind: str) -> Any:
    try:
        return auto_class.from_pretrained(directory)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ValueError(f"{directory} has no {kind} that can be loaded: {shorten_text(str(error), 200)}") from error


def _find_images(data: str, count: int, side: int) -> tuple[list[Any], list[str], list[str]]:
    """Functions that read images, the identity of each, and the problems of files left out."""
    if data == DIGITS:
        from .digits import digit_images

        samples = digit_images(count, side, captions=False)
        return (
            [lambda load=sample.load: _as_bytes(load()) for sample in samples],
            [f"{sample.key}:{side}" for sample in samples],
            [],
        )
    folder = DataFolder(Path(data).expanduser())
    files = folder.files(IMAGE_SUFFIXES)
    # Of a large folder only a part is read: it must not be that of the first classes.
    files.sort(key=lambda entry: stable_seed(printable(entry[0].relative_to(folder.path).as_posix())))
    images: list[Any] = []
    keys, problems = [], []
    for path, problem in files:
        if len(images) == count:
            break
        try:
            if problem is None:
                read_image(path)
        except UnusableSampleError as error:
            problem = str(error)
        if problem is None:
            images.append(lambda path=path: read_image(path))
            keys.append(folder.key(path))
        else:
            problems.append(problem)
    return images, keys, problems


def _as_bytes(image: torch.Tensor) -> Any:
    """uint8 `[H, W, 3]` of an image `[3, H, W]` in [-1, 1]."""
    return ((image + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0).numpy()


def _image_side(config: Any) -> int:
    size = getattr(config, "image_size", 64)
    return int(size[0] if isinstance(size, (list, tuple)) else size)


def is_causal(model: nn.Module) -> bool:
    """`True` if the attention of a converted model is causal, as in language models."""
    return any(layer.mhla.config.causal for layer in mhla_layers(model))
