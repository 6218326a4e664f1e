# SPDX-License-Identifier: Apache-2.0
"""The data of a recovery: from what `--data` names to the batches of the model's family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ..training.config import CacheConfig, TrainingConfig
from ..training.samples import DataSample
from .data import BatchSource, Latents
from .opening import picture_batches, text_batches
from .recipes import Recipe
from .subjects import Subject


DigitVideos = Callable[[CacheConfig], Sequence[DataSample]]


def open_data(
    subject: Subject,
    recipe: Recipe,
    model: nn.Module,
    data: str,
    *,
    cache: Path,
    seed: int = 0,
    progress: bool = True,
    digit_videos: DigitVideos | None = None,
) -> BatchSource:
    """Opens the data, and makes what is made of them once: tokens, or latents and embeddings.

    Args:
        subject: What is recovered.
        recipe: The recipe.
        model: The converted model.
        data: What the user gave.
        cache: Folder to keep them in.
        seed: Seed of their order.
        progress: Show progress.
        digit_videos: Makes moving digits, for `digits` with Wan.

    Raises:
        ValueError: If there are no such data, or they do not fit the model.
    """
    options = recipe.data
    amounts = {"samples": options.samples, "held_out": options.held_out, "seed": seed}
    if recipe.family in ("causal", "encoder"):
        return text_batches(
            model, subject.root, data, length=options.max_length, text_field=options.text_field, cache=cache, **amounts
        )
    if recipe.family == "vision":
        return picture_batches(model, subject.root, data, **amounts)
    return _latents(subject, recipe, model, data, cache, seed, progress, digit_videos)


def _latents(
    subject: Subject,
    recipe: Recipe,
    model: Any,
    data: str,
    cache: Path,
    seed: int,
    progress: bool,
    digit_videos: DigitVideos | None,
) -> BatchSource:
    from ..training.cache import LatentDataset
    from ..training.cache_step import make_cache
    from ..training.objectives import objective_for
    from ..training.runtime import make_accelerator

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
    cache_config = CacheConfig(
        data=data,
        num_samples=options.samples + options.held_out,
        **{name: value for name, value in sizes.items() if value is not None},
    )
    cache_config.check_family(recipe.family)
    make_cache(config, cache_config, make_accelerator(config), digit_videos)
    return Latents(LatentDataset(cache), objective, model, options.held_out, seed)
