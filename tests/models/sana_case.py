# SPDX-License-Identifier: Apache-2.0
"""SANA at tiny size, for the shared checks."""

from diffusers import SanaTransformer2DModel

from mhla_hf import MHLASanaTransformer2DModel
from tests import tiny_images
from tests.models.model_case import ModelCase


class SanaCase(ModelCase):
    """Every latent is a token."""

    upstream = SanaTransformer2DModel
    mhla_class = MHLASanaTransformer2DModel
    options = {"blocks": [2, 3], "grid": [4, 6]}
    block_list = "transformer_blocks"
    sprint = False
    # Height and width of the latents.
    sizes = ((4, 6), (2, 12), (5, 7))

    def make(self, cls=None, **overrides):
        return tiny_images.sana_transformer(cls, sprint=self.sprint, **overrides)

    def inputs(self, size=0, **options):
        height, width = self.sizes[size] if isinstance(size, int) else size
        return tiny_images.sana_inputs(height=height, width=width, sprint=self.sprint, **options)


class SanaSprintCase(SanaCase):
    """With norms of queries and keys, and the guidance scale as an input."""

    sprint = True
