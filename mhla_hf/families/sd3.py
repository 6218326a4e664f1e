# SPDX-License-Identifier: Apache-2.0
"""MHLA for Stable Diffusion 3 and 3.5, from text to one image.

Positions are added to the patches, so that attention has no rotary embedding. The grid travels in
`joint_attention_kwargs`, which blocks hand to their joint attention. Some blocks of 3.5 Medium attend a second time,
to the image alone: that stays softmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers.models.attention_processor import Attention
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel

from ..models.attention import MHLAImageModelMixin, RefusesFusedProjections
from ..models.joint import MHLAJointAttention, MHLAJointModelMixin


class MHLASD3Attention(MHLAJointAttention, Attention):
    """Joint attention of every layer, MHLA or softmax: only MHLA layers get the grid."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        grid: Sequence[int] = (),
        **kwargs: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if not hasattr(self, "mhla"):
            return super().forward(hidden_states, encoder_hidden_states, attention_mask, **kwargs)
        return self.processor(self, hidden_states, encoder_hidden_states, grid=grid, **kwargs)


class MHLASD3Transformer2DModel(
    RefusesFusedProjections, MHLAJointModelMixin, MHLAImageModelMixin, SD3Transformer2DModel
):
    """`SD3Transformer2DModel` whose joint attention is MHLA in the chosen layers.

    Takes upstream's arguments plus `mhla`, an `MHLAConfig` or a dict of its options, kept under the key `mhla` of
    `config.json`. `from_pretrained` loads MHLA checkpoints, and ordinary ones with fresh MHLA parameters. IP adapters
    and fused projections raise `ValueError`.
    """

    # 1024 × 1024: latents of 128 × 128 in patches of 2 × 2.
    default_grid = (64, 64)
    attention_class = MHLASD3Attention
    block_streams = ("encoder_hidden_states", "hidden_states")
    _repeated_blocks = ["JointTransformerBlock"]

    def _use_mhla(self, attentions: list[Any], mhla_layers: list[int]) -> None:
        super()._use_mhla(attentions, mhla_layers)
        for block in self.transformer_blocks:
            if block.attn2 is not None:
                # It is handed the grid as well, and has no use for it.
                block.attn2.__class__ = MHLASD3Attention

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        pooled_projections: torch.Tensor | None = None,
        timestep: torch.Tensor | None = None,
        block_controlnet_hidden_states: list[torch.Tensor] | None = None,
        joint_attention_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """As upstream."""
        grid = tuple(side // self.config.patch_size for side in hidden_states.shape[-2:])
        # By name: upstream takes the scale of adapters out of keyword arguments alone.
        return super().forward(
            hidden_states, encoder_hidden_states, pooled_projections, timestep, block_controlnet_hidden_states,
            joint_attention_kwargs={**(joint_attention_kwargs or {}), "grid": grid}, **kwargs,
        )  # fmt: skip
