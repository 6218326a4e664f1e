# SPDX-License-Identifier: Apache-2.0
"""MHLA for DiT and PixArt: the token grid travels in `cross_attention_kwargs`, which blocks give their attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from diffusers.loaders import PeftAdapterMixin
from diffusers.models.attention_processor import Attention, AttnProcessor
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.models.transformers.dit_transformer_2d import DiTTransformer2DModel
from diffusers.models.transformers.pixart_transformer_2d import PixArtTransformer2DModel

from ..models.attention import KeepsMHLAProcessors, MHLAAttnProcessor, MHLAImageAttention, MHLAImageModelMixin
from ..utils.compat.diffusers import checkpointed


class MHLADiTTransformer2DModel(MHLAImageModelMixin, DiTTransformer2DModel, PeftAdapterMixin):
    """`DiTTransformer2DModel` whose self-attention is MHLA in the chosen layers.

    Takes upstream's arguments plus `mhla`, an `MHLAConfig` or a dict of its options, kept under the key `mhla` of
    `config.json`. `from_pretrained` loads MHLA checkpoints, and ordinary DiT ones with fresh MHLA parameters. Besides
    it takes images that are not square, and LoRA adapters, which upstream's class does not.
    """

    _no_split_modules = ["BasicTransformerBlock"]
    _repeated_blocks = ["BasicTransformerBlock"]

    def forward(
        self,
        hidden_states: torch.Tensor,
        timestep: torch.LongTensor | None = None,
        class_labels: torch.LongTensor | None = None,
        cross_attention_kwargs: dict[str, Any] | None = None,
        return_dict: bool = True,
    ) -> Transformer2DModelOutput | tuple[torch.Tensor]:
        """As upstream, whose own `forward` puts the patches together to a square whatever the image was.

        Args:
            hidden_states: Latents `[B, C, height, width]`.
            timestep: `[B]`.
            class_labels: `[B]`.
            cross_attention_kwargs: More arguments for the attention processors.
            return_dict: Return an output object, or a tuple.

        Returns:
            The prediction `[B, C_out, height, width]`; sizes that the patches do not divide are rounded down.
        """
        patch = self.patch_size
        height, width = hidden_states.shape[-2] // patch, hidden_states.shape[-1] // patch
        attention_kwargs = {**(cross_attention_kwargs or {}), "grid": (height, width)}
        hidden_states = self.pos_embed(hidden_states)
        for block in self.transformer_blocks:
            arguments = (hidden_states, None, None, None, timestep, attention_kwargs, class_labels)
            if torch.is_grad_enabled() and self.gradient_checkpointing:
                hidden_states = checkpointed(self, block, *arguments)
            else:
                hidden_states = block(*arguments)
        conditioning = self.transformer_blocks[0].norm1.emb(timestep, class_labels, hidden_dtype=hidden_states.dtype)
        shift, scale = self.proj_out_1(F.silu(conditioning)).chunk(2, dim=1)
        hidden_states = self.norm_out(hidden_states) * (1 + scale[:, None]) + shift[:, None]
        patches = self.proj_out_2(hidden_states).unflatten(2, (patch, patch, -1)).unflatten(1, (height, width))
        output = patches.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)
        return Transformer2DModelOutput(sample=output) if return_dict else (output,)


class MHLAPixArtTransformer2DModel(
    KeepsMHLAProcessors, MHLAImageModelMixin, PixArtTransformer2DModel, PeftAdapterMixin
):
    """`PixArtTransformer2DModel` (alpha and sigma) whose self-attention is MHLA in the chosen layers.

    Takes upstream's arguments plus `mhla`, an `MHLAConfig` or a dict of its options, kept under the key `mhla` of
    `config.json`. `from_pretrained` loads MHLA checkpoints, and ordinary PixArt ones with fresh MHLA parameters.
    Besides it takes LoRA adapters, which upstream's class does not.
    """

    _repeated_blocks = ["BasicTransformerBlock"]

    def _use_mhla(self, attentions: list[nn.Module], mhla_layers: list[int]) -> None:
        super()._use_mhla(attentions, mhla_layers)
        for block in self.transformer_blocks:
            # It is handed the grid as well, and has no use for it.
            block.attn2.__class__ = MHLAImageAttention

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        timestep: torch.LongTensor | None = None,
        added_cond_kwargs: dict[str, torch.Tensor] | None = None,
        cross_attention_kwargs: dict[str, Any] | None = None,
        attention_mask: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        return_dict: bool = True,
    ) -> Transformer2DModelOutput | tuple[torch.Tensor]:
        """As upstream. MHLA layers take no `attention_mask` (`ValueError`)."""
        grid = tuple(size // self.config.patch_size for size in hidden_states.shape[-2:])
        return super().forward(
            hidden_states,
            encoder_hidden_states=encoder_hidden_states,
            timestep=timestep,
            added_cond_kwargs=added_cond_kwargs,
            cross_attention_kwargs={**(cross_attention_kwargs or {}), "grid": grid},
            attention_mask=attention_mask,
            encoder_attention_mask=encoder_attention_mask,
            return_dict=return_dict,
        )

    def fuse_qkv_projections(self) -> None:
        """Not with MHLA layers.

        Raises:
            ValueError: Always. Upstream would set processors that ignore MHLA.
        """
        raise ValueError("Projections of MHLA layers cannot be fused; leave them as they are.")

    def set_default_attn_processor(self) -> None:
        """As upstream for the layers that are not MHLA; those get the MHLA processor."""
        for attention in self.modules():
            if isinstance(attention, Attention):
                attention.set_processor(MHLAAttnProcessor() if hasattr(attention, "mhla") else AttnProcessor())
