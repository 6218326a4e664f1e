# SPDX-License-Identifier: Apache-2.0
"""MHLA for SANA-Video, whose own self-attention is linear. The token grid travels in the rotary tables, as for Wan."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from diffusers.models.transformers.transformer_sana_video import (
    SanaLinearAttnProcessor3_0,
    SanaVideoTransformer3DModel,
    SanaVideoTransformerBlock,
    WanRotaryPosEmbed,
)

from ..utils.compat.diffusers import skip_attention_in, skip_layers_in
from .attention import KeepsMHLAProcessors, tables_of_layer, tables_with_grid
from .image import MHLAImageAttention, MHLAImageModelMixin


skip_attention_in(SanaLinearAttnProcessor3_0)
skip_layers_in(SanaVideoTransformerBlock)


class MHLASanaVideoRotaryPosEmbed(WanRotaryPosEmbed):
    """Rotary tables with upstream's values that carry the grid: see [`tables_with_grid`]."""

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        grid = tuple(size // patch for size, patch in zip(hidden_states.shape[2:], self.patch_size))
        return tables_with_grid(super().forward(hidden_states), grid)


class MHLASanaVideoAttention(MHLAImageAttention):
    """Self-attention of every layer, MHLA or not: flattens the rotary tables and passes the grid on."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        grid: tuple[int, ...] | None = None,
        rotary_emb: tuple[torch.Tensor, ...] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        if rotary_emb is not None:
            rotary_emb, carried = tables_of_layer(rotary_emb, hasattr(self, "mhla"))
            grid = grid if carried is None else carried
        return super().forward(
            hidden_states, encoder_hidden_states, attention_mask, grid=grid, rotary_emb=rotary_emb, **kwargs
        )


class MHLASanaVideoTransformer3DModel(KeepsMHLAProcessors, MHLAImageModelMixin, SanaVideoTransformer3DModel):
    """`SanaVideoTransformer3DModel` whose self-attention is MHLA in the chosen layers.

    Takes upstream's arguments plus `mhla`, an `MHLAConfig` or a dict of its options, kept under the key `mhla` of
    `config.json`. `from_pretrained` loads MHLA checkpoints, and ordinary SANA-Video ones with fresh MHLA parameters,
    which leave the videos as they were unless the options change the feature map, the normaliser, where rotary
    embeddings meet it, or the mixing weights' start. Layers left out of `layers` keep SANA's linear attention.
    """

    # 81 frames of 480 × 832 as Wan's autoencoder makes them, in patches of 2 × 2.
    default_grid = (21, 30, 52)
    default_options = MappingProxyType({"mixing_init": "uniform", "eps": 1e-15})
    upstream_is_linear = True
    attention_class = MHLASanaVideoAttention
    _repeated_blocks = ["SanaVideoTransformerBlock"]

    @classmethod
    def config_grid(cls, config: Mapping[str, Any]) -> tuple[int, ...] | None:
        """As for Wan; `sample_size` alone does not tell the number of frames."""
        return super(MHLAImageModelMixin, cls).config_grid(config)

    @classmethod
    def reference_grid(cls, config: Mapping[str, Any], compression: tuple[int, int] | None = None) -> tuple[int, ...]:
        """As for Wan, with `sample_size` rows: 30 of 52 tokens for 480 pixels, 22 of 38 for 704."""
        grid = super().reference_grid(config, compression)
        if cls.config_grid(config) is not None:
            return grid
        rows = cls.config_value(config, "sample_size")
        return (grid[0], rows, round(rows * cls.default_grid[2] / cls.default_grid[1]))

    def _use_mhla(self, attentions: list[Any], mhla_layers: list[int]) -> None:
        self.rope.__class__ = MHLASanaVideoRotaryPosEmbed
        super()._use_mhla(attentions, mhla_layers)
