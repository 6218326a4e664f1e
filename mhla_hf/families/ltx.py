# SPDX-License-Identifier: Apache-2.0
"""MHLA for LTX-Video and LTX-2: self-attention over the grid of a video.

Attention to text, and in LTX-2 that of the audio and between both, stays softmax. As for Wan, the grid travels in the
shape of the rotary tables, which are made from the video's sizes. Those of LTX run over the channels of all heads, so
every head has tables of its own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from diffusers.models.transformers.transformer_ltx import (
    LTXAttention,
    LTXVideoRotaryPosEmbed,
    LTXVideoTransformer3DModel,
)
from diffusers.models.transformers.transformer_ltx2 import (
    LTX2Attention,
    LTX2AudioVideoRotaryPosEmbed,
    LTX2VideoTransformer3DModel,
)

from ..layers import HalfRotary, PairwiseRotary
from ..models.attention import KeepsMHLAProcessor, KeepsMHLAProcessors, MHLAAttnProcessor
from ..models.directory import ModelDirectory
from .objectives import MASKED_NAMES, PADDED, FlowObjective, Inputs, Tensors


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
        rotary_emb = None if image_rotary_emb is None else pairwise_rotary(image_rotary_emb, self.heads)
        return self.processor(self, *arguments, rotary_emb=rotary_emb, grid=grid)


def pairwise_rotary(tables: tuple[torch.Tensor, ...], num_heads: int) -> PairwiseRotary:
    """Return the rotation by cosines and sines `[B, T, H * K]` that have each value twice; copies nothing."""
    return PairwiseRotary(*(table.unflatten(-1, (num_heads, -1))[..., 0::2] for table in tables))


class MHLALTXVideoTransformer3DModel(KeepsMHLAProcessors, LTXVideoTransformer3DModel):
    """`LTXVideoTransformer3DModel` whose self-attention is MHLA in the chosen layers.

    Takes upstream's arguments plus `mhla`, an `MHLAConfig` or a dict of its options, kept under the key `mhla` of
    `config.json`. `from_pretrained` loads MHLA checkpoints, and ordinary LTX ones with fresh MHLA parameters. Calls
    need `num_frames`, `height` and `width`; tokens beside that grid, as keyframes bring, raise `ValueError`. Besides
    it takes `device_map`, which upstream's class does not.
    """

    _no_split_modules = ["LTXVideoTransformerBlock"]

    # 161 frames of 512 × 704: (161 - 1) / 8 + 1 latent frames, and a latent for 32 × 32 pixels.
    default_grid = (21, 16, 22)
    attention_class = MHLALTXAttention
    module_classes = MappingProxyType({"rope": MHLALTXVideoRotaryPosEmbed})


class MHLALTX2AttnProcessor(MHLAAttnProcessor):
    """As for other models, with the perturbed samples of spatio-temporal guidance."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        *args: Any,
        perturbation_mask: torch.Tensor | None = None,
        all_perturbed: bool | torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attend; tokens of samples where `perturbation_mask` `[B, 1, 1]` is 0 attend to themselves alone."""
        attended = functools.partial(super().__call__, attn, hidden_states, *args, **kwargs)
        if perturbation_mask is None:
            return attended()
        if all_perturbed is None:
            all_perturbed = torch.all(perturbation_mask == 0)
        itself = attended(perturbed=True)
        # What follows attention is affine: mixing its outputs is mixing its inputs.
        return itself if all_perturbed else torch.lerp(itself, attended(), perturbation_mask.to(itself))


class MHLALTX2RotaryPosEmbed(LTX2AudioVideoRotaryPosEmbed):
    """Rotary tables that carry the grid of their coordinates `[B, axes, frames, height, width, 2]`."""

    def forward(self, coords: torch.Tensor, device: str | torch.device | None = None) -> tuple[torch.Tensor, ...]:
        tables = super().forward(coords.flatten(2, 4), device)
        return tuple(table.unflatten(_token_axis(self), coords.shape[2:5]) for table in tables)


class MHLALTX2CrossRotaryPosEmbed(LTX2AudioVideoRotaryPosEmbed):
    """Upstream's tables for the same coordinates, for attention between video and audio."""

    def forward(self, coords: torch.Tensor, device: str | torch.device | None = None) -> tuple[torch.Tensor, ...]:
        return super().forward(coords.flatten(2, 4), device)


class MHLALTX2Attention(KeepsMHLAProcessor, LTX2Attention):
    """Self-attention of the video in every layer, MHLA or softmax: as that of LTX-Video."""

    mhla_processor_class = MHLALTX2AttnProcessor

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        query_rotary_emb: tuple[torch.Tensor, ...] | None = None,
        key_rotary_emb: tuple[torch.Tensor, ...] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        grid, axis = None, _token_axis(self)
        if query_rotary_emb is not None and query_rotary_emb[0].ndim > 4:
            grid = tuple(query_rotary_emb[0].shape[axis : axis + 3])
            query_rotary_emb = tuple(table.flatten(axis, axis + 2) for table in query_rotary_emb)
        arguments: tuple[Any, ...] = (hidden_states, encoder_hidden_states, attention_mask)
        if not hasattr(self, "mhla"):
            return super().forward(*arguments, query_rotary_emb, key_rotary_emb, **kwargs)
        rotary_emb: Any = query_rotary_emb
        if rotary_emb is not None and self.rope_type == "split":
            rotary_emb = HalfRotary(*(table.transpose(1, 2) for table in rotary_emb))
        elif rotary_emb is not None:
            rotary_emb = pairwise_rotary(rotary_emb, self.heads)
        return self.processor(self, *arguments, rotary_emb=rotary_emb, grid=grid, **kwargs)


def _token_axis(module: LTX2Attention | LTX2AudioVideoRotaryPosEmbed) -> int:
    """The axis of tokens in rotary tables: `[B, H, T, K / 2]` for halves, `[B, T, H * K]` for pairs."""
    return 2 if module.rope_type == "split" else 1


class MHLALTX2VideoTransformer3DModel(KeepsMHLAProcessors, LTX2VideoTransformer3DModel):
    """`LTX2VideoTransformer3DModel` whose self-attention of the video is MHLA in the chosen layers.

    Takes arguments and checkpoints as `MHLALTXVideoTransformer3DModel` does. Attention of the audio, to text and
    between video and audio is softmax.
    """

    # 121 frames of 512 × 768.
    default_grid = (16, 16, 24)
    attention_class = MHLALTX2Attention
    module_classes = MappingProxyType({"rope": MHLALTX2RotaryPosEmbed, "cross_attn_rope": MHLALTX2CrossRotaryPosEmbed})
    block_streams = ("hidden_states", "audio_hidden_states")
    _no_split_modules = ["LTX2VideoTransformerBlock"]

    @classmethod
    def own_inputs(cls, model: Any, grid: tuple[int, ...], text: int, random: Any) -> dict[str, Any]:
        """Return the audio, 25 latents for a second of 24 frames, and both texts, which LTX-2.3 widens itself."""
        config, sound = model.config, round(25 * (8 * grid[0] - 7) / 24)
        widths = [config.cross_attention_dim, config.audio_cross_attention_dim]
        if config.use_prompt_embeddings:
            widths = [config.caption_channels] * 2
        return {
            "audio_hidden_states": random(sound, config.audio_in_channels),
            "audio_num_frames": sound,
            "encoder_hidden_states": random(text, widths[0]),
            "audio_encoder_hidden_states": random(text, widths[1]),
        }

    @functools.wraps(LTX2VideoTransformer3DModel.forward)
    def forward(
        self,
        hidden_states: torch.Tensor,
        *args: Any,
        num_frames: int | None = None,
        height: int | None = None,
        width: int | None = None,
        fps: float = 24.0,
        video_coords: torch.Tensor | None = None,
        video_self_attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if video_self_attention_mask is not None:
            raise ValueError("MHLA layers take no video_self_attention_mask.")
        batch, num_tokens = hidden_states.shape[:2]
        sizes: Any = (num_frames, height, width)
        patches = self.patch_sizes(self.config)
        grid: Any = tuple(None if size is None else -(-size // patch) for size, patch in zip(sizes, patches))
        check_grid(grid, num_tokens)
        if video_coords is None:
            video_coords = self.rope.prepare_video_coords(batch, *sizes, hidden_states.device, fps=fps)
        check_grid(grid, video_coords.shape[2])
        return super().forward(hidden_states, *args, video_coords=video_coords.unflatten(2, grid), **kwargs)


@dataclass(frozen=True, kw_only=True)
class LTXObjective(FlowObjective):
    """Flow matching of videos.

    Samples have `latents` `[C, F, H, W]`, `prompt_embeds` `[L, D]` and `prompt_attention_mask` `[L]`.

    Attributes:
        temporal_factor: Frames per latent.
        spatial_factor: Pixels of height or width per latent.
        frame_rate: Frames per second of the videos; by default the pipeline's.
    """

    name = "ltx"
    condition_names = PADDED
    encoded_names = MASKED_NAMES
    packed = 1

    temporal_factor: int = 8
    spatial_factor: int = 32
    # Follows from the data, whose fingerprint tells runs apart.
    frame_rate: float = field(default=25.0, compare=False)

    def model_inputs(self, config: Any, noisy: torch.Tensor, levels: torch.Tensor, condition: Tensors) -> Inputs:
        """Return the arguments of `forward`, which predicts the packed direction `[B, F H W, C]`."""
        return {
            **super().model_inputs(config, noisy, levels, condition),
            "encoder_attention_mask": condition["prompt_attention_mask"].bool(),
            **dict(zip(("num_frames", "height", "width"), noisy.shape[2:], strict=True)),
            "rope_interpolation_scale": (
                self.temporal_factor / self.frame_rate,
                self.spatial_factor,
                self.spatial_factor,
            ),
        }

    def frames_per_second(self, directory: ModelDirectory) -> float:
        return self.frame_rate

    def validation_inputs(self, pipeline: Any, config: Any, settings: Mapping[str, Any], **size: Any) -> list[Any]:
        size["frame_rate"] = settings.get("fps") or self.frame_rate
        return super().validation_inputs(pipeline, config, settings, **size)

    @classmethod
    def for_run(cls, config: Any, directory: ModelDirectory | None) -> Any:
        """Take the distances between latents in seconds and pixels from the pipeline's VAE."""
        objective = super().for_run(config, directory)
        if directory is None or directory.index is None:
            return objective
        return replace(objective, **dict(zip(("temporal_factor", "spatial_factor"), directory.sample_size.vae)))
