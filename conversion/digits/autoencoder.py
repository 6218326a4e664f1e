# SPDX-License-Identifier: Apache-2.0
"""Training of the demo's VAE and the statistics of its latents."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan

from mhla_hf.training.data.digits import MovingDigits, MovingDigitsConfig, stack_videos

from .checkpoints import load_checkpoint, save_checkpoint


CROP_SIZE = 32
CROP_BATCH = 8
KL_WEIGHT = 1e-4
CHECKPOINT_EVERY = 100

Losses = Callable[[int], tuple[torch.Tensor, dict[str, torch.Tensor]]]


def train_vae(
    vae: AutoencoderKLWan,
    work: Path,
    *,
    crop_steps: int,
    full_steps: int,
    learning_rate: float = 3e-3,
    seed: int = 0,
    log: Callable[[str], None] = print,
) -> AutoencoderKLWan:
    """Trains a VAE on moving digits: first on short 32x32 crops, then on whole videos.

    A convolutional VAE learns nearly everything from crops of 5 frames, which cost a fraction of a whole video; the
    last steps show it borders and long runs of frames. The loss is L1 plus squared error plus a small KL term, which
    keeps the latents smooth enough for the transformer.

    Args:
        vae: Trained in place, on its device.
        work: Directory of the checkpoint that training resumes from.
        crop_steps: Steps on batches of crops.
        full_steps: Steps on single whole videos.
        learning_rate: Peak of the cosine schedule.
        seed: Seed of videos, crops and sampled latents.
        log: Receives progress lines.

    Returns:
        The same VAE, in evaluation mode.
    """
    crops = MovingDigits(
        "train", crop_steps * CROP_BATCH, seed=seed + 1, config=MovingDigitsConfig(num_frames=5, size=48)
    )
    whole = MovingDigits("train", max(full_steps, 1), seed=seed + 2)

    def losses(step: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        # One generator per step makes a resumed run the same as an uninterrupted one.
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        if step < crop_steps:
            videos, _ = stack_videos(crops, step * CROP_BATCH, (step + 1) * CROP_BATCH)
            row, column = torch.randint(0, videos.shape[-1] - CROP_SIZE + 1, (2,), generator=generator).tolist()
            videos = videos[..., row : row + CROP_SIZE, column : column + CROP_SIZE]
        else:
            videos, _ = stack_videos(whole, step - crop_steps, step - crop_steps + 1)
        videos = videos.to(vae.device)
        posterior = vae.encode(videos).latent_dist
        noise = torch.randn(posterior.mean.shape, generator=generator).to(vae.device)
        error = vae.decode(posterior.mean + posterior.std * noise).sample - videos
        absolute = error.abs().mean()
        divergence = 0.5 * (posterior.mean.square() + posterior.var - 1.0 - posterior.logvar).mean()
        return absolute + error.square().mean() + KL_WEIGHT * divergence, {"l1": absolute, "kl": divergence}

    vae.train()
    _train(vae, work / "vae.pt", crop_steps + full_steps, losses, learning_rate, warmup_steps=20, log=log)
    return vae.eval()


def refine_decoder(
    vae: AutoencoderKLWan,
    work: Path,
    *,
    steps: int,
    learning_rate: float = 1.5e-3,
    seed: int = 0,
    log: Callable[[str], None] = print,
) -> AutoencoderKLWan:
    """Trains the decoder alone on whole videos, which sharpens them and leaves the latents unchanged.

    Args:
        vae: A trained VAE; its decoder is trained in place.
        work: Directory of the checkpoint that training resumes from.
        steps: Steps of one video each.
        learning_rate: Peak of the cosine schedule.
        seed: Seed of the videos.
        log: Receives progress lines.

    Returns:
        The same VAE, in evaluation mode.
    """
    decoder = torch.nn.ModuleDict({"decoder": vae.decoder, "post_quant_conv": vae.post_quant_conv})
    dataset = MovingDigits("train", max(steps, 1), seed=seed + 3)

    def losses(step: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        video = stack_videos(dataset, step, step + 1)[0].to(vae.device)
        with torch.no_grad():
            latents = vae.encode(video).latent_dist.mean
        error = vae.decode(latents).sample - video
        absolute = error.abs().mean()
        return absolute + error.square().mean(), {"l1": absolute}

    vae.train()
    _train(decoder, work / "decoder.pt", steps, losses, learning_rate, warmup_steps=10, log=log)
    return vae.eval()


def _train(
    module: torch.nn.Module,
    checkpoint: Path,
    steps: int,
    losses: Losses,
    learning_rate: float,
    *,
    warmup_steps: int,
    log: Callable[[str], None],
) -> None:
    """Trains a module from its last checkpoint on, with a linear warm-up and a cosine down to 2 %."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    start = 0
    if (state := load_checkpoint(checkpoint)) is not None:
        module.load_state_dict(state["weights"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["step"]
    for step in range(start, steps):
        cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
        rate = learning_rate * min(1.0, (step + 1) / warmup_steps) * (0.02 + 0.98 * cosine)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss, figures = losses(step)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        done = step + 1
        if step % 20 == 0 or done == steps:
            values = " ".join(f"{key} {value.item():.4f}" for key, value in figures.items())
            log(f"{checkpoint.stem} step {done}/{steps} {values}")
        if done % CHECKPOINT_EVERY == 0 or done == steps:
            state = {"step": done, "weights": module.state_dict(), "optimizer": optimizer.state_dict()}
            save_checkpoint(checkpoint, state)


@torch.no_grad()
def measure_latents(vae: AutoencoderKLWan, videos: torch.Tensor) -> AutoencoderKLWan:
    """Writes mean and standard deviation of each latent channel over `videos` into the VAE's config.

    Args:
        vae: A trained VAE.
        videos: `[N, 3, F, H, W]` float32 in -1..1.

    Returns:
        The same VAE.
    """
    latents = torch.cat([vae.encode(part).latent_dist.mean for part in videos.split(8)])
    dimensions = (0, 2, 3, 4)
    mean = [round(value, 6) for value in latents.mean(dim=dimensions).tolist()]
    std = [round(value, 6) for value in latents.std(dim=dimensions).tolist()]
    vae.register_to_config(latents_mean=mean, latents_std=std)
    return vae
