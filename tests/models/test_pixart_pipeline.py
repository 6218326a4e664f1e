# SPDX-License-Identifier: Apache-2.0
"""PixArt-alpha and PixArt-sigma pipelines."""

from mhla_hf import MHLAPixArtTransformer2DModel
from tests import tiny_images
from tests.models.image_pipeline_checks import PromptedPipelineChecks


class PixArtPipelines(PromptedPipelineChecks):
    mhla_class = MHLAPixArtTransformer2DModel
    # Token grids of 4×4, 4×6 and 6×4.
    sizes = ((16, 16), (16, 24), (24, 16))
    own_options = {"clean_caption": False}
    latents_shape = (4, 8, 12)
    sigma = False

    @classmethod
    def make_pipeline(cls, transformer_cls=None, **overrides):
        return tiny_images.pixart_pipeline(transformer_cls, sigma=cls.sigma, **overrides)


class TestPixArtAlphaPipeline(PixArtPipelines):
    pass


class TestPixArtSigmaPipeline(PixArtPipelines):
    sigma = True
