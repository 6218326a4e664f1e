# SPDX-License-Identifier: Apache-2.0
"""Pools of encoded videos, kept as safetensors so that no video is encoded twice."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast

from ..training.data.encoding import encode_videos
from .checkpoints import write_safetensors
from .digits import MovingDigits, stack_videos
from .text import tokenize


_ENCODE_BATCH = 8


@dataclass(frozen=True)
class LatentPool:
    """Encoded videos and their captions.

    Attributes:
        latents: `[N, C, f, h, w]` float32, normalised.
        token_ids: `[N, L]` int64, captions.
        lengths: `[N]` int64, tokens of each caption that are no padding.
    """

    latents: torch.Tensor
    token_ids: torch.Tensor
    lengths: torch.Tensor

    def __len__(self) -> int:
        return len(self.latents)

    def to(self, device: str) -> LatentPool:
        """Move everything to a device."""
        return LatentPool(self.latents.to(device), self.token_ids.to(device), self.lengths.to(device))


def encode_shard(
    vae: AutoencoderKLWan,
    tokenizer: PreTrainedTokenizerFast,
    path: Path,
    split: str,
    seed: int,
    start: int,
    stop: int,
) -> None:
    """Encode videos `start` to `stop` of a split into the file `path`, as float16; a file that exists is kept."""
    if path.exists():
        return
    dataset = MovingDigits(split, stop, seed=seed)
    latents, captions = [], []
    for first in range(start, stop, _ENCODE_BATCH):
        videos, texts = stack_videos(dataset, first, min(first + _ENCODE_BATCH, stop))
        latents.append(encode_videos(vae, videos).cpu())
        captions += texts
    token_ids, lengths = tokenize(tokenizer, captions)
    write_safetensors(
        path,
        {"latents": torch.cat(latents).half(), "token_ids": token_ids.short(), "lengths": lengths.short()},
    )


def _encode_shard_in_process(vae_dir: str, tokenizer_dir: str, device: str, *arguments) -> None:
    if device == "cpu":
        torch.set_num_threads(1)
    vae = AutoencoderKLWan.from_pretrained(vae_dir).eval().to(device)
    encode_shard(vae, PreTrainedTokenizerFast.from_pretrained(tokenizer_dir), *arguments)


def encode_pool(
    directory: Path,
    vae_dir: Path,
    tokenizer_dir: Path,
    *,
    split: str,
    count: int,
    seed: int,
    shard_size: int = 250,
    workers: int = 1,
    device: str = "cpu",
    log: Callable[[str], None] = print,
) -> LatentPool:
    """Encode `count` videos, in several processes if asked to, and load them all.

    Args:
        directory: Where the shards are kept; those that exist are not made again.
        vae_dir: Saved VAE with measured latent statistics.
        tokenizer_dir: Saved tokenizer.
        split: Which scans to use.
        count: Number of videos.
        seed: Chooses the videos.
        shard_size: Videos per file.
        workers: Processes; each uses one CPU thread.
        device: Where to encode.
        log: Gets a line of progress per shard.

    Returns:
        All of them, on the CPU.
    """
    tasks = []
    for start in range(0, count, shard_size):
        stop = min(start + shard_size, count)
        path = directory / f"{split}-{seed}-{start:05d}-{stop:05d}.safetensors"
        tasks.append((path, split, seed, start, stop))
    todo = [(str(vae_dir), str(tokenizer_dir), device, *task) for task in tasks if not task[0].exists()]
    if todo and workers > 1:
        # Spawned processes: forking after torch has started its threads can hang.
        with multiprocessing.get_context("spawn").Pool(workers) as pool:
            results = [pool.apply_async(_encode_shard_in_process, task) for task in todo]
            for task, result in zip(todo, results, strict=True):
                result.get()
                log(f"encoded {task[3].name}")
    else:
        for task in todo:
            _encode_shard_in_process(*task)
            log(f"encoded {task[3].name}")
    return load_pool([task[0] for task in tasks])


def load_pool(paths: list[Path]) -> LatentPool:
    """Load shards that `encode_shard` wrote, in the order given."""
    parts = [load_file(path) for path in paths]
    joined = {name: torch.cat([part[name] for part in parts]) for name in ("latents", "token_ids", "lengths")}
    return LatentPool(joined["latents"].float(), joined["token_ids"].long(), joined["lengths"].long())
