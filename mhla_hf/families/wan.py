# SPDX-License-Identifier: Apache-2.0
"""MHLA for the Wan family: Wan, Wan-VACE, Wan-Animate and SkyReels-V2.

Its attention sees a flat token sequence. Rotary tables are the one thing that every layer is handed and that depends
on the grid, so here they keep the grid in their shape, `(1, frames, height, width, 1, width of a head)`, and the
attention modules flatten them again. That is purely functional: checkpointing, compilation and two forwards at
different grids before one backward cannot go wrong. Compact tables for MHLA layers travel with them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import torch
import torch.nn as nn
from diffusers.models.transformers import transformer_wan_animate as animate
from diffusers.models.transformers.transformer_skyreels_v2 import (
    SkyReelsV2Attention,
    SkyReelsV2AttnProcessor,
    SkyReelsV2RotaryPosEmbed,
    SkyReelsV2Transformer3DModel,
    SkyReelsV2TransformerBlock,
)
from diffusers.models.transformers.transformer_wan import (
    WanAttention,
    WanAttnProcessor,
    WanRotaryPosEmbed,
    WanTransformer3DModel,
)
from diffusers.models.transformers.transformer_wan_vace import WanVACETransformer3DModel

from ..models.attention import KeepsMHLAProcessor, KeepsMHLAProcessors, RotaryWithGrid, tables_of_layer
from ..models.base import shard_of
from ..models.directory import ModelDirectory
from ..models.ordering import latents_in_block_order
from ..models.sizes import SampleSize
from ..models.weight_files import damage_named
from ..utils.compat.diffusers import context_parallel_plan, skip_attention_in, skip_layers_in
from .objectives import FlowObjective, Inputs, Tensors, encode_media


skip_attention_in(WanAttnProcessor, animate.WanAttnProcessor, SkyReelsV2AttnProcessor)
# Not those of Wan-Animate: its face adapters between blocks would act twice where a cache skips the blocks.
skip_layers_in(SkyReelsV2TransformerBlock)


class AttentionOnGrid(KeepsMHLAProcessor):
    """Goes before an attention class of the family: flattens the rotary tables and passes the grid on to MHLA.

    Self-attention of every layer has it, MHLA or softmax.
    """

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
            rotary_emb, grid, block_order = tables_of_layer(rotary_emb, is_mhla)
            shard = None if grid is None else shard_of(self.processor, math.prod(grid))
            if shard is not None:
                shard.check_length(hidden_states.shape[1])
                rotary_emb = tuple(table[:, slice(*shard.run)] for table in rotary_emb)
            if is_mhla and grid is not None:
                kwargs.update(grid=grid, shard=shard, block_order=block_order)
        kwargs["rotary_emb"] = rotary_emb
        return self.processor(self, hidden_states, encoder_hidden_states, attention_mask, **kwargs)


class MHLAWanAttention(AttentionOnGrid, WanAttention):
    """Self-attention of Wan and VACE."""


class MHLAWanRotaryPosEmbed(RotaryWithGrid, WanRotaryPosEmbed):
    """Rotary tables of Wan and VACE."""


class MHLAWanAnimateAttention(AttentionOnGrid, animate.WanAttention):
    """Self-attention of Wan-Animate."""


class MHLAWanAnimateRotaryPosEmbed(RotaryWithGrid, animate.WanRotaryPosEmbed):
    """Rotary tables of Wan-Animate."""


class MHLASkyReelsV2Attention(AttentionOnGrid, SkyReelsV2Attention):
    """Self-attention of SkyReels-V2."""


class MHLASkyReelsV2RotaryPosEmbed(RotaryWithGrid, SkyReelsV2RotaryPosEmbed):
    """Rotary tables of SkyReels-V2."""


class WanFamilyMixin(KeepsMHLAProcessors):
    """Goes before a model class of the family in the bases of its MHLA version."""

    # 81 frames of 480 × 832: (81 - 1) / 4 + 1 latent frames, 60 × 104 latent pixels in patches of 2 × 2.
    default_grid = (21, 30, 52)
    attention_class: ClassVar[type] = MHLAWanAttention
    module_classes: ClassVar[Mapping[str, type]] = MappingProxyType({"rope": MHLAWanRotaryPosEmbed})

    def _self_attentions(self) -> list[nn.Module]:
        return [block.attn1 for block in self.blocks]

    @classmethod
    def own_inputs(cls, model: Any, grid: tuple[int, ...], text: int, random: Any) -> dict[str, Any]:
        """Return the tokens of an image."""
        width = model.config.image_dim
        return {"encoder_hidden_states_image": random(257, width)} if width else {}


class MHLAWanTransformer3DModel(WanFamilyMixin, WanTransformer3DModel):
    """`WanTransformer3DModel` whose self-attention is MHLA in the chosen layers.

    Takes upstream's arguments plus `mhla`, an `MHLAConfig` or a dict of its options, kept under the key `mhla` of
    `config.json`. `from_pretrained` loads MHLA checkpoints, and ordinary Wan ones with fresh MHLA parameters.
    """

    forward = latents_in_block_order(WanTransformer3DModel, "hidden_states")
    # Rotary tables stay whole, as they carry the grid: layers take their part of them.
    _cp_plan = context_parallel_plan(WanTransformer3DModel, "rope")
    supports_context_parallel = True


class MHLAWanVACETransformer3DModel(WanFamilyMixin, WanVACETransformer3DModel):
    """`WanVACETransformer3DModel` whose self-attention is MHLA in the chosen layers.

    Takes arguments and checkpoints as `MHLAWanTransformer3DModel` does. The layers of `blocks` come first, numbered as
    in Wan, and those of `vace_blocks` after them.
    """

    block_lists = ("blocks",)
    forward = latents_in_block_order(WanVACETransformer3DModel, "hidden_states", "control_hidden_states")

    def _self_attentions(self) -> list[nn.Module]:
        return [block.attn1 for block in (*self.blocks, *self.vace_blocks)]

    @classmethod
    def layer_count(cls, config: Mapping[str, Any]) -> int:
        """Count the control blocks as well."""
        return super().layer_count(config) + len(cls.config_value(config, "vace_layers"))

    @classmethod
    def own_inputs(cls, model: Any, grid: tuple[int, ...], text: int, random: Any) -> dict[str, Any]:
        """Return the control."""
        return {"control_hidden_states": random(model.config.vace_in_channels, *grid)}


class MHLAWanAnimateTransformer3DModel(WanFamilyMixin, animate.WanAnimateTransformer3DModel):
    """`WanAnimateTransformer3DModel` whose self-attention is MHLA in the chosen layers.

    Takes arguments and checkpoints as `MHLAWanTransformer3DModel` does. Attention to text, image and face is softmax.
    """

    # 77 frames of 720 × 1280, and the reference image as a latent frame before theirs.
    default_grid = (21, 45, 80)
    attention_class = MHLAWanAnimateAttention
    module_classes = MappingProxyType({"rope": MHLAWanAnimateRotaryPosEmbed})

    @classmethod
    def own_inputs(cls, model: Any, grid: tuple[int, ...], text: int, random: Any) -> dict[str, Any]:
        """Return pose and face; the first latent frame is the reference image's, the others stand for four frames."""
        frames, side = grid[0], model.config.motion_encoder_size
        return {
            **super().own_inputs(model, grid, text, random),
            "pose_hidden_states": random(model.config.latent_channels, frames - 1, *grid[1:]),
            "face_pixel_values": random(3, 4 * frames - 7, side, side),
        }


class MHLASkyReelsV2Transformer3DModel(WanFamilyMixin, SkyReelsV2Transformer3DModel):
    """`SkyReelsV2Transformer3DModel` whose self-attention is MHLA in the chosen layers.

    Takes arguments and checkpoints as `MHLAWanTransformer3DModel` does. Diffusion forcing works where every frame sees
    all others; causal blocks of frames raise `ValueError`.
    """

    default_grid = (25, 34, 60)
    forward = latents_in_block_order(SkyReelsV2Transformer3DModel, "hidden_states")
    attention_class = MHLASkyReelsV2Attention
    module_classes = MappingProxyType({"rope": MHLASkyReelsV2RotaryPosEmbed})

    @classmethod
    def check_config(cls, config: Mapping[str, Any]) -> None:
        """Refuse causal blocks of frames."""
        _check_not_causal(cls.config_value(config, "num_frame_per_block"))

    def _set_ar_attention(self, causal_block_size: int) -> None:
        _check_not_causal(causal_block_size)
        super()._set_ar_attention(causal_block_size)


def _check_not_causal(frames: int) -> None:
    """Refuse the attention mask of diffusion forcing in blocks of several frames."""
    if frames > 1:
        raise ValueError(
            f"MHLA layers take no attention mask, as diffusion forcing in causal blocks of {frames} frames needs: use "
            "causal_block_size=1."
        )


@dataclass(frozen=True, kw_only=True)
class WanObjective(FlowObjective):
    """Flow matching of videos; samples have `latents` `[C, F, H, W]` and `prompt_embeds` `[L, D]`."""

    name = "wan"
    encoded_names = ("prompt_embeds", "negative_prompt_embeds")
    out_channels = 16

    @classmethod
    def for_run(cls, config: Any, directory: ModelDirectory | None) -> Any:
        """Restrict each of two transformers of a pipeline to its side of the boundary."""
        objective = super().for_run(config, directory)
        boundary = None if directory is None or directory.index is None else directory.index.get("boundary_ratio")
        if directory is None or boundary is None:
            return objective
        is_first = directory.component == "transformer"
        return replace(objective, sigma_range=(float(boundary), 1.0) if is_first else (0.0, float(boundary)))

    def check_model(self, config: Any) -> None:
        """Refuse image-to-video models, and those that are told the frame rate, which are for diffusion forcing."""
        if config.get("inject_sample_info"):
            raise ValueError("model: this is a diffusion-forcing model, which cannot be trained here yet")
        super().check_model(config)

    def frames_per_second(self, directory: ModelDirectory) -> float:
        # Wan 2.2 5B has steps for every token.
        is_faster = "SkyReels" in directory.class_name or (directory.index or {}).get("expand_timesteps")
        return 24.0 if is_faster else 16.0

    def encode_condition(self, pipeline: Any, condition: str | int, length: int | None) -> dict[str, torch.Tensor]:
        embeddings = super().encode_condition(pipeline, condition, length)["prompt_embeds"]
        used = embeddings.abs().sum(dim=1).nonzero()
        return {"prompt_embeds": embeddings[: int(used.max()) + 1 if len(used) else 0]}


@dataclass(frozen=True, kw_only=True)
class WanVACEObjective(WanObjective):
    """Flow matching of videos that nothing but text controls; samples as those of Wan.

    Attributes:
        control: Makes the control of no video, `[1, C, F, H, W]`, for the shape of latents `[F, H, W]` and a device;
            None for a model without pipeline, which cannot be called.
    """

    name = "wan-vace"

    control: Callable[[tuple[int, ...], torch.device], torch.Tensor] | None = field(default=None, compare=False)

    def model_inputs(self, config: Any, noisy: torch.Tensor, levels: torch.Tensor, condition: Tensors) -> Inputs:
        """Return the arguments of `forward`, which predicts the direction `[B, C, F, H, W]`."""
        if self.control is None:
            raise ValueError(
                "model: Wan-VACE needs the VAE of its pipeline to be trained; give the pipeline's directory"
            )
        control = self.control(tuple(noisy.shape[2:]), noisy.device).to(noisy)
        return {
            **super().model_inputs(config, noisy, levels, condition),
            "control_hidden_states": control.expand(len(noisy), *control.shape[1:]),
            "control_hidden_states_scale": noisy.new_ones(len(config["vace_layers"])),
        }

    @classmethod
    def for_run(cls, config: Any, directory: ModelDirectory | None) -> Any:
        """Have the pipeline's VAE encode what controls nothing, once for every size."""
        objective = super().for_run(config, directory)
        if directory is None or directory.index is None:
            return objective
        return replace(objective, control=partial(_without_control, directory.root, directory.sample_size.vae))


@lru_cache(maxsize=8)
def _without_control(
    root: Path, compression: tuple[int, int], shape: tuple[int, ...], device: torch.device
) -> torch.Tensor:
    """Encode the control of Wan-VACE for latents `[F', H', W']` as its pipeline does that of no video: gray, masked.

    Returns:
        `[1, C, F', H', W']`, fp32: what the mask leaves, what it hides, and the mask itself.
    """
    import diffusers

    size = SampleSize(compression, (1, 1, 1)).pixels(shape)
    gray = torch.zeros(1, 3, size["num_frames"], size["height"], size["width"], device=device)
    with damage_named(root), torch.autocast(device.type, enabled=False):
        vae: Any = diffusers.AutoencoderKLWan.from_pretrained(root / "vae", torch_dtype=torch.float32)
        latents = encode_media(vae.to(device), gray)
    return torch.cat([latents, latents, latents.new_ones(1, compression[1] ** 2, *shape)], dim=1)
