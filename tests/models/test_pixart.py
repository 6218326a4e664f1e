# SPDX-License-Identifier: Apache-2.0
"""PixArt: what is particular to it, the shared checks, and its pipelines."""

import pytest
import torch

from mhla_hf import MHLAPixArtTransformer2DModel, convert
from tests import tiny_images
from tests.models.adapter_checks import AdapterChecks
from tests.models.cases import PixArtCase
from tests.models.compile_checks import CompileChecks
from tests.models.image_checks import ImageChecks
from tests.models.image_pipeline_checks import PromptedPipelineChecks
from tests.models.memory_checks import InPlaceChecks, MemoryChecks
from tests.models.model_case import recorded_warnings
from tests.models.saving_checks import SavingChecks
from tests.models.training_checks import TrainingChecks


class TestPixArt(PixArtCase, ImageChecks):
    patch = 2

    def test_cross_attention_is_not_bothered_with_the_grid(self):
        model = self.make_mhla(layers=[1])
        with recorded_warnings() as warnings:
            self.run(model)
        assert warnings == []

    def test_an_attention_mask_is_refused(self):
        model = self.make_mhla()
        with pytest.raises(ValueError, match="attention_mask"):
            model(**self.inputs(), attention_mask=torch.ones(1, 24))

    def test_fusing_is_refused(self):
        model = self.make_mhla(layers=[1])
        expected = self.run(model)
        with pytest.raises(ValueError, match="cannot be fused"):
            model.fuse_qkv_projections()
        torch.testing.assert_close(self.run(model), expected)
        softmax = self.make()
        softmax.fuse_qkv_projections()
        with pytest.raises(ValueError, match="unfuse_qkv_projections"):
            convert(softmax)


class TestPixArtModel(PixArtCase, SavingChecks, TrainingChecks, AdapterChecks, MemoryChecks, InPlaceChecks):
    block_class = "BasicTransformerBlock"


class TestPixArtCompile(PixArtCase, CompileChecks):
    pass


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
