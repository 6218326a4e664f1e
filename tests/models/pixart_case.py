# SPDX-License-Identifier: Apache-2.0
"""PixArt at tiny size, for the shared checks."""

from diffusers import PixArtTransformer2DModel

from mhla_hf import MHLAPixArtTransformer2DModel
from tests import tiny_images
from tests.models.model_case import ModelCase


class PixArtCase(ModelCase):
    """Latents of 8×12 are a token grid of 4×6."""

    upstream = PixArtTransformer2DModel
    mhla_class = MHLAPixArtTransformer2DModel
    options = {"blocks": [2, 3], "grid": [4, 6]}
    block_list = "transformer_blocks"
    # Height and width of the latents.
    sizes = ((8, 12), (4, 24), (10, 14))

    def make(self, cls=None, **overrides):
        return tiny_images.pixart_transformer(cls, **overrides)

    def inputs(self, size=0, **options):
        height, width = self.sizes[size] if isinstance(size, int) else size
        return tiny_images.pixart_inputs(height=height, width=width, **options)
