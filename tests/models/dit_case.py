# SPDX-License-Identifier: Apache-2.0
"""DiT at tiny size, for the shared checks."""

from diffusers import DiTTransformer2DModel

from mhla_hf import MHLADiTTransformer2DModel
from tests import tiny_images
from tests.models.model_case import ModelCase


class DiTCase(ModelCase):
    """Latents of 8×12 are a token grid of 4×6."""

    upstream = DiTTransformer2DModel
    mhla_class = MHLADiTTransformer2DModel
    options = {"blocks": [2, 3], "grid": [4, 6]}
    block_list = "transformer_blocks"
    # Square images only.
    upstream_size = (8, 8)
    # Height and width of the latents.
    sizes = ((8, 12), (4, 24), (10, 14))

    def make(self, cls=None, **overrides):
        model = tiny_images.dit_transformer(cls, **overrides)
        for block in model.transformer_blocks:
            # Labels are dropped at random in training: two runs would not be the same.
            block.norm1.emb.class_embedder.dropout_prob = 0
        return model

    def inputs(self, size=0, **options):
        height, width = self.sizes[size] if isinstance(size, int) else size
        return tiny_images.dit_inputs(height=height, width=width, **options)
