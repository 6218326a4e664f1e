# SPDX-License-Identifier: Apache-2.0
"""MHLA for PixArt. The token grid travels in `cross_attention_kwargs`, which blocks hand to both their attentions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from diffusers.loaders import PeftAdapterMixin
from diffusers.models.attention_processor import Attention, AttnProcessor, FusedAttnProcessor2_0
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.models.transformers.pixart_transformer_2d import PixArtTransformer2DModel

from .attention import KeepsMHLAProcessors
from .image import MHLAImageAttention, MHLAImageModelMixin


class MHLAPixArtTransformer2DModel(
    KeepsMHLAProcessors, MHLAImageModelMixin, PixArtTransformer2DModel, PeftAdapterMixin
):
    """`PixArtTransformer2DModel` (alpha and sigma) whose self-attention is MHLA in the chosen layers.

    Takes upstream's arguments plus `mhla`, an `MHLAConfig` or a dict of its options, kept under the key `mhla` of
    `config.json`. `from_pretrained` loads MHLA checkpoints, and ordinary PixArt ones with fresh MHLA parameters.
    Besides it takes LoRA adapters, which upstream's class does not.
    """

    # Upstream's, from before projections were fused.
    original_attn_processors: dict[str, Any] | None
    _repeated_blocks = ["BasicTransformerBlock"]

    def _use_mhla(self, attentions: list[nn.Module], mhla_layers: list[int]) -> None:
        super()._use_mhla(attentions, mhla_layers)
        for block in self.transformer_blocks:
            # It is handed the grid as well, and has no use for it.
            block.attn2.__class__ = MHLAImageAttention
        before = getattr(self, "original_attn_processors", None)
        if before is not None:
            # Fused before it was converted: MHLA layers keep their new processors when projections come apart again.
            new = {name: kept for name, kept in self.attn_processors.items() if isinstance(kept, self.processor_class)}
            self.original_attn_processors = {**before, **new}

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
        """As upstream; MHLA layers keep their processor, which uses fused projections too.

        Raises:
            ValueError: If there are adapters on the projections, whose part would be lost.
        """
        if getattr(self, "original_attn_processors", None) is not None:
            return
        if any(hasattr(module, "base_layer") for module in self.modules()):
            raise ValueError("Projections with adapters cannot be fused: call fuse_lora() or unload_lora() before.")
        self.original_attn_processors = self.attn_processors
        for attention in self._attentions():
            attention.fuse_projections()
            if not hasattr(attention, "mhla"):
                attention.set_processor(FusedAttnProcessor2_0())

    def unfuse_qkv_projections(self) -> None:
        """Takes fused projections away again, where there are some."""
        processors = getattr(self, "original_attn_processors", None)
        if processors is None:
            return
        self.set_attn_processor(processors)
        self.original_attn_processors = None
        for attention in self._attentions():
            attention.fused_projections = False
            for name in ("to_qkv", "to_kv"):
                if hasattr(attention, name):
                    delattr(attention, name)

    def set_default_attn_processor(self) -> None:
        """As upstream for the layers that are not MHLA; those get the MHLA processor."""
        for attention in self._attentions():
            attention.set_processor(self.processor_class() if hasattr(attention, "mhla") else AttnProcessor())

    def add_adapter(self, *args: Any, **kwargs: Any) -> None:
        """As in `PeftAdapterMixin`; `ValueError` while projections are fused, which would pass adapters by."""
        self._refuse_fused()
        super().add_adapter(*args, **kwargs)

    def load_lora_adapter(self, *args: Any, **kwargs: Any) -> Any:
        """As in `PeftAdapterMixin`; `ValueError` while projections are fused, which would pass adapters by."""
        self._refuse_fused()
        return super().load_lora_adapter(*args, **kwargs)

    def _refuse_fused(self) -> None:
        if any(attention.fused_projections for attention in self._attentions()):
            raise ValueError("Fused projections would pass adapters by: call unfuse_qkv_projections() before.")

    def _attentions(self) -> list[Attention]:
        return [module for module in self.modules() if isinstance(module, Attention)]
