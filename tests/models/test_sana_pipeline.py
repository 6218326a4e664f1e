# SPDX-License-Identifier: Apache-2.0
"""SANA and SANA-Sprint pipelines."""

import numpy as np
import pytest
from diffusers import DiffusionPipeline

from mhla_hf import MHLASanaTransformer2DModel, load_pipeline
from tests import tiny_images
from tests.models.image_pipeline_checks import PromptedPipelineChecks, command


class SanaPipelines(PromptedPipelineChecks):
    mhla_class = MHLASanaTransformer2DModel
    # Token grids of 4×4, 4×6 and 6×4.
    sizes = ((128, 128), (128, 192), (192, 128))
    # The model is for 16×16.
    mhla = {"blocks": [2, 2], "grid": [4, 4]}
    own_options = {"complex_human_instruction": None}
    latents_shape = (4, 4, 6)
    size_in_between = (400, 600)
    sprint = False

    @classmethod
    def make_pipeline(cls, transformer_cls=None, **overrides):
        return tiny_images.sana_pipeline(transformer_cls, sprint=cls.sprint, **overrides)

    @pytest.mark.parametrize("blocks", [[1, 1], [2, 2], [3, 2]], ids=str)
    def test_before_fine_tuning_the_images_are_those_of_the_original(self, blocks, ordinary_dir, tmp_path):
        stock = DiffusionPipeline.from_pretrained(ordinary_dir)
        pipeline = load_pipeline(ordinary_dir, mhla={**self.mhla, "blocks": blocks})
        for actual, expected in zip(self.images(pipeline), self.images(stock)):
            np.testing.assert_allclose(actual, expected, atol=1e-4)
        result = command(
            "convert", ordinary_dir, tmp_path / "mhla", "--blocks", ",".join(map(str, blocks)), "--grid", "4,4"
        )
        assert result.exit_code == 0, result.output
        converted = DiffusionPipeline.from_pretrained(tmp_path / "mhla")
        np.testing.assert_allclose(self.generate(converted), self.generate(stock), atol=1e-4)
        linear = load_pipeline(ordinary_dir, mhla={**self.mhla, "mixing_init": "linear"})
        assert np.abs(self.generate(linear) - self.generate(stock)).max() > 1e-3

    def test_resolution_binning(self, ordinary_dir):
        """Sizes in between are drawn at the nearest of the model's own and cut."""
        stock = DiffusionPipeline.from_pretrained(ordinary_dir)
        pipeline = load_pipeline(ordinary_dir, mhla=self.mhla)
        size = self.size_in_between
        options = {"use_resolution_binning": True, "num_inference_steps": 1, **self.without_noise}
        actual, expected = (self.generate(each, size, **options) for each in (pipeline, stock))
        assert actual.shape == (1, *size, 3)
        np.testing.assert_allclose(actual, expected, atol=1e-4)


class TestSanaPipeline(SanaPipelines):
    trained_as = "sana"


class TestSanaSprintPipeline(SanaPipelines):
    size_in_between = (900, 1100)
    without_noise = {"num_inference_steps": 1, "intermediate_timesteps": None}
    sprint = True
