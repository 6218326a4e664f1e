# SPDX-License-Identifier: Apache-2.0
"""From videos, pictures and captions to what a transformer is trained on: its latents and its condition."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import lru_cache
from typing import Any, ClassVar

import torch

from ...utils.compat.diffusers import call_default
from ..config import CacheConfig


# Captions often repeat: all digits have ten between them.
_REMEMBERED_PROMPTS = 64


class Encoder(ABC):
    """Encodes the data of one family with the encoders of its pipeline, on the device that they are on.

    Args:
        pipeline: The pipeline, without its transformer.
        config: The options.
        num_classes: How many classes the model has; 0 if it is conditioned on text.

    Attributes:
        folders: Parts of the pipeline directory that the result depends on.
    """

    folders: ClassVar[tuple[str, ...]] = ("vae", "text_encoder", "tokenizer")

    def __init__(self, pipeline: Any, config: CacheConfig, num_classes: int = 0) -> None:
        self.pipeline = pipeline
        self.config = config
        self.num_classes = num_classes

    @abstractmethod
    def latents(self, media: torch.Tensor) -> torch.Tensor:
        """Latents of one video or picture, fp32, as the transformer takes them.

        Args:
            media: As `DataSample.load` gives it.
        """

    @abstractmethod
    def condition(self, condition: str | int) -> dict[str, torch.Tensor]:
        """What a sample holds besides latents, text without its padding.

        Args:
            condition: Caption or class, as in `DataSample`.
        """

    @abstractmethod
    def null_condition(self) -> dict[str, torch.Tensor]:
        """The same for a sample without caption or class, as the pipeline's guidance takes it."""


class TextConditionEncoder(Encoder):
    """What models of captions share: prompts that repeat are encoded once."""

    def __init__(self, pipeline: Any, config: CacheConfig, num_classes: int = 0) -> None:
        super().__init__(pipeline, config, num_classes)
        self._remembered = lru_cache(_REMEMBERED_PROMPTS)(self._encode_prompt)

    def condition(self, condition: str | int) -> dict[str, torch.Tensor]:
        """See the base class."""
        return self._remembered(str(condition))

    @abstractmethod
    def _encode_prompt(self, prompt: str) -> dict[str, torch.Tensor]:
        """The condition of a caption."""


class WanEncoder(TextConditionEncoder):
    """Videos `[3, F, H, W]` to `[C, F', H', W']`; captions to `prompt_embeds` `[l, D]`."""

    def latents(self, media: torch.Tensor) -> torch.Tensor:
        """See the base class."""
        return encode_videos(self.pipeline.vae, media[None])[0]

    def null_condition(self) -> dict[str, torch.Tensor]:
        """The empty prompt."""
        return self.condition("")

    @torch.no_grad()
    def _encode_prompt(self, prompt: str) -> dict[str, torch.Tensor]:
        embeddings, _ = self.pipeline.encode_prompt(
            prompt, do_classifier_free_guidance=False, max_sequence_length=self.config.max_sequence_length
        )
        used = embeddings[0].abs().sum(dim=1).nonzero()
        return {"prompt_embeds": embeddings[0, : int(used.max()) + 1 if len(used) else 0]}


class SanaEncoder(TextConditionEncoder):
    """Pictures `[3, H, W]` to `[C, H', W']`; captions to `prompt_embeds` `[l, D]`, `prompt_attention_mask` `[l]`.

    Captions follow the instruction that the pipeline puts before prompts unless told otherwise ("complex human
    instruction"), and the empty prompt is without it: training sees text as inference does.
    """

    @torch.no_grad()
    def latents(self, media: torch.Tensor) -> torch.Tensor:
        """See the base class."""
        vae = self.pipeline.vae
        return _encode(vae, media[None]).latent[0].float() * vae.config.scaling_factor

    @torch.no_grad()
    def null_condition(self) -> dict[str, torch.Tensor]:
        """The empty negative prompt."""
        _, _, embeddings, mask = self.pipeline.encode_prompt(
            "", negative_prompt="", max_sequence_length=self.config.max_sequence_length
        )
        return _without_padding(embeddings[0], mask[0])

    @torch.no_grad()
    def _encode_prompt(self, prompt: str) -> dict[str, torch.Tensor]:
        embeddings, mask, _, _ = self.pipeline.encode_prompt(
            prompt,
            do_classifier_free_guidance=False,
            max_sequence_length=self.config.max_sequence_length,
            complex_human_instruction=sana_instruction(self.pipeline),
        )
        return _without_padding(embeddings[0], mask[0])


class DiTEncoder(Encoder):
    """Pictures `[3, H, W]` to `[C, H', W']`; classes to `class_label` `[]`, int64."""

    folders = ("vae",)

    @torch.no_grad()
    def latents(self, media: torch.Tensor) -> torch.Tensor:
        """The mode of the VAE's distribution, scaled as the pipeline scales it."""
        vae = self.pipeline.vae
        return _encode(vae, media[None]).latent_dist.mode()[0].float() * vae.config.scaling_factor

    def condition(self, condition: str | int) -> dict[str, torch.Tensor]:
        """See the base class."""
        return {"class_label": torch.tensor(int(condition))}

    def null_condition(self) -> dict[str, torch.Tensor]:
        """The label after the last class."""
        return self.condition(self.num_classes)


ENCODERS: dict[str, type[Encoder]] = {"wan": WanEncoder, "sana": SanaEncoder, "dit": DiTEncoder}
"""By the name of the family."""


@torch.no_grad()
def encode_videos(vae: Any, videos: torch.Tensor) -> torch.Tensor:
    """Normalised latents of videos: the mean of the VAE's distribution, less the VAE's mean, over its deviation.

    Args:
        vae: An `AutoencoderKLWan`.
        videos: `[N, 3, F, H, W]` in [-1, 1].

    Returns:
        `[N, C, F', H', W']`, fp32, as Wan's transformer takes it.
    """
    encoded = _encode(vae, videos).latent_dist.mode().float()
    mean = torch.tensor(vae.config.latents_mean, device=encoded.device).view(1, -1, 1, 1, 1)
    deviation = torch.tensor(vae.config.latents_std, device=encoded.device).view(1, -1, 1, 1, 1)
    return (encoded - mean) / deviation


def sana_instruction(pipeline: Any) -> list[str]:
    """The lines that a SANA pipeline puts before prompts when it is called without saying otherwise."""
    return list(call_default(pipeline, "complex_human_instruction"))


def _encode(vae: Any, media: torch.Tensor) -> Any:
    """What a VAE makes of videos or pictures, on its device and in its type."""
    parameter = next(vae.parameters())
    return vae.encode(media.to(parameter.device, parameter.dtype))


def _without_padding(embeddings: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Cuts the padding off embeddings `[L, D]` and their mask `[L]`."""
    used = mask.nonzero()
    # With everything masked, attention would look at the padding: it stays.
    length = int(used.max()) + 1 if len(used) else len(mask)
    return {"prompt_embeds": embeddings[:length], "prompt_attention_mask": mask[:length]}
