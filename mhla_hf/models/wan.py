# SPDX-License-Identifier: Apache-2.0
"""MHLA for Wan: attention, processor and token grid of `WanTransformer3DModel`.

Wan's attention sees a flat token sequence. Its rotary tables are the one thing that every layer is handed and that
depends on the grid, so here they keep the grid in their shape, `(1, frames, height, width, 1, width of a head)`, and
the attention modules flatten them again. That is purely functional: checkpointing, compilation and two forwards at
different grids before one backward cannot go wrong. Compact tables for MHLA layers travel with them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn as nn
from diffusers.models.transformers.transformer_wan import (
    WanAttention,
    WanAttnProcessor,
    WanRotaryPosEmbed,
    WanTransformer3DModel,
)

from ..utils.compat.diffusers import context_parallel_plan, declared, skip_attention_in
from .attention import KeepsMHLAProcessor, KeepsMHLAProcessors, MHLAAttnProcessor, tables_of_layer, tables_with_grid
from .base import shard_of


skip_attention_in(WanAttnProcessor)


class MHLAWanRotaryPosEmbed(WanRotaryPosEmbed):
    """Rotary tables with upstream's values that carry the grid: see [`tables_with_grid`]."""

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        grid = tuple(size // patch for size, patch in zip(hidden_states.shape[2:], self.patch_size))
        return tables_with_grid(super().forward(hidden_states), grid)


class MHLAWanAttention(KeepsMHLAProcessor, WanAttention):
    """Self-attention of every layer, MHLA or softmax: flattens the rotary tables and passes the grid on to MHLA."""

    _available_processors = declared(WanAttention, "_available_processors", MHLAAttnProcessor)

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: tuple[torch.Tensor, ...] | None = None,
        **kwargs: object,
    ) -> torch.Tensor:
        if rotary_emb is not None:
            is_mhla = hasattr(self, "mhla")
            rotary_emb, grid = tables_of_layer(rotary_emb, is_mhla)
            shard = None if grid is None else shard_of(self.processor, math.prod(grid))
            if shard is not None:
                shard.check_length(hidden_states.shape[1])
                rotary_emb = tuple(table[:, slice(*shard.run)] for table in rotary_emb)
            if is_mhla and grid is not None:
                kwargs.update(grid=grid, shard=shard)
        kwargs["rotary_emb"] = rotary_emb
        return self.processor(self, hidden_states, encoder_hidden_states, attention_mask, **kwargs)


class MHLAWanTransformer3DModel(KeepsMHLAProcessors, WanTransformer3DModel):
    """`WanTransformer3DModel` whose self-attention is MHLA in the chosen layers.

    Takes upstream's arguments plus `mhla`, an `MHLAConfig` or a dict of its options, kept under the key `mhla` of
    `config.json`. `from_pretrained` loads MHLA checkpoints, and ordinary Wan ones with fresh MHLA parameters.
    """

    # 81 frames of 480 × 832: (81 - 1) / 4 + 1 latent frames, 60 × 104 latent pixels in patches of 2 × 2.
    default_grid = (21, 30, 52)
    # Rotary tables stay whole, as they carry the grid: layers take their part of them.
    _cp_plan = context_parallel_plan(WanTransformer3DModel, "rope")
    supports_context_parallel = True

    def _self_attentions(self) -> list[nn.Module]:
        return [block.attn1 for block in self.blocks]

    def _use_mhla(self, attentions: list[Any], mhla_layers: list[int]) -> None:
        self.rope.__class__ = MHLAWanRotaryPosEmbed
        for attention in attentions:
            attention.__class__ = MHLAWanAttention
        for index in mhla_layers:
            attentions[index].set_processor(MHLAAttnProcessor())
