# SPDX-License-Identifier: Apache-2.0
"""MHLA for SANA, whose own self-attention is linear: one summary of all tokens, which MHLA cuts into blocks.

With equal mixing weights MHLA is exactly that attention, whatever the blocks. They are the default start here, so a
converted model draws the image that it drew before, and fine-tuning starts from there (an output norm, another start
or another `eps` change it at once).
"""

from __future__ import annotations

from types import MappingProxyType

import torch
from diffusers.models.attention_processor import Attention, SanaLinearAttnProcessor2_0
from diffusers.models.transformers.sana_transformer import SanaTransformer2DModel, SanaTransformerBlock

from ..utils.compat.diffusers import declared, skip_attention_in, skip_layers_in
from .attention import KeepsMHLAProcessors
from .image import MHLAImageAttention, MHLAImageAttnProcessor, MHLAImageModelMixin


class MHLASanaAttnProcessor(MHLAImageAttnProcessor):
    """As for other image models; outputs in float16 are clipped to its range, as SANA does."""

    def __call__(self, attn: Attention, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        output = super().__call__(attn, hidden_states, *args, **kwargs)  # type: ignore[arg-type]
        if hidden_states.dtype == torch.float16:
            limit = torch.finfo(torch.float16).max
            output = output.clip(-limit, limit)
        return output


class MHLASanaAttention(MHLAImageAttention):
    """As for other image models, with SANA's processor."""

    mhla_processor_class = MHLASanaAttnProcessor


class MHLASanaTransformerBlock(SanaTransformerBlock):
    """SANA's block, which knows its height and width, and here tells them to the self-attention too."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        timestep: torch.Tensor | None = None,
        height: int | None = None,
        width: int | None = None,
    ) -> torch.Tensor:
        """As upstream (`attention_mask` has no effect there either)."""
        assert timestep is not None and height is not None and width is not None
        modulation = self.scale_shift_table[None] + timestep.reshape(hidden_states.shape[0], 6, -1)
        shift_attention, scale_attention, gate_attention, shift_mlp, scale_mlp, gate_mlp = modulation.chunk(6, dim=1)

        normed = self.norm1(hidden_states) * (1 + scale_attention) + shift_attention
        attended = self.attn1(normed.to(hidden_states.dtype), grid=(height, width))
        hidden_states = hidden_states + gate_attention * attended

        if self.attn2 is not None:
            attended = self.attn2(
                hidden_states, encoder_hidden_states=encoder_hidden_states, attention_mask=encoder_attention_mask
            )
            hidden_states = attended + hidden_states

        normed = self.norm2(hidden_states) * (1 + scale_mlp) + shift_mlp
        image = self.ff(normed.unflatten(1, (height, width)).permute(0, 3, 1, 2))
        return hidden_states + gate_mlp * image.flatten(2, 3).permute(0, 2, 1)


skip_attention_in(MHLASanaAttnProcessor, SanaLinearAttnProcessor2_0)
skip_layers_in(MHLASanaTransformerBlock)


class MHLASanaTransformer2DModel(KeepsMHLAProcessors, MHLAImageModelMixin, SanaTransformer2DModel):
    """`SanaTransformer2DModel`, SANA-Sprint's too, whose self-attention is MHLA in the chosen layers.

    Takes upstream's arguments plus `mhla`, an `MHLAConfig` or a dict of its options, kept under the key `mhla` of
    `config.json`. `from_pretrained` loads MHLA checkpoints, and ordinary SANA ones with fresh MHLA parameters, which
    leave the images as they were unless the options change the feature map, the normaliser or the mixing weights'
    start. Layers left out of `layers` keep SANA's linear attention.
    """

    default_options = MappingProxyType({"mixing_init": "uniform", "eps": 1e-15})
    upstream_is_linear = True
    attention_class = MHLASanaAttention
    processor_class = MHLASanaAttnProcessor
    _no_split_modules = declared(SanaTransformer2DModel, "_no_split_modules", "MHLASanaTransformerBlock")
    _repeated_blocks = ["MHLASanaTransformerBlock"]

    def _use_mhla(self, attentions: list, mhla_layers: list[int]) -> None:
        for block in self.transformer_blocks:
            block.__class__ = MHLASanaTransformerBlock
        super()._use_mhla(attentions, mhla_layers)
