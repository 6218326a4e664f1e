# SPDX-License-Identifier: Apache-2.0
"""Longer videos with softmax and with the recovered MHLA: CPU seconds of a forward pass and of a generation.

Only the number of frames changes. Both models have only seen short videos: time is compared here, not quality.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..utils.figures import new_figure, save_figure
from .config import SIZE, TITLES, DemoConfig


_COLORS = {"softmax": "#444444", "mhla": "#1f77b4"}
_REPEATS, _SHOWN_FRAMES = 3, 8


@torch.no_grad()
def time_long_videos(config: DemoConfig, path: Path) -> dict[str, Any]:
    """Time the base and `OUTPUT/mhla` on longer videos, generate one with each, and draw both into a picture.

    Args:
        config: Options of the demo.
        path: PNG file to write.

    Returns:
        `lengths`: for each number of frames its `tokens`, and the CPU `seconds` of one forward pass of the denoiser by
        model, medians of repeats in turns. `faster_from`: the fewest of these tokens from which on MHLA is faster,
        `None` if it is nowhere. `generation`: the `seconds` from prompt to pixels, by model.
    """
    from diffusers import DiffusionPipeline

    folders = {"softmax": config.base_directory, "mhla": config.directory / "mhla"}
    pipelines = {name: DiffusionPipeline.from_pretrained(at, use_safetensors=True) for name, at in folders.items()}
    lengths: list[dict[str, Any]] = []
    longest = 2 * config.long_frames - 1
    for frames in sorted({SIZE["num_frames"], (config.long_frames + 1) // 2, config.long_frames, longest}):
        runs, tokens = {}, 0
        for name, pipeline in pipelines.items():
            inputs = _inputs(pipeline, config, frames)
            runs[name] = partial(pipeline.transformer, **inputs, return_dict=False)
            tokens = inputs["hidden_states"][0, 0].numel() // int(np.prod(pipeline.transformer.config.patch_size))
        lengths.append({"frames": frames, "tokens": tokens, "seconds": _median_seconds(runs)})
    videos, seconds = {}, {}
    # Half of the usual steps, to keep it short.
    steps = max(1, config.inference_steps // 2)
    for name, pipeline in pipelines.items():
        pipeline.set_progress_bar_config(disable=True)
        noise = torch.Generator().manual_seed(config.seed * 1000)
        options: dict[str, Any] = {**SIZE, "num_frames": config.long_frames, "guidance_scale": config.guidance}
        began = time.process_time()
        videos[name] = pipeline(
            config.prompts[0], generator=noise, num_inference_steps=steps, max_sequence_length=32, **options
        ).frames[0]
        seconds[name] = time.process_time() - began
    generation = {
        "prompt": config.prompts[0], "frames": config.long_frames, "inference_steps": steps, "seconds": seconds
    }  # fmt: skip
    faster_from = None
    for each in reversed(lengths):
        if each["seconds"]["mhla"] >= each["seconds"]["softmax"]:
            break
        faster_from = each["tokens"]
    report = {
        "threads": torch.get_num_threads(), "repeats": _REPEATS, "lengths": lengths,
        "faster_from": faster_from, "generation": generation
    }  # fmt: skip
    save_figure(_figure(videos, report), path)
    return report


def _inputs(pipeline: Any, config: DemoConfig, frames: int) -> dict[str, torch.Tensor]:
    text, _ = pipeline.encode_prompt(config.prompts[0], do_classifier_free_guidance=False, max_sequence_length=32)
    shape = (
        (frames - 1) // pipeline.vae_scale_factor_temporal + 1,
        *(SIZE[side] // pipeline.vae_scale_factor_spatial for side in ("height", "width")),
    )
    latents = torch.randn(
        1, pipeline.transformer.config.in_channels, *shape, generator=torch.Generator().manual_seed(config.seed)
    )
    return {"hidden_states": latents, "timestep": torch.tensor([500.0]), "encoder_hidden_states": text}


def _median_seconds(runs: Mapping[str, Any]) -> dict[str, float]:
    """Median CPU seconds of functions that take turns, after a first call of each."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(1 + _REPEATS):
        for name, run in runs.items():
            began = time.process_time()
            run()
            if repeat:
                times[name].append(time.process_time() - began)
    return {name: statistics.median(each) for name, each in times.items()}


def _figure(videos: Mapping[str, np.ndarray], report: Mapping[str, Any]) -> Any:
    """Frames of both videos beside the seconds that they took, and the seconds of a forward pass by tokens."""
    figure = new_figure(11, 2.9)
    left, right = figure.subfigures(1, 2, width_ratios=(2, 1))
    generation, lengths = report["generation"], report["lengths"]
    length, steps = generation["frames"], generation["inference_steps"]
    left.suptitle(f"“{generation['prompt']}”: {length} frames, {steps} steps", fontsize=11)
    axes = left.subplots(len(videos), _SHOWN_FRAMES, squeeze=False)
    # The middle of each of as many parts.
    shown = (np.arange(_SHOWN_FRAMES) + 0.5) * length / _SHOWN_FRAMES
    for row, (name, frames) in zip(axes, videos.items()):
        for axis, number in zip(row, shown.astype(int)):
            axis.imshow(frames[number].clip(0, 1))
            axis.set(xticks=[], yticks=[])
            axis.set_xlabel(f"frame {number}", fontsize=8)
        label = f"{TITLES[name]}\n{generation['seconds'][name]:.1f} s"
        row[0].set_ylabel(label, color=_COLORS[name], fontsize=13, rotation=0, ha="right", va="center", labelpad=8)
    axis = right.subplots()
    for name in videos:
        seconds = [each["seconds"][name] for each in lengths]
        axis.loglog([each["tokens"] for each in lengths], seconds, "o-", color=_COLORS[name], label=TITLES[name])
    axis.set_xticks([each["tokens"] for each in lengths], [f"{each['tokens']:,}" for each in lengths])
    axis.minorticks_off()
    axis.set(xlabel="tokens", ylabel="CPU seconds")
    axis.set_title("one forward pass of the denoiser", fontsize=11)
    axis.legend()
    axis.spines[["top", "right"]].set_visible(False)
    return figure
