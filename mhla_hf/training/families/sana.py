# SPDX-License-Identifier: Apache-2.0
"""SANA: text-to-image by flow matching."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..stages.flow_matching import timesteps_from_sigmas
from .base import Tensors, check_text_width
from .flow import FlowObjective


@dataclass(frozen=True, kw_only=True)
class SanaObjective(FlowObjective):
    """Flow matching of pictures.

    Samples have `latents` `[C, H, W]`, `prompt_embeds` `[L, D]` and `prompt_attention_mask` `[L]`.
    """

    upstream = "SanaTransformer2DModel"
    condition_names = ("prompt_embeds", "prompt_attention_mask")

    @classmethod
    def check_config(cls, config: Mapping[str, Any]) -> None:
        """See the base class; SANA-Sprint, which is distilled, is refused."""
        if config.get("guidance_embeds"):
            raise ValueError(
                "model: this is a SANA-Sprint model, which is distilled and not trained by flow matching; train the "
                "SANA model that it comes from"
            )
        channels = config.get("in_channels", 32)
        if config.get("out_channels") not in (None, channels):
            raise ValueError(
                f"model: out_channels must be in_channels for flow matching, {channels}, got {config['out_channels']}"
            )

    @classmethod
    def check_condition(cls, config: Mapping[str, Any], condition: Tensors) -> None:
        """See the base class."""
        embeddings, mask = condition["prompt_embeds"], condition["prompt_attention_mask"]
        check_text_width(embeddings, config["caption_channels"])
        if mask.shape != embeddings.shape[:1]:
            raise ValueError(
                f"prompt_attention_mask must have one entry for each of the {len(embeddings)} tokens of "
                f"prompt_embeds, got {tuple(mask.shape)}"
            )

    def model_inputs(
        self, config: Mapping[str, Any], noisy: torch.Tensor, levels: torch.Tensor, condition: Tensors
    ) -> dict[str, Any]:
        """See the base class; the model predicts the direction `[B, C, H, W]`."""
        return {
            "hidden_states": noisy,
            "encoder_hidden_states": condition["prompt_embeds"],
            "encoder_attention_mask": condition["prompt_attention_mask"],
            # As the pipeline hands it over.
            "timestep": timesteps_from_sigmas(levels) * config["timestep_scale"],
            "return_dict": False,
        }
