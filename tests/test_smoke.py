# SPDX-License-Identifier: Apache-2.0
"""Every part once, in seconds: for environments with the core dependencies and pytest alone (`make test-lowest`)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import mhla_hf
from mhla_hf.cli.main import app
from mhla_hf.demo import base_pipeline_directory
from tests.integrations.transformers.tiny_models import inputs, softmax_model
from tests.tiny import wan_inputs, wan_transformer


LLAMA, WAN = {"block_size": 4}, {"blocks": [1, 2, 2]}


def command(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.output


@torch.no_grad()
def output(model: torch.nn.Module, given: dict) -> torch.Tensor:
    return model.eval()(**given)[0]


def test_every_public_name_is_there():
    assert all(getattr(mhla_hf, name) is not None for name in mhla_hf.__all__)


@pytest.mark.parametrize(
    ("make", "given", "options"),
    [(lambda: softmax_model("llama"), inputs("llama"), LLAMA), (wan_transformer, wan_inputs(), WAN)],
    ids=["llama", "wan"],
)
def test_models_are_converted_saved_and_loaded(make, given, options, tmp_path):
    model = make()
    softmax = output(model, given)
    model = mhla_hf.convert(model, mhla_hf.MHLAConfig(**options))
    expected = output(model, given)
    assert expected.shape == softmax.shape and not torch.allclose(expected, softmax, atol=1e-4)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(output(type(model).from_pretrained(tmp_path), given), expected)


def test_language_models_generate():
    model = mhla_hf.convert(softmax_model("llama"), mhla_hf.MHLAConfig(**LLAMA))
    ids = inputs("llama", length=6)["input_ids"]
    generated = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=-1)
    assert torch.equal(generated[:, -1], output(model, {"input_ids": generated[:, :-1]})[:, -1].argmax(-1))


def test_adapters_come_back(tmp_path):
    mhla_hf.convert(softmax_model("llama"), mhla_hf.MHLAConfig(**LLAMA)).save_pretrained(tmp_path / "base")
    base = [AutoModelForCausalLM.from_pretrained(tmp_path / "base") for _ in range(2)]
    model = get_peft_model(
        base[0], LoraConfig(target_modules=["q_proj"], modules_to_save=["mhla"], init_lora_weights=False)
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".mhla.modules_to_save." in name:
                parameter.add_(0.1)
    model.save_pretrained(tmp_path / "adapter")
    expected = output(model, inputs("llama"))
    torch.testing.assert_close(
        output(PeftModel.from_pretrained(base[1], tmp_path / "adapter"), inputs("llama")), expected
    )


def test_the_command_line_converts_the_pipeline_of_the_demo(tmp_path):
    assert "convert" in command("--help") and "None" not in command("convert", "--help")
    assert "WanTransformer3DModel" in command("models")
    command("convert", str(base_pipeline_directory()), str(tmp_path / "mhla"), "--blocks", "5,4,4", "--quiet")
    assert json.loads(Path(tmp_path, "mhla", "model_index.json").read_text())["transformer"][1].startswith("MHLAWan")
    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "mhla")
    video = pipeline("a zero moves down", height=64, width=64, num_frames=5, num_inference_steps=1).frames[0]
    assert video.shape == (5, 64, 64, 3)
