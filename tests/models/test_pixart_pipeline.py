# SPDX-License-Identifier: Apache-2.0
"""PixArt-alpha and PixArt-sigma pipelines."""

import torch

from mhla_hf import MHLAPixArtTransformer2DModel, load_pipeline
from tests import tiny_images
from tests.models.image_pipeline_checks import ImagePipelineChecks


class PixArtPipelines(ImagePipelineChecks):
    mhla_class = MHLAPixArtTransformer2DModel
    # Token grids of 4×4, 4×6 and 6×4.
    sizes = ((16, 16), (16, 24), (24, 16))
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
    def test_guidance_and_batches(self, mhla_dir):
        pipeline = load_pipeline(mhla_dir)
        for scale in (1.0, 4.5):
            options = {"num_images_per_prompt": 2, "guidance_scale": scale}
            images = self.generate(pipeline, (16, 24), ["a seven", "a one"], **options)
            assert images.shape == (4, 16, 24, 3)


class TestPixArtSigmaPipeline(PixArtPipelines):
    sigma = True
