# SPDX-License-Identifier: Apache-2.0
"""PixArt-alpha and PixArt-sigma pipelines."""

import torch

from mhla_hf import MHLAPixArtTransformer2DModel
from tests import tiny_images
from tests.models.image_pipeline_checks import PromptedPipelineChecks


class PixArtPipelines(PromptedPipelineChecks):
    mhla_class = MHLAPixArtTransformer2DModel
    # Token grids of 4×4, 4×6 and 6×4.
    sizes = ((16, 16), (16, 24), (24, 16))
    latents_shape = (4, 8, 12)
    sigma = False

    @classmethod
    def make_pipeline(cls, transformer_cls=None, **overrides):
        return tiny_images.pixart_pipeline(transformer_cls, sigma=cls.sigma, **overrides)

    def generate(self, pipeline, size=(16, 16), prompt="a blue seven", **options):
        pipeline.set_progress_bar_config(disable=True)
        arguments = {
            "height": size[0],
            "width": size[1],
            "num_inference_steps": 2,
            "use_resolution_binning": False,
            "clean_caption": False,
            "max_sequence_length": 16,
            "output_type": "np",
            "generator": torch.Generator().manual_seed(0),
            **options,
        }
        return pipeline(prompt, **arguments).images


class TestPixArtAlphaPipeline(PixArtPipelines):
    pass


class TestPixArtSigmaPipeline(PixArtPipelines):
    sigma = True
