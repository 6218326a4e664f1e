# SPDX-License-Identifier: Apache-2.0
"""Wan: text-to-video by flow matching."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ..stages.flow_matching import timesteps_from_sigmas
from .base import Tensors, check_text_width
from .flow import FlowObjective


if TYPE_CHECKING:
    from ..config import TrainingConfig
    from ..loading import PipelineSource


@dataclass(frozen=True, kw_only=True)
class WanObjective(FlowObjective):
    """Flow matching of videos; samples have `latents` `[C, F, H, W]` and `prompt_embeds` `[L, D]`."""

    upstream = "WanTransformer3DModel"
    condition_names = ("prompt_embeds",)

    @classmethod
    def from_run(cls, config: TrainingConfig, source: PipelineSource | None) -> WanObjective:
        """See the base class; of a pipeline with two transformers, each sees its side of the boundary."""
        objective = super().from_run(config, source)
        assert isinstance(objective, WanObjective)
        if source is None:
            return objective
        return replace(objective, sigma_range=sigma_range(source, config.component))

    @classmethod
    def check_config(cls, config: Mapping[str, Any]) -> None:
        """See the base class; image-to-video models are refused."""
        if config.get("in_channels", 16) != config.get("out_channels", 16):
            raise ValueError("model: this is an image-to-video model, which cannot be trained here yet")

    @classmethod
    def check_condition(cls, config: Mapping[str, Any], condition: Tensors) -> None:
        """See the base class."""
        check_text_width(condition["prompt_embeds"], config["text_dim"])

    def model_inputs(
        self, config: Mapping[str, Any], noisy: torch.Tensor, levels: torch.Tensor, condition: Tensors
    ) -> dict[str, Any]:
        """See the base class; the model predicts the direction `[B, C, F, H, W]`."""
        return {
            "hidden_states": noisy,
            "timestep": timesteps_from_sigmas(levels),
            "encoder_hidden_states": condition["prompt_embeds"],
            "return_dict": False,
        }


def sigma_range(source: PipelineSource, component: str) -> tuple[float, float]:
    """The noise levels that a transformer of the pipeline sees: all, or its side of Wan 2.2's boundary."""
    boundary = source.index.get("boundary_ratio")
    if boundary is None:
        return (0.0, 1.0)
    return (float(boundary), 1.0) if component == "transformer" else (0.0, float(boundary))
