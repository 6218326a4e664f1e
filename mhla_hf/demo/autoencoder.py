# SPDX-License-Identifier: Apache-2.0
"""Training the demo's VAE, and turning videos into normalised latents with it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan

from .checkpoints import load_checkpoint, save_checkpoint
from .digits import MovingDigits, MovingDigitsConfig, stack_videos


_CHECKPOINT_EVERY = 100


def train_vae(
    vae: AutoencoderKLWan,
    work: Path,
    *,
    crop_steps: int = 700,
    full_steps: int = 50,
    batch_size: int = 8,
    learning_rate: float = 3e-3,
    kl_weight: float = 1e-4,
    seed: int = 0,
    device: str = "cpu",
    log: Callable[[str], None] = print,
) -> AutoencoderKLWan:
    """Train a VAE on moving digits: first on short 32x32 crops, then on whole videos.

    A convolutional VAE learns nearly all it needs from crops of 5 frames, which cost a fraction of a whole video; the
    last steps let it see borders and long runs of frames. The loss is L1 plus squared error plus a small KL term,
    which keeps the latents smooth enough for the transformer.

    Args:
        vae: Trained in place.
        work: Directory for the checkpoint; training continues from it.
        crop_steps: Steps on crops, `batch_size` each.
        full_steps: Steps on single whole videos.
        batch_size: Crops per step.
        learning_rate: Peak of the cosine schedule.
        kl_weight: Weight of the KL divergence per latent number.
        seed: Chooses the videos, the crops and the sampled latents.
        device: Where to train.
        log: Gets one line of progress now and then.

    Returns:
        The same VAE, in evaluation mode.
    """
    vae.to(device).train()
    steps = crop_steps + full_steps
    optimizer = torch.optim.AdamW(vae.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    checkpoint = load_checkpoint(work / "vae_checkpoint")
    start = 0
    if checkpoint is not None:
        weights, state = checkpoint
        vae.load_state_dict(weights)
        optimizer.load_state_dict(state["optimizer"])
        start = state["step"]
    crops = MovingDigits(
        "train", crop_steps * batch_size, seed=seed + 1, config=MovingDigitsConfig(num_frames=5, size=48)
    )
    whole = MovingDigits("train", max(full_steps, 1), seed=seed + 2)
    for step in range(start, steps):
        # One generator per step makes a resumed run the same as an uninterrupted one.
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        if step < crop_steps:
            videos, _ = stack_videos(crops, step * batch_size, (step + 1) * batch_size)
            row, column = torch.randint(0, videos.shape[-1] - 31, (2,), generator=generator).tolist()
            videos = videos[..., row : row + 32, column : column + 32]
        else:
            videos, _ = stack_videos(whole, step - crop_steps, step - crop_steps + 1)
        videos = videos.to(device)
        rate = learning_rate * min(1.0, (step + 1) / 20) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        posterior = vae.encode(videos).latent_dist
        noise = torch.randn(posterior.mean.shape, generator=generator).to(device)
        decoded = vae.decode(posterior.mean + posterior.std * noise).sample
        reconstruction = (decoded - videos).abs().mean()
        squared = (decoded - videos).square().mean()
        divergence = 0.5 * (posterior.mean.square() + posterior.var - 1.0 - posterior.logvar).mean()
        loss = reconstruction + squared + kl_weight * divergence
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 0 or step + 1 == steps:
            log(f"vae step {step + 1}/{steps} l1 {reconstruction.item():.4f} kl {divergence.item():.2f}")
        if (step + 1) % _CHECKPOINT_EVERY == 0 or step + 1 == steps:
            save_checkpoint(work / "vae_checkpoint", step + 1, vae.state_dict(), {"optimizer": optimizer.state_dict()})
    return vae.eval()


def refine_decoder(
    vae: AutoencoderKLWan,
    work: Path,
    *,
    steps: int = 400,
    learning_rate: float = 1.5e-3,
    seed: int = 0,
    device: str = "cpu",
    log: Callable[[str], None] = print,
) -> AutoencoderKLWan:
    """Train only the decoder, on whole videos, which sharpens them and leaves the latents as they are.

    The transformer can be trained on the latents meanwhile, or before.

    Args:
        vae: A trained VAE; its decoder is trained in place.
        work: Directory for the checkpoint; training continues from it.
        steps: Steps of one video each.
        learning_rate: Peak of the cosine schedule.
        seed: Chooses the videos.
        device: Where to train.
        log: Gets one line of progress now and then.

    Returns:
        The same VAE, in evaluation mode.
    """
    vae.to(device).train()
    decoder = torch.nn.ModuleDict({"decoder": vae.decoder, "post_quant_conv": vae.post_quant_conv})
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    checkpoint = load_checkpoint(work / "decoder_checkpoint")
    start = 0
    if checkpoint is not None:
        weights, state = checkpoint
        decoder.load_state_dict(weights)
        optimizer.load_state_dict(state["optimizer"])
        start = state["step"]
    dataset = MovingDigits("train", max(steps, 1), seed=seed + 3)
    for step in range(start, steps):
        video = stack_videos(dataset, step, step + 1)[0].to(device)
        with torch.no_grad():
            latents = vae.encode(video).latent_dist.mean
        rate = learning_rate * min(1.0, (step + 1) / 10) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        error = vae.decode(latents).sample - video
        loss = error.abs().mean() + error.square().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 0 or step + 1 == steps:
            log(f"decoder step {step + 1}/{steps} l1 {error.abs().mean().item():.4f}")
        if (step + 1) % _CHECKPOINT_EVERY == 0 or step + 1 == steps:
            weights = {name: value.clone() for name, value in decoder.state_dict().items()}
            save_checkpoint(work / "decoder_checkpoint", step + 1, weights, {"optimizer": optimizer.state_dict()})
    return vae.eval()


@torch.no_grad()
def measure_latents(vae: AutoencoderKLWan, videos: torch.Tensor) -> AutoencoderKLWan:
    """Write the mean and standard deviation of each latent channel over `videos` into the VAE's config.

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


@torch.no_grad()
def encode_videos(vae: AutoencoderKLWan, videos: torch.Tensor) -> torch.Tensor:
    """Encode videos to normalised latents, the numbers that a Wan transformer sees.

    Args:
        vae: A VAE whose config holds measured `latents_mean` and `latents_std`.
        videos: `[N, 3, F, H, W]` float32 in -1..1.

    Returns:
        `[N, C, (F - 1) / 4 + 1, H / 4, W / 4]` float32.
    """
    latents = vae.encode(videos.to(device=vae.device, dtype=vae.dtype)).latent_dist.mean
    mean = torch.tensor(vae.config.latents_mean, device=latents.device).view(1, -1, 1, 1, 1)
    std = torch.tensor(vae.config.latents_std, device=latents.device).view(1, -1, 1, 1, 1)
    return (latents.float() - mean) / std
