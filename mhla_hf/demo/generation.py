# SPDX-License-Identifier: Apache-2.0
"""Videos of the same captions from the same noise with every model of the demo."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file

from ..training.data.digits import MovingDigitsConfig
from ..utils.files import atomic_file, write_json
from ..utils.json_files import read_json
from ..utils.tensor_files import read_tensors
from .config import DemoConfig
from .progress import DemoProgress


def generate_videos(
    config: DemoConfig, pipelines: Mapping[str, Path], folder: Path, progress: DemoProgress
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Generates every caption with every pipeline, except for videos that `folder` has already.

    Args:
        config: Options of the demo.
        pipelines: Pipeline directories by name.
        folder: Folder of the results.
        progress: Progress display.

    Returns:
        For each pipeline the videos `[prompts, F, H, W, 3]` uint8, and the seconds of their generation.
    """
    videos, seconds = {}, {}
    with progress.stage("Generate videos", len(pipelines)) as stage:
        for name, directory in pipelines.items():
            path, record = folder / f"{name}.safetensors", folder / f"{name}.json"
            if not record.is_file():
                frames, took = _generate(config, directory)
                folder.mkdir(parents=True, exist_ok=True)
                with atomic_file(path) as temporary:
                    save_file({"frames": frames}, temporary)
                write_json(record, {"seconds": took})
            remedy = f"remove it and {record.name} to generate again"
            videos[name] = read_tensors(path, remedy, ("frames",))["frames"].numpy()
            stored = read_json(record, "the demo's record (remove it to repeat):", required={"seconds": float})
            seconds[name] = stored["seconds"]
            stage.advance(1)
    return videos, seconds


def _generate(config: DemoConfig, directory: Path) -> tuple[np.ndarray, float]:
    # Plain diffusers, as a user of the converted pipeline would load it.
    from diffusers import DiffusionPipeline

    pipeline = DiffusionPipeline.from_pretrained(directory, use_safetensors=True)
    pipeline.set_progress_bar_config(disable=True)
    appearance = MovingDigitsConfig()
    # One generator per caption: its noise does not depend on how many captions there are.
    generators = [torch.Generator().manual_seed(config.seed * 1000 + number) for number in range(len(config.prompts))]
    began = time.perf_counter()
    frames = pipeline(
        prompt=list(config.prompts),
        height=appearance.size,
        width=appearance.size,
        num_frames=appearance.num_frames,
        num_inference_steps=config.inference_steps,
        guidance_scale=config.guidance,
        generator=generators,
        max_sequence_length=32,
    ).frames
    seconds = time.perf_counter() - began
    # The pipeline returns a transposed view, and safetensors writes memory in its order.
    pixels = np.rint(np.asarray(frames) * 255.0).clip(0, 255).astype(np.uint8)
    return np.ascontiguousarray(pixels), seconds
