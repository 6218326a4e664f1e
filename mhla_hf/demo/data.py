# SPDX-License-Identifier: Apache-2.0
"""The demo's training and held-out sets: moving digits, encoded by the base pipeline and kept in memory."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from ..training.data.encoding import encode_videos
from ..utils.tensor_files import read_tensors
from .checkpoints import write_safetensors
from .digits import MovingDigits, MovingDigitsConfig, stack_videos
from .text import PRETRAINING_TEXT_LENGTH


_ENCODE_BATCH = 8


class DigitLatents:
    """Encoded videos as `mhla_hf.training` takes them.

    Args:
        latents: `[N, C, F, H, W]`, normalised.
        prompt_embeds: `[N, L, D]`, padded with zeros.
        null_prompt_embeds: `[L, D]`, of the empty caption.
    """

    def __init__(self, latents: torch.Tensor, prompt_embeds: torch.Tensor, null_prompt_embeds: torch.Tensor) -> None:
        self.latents = latents
        self.prompt_embeds = prompt_embeds
        self.null_condition = {"prompt_embeds": null_prompt_embeds}

    def __len__(self) -> int:
        return len(self.latents)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"latents": self.latents[index], "prompt_embeds": self.prompt_embeds[index]}


def encode_digits(
    pipeline: Any,
    path: Path,
    split: str,
    count: int,
    *,
    seed: int,
    appearance: MovingDigitsConfig | None = None,
    on_encoded: Callable[[int], None] = lambda number: None,
) -> DigitLatents:
    """Encode videos and captions with a Wan pipeline, or read them where that has been done.

    Args:
        pipeline: The base pipeline, on the CPU.
        path: File that keeps the result.
        split: `"train"` or `"held_out"`.
        count: Number of videos.
        seed: Chooses them.
        appearance: What the videos look like.
        on_encoded: Called with a number of videos when they are encoded.

    Returns:
        The set.
    """
    if not path.is_file():
        dataset = MovingDigits(split, count, seed=seed, config=appearance)
        captions = [dataset[index].caption for index in range(count)]
        with torch.no_grad():
            prompts, null = pipeline.encode_prompt(captions, max_sequence_length=PRETRAINING_TEXT_LENGTH)
        tensors = {
            "latents": _encode(pipeline.vae, dataset, on_encoded),
            "prompt_embeds": prompts.float(),
            "null_prompt_embeds": null[0].float().clone(),
        }
        write_safetensors(path, tensors)
    else:
        on_encoded(count)
    names = ("latents", "prompt_embeds", "null_prompt_embeds")
    tensors = read_tensors(path, "remove it to encode the videos again", names)
    return DigitLatents(**{name: tensors[name] for name in names})


def _encode(vae: Any, dataset: MovingDigits, on_encoded: Callable[[int], None]) -> torch.Tensor:
    """Encode a whole data set, `[N, C, F, H, W]`, batches side by side on the CPU's cores.

    Small convolutions gain little from several threads each, but several batches at a time keep all cores busy. The
    VAE keeps the frames it has seen in itself, so each thread has a copy.
    """
    threads = torch.get_num_threads()
    workers = max(1, min(threads, os.cpu_count() or 1, 8))
    starts = list(range(0, len(dataset), _ENCODE_BATCH))

    def encode_some(worker: int) -> dict[int, torch.Tensor]:
        torch.set_num_threads(1)
        own, encoded = copy.deepcopy(vae), {}
        for start in starts[worker::workers]:
            videos, _ = stack_videos(dataset, start, min(start + _ENCODE_BATCH, len(dataset)))
            encoded[start] = encode_videos(own, videos)
            on_encoded(len(videos))
        return encoded

    try:
        with ThreadPoolExecutor(max_workers=workers) as pool:
            parts: dict[int, torch.Tensor] = {}
            for encoded in pool.map(encode_some, range(workers)):
                parts |= encoded
    finally:
        torch.set_num_threads(threads)
    return torch.cat([parts[start] for start in starts]).contiguous()
