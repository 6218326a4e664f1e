# SPDX-License-Identifier: Apache-2.0
"""SANA-Video pipelines."""

import numpy as np
import torch
from diffusers import DiffusionPipeline

from mhla_hf import MHLASanaVideoTransformer3DModel, load_pipeline
from tests import tiny_images
from tests.models.image_pipeline_checks import PromptedPipelineChecks


class TestSanaVideoPipeline(PromptedPipelineChecks):
    mhla_class = MHLASanaVideoTransformer3DModel
    mhla = {"blocks": [2, 1, 2]}
    # Token grids of 2×2×4 and 2×4×2.
    sizes = ((32, 64), (64, 32))
    latents_shape = (16, 2, 8, 4)
    images_per_prompt = "num_videos_per_prompt"

    @classmethod
    def make_pipeline(cls, transformer_cls=None, **overrides):
        return tiny_images.sana_video_pipeline(transformer_cls, **overrides)

    def generate(self, pipeline, size=(32, 64), prompt="a blue seven", **options):
        """The frames of the first video."""
        return self.all_images(pipeline, size, prompt, **options)[0]

    def all_images(self, pipeline, size, prompt, **options):
        pipeline.set_progress_bar_config(disable=True)
        arguments = {
            "height": size[0],
            "width": size[1],
            "frames": 5,
            "num_inference_steps": 2,
            "use_resolution_binning": False,
            "complex_human_instruction": None,
            "max_sequence_length": 16,
            "output_type": "np",
            "generator": torch.Generator().manual_seed(0),
            **options,
        }
        return pipeline(prompt, **arguments).frames

    def test_before_fine_tuning_the_videos_are_those_of_the_original(self, ordinary_dir):
        stock = DiffusionPipeline.from_pretrained(ordinary_dir)
        pipeline = load_pipeline(ordinary_dir, mhla=self.mhla)
        for actual, expected in zip(self.images(pipeline), self.images(stock)):
            np.testing.assert_allclose(actual, expected, atol=1e-4)
