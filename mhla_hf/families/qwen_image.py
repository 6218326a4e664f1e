# SPDX-License-Identifier: Apache-2.0
"""MHLA for Qwen-Image, from text to one image.

Rotary tables are complex, those of the image and those of the text apart. Here those of the image keep the grid in
their shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from diffusers.models.attention_processor import Attention
from diffusers.models.transformers.transformer_qwenimage import QwenEmbedRope, QwenImageTransformer2DModel

from ..layers import PairwiseRotary
from ..models.joint import JointImageMixin, MHLAJointAttention


class MHLAQwenEmbedRope(QwenEmbedRope):
    """Rotary tables that carry the grid of the image."""

    def forward(self, video_fhw: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        """Return upstream's tables, with those of the image as `[height, width, K / 2]`, and compact ones.

        Those are cosines and sines `[1, T, 1, K / 2]` of the image, and of the text.

        Raises:
            ValueError: If there are several images, or sizes.
        """
        samples = [shapes if isinstance(shapes, list) else [shapes] for shapes in video_fhw]
        if any(sample != samples[0] for sample in samples) or len(samples[0]) != 1 or samples[0][0][0] != 1:
            raise ValueError(
                "MHLA layers of Qwen-Image take one image of one size: no images to edit and no layers beside it."
            )
        tables = super().forward(video_fhw, *args, **kwargs)
        pairs = (part[None, :, None].contiguous() for table in tables for part in (table.real, table.imag))
        image, text = tables
        return image.unflatten(0, tuple(samples[0][0][1:])), text, *pairs


class MHLAQwenAttention(MHLAJointAttention, Attention):
    """Joint attention: the tables of the image carry the grid."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        encoder_hidden_states_mask: torch.Tensor | None = None,
        image_rotary_emb: tuple[torch.Tensor, ...] = (),
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        image, text, *pairs = image_rotary_emb
        if not hasattr(self, "mhla"):
            kwargs.update(encoder_hidden_states_mask=encoder_hidden_states_mask)
            return super().forward(
                hidden_states, encoder_hidden_states, image_rotary_emb=(image.flatten(0, 1), text), **kwargs
            )
        rotary, text_rotary = PairwiseRotary(*pairs[:2]), PairwiseRotary(*pairs[2:])
        valid = None if encoder_hidden_states_mask is None else encoder_hidden_states_mask.bool()
        return self.processor(
            self, hidden_states, encoder_hidden_states, grid=tuple(image.shape[:2]), rotary=rotary,
            text_rotary=text_rotary, valid=valid, **kwargs,
        )  # fmt: skip


class MHLAQwenImageTransformer2DModel(JointImageMixin, QwenImageTransformer2DModel):
    """`QwenImageTransformer2DModel` whose joint attention is MHLA in the chosen layers.

    Takes upstream's arguments plus `mhla`, an `MHLAConfig` or a dict of its options, kept under the key `mhla` of
    `config.json`. `from_pretrained` loads MHLA checkpoints, and ordinary ones with fresh MHLA parameters. Images to
    edit and layers raise `ValueError`.
    """

    # 1328 × 1328: latents of 166 × 166 in patches of 2 × 2.
    default_grid = (83, 83)
    attention_class = MHLAQwenAttention
    module_classes = MappingProxyType({"pos_embed": MHLAQwenEmbedRope})

    @classmethod
    def check_config(cls, config: Mapping[str, Any]) -> None:
        """Refuse Qwen-Image-Layered."""
        if cls.config_value(config, "use_layer3d_rope"):
            raise ValueError("Qwen-Image-Layered (use_layer3d_rope) has no MHLA version: its images have layers.")
