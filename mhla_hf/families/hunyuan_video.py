# SPDX-License-Identifier: Apache-2.0
"""MHLA for HunyuanVideo and HunyuanVideo-1.5.

Rotary tables are those of the grid alone. Every layer is handed them, so here they keep the grid in their shape, as in
the models of Wan.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from diffusers.models.attention_processor import Attention
from diffusers.models.transformers.transformer_hunyuan_video import (
    HunyuanVideoAttnProcessor2_0,
    HunyuanVideoRotaryPosEmbed,
    HunyuanVideoTransformer3DModel,
)
from diffusers.models.transformers.transformer_hunyuan_video15 import (
    HunyuanVideo15AttnProcessor2_0,
    HunyuanVideo15RotaryPosEmbed,
    HunyuanVideo15Transformer3DModel,
    HunyuanVideo15TransformerBlock,
)

from ..layers import PairwiseRotary
from ..models.attention import Upstream, compact
from ..models.joint import MHLAJointAttention, MHLAJointModelMixin
from ..models.ordering import carried_layout, latents_in_block_order
from ..utils.compat.diffusers import skip_attention_in, skip_layers_in
from .objectives import TWO_ENCODERS, FlowObjective, Inputs, Tensors, timesteps_from_sigmas


skip_attention_in(HunyuanVideoAttnProcessor2_0, HunyuanVideo15AttnProcessor2_0, is_joint=True)
skip_layers_in(HunyuanVideo15TransformerBlock, is_joint=True)


class RotaryOfGrid(Upstream):
    """Goes before a rotary class of the family in the bases of its MHLA version."""

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return upstream's tables as `(*grid, K)`, and compact ones for MHLA layers, `[1, T, 1, K / 2]`.

        Those have one more axis of 1 where the tokens come in block order, `(*grid, 1, K)`.
        """
        patches = (self.patch_size_t, self.patch_size, self.patch_size)
        grid = tuple(size // patch for size, patch in zip(hidden_states.shape[2:], patches))
        tables, layout = super().forward(hidden_states), carried_layout(hidden_states)
        if layout is not None:
            tables, grid = [layout.to_block_order(table, 0) for table in tables], (*grid, 1)
        pairs = (table[None, :, None] for table in compact(*tables))
        return *(table.unflatten(0, grid) for table in tables), *pairs


class MHLAHunyuanVideoRotaryPosEmbed(RotaryOfGrid, HunyuanVideoRotaryPosEmbed):
    """Rotary tables of HunyuanVideo."""


class MHLAHunyuanVideo15RotaryPosEmbed(RotaryOfGrid, HunyuanVideo15RotaryPosEmbed):
    """Rotary tables of HunyuanVideo-1.5."""


class MHLAHunyuanVideoAttention(MHLAJointAttention, Attention):
    """Joint attention of both models: the tables carry the grid, the mask of keys the padding of the text."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor,
        image_rotary_emb: tuple[torch.Tensor, ...],
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not hasattr(self, "mhla"):
            kwargs["image_rotary_emb"] = tuple(table.flatten(0, -2) for table in image_rotary_emb[:2])
            return super().forward(hidden_states, encoder_hidden_states, attention_mask, **kwargs)
        # The mask covers all keys, `[B, 1, 1, T + X]`, or the text alone.
        valid = attention_mask.flatten(1)[:, -encoder_hidden_states.shape[1] :].bool()
        table, rotary = image_rotary_emb[0], PairwiseRotary(*image_rotary_emb[2:])
        kwargs.update(grid=tuple(table.shape[:3]), block_order=table.ndim > 4, rotary=rotary, valid=valid)
        return self.processor(self, hidden_states, encoder_hidden_states, **kwargs)


class MHLAHunyuanVideoTransformer3DModel(MHLAJointModelMixin, HunyuanVideoTransformer3DModel):
    """`HunyuanVideoTransformer3DModel` whose joint attention is MHLA in the chosen layers.

    Takes upstream's arguments plus `mhla`, an `MHLAConfig` or a dict of its options, kept under the key `mhla` of
    `config.json`. `from_pretrained` loads MHLA checkpoints, and ordinary ones with fresh MHLA parameters. The layers
    of `transformer_blocks` come first, and those of `single_transformer_blocks` after them.
    """

    default_grid = (33, 45, 80)
    forward = latents_in_block_order(HunyuanVideoTransformer3DModel, "hidden_states")
    attention_class = MHLAHunyuanVideoAttention
    module_classes = MappingProxyType({"rope": MHLAHunyuanVideoRotaryPosEmbed})
    layer_counts = ("num_layers", "num_single_layers")


class MHLAHunyuanVideo15Transformer3DModel(MHLAJointModelMixin, HunyuanVideo15Transformer3DModel):
    """`HunyuanVideo15Transformer3DModel` whose joint attention is MHLA in the chosen layers.

    Takes arguments and checkpoints as `MHLAHunyuanVideoTransformer3DModel` does. Tokens of the image and of glyphs
    count as text.
    """

    default_grid = (31, 30, 52)
    forward = latents_in_block_order(HunyuanVideo15Transformer3DModel, "hidden_states")
    attention_class = MHLAHunyuanVideoAttention
    module_classes = MappingProxyType({"rope": MHLAHunyuanVideo15RotaryPosEmbed})

    @classmethod
    def own_inputs(cls, model: Any, grid: tuple[int, ...], text: int, random: Any) -> dict[str, Any]:
        """Return glyphs and no image, as pipelines from text give them; the model sorts its text by masks' values."""
        glyphs = random(256, model.config.text_embed_2_dim)
        kept = torch.device("cpu") if glyphs.is_meta else glyphs.device
        batch, ones = len(glyphs), partial(torch.ones, dtype=torch.long, device=kept)
        return {
            "timestep": torch.full_like(random(), 500.0),
            "encoder_hidden_states_2": glyphs,
            "encoder_attention_mask": ones(batch, text),
            "encoder_attention_mask_2": ones(batch, 256),
            "image_embeds": torch.zeros(batch, 729, model.config.image_embed_dim, dtype=glyphs.dtype, device=kept),
        }


@dataclass(frozen=True, kw_only=True)
class HunyuanVideoObjective(FlowObjective):
    """Flow matching of videos.

    Samples have `latents` `[C, F, H, W]`, `prompt_embeds` `[L, D]`, `prompt_attention_mask` `[L]` and
    `pooled_prompt_embeds` `[P]`. Models are told a guidance scale of 1, as those of Flux.
    """

    name = "hunyuan-video"
    condition_names = ("prompt_embeds", "prompt_attention_mask", "pooled_prompt_embeds")
    encoders = TWO_ENCODERS
    # Captions follow the instruction that the pipeline puts before prompts.
    encoded_names = ("prompt_embeds", "pooled_prompt_embeds", "prompt_attention_mask")

    def model_inputs(self, config: Any, noisy: torch.Tensor, levels: torch.Tensor, condition: Tensors) -> Inputs:
        """Return the arguments of `forward`, which predicts the direction `[B, C, F, H, W]`."""
        return {
            **super().model_inputs(config, noisy, levels, condition),
            "encoder_attention_mask": condition["prompt_attention_mask"].to(noisy.dtype),
            "pooled_projections": condition["pooled_prompt_embeds"],
            # As guidance scales are counted; models without them ignore it.
            "guidance": timesteps_from_sigmas(torch.ones_like(levels)),
        }
