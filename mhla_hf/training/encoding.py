# SPDX-License-Identifier: Apache-2.0
"""From videos and captions to what the transformer is trained on: normalised latents and text embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .config import CacheConfig


@torch.no_grad()
def encode_videos(vae: torch.nn.Module, videos: torch.Tensor) -> torch.Tensor:
    """Normalised latents of videos: the mean of the VAE's distribution, less the VAE's mean, over its deviation.

    Args:
        vae: An `AutoencoderKLWan`.
        videos: `[N, 3, F, H, W]` in [-1, 1].

    Returns:
        `[N, C, F', H', W']`, fp32, as Wan's transformer takes it.
    """
    parameter = next(vae.parameters())
    encoded = vae.encode(videos.to(parameter.device, parameter.dtype)).latent_dist.mode().float()
    mean = torch.tensor(vae.config.latents_mean, device=encoded.device).view(1, -1, 1, 1, 1)
    deviation = torch.tensor(vae.config.latents_std, device=encoded.device).view(1, -1, 1, 1, 1)
    return (encoded - mean) / deviation


@torch.no_grad()
def encode_prompt(pipeline: Any, prompt: str, max_sequence_length: int) -> torch.Tensor:
    """Text embeddings of a prompt without their padding `[l, D]`, from a `WanPipeline`."""
    embeddings, _ = pipeline.encode_prompt(
        prompt, do_classifier_free_guidance=False, max_sequence_length=max_sequence_length
    )
    used = embeddings[0].abs().sum(dim=1).nonzero()
    return embeddings[0, : int(used.max()) + 1 if len(used) else 0]


def check_video_size(pipeline: Any, config: CacheConfig, patch_size: Sequence[int]) -> None:
    """Checks that the VAE and the transformer's patches divide the wanted videos.

    Raises:
        ValueError: If they do not; the error names the option.
    """
    spatial, temporal = pipeline.vae_scale_factor_spatial, pipeline.vae_scale_factor_temporal
    for name, size, multiple in (
        ("height", config.height, spatial * patch_size[1]),
        ("width", config.width, spatial * patch_size[2]),
    ):
        if size % multiple:
            raise ValueError(f"{name} must be a multiple of {multiple} for this pipeline, got {size}")
    if (config.num_frames - 1) % temporal:
        raise ValueError(f"num_frames must be a multiple of {temporal} plus 1, got {config.num_frames}")
