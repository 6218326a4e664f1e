# SPDX-License-Identifier: Apache-2.0
"""The cache step over several processes, from options to a finished cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from accelerate import Accelerator

from ..sources import find_pipeline
from . import cache_building, loading
from .config import CacheConfig, TrainingConfig
from .encoding import check_video_size
from .validation import load_encoders
from .videos import VideoSample


def make_cache(
    config: TrainingConfig, cache_config: CacheConfig, samples: Sequence[VideoSample], accelerator: Accelerator
) -> Path:
    """Makes the cache that `config` names, or does nothing if it is there already.

    Args:
        config: Options of the run; `model`, `cache` (or `output`), `component` and `progress` matter.
        cache_config: Options of the cache.
        samples: The videos.
        accelerator: The processes; each encodes its share.

    Returns:
        The cache's directory.

    Raises:
        ValueError: If sizes do not fit the pipeline, or a cache made otherwise is there.
    """
    if config.model is None:
        raise ValueError("model must be given: a pipeline directory or a Hub id")
    if config.cache is None and config.output is None:
        raise ValueError("cache must be given: the directory to write")
    directory = Path(config.cache) if config.cache is not None else Path(str(config.output)) / "cache"
    with accelerator.main_process_first():
        source = find_pipeline(config.model, "model")
    patch_size = loading.component_config(source, config.component)["patch_size"]
    settings = cache_building.cache_settings(source, cache_config)
    work = cache_building.start_cache(directory, settings, samples, main_process=accelerator.is_main_process)
    # Nobody writes before all have looked: the main process may already be done when another one starts.
    accelerator.wait_for_everyone()
    if not work:
        return directory
    pipeline = load_encoders(source)
    check_video_size(pipeline, cache_config, patch_size)
    if accelerator.device.type != "cpu":
        # Wan's text encoder is made for bfloat16, and takes 22 GB in float32; the VAE needs float32.
        pipeline.text_encoder.to(torch.bfloat16)
    pipeline.to(accelerator.device)
    cache_building.build_cache(
        directory,
        pipeline,
        samples,
        cache_config,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
        progress=config.progress and accelerator.is_main_process,
    )
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        cache_building.finish_cache(directory, samples)
    accelerator.wait_for_everyone()
    del pipeline
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return directory
