# SPDX-License-Identifier: Apache-2.0
"""SANA: text-to-image by flow matching."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .base import FLOW_OPTIONS, TEXT_OPTIONS, Family, FlowObjective, Tensors, encode_with, text_width_problem


if TYPE_CHECKING:
    import torch

    from ..config import CacheConfig, TrainingConfig
    from ..data.cache import LatentDataset
    from ..loading import PipelineSource


@dataclass(frozen=True, kw_only=True)
class SanaObjective(FlowObjective):
    """Flow matching of images.

    Samples have `latents` `[C, H, W]`, `prompt_embeds` `[L, D]` and `prompt_attention_mask` `[L]`.
    """

    upstream = "SanaTransformer2DModel"
    condition_names = ("prompt_embeds", "prompt_attention_mask")

    @classmethod
    def check_config(cls, config: Mapping[str, Any]) -> None:
        """Refuse SANA-Sprint, which is distilled."""
        if config.get("guidance_embeds"):
            raise ValueError(
                "model: this is a SANA-Sprint model, which is distilled and not trained by flow matching; train the "
                "SANA model that it comes from"
            )

    @classmethod
    def condition_problem(cls, config: Mapping[str, Any], condition: Tensors) -> str | None:
        embeddings, mask = condition["prompt_embeds"], condition["prompt_attention_mask"]
        if mask.shape != embeddings.shape[:1]:
            return (
                f"prompt_attention_mask must have one entry for each of the {len(embeddings)} tokens of "
                f"prompt_embeds, got {tuple(mask.shape)}"
            )
        return text_width_problem(embeddings, config["caption_channels"])

    def model_inputs(
        self, config: Mapping[str, Any], noisy: torch.Tensor, levels: torch.Tensor, condition: Tensors
    ) -> dict[str, Any]:
        """Return the arguments of `forward`, which predicts the direction `[B, C, H, W]`."""
        return {
            "hidden_states": noisy,
            "encoder_hidden_states": condition["prompt_embeds"],
            "encoder_attention_mask": condition["prompt_attention_mask"],
            # As the pipeline hands it over.
            "timestep": self.timesteps(levels) * config["timestep_scale"],
            "return_dict": False,
        }


class Sana(Family):
    """Images `[3, H, W]` to `[C, H', W']`; captions to `prompt_embeds` `[l, D]`, `prompt_attention_mask` `[l]`.

    Captions follow the instruction that the pipeline puts before prompts by default ("complex human instruction"), and
    the empty prompt goes without it: training sees text as inference does.
    """

    objective = SanaObjective
    help = (
        "Fine-tune a SANA pipeline by flow matching.\n\nWith --match-steps, layers that do not start from SANA's "
        "linear attention are first matched to it."
    )
    options = FLOW_OPTIONS | TEXT_OPTIONS
    text_length = 300

    def encode_media(self, pipeline: Any, media: torch.Tensor) -> torch.Tensor:
        vae = pipeline.vae
        return encode_with(vae, media[None]).latent[0].float() * vae.config.scaling_factor

    def encode_condition(self, pipeline: Any, condition: str | int, config: CacheConfig) -> dict[str, torch.Tensor]:
        embeddings, mask, _, _ = pipeline.encode_prompt(
            str(condition),
            do_classifier_free_guidance=False,
            max_sequence_length=config.max_sequence_length,
            complex_human_instruction=sana_instruction(pipeline),
        )
        return _without_padding(embeddings[0], mask[0])

    def encode_null_condition(self, pipeline: Any, config: CacheConfig, num_classes: int) -> dict[str, torch.Tensor]:
        """Encode the empty negative prompt."""
        _, _, embeddings, mask = pipeline.encode_prompt(
            "", negative_prompt="", max_sequence_length=config.max_sequence_length
        )
        return _without_padding(embeddings[0], mask[0])

    def validation_inputs(
        self, pipeline: Any, source: PipelineSource, config: TrainingConfig, dataset: LatentDataset
    ) -> list[dict[str, Any]]:
        names = [f"{kind}prompt_{part}" for kind in ("", "negative_") for part in ("embeds", "attention_mask")]
        encoded = pipeline.encode_prompt(
            list(config.validation_prompts),
            negative_prompt=config.validation_negative_prompt,
            max_sequence_length=dataset.settings["max_sequence_length"],
            complex_human_instruction=sana_instruction(pipeline),
            device=pipeline.text_encoder.device,
        )
        common = {
            # By default it is an empty text, which the pipeline refuses beside embeddings.
            "negative_prompt": None,
            "height": dataset.settings["height"],
            "width": dataset.settings["width"],
            "use_resolution_binning": False,
        }
        by_prompt = zip(*(tensor.cpu().split(1) for tensor in encoded), strict=True)
        return [{**dict(zip(names, tensors, strict=True)), **common} for tensors in by_prompt]


def sana_instruction(pipeline: Any) -> list[str]:
    """Return the lines that a SANA pipeline puts before prompts by default."""
    from ...utils.compat.diffusers import call_default

    return list(call_default(pipeline, "complex_human_instruction"))


def _without_padding(embeddings: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Cut the padding off embeddings `[L, D]` and their mask `[L]`."""
    used = mask.nonzero()
    # With everything masked, attention would look at the padding: it stays.
    length = int(used.max()) + 1 if len(used) else len(mask)
    return {"prompt_embeds": embeddings[:length], "prompt_attention_mask": mask[:length]}
