# SPDX-License-Identifier: Apache-2.0
"""MHLA for SANA and SANA-Video, whose own self-attention is linear: one summary of all tokens, which MHLA cuts up.

With equal mixing weights MHLA is exactly that attention for all blocks. They are the default start here, so a
converted model draws the image that it drew before, and fine-tuning starts from there (an output norm, another start
or another `eps` change it at once). SANA-Video's token grid travels in the rotary tables, as for Wan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from diffusers.models.attention_processor import Attention, SanaLinearAttnProcessor2_0
from diffusers.models.transformers.sana_transformer import SanaTransformer2DModel, SanaTransformerBlock
from diffusers.models.transformers.transformer_sana_video import (
    SanaLinearAttnProcessor3_0,
    SanaVideoTransformer3DModel,
    SanaVideoTransformerBlock,
    WanRotaryPosEmbed,
)

from ..models.attention import (
    KeepsMHLAProcessors,
    MHLAAttnProcessor,
    MHLAImageAttention,
    MHLAImageModelMixin,
    RotaryWithGrid,
    tables_of_layer,
)
from ..utils.compat.diffusers import call_default, declared, skip_attention_in, skip_layers_in
from .objectives import MASKED_NAMES, PADDED, FlowObjective, Inputs, Tensors, timesteps_from_sigmas, without_padding


class MHLASanaAttnProcessor(MHLAAttnProcessor):
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


skip_attention_in(MHLASanaAttnProcessor, SanaLinearAttnProcessor2_0, SanaLinearAttnProcessor3_0)
skip_layers_in(MHLASanaTransformerBlock, SanaVideoTransformerBlock)


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
    _no_split_modules = declared(SanaTransformer2DModel, "_no_split_modules", "MHLASanaTransformerBlock")
    _repeated_blocks = ["MHLASanaTransformerBlock"]

    def _use_mhla(self, attentions: list, mhla_layers: list[int]) -> None:
        for block in self.transformer_blocks:
            block.__class__ = MHLASanaTransformerBlock
        super()._use_mhla(attentions, mhla_layers)


class MHLASanaVideoRotaryPosEmbed(RotaryWithGrid, WanRotaryPosEmbed):
    """Rotary tables that carry the grid."""


class MHLASanaVideoAttention(MHLAImageAttention):
    """Self-attention of every layer, MHLA or not: flattens the rotary tables and passes the grid on."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        *args: Any,
        rotary_emb: tuple[torch.Tensor, ...] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        if rotary_emb is not None:
            rotary_emb, grid, _ = tables_of_layer(rotary_emb, hasattr(self, "mhla"))
            kwargs |= {} if grid is None else {"grid": grid}
        return super().forward(hidden_states, *args, rotary_emb=rotary_emb, **kwargs)


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
    module_classes = MappingProxyType({"rope": MHLASanaVideoRotaryPosEmbed})
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


@dataclass(frozen=True, kw_only=True)
class SanaObjective(FlowObjective):
    """Flow matching of images.

    Samples have `latents` `[C, H, W]`, `prompt_embeds` `[L, D]` and `prompt_attention_mask` `[L]`. Captions follow the
    instruction that the pipeline puts before prompts by default ("complex human instruction"), and the empty prompt
    goes without it: training sees text as inference does.
    """

    name = "sana"
    condition_names = PADDED
    encoded_names = MASKED_NAMES
    # By default the negative prompt is an empty text, which the pipeline refuses beside embeddings.
    call_options = {"negative_prompt": None, "use_resolution_binning": False}

    def model_inputs(self, config: Any, noisy: torch.Tensor, levels: torch.Tensor, condition: Tensors) -> Inputs:
        """Return the arguments of `forward`, which predicts the direction `[B, C, H, W]`."""
        return {
            **super().model_inputs(config, noisy, levels, condition),
            "encoder_attention_mask": condition["prompt_attention_mask"],
            # As the pipeline hands it over.
            "timestep": timesteps_from_sigmas(levels) * config["timestep_scale"],
        }

    def check_model(self, config: Any) -> None:
        """Refuse SANA-Sprint, which is distilled."""
        if config.get("guidance_embeds"):
            raise ValueError(
                "model: this is a SANA-Sprint model, which is distilled and not trained by flow matching; train the "
                "SANA model that it comes from"
            )

    def encode_null_condition(self, pipeline: Any, length: int | None, num_classes: int) -> dict[str, torch.Tensor]:
        """Encode the empty negative prompt."""
        _, _, embeddings, mask = pipeline.encode_prompt("", negative_prompt="", max_sequence_length=length)
        return without_padding({"prompt_embeds": embeddings[0], "prompt_attention_mask": mask[0]})

    def prompt_options(self, pipeline: Any) -> dict[str, Any]:
        """Return the lines that the pipeline puts before prompts by default."""
        return {"complex_human_instruction": list(call_default(pipeline, "complex_human_instruction"))}
