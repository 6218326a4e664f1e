# SPDX-License-Identifier: Apache-2.0
"""Training and held-out sets of the demo: moving digits, encoded by the base pipeline and kept in memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from ..training.data.digits import MovingDigits, stack_videos
from ..training.families.wan import encode_videos
from ..utils.tensor_files import read_tensors, write_tensors


# Enough for the longest caption, four digits: 19 words and the end mark.
TEXT_LENGTH = 24
_ENCODE_BATCH = 8
_NAMES = ("latents", "prompt_embeds", "null_prompt_embeds")


class DigitLatents:
    """Encoded videos in the form that `mhla_hf.training` reads.

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
    on_encoded: Callable[[int], None] = lambda number: None,
) -> DigitLatents:
    """Encodes videos and captions with a Wan pipeline, or reads the file of an earlier run.

    Args:
        pipeline: The base pipeline, on the CPU.
        path: File of the result.
        split: `"train"` or `"held_out"`.
        count: Number of videos.
        seed: Seed of the videos.
        on_encoded: Called with the number of videos just encoded.

    Raises:
        ValueError: If the file is damaged.
    """
    if path.is_file():
        on_encoded(count)
    else:
        dataset = MovingDigits(split, count, seed=seed)
        captions = [dataset[index].caption for index in range(count)]
        with torch.no_grad():
            prompts, null = pipeline.encode_prompt(captions, max_sequence_length=TEXT_LENGTH)
        latents = encode_moving_digits(
            pipeline.vae, dataset, 0, count, workers=torch.get_num_threads(), on_encoded=on_encoded
        )
        write_tensors(path, dict(zip(_NAMES, (latents, prompts.float(), null[0].float().clone()))))
    tensors = read_tensors(path, "remove it to encode the videos again", _NAMES)
    return DigitLatents(**{name: tensors[name] for name in _NAMES})


def encode_moving_digits(
    vae: Any,
    dataset: MovingDigits,
    start: int,
    stop: int,
    *,
    workers: int = 1,
    on_encoded: Callable[[int], None] = lambda number: None,
) -> torch.Tensor:
    """Encodes videos `start` to `stop` of a data set, on a CPU in several threads.

    Small convolutions gain little from several threads each, but several batches at a time keep all cores busy. The
    VAE caches the frames that it has seen, so each thread has a copy.

    Args:
        vae: The VAE.
        dataset: The videos.
        start: First video.
        stop: End of the videos, exclusive.
        workers: Threads; a GPU takes one.
        on_encoded: Called with the number of videos just encoded.

    Returns:
        Latents `[stop - start, C, F, H, W]` on the CPU, normalised.
    """
    threads = torch.get_num_threads()
    workers = max(1, min(workers, 8)) if vae.device.type == "cpu" else 1
    starts = range(start, stop, _ENCODE_BATCH)

    def encode_share(worker: int) -> dict[int, torch.Tensor]:
        torch.set_num_threads(1)
        own, encoded = copy.deepcopy(vae), {}
        for first in starts[worker::workers]:
            videos, _ = stack_videos(dataset, first, min(first + _ENCODE_BATCH, stop))
            encoded[first] = encode_videos(own, videos).cpu()
            on_encoded(len(videos))
        return encoded

    try:
        with ThreadPoolExecutor(max_workers=workers) as pool:
            parts = {first: part for share in pool.map(encode_share, range(workers)) for first, part in share.items()}
    finally:
        torch.set_num_threads(threads)
    return torch.cat([parts[first] for first in starts]).contiguous()
