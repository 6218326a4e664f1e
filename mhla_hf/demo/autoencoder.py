# SPDX-License-Identifier: Apache-2.0
"""Training the demo's VAE, and measuring its latents."""

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
    crops = MovingDigits(
        "train", crop_steps * batch_size, seed=seed + 1, config=MovingDigitsConfig(num_frames=5, size=48)
    )
    whole = MovingDigits("train", max(full_steps, 1), seed=seed + 2)

    def losses(step: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        # One generator per step makes a resumed run the same as an uninterrupted one.
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        if step < crop_steps:
            videos, _ = stack_videos(crops, step * batch_size, (step + 1) * batch_size)
            row, column = torch.randint(0, videos.shape[-1] - 31, (2,), generator=generator).tolist()
            videos = videos[..., row : row + 32, column : column + 32]
        else:
            videos, _ = stack_videos(whole, step - crop_steps, step - crop_steps + 1)
        videos = videos.to(device)
        posterior = vae.encode(videos).latent_dist
        noise = torch.randn(posterior.mean.shape, generator=generator).to(device)
        error = vae.decode(posterior.mean + posterior.std * noise).sample - videos
        absolute = error.abs().mean()
        divergence = 0.5 * (posterior.mean.square() + posterior.var - 1.0 - posterior.logvar).mean()
        return absolute + error.square().mean() + kl_weight * divergence, {"l1": absolute, "kl": divergence}

    _train(vae, work, "vae", crop_steps + full_steps, losses, learning_rate=learning_rate, warmup_steps=20, log=log)
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
    dataset = MovingDigits("train", max(steps, 1), seed=seed + 3)

    def losses(step: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        video = stack_videos(dataset, step, step + 1)[0].to(device)
        with torch.no_grad():
            latents = vae.encode(video).latent_dist.mean
        error = vae.decode(latents).sample - video
        absolute = error.abs().mean()
        return absolute + error.square().mean(), {"l1": absolute}

    _train(decoder, work, "decoder", steps, losses, learning_rate=learning_rate, warmup_steps=10, log=log)
    return vae.eval()


def _train(
    module: torch.nn.Module,
    work: Path,
    name: str,
    steps: int,
    losses: Callable[[int], tuple[torch.Tensor, dict[str, torch.Tensor]]],
    *,
    learning_rate: float,
    warmup_steps: int,
    log: Callable[[str], None],
) -> None:
    """Trains a module, from its last checkpoint in `work` on, with a warm-up and a cosine down to 2 %.

    Args:
        module: What trains.
        work: Directory of the checkpoint `<name>_checkpoint`.
        name: What the checkpoint and the lines of progress call it.
        steps: Steps in all.
        losses: Gives for the number of a step the loss and the figures to log.
        learning_rate: Peak of the schedule.
        warmup_steps: Length of the linear warm-up.
        log: Gets one line of progress now and then.
    """
    optimizer = torch.optim.AdamW(module.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    directory = work / f"{name}_checkpoint"
    checkpoint = load_checkpoint(directory)
    start = 0
    if checkpoint is not None:
        weights, state = checkpoint
        module.load_state_dict(weights)
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
            log(f"{name} step {done}/{steps} {values}")
        if done % _CHECKPOINT_EVERY == 0 or done == steps:
            weights = {key: value.clone() for key, value in module.state_dict().items()}
            save_checkpoint(directory, done, weights, {"optimizer": optimizer.state_dict()})


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
