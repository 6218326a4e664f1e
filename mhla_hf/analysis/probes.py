# SPDX-License-Identifier: Apache-2.0
"""Probe batches for any MHLA model: samples of a pipeline, texts, images, or random inputs where there are none."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..lora_check.probing import diffusion_probes, probe_grid, transformers_probes
from ..models.registry import family_for
from ..models.source import Component
from ..training.data.images import read_image
from ..training.matching.layers import Batch
from ..utils.messages import pluralize, shorten_text


DEFAULT_SAMPLES = 4
# Modules of the standard library whose source is the default text.
_MODULES = ("textwrap", "heapq", "json.decoder", "shlex")
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")


def default_texts(count: int, length: int) -> list[str]:
    """Texts to probe a model with: source code of Python's standard library.

    Args:
        count: Number of texts.
        length: Characters of each.
    """
    from importlib import import_module

    sources = [inspect.getsource(import_module(name)) for name in _MODULES]
    texts = []
    for number in range(count):
        source, turn = sources[number % len(sources)], number // len(sources)
        start = turn * length % max(1, len(source) - length)
        texts.append(source[start : start + length])
    return texts


def transformers_batches(
    model: Any,
    folder: Path,
    *,
    samples: int,
    tokens: int,
    seed: int,
    prompts: Sequence[str] = (),
    images: Sequence[Path] = (),
) -> tuple[list[Batch], str]:
    """Batches of one text or image each for a model of transformers.

    Args:
        model: The model.
        folder: Its directory, with its tokenizer or image processor.
        samples: Batches, where no prompts or images are given.
        tokens: Tokens of a text at most.
        seed: Seed of random inputs.
        prompts: Texts.
        images: Image files.

    Returns:
        The batches, and what they are in words.

    Raises:
        ValueError: If the model takes no such input, files are missing or damaged, or there is no input for it.
    """
    takes_text = model.main_input_name == "input_ids"
    if prompts and not takes_text:
        raise ValueError(f"prompt: a {type(model).__name__} takes {model.main_input_name}, not text.")
    if images and model.main_input_name != "pixel_values":
        raise ValueError(f"image: a {type(model).__name__} takes {model.main_input_name}, not images.")
    if takes_text:
        return _texts(model, folder, samples, tokens, seed, prompts)
    if images:
        from transformers import AutoImageProcessor

        processor = _processor(AutoImageProcessor, folder, "image processor")
        return [
            {"pixel_values": processor(images=read_image(path), return_tensors="pt")["pixel_values"]}
            for path in images
        ], pluralize(len(images), "image")
    return _random_inputs(model, samples, seed, tokens), "images of noise"


def _random_inputs(model: Any, samples: int, seed: int, tokens: int) -> list[Batch]:
    try:
        return [batch for _, batch in transformers_probes(model, samples, seed, tokens)]
    except ValueError as error:
        raise ValueError(f"{error} samples=0 (--samples 0) looks at the weights alone.") from error


def _texts(
    model: Any, folder: Path, samples: int, tokens: int, seed: int, prompts: Sequence[str]
) -> tuple[list[Batch], str]:
    from transformers import AutoTokenizer

    try:
        # Without files, transformers makes a tokenizer that knows no words.
        if not any(file for pattern in _TOKENIZER_FILES for file in folder.glob(pattern)):
            raise ValueError(f"{folder} has no tokenizer: leave the prompt out, and tokens are random.")
        tokenizer: Any = _processor(AutoTokenizer, folder, "tokenizer")
    except ValueError:
        if prompts:
            raise
        batches, words = _random_inputs(model, samples, seed, tokens), "random tokens (there is no tokenizer)"
        return [{**batch, **_noise(model, seed)} for batch in batches], words
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or tokens
    # Some models count positions from more than 0, and take fewer.
    longest = min(tokens, positions, tokenizer.model_max_length)
    vocabulary = model.config.get_text_config().vocab_size
    texts = list(prompts) or default_texts(samples, 12 * tokens)
    inputs: list[Batch] = []
    for text in texts:
        ids = tokenizer(text, truncation=True, max_length=longest, return_tensors="pt")["input_ids"]
        if ids.shape[1] < 2:
            raise ValueError(f"prompt {text!r:.60} has {ids.shape[1]} tokens; at least 2 are needed.")
        if int(ids.max()) >= vocabulary:
            raise ValueError(
                f"the tokenizer of {folder} makes token {int(ids.max())}, but the model has {vocabulary}."
            )
        inputs.append({"input_ids": ids, **_noise(model, seed)})
    return inputs, pluralize(len(texts), "prompt") if prompts else "source code of Python's standard library"


def _noise(model: Any, seed: int) -> Batch:
    """An image of noise for models that compare texts with images, such as CLIP."""
    vision = getattr(model.config, "vision_config", None)
    side = getattr(vision, "image_size", None)
    if not hasattr(model, "get_text_features") or not isinstance(side, int):
        return {}
    generator = torch.Generator().manual_seed(seed)
    return {"pixel_values": torch.randn(1, getattr(vision, "num_channels", 3), side, side, generator=generator)}


def random_latents(model: Any, part: Component, *, samples: int, tokens: int, seed: int) -> list[Batch]:
    """Random latents and conditions for a model of diffusers, at a grid of its own.

    Args:
        model: The model.
        part: Its directory.
        samples: Batches.
        tokens: Tokens of a sample at most, of models that take several sizes.
        seed: Seed of the inputs.
    """
    family = family_for(part.class_name).name
    grid = tuple(model.config_grid(part.config) or model.mhla_config.grid or model.default_grid)
    if family != "dit":
        grid = probe_grid(grid, tokens)
    return [batch for _, batch in diffusion_probes(family, model.config, grid, samples, seed)]


def _processor(auto_class: Any, folder: Path, kind: str) -> Any:
    try:
        return auto_class.from_pretrained(folder)
    # The error for a damaged file depends on the class.
    except Exception as error:
        raise ValueError(f"{folder} has no {kind} that can be loaded: {shorten_text(str(error), 200)}") from error
