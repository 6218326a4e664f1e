# SPDX-License-Identifier: Apache-2.0
"""Wan at tiny size, for the shared checks."""

from diffusers import WanTransformer3DModel

from mhla_hf import MHLAWanTransformer3DModel
from tests import tiny
from tests.models.model_case import ModelCase


class WanCase(ModelCase):
    """Text-to-video; latents of 3×4×8 are a token grid of 3×2×4."""

    upstream = WanTransformer3DModel
    mhla_class = MHLAWanTransformer3DModel
    options = {"blocks": [3, 1, 2], "grid": [3, 2, 4]}
    image_to_video = False
    # Frames, height and width of the latents.
    sizes = ((3, 4, 8), (1, 8, 12), (5, 6, 14))

    def make(self, cls=None, **overrides):
        return tiny.wan_transformer(cls, image_to_video=self.image_to_video, **overrides)

    def inputs(self, size=0, **options):
        frames, height, width = self.sizes[size] if isinstance(size, int) else size
        return tiny.wan_inputs(
            frames=frames, height=height, width=width, image_to_video=self.image_to_video, **options
        )


class WanImageToVideoCase(WanCase):
    """With image cross-attention."""

    image_to_video = True

    def inputs(self, size=0, **options):
        # The model tells image tokens from text by assuming 512 of text.
        return super().inputs(size, **{"text_tokens": 512, **options})
