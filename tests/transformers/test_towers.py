# SPDX-License-Identifier: Apache-2.0
"""Models of several towers, asked as a whole: the text part becomes MHLA, and towers that cannot keep softmax."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from typer.testing import CliRunner

from mhla_hf import convert
from mhla_hf.cli.main import app

from .mhla_models import mhla_modules
from .shrinking import tiny_config


# A tower of each that cannot be MHLA, and the reason that the line about it gives.
UNSERVED = {
    "InternVLForConditionalGeneration": ("vision_config", "InternVLVisionModel", "drop keyword arguments"),
    "Idefics3ForConditionalGeneration": ("vision_config", "Idefics3VisionTransformer", "drop keyword arguments"),
    "SmolVLMForConditionalGeneration": ("vision_config", "SmolVLMVisionTransformer", "drop keyword arguments"),
    "VoxtralForConditionalGeneration": ("audio_config", "VoxtralEncoder", "drop keyword arguments"),
    "AudioFlamingo3ForConditionalGeneration": ("audio_config", "AudioFlamingo3Encoder", "drop keyword arguments"),
    "GotOcr2ForConditionalGeneration": ("vision_config", "GotOcr2VisionEncoder", "does not go through"),
    "DeepseekVLHybridForConditionalGeneration": ("high_res_vision_config", "SamVisionEncoder", "does not go through"),
}
TEXT = {"block_size": 4}


def build(name, **request):
    model_class = getattr(transformers, name)
    torch.manual_seed(0)
    return model_class._from_config(tiny_config(model_class.config_class), **request).eval()


def attentions(model):
    return {name: getattr(model.config, name)._attn_implementation for name in model.config.sub_configs}


@pytest.fixture(autouse=True)
def lines(caplog, monkeypatch):
    """Every warning, also the ones that were given once before."""
    logger = transformers.utils.logging
    monkeypatch.setattr(logger.get_logger("transformers"), "propagate", True)
    logger.get_logger("mhla_hf").warning_once.cache_clear()
    return lambda: [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("name", UNSERVED)
def test_asked_as_a_whole(name, lines, tmp_path):
    tower, part, reason = UNSERVED[name]
    model = build(name, attn_implementation="mhla")
    found = attentions(model)
    assert found["text_config"] == "mhla" and found[tower] in ("sdpa", "eager")
    said = [line for line in lines() if "keeps softmax" in line]
    assert len(said) == 1 and said[0].startswith(f"{part} keeps softmax: ") and reason in said[0]
    assert "\n" not in said[0] and len(said[0]) < 300

    # Saved, it says which parts are MHLA; plain loading makes the same model, without another line about it.
    model.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["attn_implementation"]["text_config"] == "mhla" and tower not in stored["attn_implementation"]
    assert not stored[tower].get("mhla")
    count = len(lines())
    again = type(model).from_pretrained(tmp_path)
    assert attentions(again) == found and len(mhla_modules(again)) == len(mhla_modules(model)) > 0
    assert not any("keeps softmax" in line for line in lines()[count:])
    state = again.state_dict()
    assert all(torch.equal(state[key], tensor) for key, tensor in model.state_dict().items())
    # So does asking for the whole once more.
    assert attentions(type(model).from_pretrained(tmp_path, attn_implementation="mhla")) == found


@pytest.mark.parametrize("name", ["InternVLForConditionalGeneration", "DeepseekVLHybridForConditionalGeneration"])
@pytest.mark.parametrize("by", ["implementation", "options"])
def test_a_tower_that_is_named_and_cannot_is_an_error(name, by):
    tower, _, reason = UNSERVED[name]
    model_class = getattr(transformers, name)
    config = tiny_config(model_class.config_class)
    if by == "options":
        config.mhla = {"text_config": TEXT, tower: {}}
    else:
        config._attn_implementation = {"text_config": "mhla", tower: "mhla"}
    with pytest.raises(ValueError, match=reason):
        model_class(config)


def test_options_of_the_whole_and_in_place(lines):
    asked = build("VoxtralForConditionalGeneration", attn_implementation="mhla")
    by_options = build("VoxtralForConditionalGeneration")
    convert(by_options, TEXT)
    assert attentions(by_options) == attentions(asked) == {"audio_config": "sdpa", "text_config": "mhla"}
    assert by_options.config.text_config.mhla["block_size"] == [4]
    assert sum("VoxtralEncoder keeps softmax" in line for line in lines()) == 1


def test_options_for_the_parts_that_are_asked_alone():
    config = tiny_config(transformers.CLIPConfig)
    config._attn_implementation = {"text_config": "mhla"}
    config.mhla = TEXT
    model = transformers.CLIPModel(config)
    assert attentions(model) == {"text_config": "mhla", "vision_config": "sdpa"}
    assert model.config.text_config.mhla["block_size"] == [4]


def test_options_that_do_not_suit_a_tower(lines):
    # Blocks of four tokens are for text: the images keep softmax.
    config = tiny_config(transformers.CLIPConfig)
    config.mhla = TEXT
    assert attentions(transformers.CLIPModel(config)) == {"text_config": "mhla", "vision_config": "sdpa"}
    assert any("CLIPVisionModel keeps softmax: " in line for line in lines())
    config = tiny_config(transformers.CLIPConfig)
    config.mhla = {"blocksize": 4}
    with pytest.raises(ValueError, match="Unknown mhla option"):
        transformers.CLIPModel(config)


def test_a_text_part_that_cannot_is_an_error():
    with pytest.raises(ValueError, match="multi-head latent attention"):
        build("KimiK25ForConditionalGeneration" if hasattr(transformers, "KimiK25ForConditionalGeneration")
              else "Mistral4ForCausalLM", attn_implementation="mhla")  # fmt: skip


def test_the_command(lines, tmp_path):
    build("InternVLForConditionalGeneration").save_pretrained(tmp_path / "softmax")
    result = CliRunner().invoke(app, ["convert", str(tmp_path / "softmax"), str(tmp_path / "mhla")])
    assert result.exit_code == 0, result.output
    model = transformers.InternVLForConditionalGeneration.from_pretrained(tmp_path / "mhla")
    assert attentions(model) == {"text_config": "mhla", "vision_config": "sdpa"}
    assert any("InternVLVisionModel keeps softmax" in line for line in lines())
