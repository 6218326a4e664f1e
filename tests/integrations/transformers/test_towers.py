# SPDX-License-Identifier: Apache-2.0
"""Models of several towers, asked as a whole: the text part becomes MHLA, and towers that cannot keep softmax."""

from __future__ import annotations

import copy
import json

import pytest
import torch
import transformers

from mhla_hf import convert
from tests.command_line import run_command

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


def class_of(name):
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    return getattr(transformers, name)


def build(name, **request):
    model_class = class_of(name)
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
    model_class = class_of(name)
    config = tiny_config(model_class.config_class)
    if by == "options":
        config.mhla = {"text_config": TEXT, tower: {}}
    else:
        config._attn_implementation = {"text_config": "mhla", tower: "mhla"}
    with pytest.raises(ValueError, match=reason):
        model_class(config)


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


@pytest.mark.parametrize("arguments", [[], ["--layers", "1/2"]], ids=["all layers", "half of the layers"])
def test_the_command(arguments, lines, tmp_path):
    build("InternVLForConditionalGeneration").save_pretrained(tmp_path / "softmax")
    run_command("convert", tmp_path / "softmax", tmp_path / "mhla", *arguments)
    model = transformers.InternVLForConditionalGeneration.from_pretrained(tmp_path / "mhla")
    assert attentions(model) == {"text_config": "mhla", "vision_config": "sdpa"}
    assert len(mhla_modules(model)) == (1 if arguments else 2)
    assert any("InternVLVisionModel keeps softmax" in line for line in lines())


PACKED = "its inputs are packed"
NAMED = {
    "Mistral3ForConditionalGeneration": (PACKED, {"text_config": {"sliding_window": None}}),
    "InstructBlipForConditionalGeneration": ("learned queries", {}),
    "GlmImageForConditionalGeneration": (PACKED, {}),
    "Qwen2VLForConditionalGeneration": ("it has no attention that can be MHLA", {}),
}


@pytest.mark.parametrize("name", NAMED)
def test_towers_that_are_given_what_mhla_cannot_see(name, lines):
    """Pixtral, a Q-Former, and vision towers of packed patches: refused by name, softmax in a whole."""
    reason, settings = NAMED[name]
    model_class = class_of(name)
    tower = "qformer_config" if "Blip" in name else "vision_config"
    config = tiny_config(model_class.config_class, **settings)
    for part, values in settings.items():
        for field, value in values.items():
            setattr(getattr(config, part), field, value)
    named = copy.deepcopy(config)
    named._attn_implementation = {tower: "mhla"}
    with pytest.raises(ValueError, match=f"cannot use attn_implementation='mhla': .*{reason}"):
        model_class(named)
    model = model_class._from_config(config, attn_implementation="mhla")
    found = attentions(model)
    assert found["text_config"] == "mhla" and found[tower] in ("sdpa", "eager")
    assert any("keeps softmax" in line and reason in line for line in lines())


# Models whose text looks ahead within an image, by the way that `token_type_ids` reach them. Of the last two no other
# part can be MHLA.
LOOKING_AHEAD = {
    "Gemma3ForConditionalGeneration": "token_type_ids",
    "ShieldGemma2ForImageClassification": "token_type_ids",
    "PaliGemmaForConditionalGeneration": "token_type_ids",
    "Gemma4ForConditionalGeneration": "mm_token_type_ids",
    "Gemma4UnifiedForConditionalGeneration": "mm_token_type_ids",
}
SERVED = list(LOOKING_AHEAD)[:3]
AHEAD = "the tokens of an image attend"


def looking_ahead(name, request=None):
    config = tiny_config(class_of(name).config_class)
    config.yes_token_index, config.no_token_index = 1, 2
    if name.startswith("Gemma4"):
        # The default of those larger models whose text can be MHLA.
        config.text_config.use_bidirectional_attention = "vision"
    config._attn_implementation = request
    torch.manual_seed(0)
    return class_of(name)(config).eval()


@pytest.mark.parametrize("by", ["implementation", "convert"])
@pytest.mark.parametrize("name", SERVED)
def test_a_text_that_looks_ahead_in_images_keeps_softmax(name, by, lines, tmp_path):
    model = looking_ahead(name, "mhla" if by == "implementation" else None)
    if by == "convert":
        convert(model)
    assert attentions(model) == {"text_config": "sdpa", "vision_config": "mhla"} and len(mhla_modules(model)) == 2
    said = [line for line in lines() if "The text of" in line]
    assert len(said) == 1 and f"keeps softmax: {AHEAD} to each other in both directions" in said[0]
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert attentions(again) == attentions(model)
    # What its own processor gives: with an image in the text, and without.
    softmax = looking_ahead(name)
    softmax.load_state_dict({key: value for key, value in model.state_dict().items() if ".mhla." not in key})
    ids = torch.randint(3, 60, (2, 13), generator=torch.Generator().manual_seed(0))
    for kinds in (torch.zeros_like(ids), torch.tensor([[0] * 3 + [1] * 4 + [0] * 6] * 2)):
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": kinds}
        with torch.no_grad():
            expected = softmax(**given).logits
            assert torch.equal(model(**given).logits, expected) and torch.equal(again(**given).logits, expected)


@pytest.mark.parametrize("name", LOOKING_AHEAD)
def test_a_text_that_looks_ahead_in_images_is_refused_by_name(name):
    with pytest.raises(ValueError, match=f"The text of .* cannot use attn_implementation='mhla': {AHEAD}"):
        looking_ahead(name, {"text_config": "mhla"})
    with pytest.raises(ValueError, match=f"The text of .* cannot use attn_implementation='mhla': {AHEAD}"):
        convert(looking_ahead(name), {"text_config": TEXT})


@pytest.mark.parametrize("name", [name for name in LOOKING_AHEAD if name not in SERVED])
def test_a_text_that_looks_ahead_in_images_beside_nothing_else_is_refused(name):
    with pytest.raises(ValueError, match="in its text the tokens of an image .* and no other part of it can be MHLA"):
        looking_ahead(name, "mhla")
    softmax = looking_ahead(name)
    with pytest.raises(ValueError, match="no other part of it can be MHLA"):
        convert(softmax)
    assert softmax.config._attn_implementation == "sdpa" and not mhla_modules(softmax)


@pytest.mark.parametrize("name", ["Gemma3ForCausalLM", "Gemma4ForCausalLM"])
def test_text_models_alone_stay_mhla(name):
    model_class = class_of(name)
    config = tiny_config(model_class.config_class)
    if name.startswith("Gemma4"):
        config.mhla = {"rope": "before_feature_map"}
    model = model_class._from_config(config, attn_implementation="mhla")
    assert mhla_modules(model)


def test_composite_models_that_do_not_look_ahead_have_their_text_served():
    # As the smaller published models of the family, which read images as any text.
    config = tiny_config(class_of("Gemma4ForConditionalGeneration").config_class)
    model = transformers.Gemma4ForConditionalGeneration._from_config(config, attn_implementation="mhla").eval()
    ids = torch.randint(3, 60, (2, 13), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        output = model(ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=torch.zeros_like(ids))
    assert mhla_modules(model) and output.logits.isfinite().all()
