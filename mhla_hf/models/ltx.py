# SPDX-License-Identifier: Apache-2.0
"""MHLA for LTX-Video: self-attention over the grid of a video; text has cross-attention, which stays softmax.

As for Wan, the grid travels in the shape of the rotary tables, which are made from the video's sizes. Those of LTX run
over the channels of all heads, so every head has tables of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn as nn
from diffusers.models.transformers.transformer_ltx import (
    LTXAttention,
    LTXVideoRotaryPosEmbed,
    LTXVideoTransformer3DModel,
)

from .attention import KeepsMHLAProcessor, KeepsMHLAProcessors


def check_grid(grid: tuple[int | None, ...], num_tokens: int) -> None:
    """Check that the tokens of a video are those of its grid, and no others.

    Args:
        grid: Tokens along each axis; `None` where the caller did not say.
        num_tokens: Number of tokens.

    Raises:
        ValueError: If they are not.
    """
    if None in grid or math.prod(grid) != num_tokens:  # type: ignore[arg-type]
        raise ValueError(
            f"MHLA layers need the num_frames, height and width of a video's {num_tokens} tokens, and take no tokens "
            f"beside the grid, such as those of keyframes; got {grid}."
        )


class MHLALTXVideoRotaryPosEmbed(LTXVideoRotaryPosEmbed):
    """Rotary tables `[B, frames, height, width, width of all heads]`, which carry the grid."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        num_frames: int | None = None,
        height: int | None = None,
        width: int | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, ...]:
        grid: Any = (num_frames, height, width)
        check_grid(grid, hidden_states.shape[1])
        return tuple(table.unflatten(1, grid) for table in super().forward(hidden_states, *grid, *args, **kwargs))


class MHLALTXAttention(KeepsMHLAProcessor, LTXAttention):
    """Self-attention of every layer, MHLA or softmax: flattens the rotary tables and passes the grid on to MHLA."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: tuple[torch.Tensor, ...] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        grid = None
        if image_rotary_emb is not None and image_rotary_emb[0].ndim == 5:
            grid = tuple(image_rotary_emb[0].shape[1:4])
            image_rotary_emb = tuple(table.flatten(1, 3) for table in image_rotary_emb)
        arguments: tuple[Any, ...] = (hidden_states, encoder_hidden_states, attention_mask)
        if not hasattr(self, "mhla"):
            return super().forward(*arguments, image_rotary_emb, **kwargs)
        rotary_emb = None if image_rotary_emb is None else tables_by_head(image_rotary_emb, self.heads)
        return self.processor(self, *arguments, rotary_emb=rotary_emb, grid=grid)


def tables_by_head(tables: tuple[torch.Tensor, ...], num_heads: int) -> tuple[torch.Tensor, ...]:
    """Return cosines and sines `[B, T, H, K / 2]`, without a copy, of tables `[B, T, H * K]` with each value twice."""
    return tuple(table.unflatten(-1, (num_heads, -1))[..., 0::2] for table in tables)


class LTXFamilyMixin(KeepsMHLAProcessors):
    """Goes before a model class of LTX in the bases of its MHLA version."""

    attention_class: ClassVar[type]
    rotary_class: ClassVar[type]

    @classmethod
    def patch_sizes(cls, config: Mapping[str, Any]) -> tuple[int, ...]:
        """The pipeline's patches of latents."""
        frames, side = (cls.config_value(config, name) for name in ("patch_size_t", "patch_size"))
        return (frames, side, side)

    def _self_attentions(self) -> list[nn.Module]:
        return [block.attn1 for block in self.transformer_blocks]

    def _use_mhla(self, attentions: list[Any], mhla_layers: list[int]) -> None:
        self.rope.__class__ = self.rotary_class
        for attention in attentions:
            attention.__class__ = self.attention_class
        for index in mhla_layers:
            attentions[index].set_processor(attentions[index].mhla_processor_class())


class MHLALTXVideoTransformer3DModel(LTXFamilyMixin, LTXVideoTransformer3DModel):
    """`LTXVideoTransformer3DModel` whose self-attention is MHLA in the chosen layers.

    Takes upstream's arguments plus `mhla`, an `MHLAConfig` or a dict of its options, kept under the key `mhla` of
    `config.json`. `from_pretrained` loads MHLA checkpoints, and ordinary LTX ones with fresh MHLA parameters. Calls
    need `num_frames`, `height` and `width`; tokens beside that grid, as keyframes bring, raise `ValueError`. Besides
    it takes `device_map`, which upstream's class does not.
    """

    _no_split_modules = ["LTXVideoTransformerBlock"]

    # 161 frames of 512 × 704: (161 - 1) / 8 + 1 latent frames, and a latent for 32 × 32 pixels.
    video_size = (161, 512, 704)
    default_grid = (21, 16, 22)
    attention_class, rotary_class = MHLALTXAttention, MHLALTXVideoRotaryPosEmbed
