# SPDX-License-Identifier: Apache-2.0
"""SANA and SANA-Sprint pipelines."""

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline

from mhla_hf import MHLASanaTransformer2DModel, load_pipeline
from tests import tiny_images
from tests.models.image_pipeline_checks import ImagePipelineChecks


class SanaPipelines(ImagePipelineChecks):
    mhla_class = MHLASanaTransformer2DModel
    # Token grids of 4×4, 4×6 and 6×4.
    sizes = ((128, 128), (128, 192), (192, 128))
    # The model is for 16×16.
    mhla = {"blocks": [2, 2], "grid": [4, 4]}
    sprint = False

    @classmethod
    def make_pipeline(cls, transformer_cls=None, **overrides):
        return tiny_images.sana_pipeline(transformer_cls, sprint=cls.sprint, **overrides)

    def generate(self, pipeline, size=(128, 128), prompt="a blue seven", **options):
        pipeline.set_progress_bar_config(disable=True)
        arguments = {
            "height": size[0],
            "width": size[1],
            "num_inference_steps": 2,
            "use_resolution_binning": False,
            "complex_human_instruction": None,
            "max_sequence_length": 16,
            "output_type": "np",
            "generator": torch.Generator().manual_seed(0),
            **options,
        }
        return pipeline(prompt, **arguments).images

    @pytest.mark.parametrize("blocks", [[1, 1], [2, 2], [3, 2]], ids=str)
    def test_before_fine_tuning_the_images_are_those_of_the_original(self, blocks, ordinary_dir):
        stock = DiffusionPipeline.from_pretrained(ordinary_dir)
        pipeline = load_pipeline(ordinary_dir, mhla={**self.mhla, "blocks": blocks})
        for actual, expected in zip(self.images(pipeline), self.images(stock)):
            np.testing.assert_allclose(actual, expected, atol=1e-4)
        linear = load_pipeline(ordinary_dir, mhla={**self.mhla, "mixing_init": "linear"})
        assert np.abs(self.generate(linear) - self.generate(stock)).max() > 1e-3


class TestSanaPipeline(SanaPipelines):
    def test_resolution_binning(self, ordinary_dir):
        """Sizes in between are drawn at the nearest of the model's own and cut."""
        stock = DiffusionPipeline.from_pretrained(ordinary_dir)
        pipeline = load_pipeline(ordinary_dir, mhla=self.mhla)
        size = (400, 600)
        options = {"use_resolution_binning": True, "num_inference_steps": 1}
        actual, expected = (self.generate(each, size, **options) for each in (pipeline, stock))
        assert actual.shape == (1, *size, 3)
        np.testing.assert_allclose(actual, expected, atol=1e-4)

    def test_guidance_and_batches(self, mhla_dir):
        pipeline = load_pipeline(mhla_dir)
        latents = torch.randn(4, 4, 4, 6, generator=torch.Generator().manual_seed(1))
        # Of one length: for several prompts and images of each, upstream mixes up the masks of their padding.
        prompts = ["a blue seven", "a green four"]
        for scale in (1.0, 4.5):
            options = {"size": (128, 192), "guidance_scale": scale}
            together = self.generate(pipeline, prompt=prompts, num_images_per_prompt=2, latents=latents, **options)
            assert together.shape == (4, 128, 192, 3)
            apart = [
                self.generate(pipeline, prompt=prompts[index // 2], latents=latents[index : index + 1], **options)[0]
                for index in range(4)
            ]
            np.testing.assert_allclose(together, np.stack(apart), atol=1e-4)


class TestSanaSprintPipeline(SanaPipelines):
    sprint = True
