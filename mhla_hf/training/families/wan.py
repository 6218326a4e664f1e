# SPDX-License-Identifier: Apache-2.0
"""Wan: text-to-video by flow matching."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ...utils.files import read_json
from .base import (
    FLOW_OPTIONS,
    TEXT_OPTIONS,
    Family,
    FlowObjective,
    PipelineSizes,
    Tensors,
    encode_with,
    read_count,
    text_width_problem,
)


if TYPE_CHECKING:
    import torch

    from ..config import CacheConfig, TrainingConfig
    from ..data.cache import LatentDataset
    from ..loading import PipelineSource


@dataclass(frozen=True, kw_only=True)
class WanObjective(FlowObjective):
    """Flow matching of videos; samples have `latents` `[C, F, H, W]` and `prompt_embeds` `[L, D]`."""

    upstream = "WanTransformer3DModel"
    condition_names = ("prompt_embeds",)

    @classmethod
    def from_run(cls, config: TrainingConfig, source: PipelineSource | None) -> WanObjective:
        """Restrict each of two transformers of a pipeline to its side of the boundary."""
        objective = super().from_run(config, source)
        assert isinstance(objective, WanObjective)
        return objective if source is None else replace(objective, sigma_range=sigma_range(source))

    @classmethod
    def check_config(cls, config: Mapping[str, Any]) -> None:
        """Refuse image-to-video models."""
        in_channels = config.get("in_channels", 16)
        # As in diffusers, `null` stands for as many as go in.
        if in_channels != (config.get("out_channels", 16) or in_channels):
            raise ValueError("model: this is an image-to-video model, which cannot be trained here yet")

    @classmethod
    def condition_problem(cls, config: Mapping[str, Any], condition: Tensors) -> str | None:
        return text_width_problem(condition["prompt_embeds"], config["text_dim"])

    def model_inputs(
        self, config: Mapping[str, Any], noisy: torch.Tensor, levels: torch.Tensor, condition: Tensors
    ) -> dict[str, Any]:
        """Return the arguments of `forward`, which predicts the direction `[B, C, F, H, W]`."""
        return {
            "hidden_states": noisy,
            "timestep": self.timesteps(levels),
            "encoder_hidden_states": condition["prompt_embeds"],
            "return_dict": False,
        }


class Wan(Family):
    """Videos `[3, F, H, W]` to `[C, F', H', W']`; captions to `prompt_embeds` `[l, D]`."""

    objective = WanObjective
    help = (
        "Fine-tune a Wan pipeline by flow matching.\n\nWith --match-steps, its layers are first matched to the "
        "softmax model."
    )
    options = FLOW_OPTIONS | TEXT_OPTIONS | {"component", "num_frames", "fps"}
    text_length = 512
    video_size = {"height": 480, "width": 832, "num_frames": 81}
    pipeline_options = ("expand_timesteps",)

    def read_sizes(self, source: PipelineSource) -> PipelineSizes:
        vae_path, model_path = source.directory / "vae" / "config.json", source.model.folder / "config.json"
        vae, patch = read_json(vae_path, "the VAE's configuration"), source.model.config.get("patch_size")
        if not isinstance(patch, list) or len(patch) != 3:
            raise ValueError(f"the model's configuration {model_path}: 'patch_size' must be three integers.")
        # Checkpoints older than these entries have the VAE of Wan 2.1.
        spatial = read_count(vae, "scale_factor_spatial", vae_path, default=8)
        temporal = read_count(vae, "scale_factor_temporal", vae_path, default=4)
        height, width = (read_count({"patch_size": side}, "patch_size", model_path) for side in patch[1:])
        return PipelineSizes(self, spatial, temporal, (height, width), 0, 0)

    def encode_media(self, pipeline: Any, media: torch.Tensor) -> torch.Tensor:
        return encode_videos(pipeline.vae, media[None])[0]

    def encode_condition(self, pipeline: Any, condition: str | int, config: CacheConfig) -> dict[str, torch.Tensor]:
        embeddings, _ = pipeline.encode_prompt(
            str(condition), do_classifier_free_guidance=False, max_sequence_length=config.max_sequence_length
        )
        used = embeddings[0].abs().sum(dim=1).nonzero()
        return {"prompt_embeds": embeddings[0, : int(used.max()) + 1 if len(used) else 0]}

    def encode_null_condition(self, pipeline: Any, config: CacheConfig, num_classes: int) -> dict[str, torch.Tensor]:
        """Encode the empty prompt."""
        return self.encode_condition(pipeline, "", config)

    def validation_inputs(
        self, pipeline: Any, source: PipelineSource, config: TrainingConfig, dataset: LatentDataset
    ) -> list[dict[str, Any]]:
        settings = dataset.settings
        embeddings, negative = pipeline.encode_prompt(
            list(config.validation_prompts),
            negative_prompt=config.validation_negative_prompt,
            max_sequence_length=settings["max_sequence_length"],
            device=pipeline.text_encoder.device,
        )
        size = {name: settings[name] for name in ("height", "width", "num_frames")}
        return [
            {"prompt_embeds": own[None].cpu(), "negative_prompt_embeds": other[None].cpu(), **size}
            for own, other in zip(embeddings, negative, strict=True)
        ]


def sigma_range(source: PipelineSource) -> tuple[float, float]:
    """Return the noise levels that a transformer is used at: all, or its side of Wan 2.2's boundary."""
    boundary = source.index.get("boundary_ratio")
    if boundary is None:
        return (0.0, 1.0)
    return (float(boundary), 1.0) if source.component == "transformer" else (0.0, float(boundary))


def encode_videos(vae: Any, videos: torch.Tensor) -> torch.Tensor:
    """Encode videos to normalised latents: the mean of the distribution, less the VAE's mean, over its deviation.

    Args:
        vae: An `AutoencoderKLWan`.
        videos: `[N, 3, F, H, W]` in [-1, 1].

    Returns:
        `[N, C, F', H', W']`, fp32, as Wan's transformer takes it.
    """
    import torch

    with torch.no_grad():
        encoded = encode_with(vae, videos).latent_dist.mode().float()
    mean = torch.tensor(vae.config.latents_mean, device=encoded.device).view(1, -1, 1, 1, 1)
    deviation = torch.tensor(vae.config.latents_std, device=encoded.device).view(1, -1, 1, 1, 1)
    return (encoded - mean) / deviation
