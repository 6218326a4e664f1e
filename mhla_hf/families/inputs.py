# SPDX-License-Identifier: Apache-2.0
"""Example inputs: random arguments of a diffusion transformer's `forward`, to time, measure and test it with."""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Sequence
from typing import Any

import torch

from ..models.registry import FAMILIES, MHLA_CLASSES
from ..models.sizes import packs_latents, patch_sizes


_TEXT_TOKENS = 512
# What configurations call the width of the text's embeddings; where they have several, the first counts.
_TEXT_WIDTHS = (
    "text_dim", "joint_attention_dim", "text_embed_dim", "caption_channels", "cap_feat_dim", "cross_attention_dim",
)  # fmt: skip


def example_inputs(
    model: Any,
    grid: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    text: int = 0,
    batch: int = 1,
    seed: int = 0,
) -> dict[str, Any]:
    """Random arguments of the `forward` of a diffusion transformer, by the names that diffusers gives them.

    Those that the models of one family take alone are in its file, in `own_inputs` of its class.

    Args:
        model: A model of diffusers, supported or not; its configuration tells the widths.
        grid: Tokens along each axis.
        dtype: dtype of all but labels and masks.
        device: Their device. What a model asks for its values is on the CPU in place of the meta device.
        text: Tokens of the text; 0 for 512, or as many as the configuration says.
        batch: B.
        seed: Seed of the numbers, ignored on the meta device.
    """
    config, taken = model.config, inspect.signature(model.forward).parameters
    text = text or config.get("max_text_seq_length") or _TEXT_TOKENS
    # As many queries as keys would count as self-attention.
    text -= text == math.prod(grid)
    name, is_packed = type(model).__name__, packs_latents(type(model))
    grid = tuple(grid if is_packed else map(operator.mul, grid, patch_sizes(type(model), config, name)))
    generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        # The same numbers in every dtype.
        return torch.randn(batch, *shape, generator=generator, device=device).to(dtype)

    if is_packed or {"num_frames", "height"} <= taken.keys():
        hidden_states = random(math.prod(grid), config.in_channels)
    else:
        hidden_states = random(config.in_channels, *grid)
    if name.startswith("CogVideoX"):
        hidden_states = hidden_states.transpose(1, 2)
    width = next((config[name] for name in _TEXT_WIDTHS if config.get(name)), 0)
    axes = len(config.get("axes_dims_rope") or ())
    known: dict[str, Any] = {
        next(iter(taken)): hidden_states,
        "timestep": torch.full((batch,), 500.0, device=device),
        "guidance": random() if config.get("guidance_embeds") else None,
        "pooled_projections": random(config.get("pooled_projection_dim") or 0),
        "img_ids": random(math.prod(grid), axes)[0],
        "txt_ids": random(text, axes)[0],
        "img_shapes": [[(1, *grid)]] * batch,
        # Values of `img_ids` tell the grid, and there are none on the meta device.
        "joint_attention_kwargs": {"grid": grid} if "img_ids" in taken and hasattr(model, "mhla_config") else None,
        "num_frames": grid[0],
        "height": grid[-2],
        "width": grid[-1],
    }
    if "class_labels" in taken and config.get("num_embeds_ada_norm"):
        known["class_labels"] = torch.randint(config.num_embeds_ada_norm, (batch,), generator=generator, device=device)
    elif "encoder_hidden_states" in taken:
        known["encoder_hidden_states"] = random(text, width)
        if getattr(taken.get("encoder_attention_mask"), "default", None) is inspect.Parameter.empty:
            known["encoder_attention_mask"] = torch.ones(batch, text, dtype=torch.long, device=device)
    if family := FAMILIES.get(name) or MHLA_CLASSES.get(name):
        known |= family.load_class().own_inputs(model, grid, text, random)
    return {name: value for name, value in known.items() if name in taken and value is not None}
