# SPDX-License-Identifier: Apache-2.0
"""Data of recoveries and probes: from the user's `--data` to batches for the model's family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ..models.registry import is_mhla_class
from ..models.source import Component
from ..training.config import CacheConfig, TrainingConfig
from ..training.data.batch_sources import BatchSource, Latents, PackedText, RecordedCalls
from ..training.data.folders import DataSample
from ..training.data.opening import ROW_LENGTH, image_batches, text_batches
from ..training.matching.layers import Batch, mhla_layers
from ..utils.locations import PIPELINE_INDEX
from .probes import DEFAULT_SAMPLES, pipeline_batches
from .recipes import Recipe


DigitVideos = Callable[[CacheConfig], Sequence[DataSample]]

GENERATED = "generated"
DATA_FREE = ("pixart",)
"""Families without an objective of training: the inputs of their model while the pipeline makes samples are enough to
calibrate and match on."""


def open_data(
    root: Path,
    component: Component,
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
    """Opens the data of a recovery, and prepares them once: as tokens, or as latents and embeddings.

    Args:
        root: Directory of the original.
        component: The model that is recovered.
        recipe: The recipe.
        model: The converted model.
        data: The user's data; `generated` for samples of the original, `None` where the family takes nothing else.
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
        return _recorded(recipe, model, component.name, converted, seed, prompts)
    assert data is not None
    if recipe.family == "causal" and data == GENERATED:
        return _generated_text(root, component, recipe, model, cache, seed)
    if recipe.family in ("causal", "encoder"):
        return text_batches(
            model, root, data, length=options.max_length, text_field=options.text_field, cache=cache, **amounts
        )
    if recipe.family == "vision":
        return image_batches(model, root, data, **amounts)

    from ..training.data.cache_building import make_cache
    from ..training.processes import make_accelerator

    config = TrainingConfig(
        model=str(root),
        component=component.name,
        cache=str(cache),
        mhla="none",
        device="cpu" if next(model.parameters()).device.type == "cpu" else "auto",
        progress=progress,
        seed=seed,
    )
    sizes: dict[str, Any] = {name: getattr(options, name) for name in ("height", "width", "num_frames")}
    sizes["prompts"] = prompts
    cache_config = CacheConfig(
        data=data,
        num_samples=options.samples + options.held_out,
        **{name: value for name, value in sizes.items() if value is not None},
    )
    make_cache(config, cache_config, make_accelerator(config), digit_videos)
    return _latents(model, root, cache, options.held_out, TrainingConfig(seed=seed))


def probe_batches(
    model: nn.Module,
    directory: Path,
    data: str,
    *,
    samples: int = DEFAULT_SAMPLES,
    batch_size: int = 4,
    component: str = "transformer",
    seed: int = 0,
) -> list[Batch]:
    """Makes batches of given data to calibrate on.

    Args:
        model: The converted model.
        directory: Its directory, or the pipeline's.
        data: For language models and encoders a folder of texts, a JSONL file, or the id of a data set; for vision
            models a folder of images or `digits`; for diffusion models the cache of a training.
        samples: Rows, passages, images or noisy latents.
        batch_size: Samples of a batch.
        component: Name of the model in a pipeline.
        seed: Seed of their order, and of noise.

    Raises:
        ValueError: If there are no such data, or they do not fit the model.
    """
    source: BatchSource
    if is_mhla_class(type(model).__name__):
        config = TrainingConfig(component=component, seed=seed)
        source = _latents(model, directory, Path(data).expanduser(), 1, config)
    elif any(len(layer.mhla.blocks) == 2 for layer in mhla_layers(model)):
        source = image_batches(model, directory, data, samples=samples, held_out=1, seed=seed)
    else:
        source = text_batches(model, directory, data, samples=samples, held_out=1, seed=seed)
    return source.batches("calibrate", max(1, min(samples, 16 * len(source)) // batch_size), batch_size)


def _latents(model: nn.Module, directory: Path, cache: Path, held_out: int, config: TrainingConfig) -> Latents:
    """Cached latents, noised by the objective of the model's pipeline."""
    from ..training.data.cache import LatentDataset
    from ..training.loading import objective_for

    pipeline = directory if (directory / PIPELINE_INDEX).is_file() else None
    return Latents(LatentDataset(cache), objective_for(model, pipeline, config), model, held_out, config.seed)


def _recorded(
    recipe: Recipe, model: nn.Module, component: str, converted: Path, seed: int, prompts: str | None
) -> BatchSource:
    """Inputs of the model while the pipeline makes samples with the original attention."""
    from diffusers import DiffusionPipeline

    from ..training.data.generated import read_prompts

    pipeline = DiffusionPipeline.from_pretrained(converted, **{component: model})
    calls = pipeline_batches(
        pipeline.to(next(model.parameters()).device),
        samples=recipe.data.samples + recipe.data.held_out,
        prompts=None if prompts is None else read_prompts(prompts),
        seed=seed,
        height=recipe.data.height,
        width=recipe.data.width,
    )
    return RecordedCalls(calls[component], recipe.data.held_out, seed)


def _generated_text(
    root: Path, component: Component, recipe: Recipe, model: nn.Module, cache: Path, seed: int
) -> BatchSource:
    """Rows that the original writes."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ..training.data.generated import generate_text

    original = AutoModelForCausalLM.from_pretrained(component.folder).to(next(model.parameters()).device)
    rows = recipe.data.samples + recipe.data.held_out
    table = generate_text(original, cache, rows=rows, length=recipe.data.max_length or ROW_LENGTH, seed=seed)
    return PackedText(table, recipe.data.held_out, seed, AutoTokenizer.from_pretrained(root).decode)
