# SPDX-License-Identifier: Apache-2.0
"""Pretraining of the demo's base model: VAE, latents, then text encoder and softmax transformer together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan, WanPipeline
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

from mhla_hf.demo.run import encode_moving_digits
from mhla_hf.training.data.digits import MovingDigits, stack_videos
from mhla_hf.utils.destinations import atomic_directory
from mhla_hf.utils.files import atomic_file

from .autoencoder import measure_latents, refine_decoder, train_vae
from .models import build_tokenizer, build_vae, write_pipeline
from .text import tokenize
from .transformer import BaseTrainer, LatentPool, PretrainingConfig


# Videos of one file of encoded ones: what an interrupted run loses at most.
SHARD_SIZE = 250


def pretrain(
    config: PretrainingConfig, destination: Path, work: Path, *, log: Callable[[str], None] = print
) -> WanPipeline:
    """Trains the base pipeline; an interrupted run resumes from its `work` directory.

    Args:
        config: Options.
        destination: Directory of the finished pipeline; replaced if it exists.
        work: Directory of checkpoints, latents and snapshots.
        log: Receives progress lines.

    Returns:
        The pipeline, on the CPU.
    """
    work.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(config.seed)
    tokenizer = build_tokenizer()

    def train() -> AutoencoderKLWan:
        vae = build_vae(config).to(config.device)
        steps = {"crop_steps": config.vae_crop_steps, "full_steps": config.vae_full_steps}
        vae = train_vae(vae, work, **steps, seed=config.seed, log=log)
        videos, _ = stack_videos(MovingDigits("train", 64, seed=config.seed), 0, 64)
        return measure_latents(vae, videos.to(config.device))

    vae = _load_or_make(work / "vae", train, config)
    pools = {
        split: encode_pool(work / "latents", vae, tokenizer, split, count, config, log)
        for split, count in (("train", config.pool_size), ("held_out", config.held_out_size))
    }

    def refine() -> AutoencoderKLWan:
        return refine_decoder(vae, work, steps=config.decoder_steps, seed=config.seed, log=log)

    refined = _load_or_make(work / "vae_refined", refine, config)
    trainer = BaseTrainer(config, tokenizer, refined.cpu(), pools, work, log)
    trainer.run()
    pipeline = trainer.pipeline()
    write_pipeline(pipeline, destination, trainer.facts())
    return pipeline


def _load_or_make(
    directory: Path, make: Callable[[], AutoencoderKLWan], config: PretrainingConfig
) -> AutoencoderKLWan:
    """The VAE of `config.base`, or the one in `directory`, which `make` fills if it is missing."""
    if config.base is not None:
        return AutoencoderKLWan.from_pretrained(config.base, subfolder="vae").eval().to(config.device)
    if not (directory / "config.json").exists():
        vae = make()
        with atomic_directory(directory) as fresh:
            vae.save_pretrained(fresh)
    return AutoencoderKLWan.from_pretrained(directory).eval().to(config.device)


def encode_pool(
    directory: Path,
    vae: AutoencoderKLWan,
    tokenizer: PreTrainedTokenizerFast,
    split: str,
    count: int,
    config: PretrainingConfig,
    log: Callable[[str], None] = print,
) -> LatentPool:
    """Encodes videos and tokenizes their captions; files of an earlier run are reused.

    Args:
        directory: Folder of the files.
        vae: VAE with measured latent statistics.
        tokenizer: Tokenizer of the captions.
        split: `"train"` or `"held_out"`.
        count: Number of videos.
        config: The seed.
        log: Receives a line for each file.

    Returns:
        All of them, on the CPU.
    """
    dataset = MovingDigits(split, count, seed=config.seed)
    parts = []
    for start in range(0, count, SHARD_SIZE):
        stop = min(start + SHARD_SIZE, count)
        path = directory / f"{split}-{config.seed}-{start:05d}-{stop:05d}.safetensors"
        if not path.is_file():
            latents = encode_moving_digits(vae, dataset, start, stop)
            token_ids, lengths = tokenize(tokenizer, [dataset[index].caption for index in range(start, stop)])
            shard = {"latents": latents.half(), "token_ids": token_ids.short(), "lengths": lengths.short()}
            with atomic_file(path) as temporary:
                save_file({name: tensor.contiguous() for name, tensor in shard.items()}, temporary)
            log(f"encoded {path.name}")
        parts.append(load_file(path))
    pool = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return {name: x.float() if name == "latents" else x.long() for name, x in pool.items()}
