# SPDX-License-Identifier: Apache-2.0
"""The data of a recovery: from what `--data` names to the batches of the model's family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ..training.config import CacheConfig, TrainingConfig
from ..training.data.batch_sources import BatchSource, Latents, PackedText, RecordedCalls
from ..training.data.opening import ROW_LENGTH, picture_batches, text_batches
from ..training.data.samples import DataSample
from .recipes import Recipe
from .subjects import Subject


DigitVideos = Callable[[CacheConfig], Sequence[DataSample]]

GENERATED = "generated"
DATA_FREE = ("pixart",)
"""Families without an objective of training: what their model sees while the pipeline makes samples is enough to
calibrate and match on."""


def open_data(
    subject: Subject,
    recipe: Recipe,
    model: nn.Module,
    data: str | None,
    *,
    converted: Path,
    cache: Path,
    seed: int = 0,
    progress: bool = True,
    prompts: str | None = None,
    digit_videos: DigitVideos | None = None,
) -> BatchSource:
    """Opens the data, and makes what is made of them once: tokens, or latents and embeddings.

    Args:
        subject: What is recovered.
        recipe: The recipe.
        model: The converted model.
        data: What the user gave; `generated` for samples of the original, `None` where the family takes nothing else.
        converted: The converted directory.
        cache: Folder to keep them in.
        seed: Seed of their order.
        progress: Show progress.
        prompts: Text file with one prompt a line, for samples of the original.
        digit_videos: Makes moving digits, for `digits` with Wan.

    Raises:
        ValueError: If there are no such data, or they do not fit the model.
    """
    options = recipe.data
    amounts = {"samples": options.samples, "held_out": options.held_out, "seed": seed}
    if recipe.family in DATA_FREE:
        return _recorded(recipe, model, subject.component.name, converted, seed, prompts)
    assert data is not None
    if recipe.family == "causal" and data == GENERATED:
        return _generated_text(subject, recipe, model, cache, seed)
    if recipe.family in ("causal", "encoder"):
        return text_batches(
            model, subject.root, data, length=options.max_length, text_field=options.text_field, cache=cache, **amounts
        )
    if recipe.family == "vision":
        return picture_batches(model, subject.root, data, **amounts)
    return _latents(subject, recipe, model, data, cache, seed, progress, prompts, digit_videos)


def _latents(
    subject: Subject,
    recipe: Recipe,
    model: Any,
    data: str,
    cache: Path,
    seed: int,
    progress: bool,
    prompts: str | None,
    digit_videos: DigitVideos | None,
) -> BatchSource:
    from ..training.data.cache import LatentDataset
    from ..training.data.cache_step import make_cache
    from ..training.families import objective_for
    from ..training.processes import make_accelerator

    options = recipe.data
    sizes = {name: getattr(options, name) for name in ("height", "width", "num_frames")}
    config = TrainingConfig(
        model=str(subject.root),
        component=subject.component.name,
        cache=str(cache),
        mhla="none",
        device="cpu" if model.device.type == "cpu" else "auto",
        progress=progress,
        seed=seed,
    )
    objective = objective_for(model, subject.root, TrainingConfig(seed=seed))
    if prompts is not None:
        sizes["prompts"] = prompts
    cache_config = CacheConfig(
        data=data,
        num_samples=options.samples + options.held_out,
        **{name: value for name, value in sizes.items() if value is not None},
    )
    cache_config.check_family(recipe.family)
    make_cache(config, cache_config, make_accelerator(config), digit_videos)
    return Latents(LatentDataset(cache), objective, model, options.held_out, seed)


def _recorded(
    recipe: Recipe, model: nn.Module, component: str, converted: Path, seed: int, prompts: str | None
) -> BatchSource:
    """What the model sees while the pipeline makes samples with the original attention."""
    from diffusers import DiffusionPipeline

    from .probes import pipeline_batches

    asked = None
    if prompts is not None:
        from ..training.data.generated import read_prompts

        asked = read_prompts(prompts)
    pipeline = DiffusionPipeline.from_pretrained(converted, **{component: model})
    pipeline.to(next(model.parameters()).device)
    sizes = {name: getattr(recipe.data, name) for name in ("height", "width")}
    calls = pipeline_batches(
        pipeline,
        samples=recipe.data.samples + recipe.data.held_out,
        prompts=asked,
        seed=seed,
        **sizes,
    )
    return RecordedCalls(calls[component], recipe.data.held_out, seed)


def _generated_text(subject: Subject, recipe: Recipe, model: nn.Module, cache: Path, seed: int) -> BatchSource:
    """Rows that the original writes."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ..training.data.generated import generate_text

    device = next(model.parameters()).device
    original = AutoModelForCausalLM.from_pretrained(subject.component.folder).to(device)
    rows = recipe.data.samples + recipe.data.held_out
    table = generate_text(original, cache, rows=rows, length=recipe.data.max_length or ROW_LENGTH, seed=seed)
    tokenizer = AutoTokenizer.from_pretrained(subject.root)
    return PackedText(table, recipe.data.held_out, seed, tokenizer.decode)
