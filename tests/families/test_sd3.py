# SPDX-License-Identifier: Apache-2.0
"""Stable Diffusion 3 and 3.5: a second attention, other sizes, recovery and the shared checks."""

import copy
import json

import pytest
import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline
from peft import LoraConfig, get_peft_model_state_dict
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, T5Config, T5EncoderModel

import mhla_hf
from mhla_hf import MHLASD3Transformer2DModel, convert, unconvert
from mhla_hf.training.layers import mhla_layers, original_heads
from tests import tiny
from tests.families.checks import ModelChecks
from tests.families.image_pipeline_checks import command
from tests.families.joint_checks import JointCase, JointChecks
from tests.families.model_case import captured, recorded_warnings, relative_error


SD3 = {
    "sample_size": 8,
    "num_layers": 3,
    "attention_head_dim": 12,
    "num_attention_heads": 2,
    "in_channels": 4,
    "out_channels": 4,
    "joint_attention_dim": 16,
    "caption_projection_dim": 24,
    "pooled_projection_dim": 16,
    "pos_embed_max_size": 24,
    "qk_norm": "rms_norm",
}


def pipeline(**overrides):
    """A pipeline with three encoders of prompts; 2×2 pixels are a latent, and 2×2 of those a token."""
    torch.manual_seed(0)
    tokenizer = tiny.character_tokenizer()
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2}
    ends = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    clip = CLIPTextConfig(**sizes, **ends, num_attention_heads=2, projection_dim=8)
    t5 = T5Config(vocab_size=len(tokenizer), d_model=16, d_ff=16, d_kv=4, num_layers=1, num_heads=2)
    vae = AutoencoderKL(
        block_out_channels=(4, 4),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=2,
        sample_size=16,
        shift_factor=0.0,
    )
    tokenizers = [copy.deepcopy(tokenizer) for _ in range(3)]
    for each in tokenizers[:2]:
        each.model_max_length = 77
    parts = dict(zip(("tokenizer", "tokenizer_2", "tokenizer_3"), tokenizers))
    encoders = (CLIPTextModelWithProjection(clip), CLIPTextModelWithProjection(clip), T5EncoderModel(t5))
    parts |= dict(zip(("text_encoder", "text_encoder_2", "text_encoder_3"), (each.eval() for each in encoders)))
    made = StableDiffusion3Pipeline(
        transformer=SD3Case().make(**overrides), vae=vae.eval(), scheduler=FlowMatchEulerDiscreteScheduler(), **parts
    )
    made.set_progress_bar_config(disable=True)
    return made


def latents_of(pipeline):
    """Latents that a pipeline makes of a prompt in two steps."""
    generator = torch.Generator().manual_seed(0)
    options = {"height": 16, "width": 24, "num_inference_steps": 2, "max_sequence_length": 16, "output_type": "latent"}
    return pipeline("a seven", generator=generator, **options)[0]


class SD3Case(JointCase):
    """Latents of 8×12 are a token grid of 4×6."""

    config = SD3
    mhla_class = MHLASD3Transformer2DModel
    make_pipeline = staticmethod(pipeline)
    latents_of = staticmethod(latents_of)
    full_size = {"height": 16, "width": 16}
    is_padded = False
    block_class = "JointTransformerBlock"
    options = {"blocks": [2, 3], "grid": [4, 6]}
    # What the last block makes of the text.
    unused = ("attn.add_q_proj", "attn.norm_added_q")
    sizes = ((8, 12), (4, 24), (10, 14))


class SD35Case(SD3Case):
    """With a second attention in the first block."""

    config = {**SD3, "dual_attention_layers": (0,)}


class TestSD3(SD3Case, JointChecks, ModelChecks):
    def test_fusing_is_refused(self):
        with pytest.raises(ValueError, match="cannot be fused"):
            self.make_mhla().fuse_qkv_projections()

    def test_other_sizes_and_controls(self):
        """Squares tell nothing of the order of axes; controls are added to the hidden states."""
        model, inputs, random = self.make_mhla(), self.inputs((16, 4)), torch.Generator().manual_seed(2)
        control = {"block_controlnet_hidden_states": [torch.randn(1, 16, 24, generator=random)]}
        with torch.no_grad():
            output, controlled = (model(**inputs, **more).sample for more in ({}, control))
        assert output.shape == (1, 4, 16, 4) and relative_error(controlled, output) > 1e-3


def test_gradients_equal_those_of_the_naive_form(monkeypatch):
    assert SD3Case().naive_gradient_error({}, monkeypatch) < 1e-8


def test_the_second_attention_stays_softmax():
    case = SD35Case()
    model, stock = case.make_mhla(layers=[1, 2]), case.make()
    stock.load_state_dict({name: value for name, value in model.state_dict().items() if ".mhla." not in name})
    blocks = [each.transformer_blocks[0] for each in (model, stock)]
    with recorded_warnings() as warnings, captured(blocks[0]) as ours, captured(blocks[1]) as theirs:
        case.run(model, 2), case.run(stock, 2)
    assert warnings == []
    assert all(torch.equal(*pair) for pair in zip(ours[0].output, theirs[0].output))
    assert not hasattr(model.transformer_blocks[0].attn2, "mhla") and model.mhla_layers == [1, 2]


@pytest.mark.parametrize("case", [SD3Case(), SD35Case()], ids=["3", "3.5"])
def test_the_original_is_the_softmax_model(case):
    """In float64, with the norms and text that calibration and matching see."""
    stock = case.make().double()
    model = convert(copy.deepcopy(stock), case.options)
    with original_heads(mhla_layers(model)):
        for size in range(3):
            output, expected = (case.run(each, size, batch=2, dtype=torch.float64) for each in (model, stock))
            assert relative_error(output, expected) < 1e-12
    assert torch.equal(case.run(unconvert(model), dtype=torch.float64), case.run(stock, dtype=torch.float64))


def test_recovery_from_its_own_pipeline(tmp_path):
    pipeline().save_pretrained(tmp_path / "source")
    with pytest.raises(ValueError, match="data have no effect on sd3 models"):
        mhla_hf.recover(tmp_path / "source", tmp_path / "out", "digits")
    changes = {"data.samples": 6, "data.held_out": 2, "data.height": 16, "data.width": 24, "mhla.blocks": [2, 2]}
    changes |= {"calibrate.batches": 4, "calibrate.fit_steps": 6, "match.steps": 4, "match.batches": 4}
    changes |= {"blockwise.batches": 4, "data.max_length": 16}
    report = mhla_hf.recover(tmp_path / "source", tmp_path / "out", changes=changes, device="cpu", progress=False)
    assert list(report.figures) == ["softmax", "converted", "calibrate", "match", "blockwise"]
    assert report.figures["blockwise"]["cosine"] > report.figures["converted"]["cosine"]


def test_estimates(tmp_path):
    SD3Case().make(pos_embed_max_size=96).save_config(tmp_path)
    result = command("estimate", tmp_path, "--height", 512, "--width", 768, "--json", tmp_path / "out.json")
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["grid"], found["layers"]) == ([32, 48], 3)


def test_lora_of_the_pipeline(tmp_path):
    stock = pipeline()
    converted = convert(stock, {"blocks": [2, 2]})
    before = latents_of(converted)
    converted.transformer.add_adapter(
        LoraConfig(r=2, lora_alpha=2, target_modules=["to_q", "add_k_proj"], init_lora_weights=False)
    )
    adapted = latents_of(converted)
    assert relative_error(adapted, before) > 1e-4
    layers = get_peft_model_state_dict(converted.transformer)
    StableDiffusion3Pipeline.save_lora_weights(tmp_path, transformer_lora_layers=layers)
    converted.transformer.delete_adapters("default")
    torch.testing.assert_close(latents_of(converted), before)
    converted.load_lora_weights(tmp_path)
    torch.testing.assert_close(latents_of(converted), adapted)
