# SPDX-License-Identifier: Apache-2.0
"""Tiny complete image pipelines with random weights, as `tiny.py` makes them for Wan."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import AutoencoderKL, DDIMScheduler, DiTPipeline, DiTTransformer2DModel


DIT: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 8,
    "num_layers": 2,
    "sample_size": 8,
    "patch_size": 2,
    # The pipeline's label for no class.
    "num_embeds_ada_norm": 1000,
}
"""Constructor arguments of the class-conditional transformer; half of its output is the learned variance."""


def dit_transformer(cls: type | None = None, *, seed: int = 0, **overrides: Any):
    """A tiny DiT in evaluation mode, fp32; arguments as for `tiny.wan_transformer`."""
    torch.manual_seed(seed)
    return (cls or DiTTransformer2DModel)(**{**DIT, **overrides}).eval()


def dit_inputs(
    batch: int = 1, height: int = 8, width: int = 12, *, dtype: torch.dtype = torch.float32, seed: int = 1
) -> dict[str, torch.Tensor]:
    """Keyword arguments for the transformer's `forward`; the token grid is `(height / 2, width / 2)`."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "hidden_states": torch.randn(batch, 4, height, width, generator=generator).to(dtype),
        "timestep": torch.full((batch,), 500),
        "class_labels": torch.arange(batch) + 3,
    }


def dit_vae() -> AutoencoderKL:
    """An autoencoder with four latent channels that halves height and width."""
    torch.manual_seed(0)
    stages = 2
    return AutoencoderKL(
        block_out_channels=(4,) * stages,
        down_block_types=("DownEncoderBlock2D",) * stages,
        up_block_types=("UpDecoderBlock2D",) * stages,
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=2,
        sample_size=16,
    ).eval()


def dit_pipeline(transformer_cls: type | None = None, **transformer_overrides: Any) -> DiTPipeline:
    """A complete DiT pipeline of 16x16 pictures; arguments as for `tiny.wan_pipeline`."""
    transformer = dit_transformer(transformer_cls, **transformer_overrides)
    pipeline = DiTPipeline(transformer=transformer, vae=dit_vae(), scheduler=DDIMScheduler())
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
