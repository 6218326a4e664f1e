# SPDX-License-Identifier: Apache-2.0
"""Attention and processor of the models that use diffusers' `Attention`: those of images, and SANA-Video.

`Attention` sees a flat token sequence. Each model's file says how the token grid gets to it; here it is a keyword
argument, so nothing is remembered between calls: checkpointing, compilation and two forwards at different grids
before one backward cannot go wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn as nn
from diffusers.models.attention_processor import Attention

from ..utils.compat.diffusers import skip_attention_in
from .attention import KeepsMHLAProcessor, attend, attend_in_parts
from .base import MHLAModelMixin


class MHLAImageAttnProcessor:
    """Stateless processor of an MHLA self-attention layer; the parameters live in `attn.mhla`."""

    def __call__(
        self,
        attn: Attention,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        grid: tuple[int, ...] | None = None,
        rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
        perturbed: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attends over `hidden_states` `[B, T, hidden]`, the T tokens of `grid`, row-major.

        `rotary_emb` is cosines and sines `[1, T, 1, K / 2]`, for neighbouring pairs of channels. `perturbed` lets
        every token attend to itself alone, as a guider's hook on `attn` does.

        Raises:
            ValueError: If `grid` is missing, or a context, an attention mask or another argument is given.
        """
        others = {"encoder_hidden_states": encoder_hidden_states, "attention_mask": attention_mask, **kwargs}
        if any(value is not None for value in others.values()):
            given = ", ".join(name for name, value in others.items() if value is not None)
            raise ValueError(f"MHLA is self-attention over the whole grid and takes no {given}.")
        return attend(attn, hidden_states, rotary_emb=rotary_emb, perturbed=perturbed, grid=grid)


skip_attention_in(MHLAImageAttnProcessor)


class MHLAImageAttention(KeepsMHLAProcessor, Attention):
    """Self-attention of every layer, MHLA or not: only MHLA layers get the grid."""

    mhla_processor_class = MHLAImageAttnProcessor

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        grid: tuple[int, ...] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        if not hasattr(self, "mhla"):
            return super().forward(hidden_states, encoder_hidden_states, attention_mask, **kwargs)
        kwargs.update(encoder_hidden_states=encoder_hidden_states, attention_mask=attention_mask, grid=grid)
        if isinstance(self.processor, self.mhla_processor_class):
            return self.processor(self, hidden_states, **kwargs)
        # Pipelines of perturbed-attention guidance set the attribute and put the processors back afterwards.
        return attend_in_parts(self.processor, self.mhla_processor_class(), self, hidden_states, **kwargs)


class MHLAImageModelMixin(MHLAModelMixin):
    """`MHLAModelMixin` for models with `transformer_blocks[i].attn1`, and square `sample_size` and `patch_size`."""

    default_grid: ClassVar[tuple[int, ...]] = (32, 32)
    attention_class: ClassVar[type] = MHLAImageAttention
    processor_class: ClassVar[type] = MHLAImageAttnProcessor

    @classmethod
    def config_grid(cls, config: Mapping[str, Any]) -> tuple[int, ...] | None:
        """The grid of an image of the size that the model was made for, in patches."""
        size = cls.config_value(config, "sample_size") // cls.config_value(config, "patch_size")
        return (size, size)

    def _self_attentions(self) -> list[nn.Module]:
        return [block.attn1 for block in self.transformer_blocks]

    def _use_mhla(self, attentions: list[Any], mhla_layers: list[int]) -> None:
        for attention in attentions:
            attention.__class__ = self.attention_class
        for index in mhla_layers:
            attentions[index].set_processor(self.processor_class())
