# SPDX-License-Identifier: Apache-2.0
"""PixArt: what is particular to it, the shared checks, and its pipelines."""

import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor2_0, FusedAttnProcessor2_0
from peft import LoraConfig

from mhla_hf import MHLAPixArtTransformer2DModel, convert
from mhla_hf.models.attention import MHLAAttnProcessor
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

    def test_fusing_leaves_mhla_layers_their_processor(self):
        model = self.make_mhla(layers=[1])
        expected = self.run(model)
        model.unfuse_qkv_projections()
        model.fuse_qkv_projections()
        kinds = [type(attention.processor) for attention in model._self_attentions()]
        assert kinds == [FusedAttnProcessor2_0, MHLAAttnProcessor]
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


def test_fused_projections_take_no_adapters(tmp_path):
    case, lora = TestPixArt(), LoraConfig(target_modules=["to_q", "to_k", "to_v"])
    trained = case.make_mhla()
    trained.add_adapter(lora)
    trained.save_lora_adapter(tmp_path)
    model = case.make_mhla()
    expected, keys = case.run(model), set(model.state_dict())
    model.fuse_qkv_projections()
    with pytest.raises(ValueError, match="call unfuse_qkv_projections"):
        model.add_adapter(lora)
    with pytest.raises(ValueError, match="call unfuse_qkv_projections"):
        model.load_lora_adapter(tmp_path, use_safetensors=True, prefix=None)
    torch.testing.assert_close(case.run(model), expected)
    model.unfuse_qkv_projections()
    assert set(model.state_dict()) == keys
    model.load_lora_adapter(tmp_path, use_safetensors=True, prefix=None)
    assert set(model.state_dict()) != keys


@pytest.mark.parametrize("layers", [[1], None], ids=["hybrid", "all"])
def test_a_model_whose_projections_were_fused_converts(layers):
    case = TestPixArt()
    options = {**case.options, "layers": layers}
    expected = case.run(convert(case.make(), options))
    stock = case.make()
    keys = set(stock.state_dict())
    stock.fuse_qkv_projections()
    model = convert(stock, options)
    torch.testing.assert_close(case.run(model), expected)
    model.unfuse_qkv_projections()
    kinds = {type(attention.processor) for attention in model._self_attentions()}
    assert kinds == ({MHLAAttnProcessor} if layers is None else {MHLAAttnProcessor, AttnProcessor2_0})
    assert {name for name in model.state_dict() if ".mhla." not in name} == keys
    torch.testing.assert_close(case.run(model), expected)


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
