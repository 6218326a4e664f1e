# SPDX-License-Identifier: Apache-2.0
"""DiTs that differ in their attention alone."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import DiTTransformer2DModel
from torch import nn

from mhla_hf.models.converting import convert_model
from mhla_hf.training.data.order import stable_seed

from .data import NUM_CLASSES
from .gated import VARIANT as GATED
from .gated import use_gated_attention
from .options import QualityOptions


def make_model(options: QualityOptions, variant: str, seed: int) -> Any:
    """Makes a model with fresh weights; those that all variants have are the same for a seed.

    Args:
        options: Sizes.
        variant: One of `VARIANTS`, or `"dig"`.
        seed: Chooses the weights.
    """
    torch.manual_seed(stable_seed(seed, "quality", "weights"))
    model = DiTTransformer2DModel(
        num_attention_heads=options.heads,
        attention_head_dim=options.hidden_size // options.heads,
        in_channels=1,
        num_layers=options.layers,
        sample_size=options.image_size,
        patch_size=options.patch_size,
        num_embeds_ada_norm=NUM_CLASSES,
    )
    initialize_as_dit(model)
    if variant == GATED:
        return use_gated_attention(model)
    mhla = options.mhla(variant)
    return model if mhla is None else convert_model(model, mhla)


@torch.no_grad()
def initialize_as_dit(model: nn.Module) -> None:
    """Draws weights as DiT does (Peebles and Xie, "Scalable Diffusion Models with Transformers", 2023).

    diffusers leaves a fresh model with torch's defaults; DiT starts with every block an identity and output zero.

    Args:
        model: A `DiTTransformer2DModel`.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            if name.endswith(("norm1.linear", "proj_out_1", "proj_out_2")):
                nn.init.zeros_(module.weight)
            elif ".timestep_embedder." in name:
                nn.init.normal_(module.weight, std=0.02)
            else:
                nn.init.xavier_uniform_(module.weight)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, nn.Conv2d):
            nn.init.xavier_uniform_(module.weight.flatten(1))
        if isinstance(module, (nn.Linear, nn.Conv2d)) and module.bias is not None:
            nn.init.zeros_(module.bias)
