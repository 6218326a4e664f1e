# SPDX-License-Identifier: Apache-2.0
"""SANA-Video at tiny size, for the shared checks."""

from diffusers import SanaVideoTransformer3DModel

from mhla_hf import MHLASanaVideoTransformer3DModel
from tests import tiny_images
from tests.models.model_case import ModelCase


class SanaVideoCase(ModelCase):
    """Latents of 3×4×8 are a token grid of 3×2×4."""

    upstream = SanaVideoTransformer3DModel
    mhla_class = MHLASanaVideoTransformer3DModel
    options = {"blocks": [3, 1, 2], "grid": [3, 2, 4]}
    block_list = "transformer_blocks"
    # Frames, height and width of the latents.
    sizes = ((3, 4, 8), (1, 8, 12), (5, 6, 14))

    def make(self, cls=None, **overrides):
        return tiny_images.sana_video_transformer(cls, **overrides)

    def inputs(self, size=0, **options):
        frames, height, width = self.sizes[size] if isinstance(size, int) else size
        return tiny_images.sana_video_inputs(frames=frames, height=height, width=width, **options)
