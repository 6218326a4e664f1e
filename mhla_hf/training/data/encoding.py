# SPDX-License-Identifier: Apache-2.0
"""Encoding of samples: videos, images, captions and classes to the tensors that a transformer is trained on."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from ..config import CacheConfig
from ..families import Family


# Captions often repeat: all digits have ten between them.
_REMEMBERED_CONDITIONS = 64


class Encoder:
    """Encodes samples of one family with the encoders of its pipeline, on the device that they are on.

    Args:
        family: The family.
        pipeline: The pipeline, without its transformer.
        config: The options.
        num_classes: How many classes the model has; 0 if it is conditioned on text.
        generated: Whether samples are latents already.
    """

    def __init__(
        self, family: Family, pipeline: Any, config: CacheConfig, num_classes: int = 0, generated: bool = False
    ) -> None:
        self.family, self.pipeline, self.config, self.num_classes = family, pipeline, config, num_classes
        self.generated = generated
        self._encode_condition = lru_cache(_REMEMBERED_CONDITIONS)(
            lambda condition: family.encode_condition(pipeline, condition, config)
        )

    @torch.no_grad()
    def latents(self, media: torch.Tensor) -> torch.Tensor:
        """Latents of one sample as `DataSample.load` gives it; see `Family.encode_media`."""
        return media if self.generated else self.family.encode_media(self.pipeline, media)

    @torch.no_grad()
    def condition(self, condition: str | int) -> dict[str, torch.Tensor]:
        """Tensors of a caption or class; see `Family.encode_condition`."""
        return self._encode_condition(condition)

    @torch.no_grad()
    def null_condition(self) -> dict[str, torch.Tensor]:
        """Tensors of a sample without caption or class."""
        return self.family.encode_null_condition(self.pipeline, self.config, self.num_classes)
