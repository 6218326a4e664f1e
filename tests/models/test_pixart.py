# SPDX-License-Identifier: Apache-2.0
"""What is particular to PixArt."""

import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor2_0, FusedAttnProcessor2_0
from peft import LoraConfig

from mhla_hf.models.image import MHLAImageAttnProcessor
from tests.models.image_checks import ImageChecks
from tests.models.model_case import recorded_warnings
from tests.models.pixart_case import PixArtCase


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

    def test_fusing_leaves_mhla_layers_their_processor(self):
        model = self.make_mhla(layers=[1])
        expected = self.run(model)
        model.unfuse_qkv_projections()
        model.fuse_qkv_projections()
        kinds = [type(attention.processor) for attention in model._self_attentions()]
        assert kinds == [FusedAttnProcessor2_0, MHLAImageAttnProcessor]
        torch.testing.assert_close(self.run(model), expected)
        model.unfuse_qkv_projections()
        assert [type(attention.processor) for attention in model._self_attentions()][0] is AttnProcessor2_0
        torch.testing.assert_close(self.run(model), expected)


def test_adapters_are_not_lost_in_fused_projections():
    case = TestPixArt()
    model = case.make_mhla()
    model.fuse_qkv_projections()
    model.fuse_qkv_projections()
    model.unfuse_qkv_projections()
    assert case.run(model).isfinite().all()
    model.add_adapter(LoraConfig(target_modules=["to_q", "to_k", "to_v"]))
    with pytest.raises(ValueError, match="Projections with adapters cannot be fused"):
        model.fuse_qkv_projections()
