# SPDX-License-Identifier: Apache-2.0
"""Making the demo's base model from nothing: VAE, latents, then text encoder and softmax transformer together."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan, WanPipeline

from ..utils.files import atomic_directory
from .autoencoder import measure_latents, refine_decoder, train_vae
from .base_model import build_tokenizer, build_vae, write_pipeline
from .base_trainer import BaseTrainer, PretrainingConfig
from .digits import MovingDigits, stack_videos
from .latents import encode_pool


__all__ = ["PretrainingConfig", "pretrain"]


def pretrain(
    config: PretrainingConfig, destination: Path, work: Path, *, log: Callable[[str], None] = print
) -> WanPipeline:
    """Make the base pipeline; a run that was stopped continues where its `work` directory is.

    Args:
        config: How.
        destination: Directory of the finished pipeline; replaced if it exists.
        work: Directory of checkpoints, latents and snapshots.
        log: Gets lines of progress.

    Returns:
        The pipeline, on the CPU.
    """
    work.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(config.seed)
    tokenizer_dir, vae_dir = work / "tokenizer", work / "vae"
    tokenizer = build_tokenizer()
    with atomic_directory(tokenizer_dir) as fresh:
        tokenizer.save_pretrained(fresh)
    if config.base is not None:
        for directory in (vae_dir, work / "vae_refined"):
            with atomic_directory(directory) as fresh:
                shutil.copytree(Path(config.base) / "vae", fresh, dirs_exist_ok=True)
    if not (vae_dir / "config.json").exists():
        vae = train_vae(
            build_vae(config.model),
            work,
            crop_steps=config.vae_crop_steps,
            full_steps=config.vae_full_steps,
            seed=config.seed,
            device=config.device,
            log=log,
        )
        videos, _ = stack_videos(MovingDigits("train", 64, seed=config.seed), 0, 64)
        vae = measure_latents(vae, videos.to(config.device))
        with atomic_directory(vae_dir) as fresh:
            vae.save_pretrained(fresh)
    pools = {
        split: encode_pool(
            work / "latents",
            vae_dir,
            tokenizer_dir,
            split=split,
            count=count,
            seed=config.seed,
            workers=config.workers,
            device=config.device,
            log=log,
        )
        for split, count in (("train", config.pool_size), ("held_out", config.held_out_size))
    }
    if not (work / "vae_refined" / "config.json").exists():
        vae = AutoencoderKLWan.from_pretrained(vae_dir)
        vae = refine_decoder(vae, work, steps=config.decoder_steps, seed=config.seed, device=config.device, log=log)
        with atomic_directory(work / "vae_refined") as fresh:
            vae.save_pretrained(fresh)
    vae_dir = work / "vae_refined"
    trainer = BaseTrainer(config, tokenizer, AutoencoderKLWan.from_pretrained(vae_dir), pools, work, log)
    trainer.run()
    pipeline = trainer.pipeline()
    write_pipeline(pipeline, destination, trainer.facts())
    return pipeline
