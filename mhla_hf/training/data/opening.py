# SPDX-License-Identifier: Apache-2.0
"""Batches of text or images for the value of `--data`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...utils.messages import shorten_text
from ..config import DIGITS
from ..matching.layers import mhla_layers
from .batch_sources import BatchSource, Images, PackedText, Passages
from .batches import stable_seed
from .folders import DataFolder, UnusableSampleError
from .images import IMAGE_SUFFIXES, read_image
from .texts import TextCorpus
from .tokens import TokenOptions, tokenize


logger = logging.getLogger(__name__)

ROW_LENGTH, PASSAGE_LENGTH = 512, 128
# Named in the log.
_NAMED = 20


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
    """Text for a language model or an encoder.

    Args:
        model: The converted model; rows for causal attention, passages otherwise.
        directory: Where its tokenizer is.
        data: A folder of .txt, .md, .rst or .py files, a JSONL file, or the id of a data set.
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
    options = TokenOptions(packed=packed, length=length, samples=samples + held_out)
    table = tokenize(corpus, tokenizer, directory, options, cache)
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
    """Opens texts and the tokenizer of a model; arguments and errors are those of [`text_batches`].

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
    """Images for a vision model.

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
    """Opens images and the image processor of a model; arguments and errors are those of [`image_batches`].

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
        raise ValueError(f"data: {data} has {len(images)} images that can be read; at least 2 are needed")
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
    if not files:
        raise ValueError(f"data: {data} has no images ({', '.join(IMAGE_SUFFIXES)})")
    # Of a large folder only a part is read: it must not be that of the first classes.
    files.sort(key=lambda entry: stable_seed(entry[0].relative_to(folder.path).as_posix()))
    images: list[Any] = []
    keys, problems = [], []
    for path, problem in files:
        if len(images) == count:
            break
        if problem is None:
            try:
                read_image(path)
            except UnusableSampleError as error:
                problem = str(error)
        if problem is not None:
            problems.append(problem)
            continue
        images.append(lambda path=path: read_image(path))
        keys.append(folder.key(path))
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
