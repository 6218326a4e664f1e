# SPDX-License-Identifier: Apache-2.0
"""`set_attn_implementation("mhla")` and `pipeline(..., attn_implementation="mhla")` on models without MHLA."""

import copy

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CLIPModel,
    T5Config,
    T5ForConditionalGeneration,
    pipeline,
)

from mhla_hf import convert
from mhla_hf.models.registry import recovery_advice
from tests.families.model_case import recorded_warnings
from tests.processes import run_program

from .mhla_models import mhla_modules
from .tiny_files import save_softmax
from .tiny_models import clip_model, softmax_model


TOKENS = torch.arange(3, 43)[None]


def attention_of(model):
    config = model.config
    return {name: getattr(config, f"{name}_config")._attn_implementation for name in ("text", "vision")}


@pytest.mark.parametrize("part", ["whole", "inner model"])
@pytest.mark.parametrize("asked", ["mhla", {"": "mhla"}], ids=str)
def test_whole_models_are_converted_and_saved_as_mhla(part, asked, tmp_path):
    model = softmax_model("llama")
    expected = convert(copy.deepcopy(model))(TOKENS).logits
    with recorded_warnings() as warnings:
        (model if part == "whole" else model.model).set_attn_implementation(asked)
    assert len(warnings) == 1 and warnings[0].endswith(recovery_advice("LlamaForCausalLM"))
    assert len(mhla_modules(model)) == 3
    assert torch.equal(model(TOKENS).logits, expected)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config._attn_implementation == "mhla" and torch.equal(again(TOKENS).logits, expected)
    model.set_attn_implementation("sdpa")
    assert torch.equal(model(TOKENS).logits, softmax_model("llama")(TOKENS).logits)


def test_parts_are_converted(tmp_path):
    given = {"input_ids": torch.arange(3, 23)[None], "pixel_values": torch.randn(1, 3, 16, 16)}
    named, inner, whole = clip_model(), clip_model(), clip_model()
    named.set_attn_implementation({"vision_config": "mhla", "text_config": "eager"})
    assert attention_of(named) == {"text": "eager", "vision": "mhla"}
    inner.vision_model.set_attn_implementation("mhla")
    assert attention_of(inner) == {"text": "sdpa", "vision": "mhla"}
    whole.set_attn_implementation("mhla")
    assert attention_of(whole) == {"text": "mhla", "vision": "mhla"}
    for name, model in {"named": named, "inner": inner, "whole": whole}.items():
        model.save_pretrained(tmp_path / name)
        again = CLIPModel.from_pretrained(tmp_path / name).eval()
        assert attention_of(again)["vision"] == "mhla" and len(mhla_modules(again)) == (6 if name == "whole" else 3)
        torch.testing.assert_close(again(**given).logits_per_image, model(**given).logits_per_image)
    # Switched back and forth, the part that was not converted stays softmax.
    inner.set_attn_implementation("sdpa")
    inner.set_attn_implementation("mhla")
    assert attention_of(inner) == {"text": "sdpa", "vision": "mhla"}
    with pytest.raises(
        ValueError, match="CLIPTextModel has no MHLA parameters, and other parts of this CLIPModel have"
    ):
        inner.set_attn_implementation({"text_config": "mhla"})
    assert attention_of(inner) == {"text": "sdpa", "vision": "mhla"}
    inner(**given)


@pytest.mark.parametrize(
    "asked, message",
    [
        ({"vision_confg": "mhla"}, "'vision_confg' is not one of .*Did you mean 'vision_config'"),
        ({"": "mhla"}, "'' is not one of 'vision_config', 'text_config'|'' is not one of 'text_config'"),
        ({"vision_config": "mhla", "text_config": "nonsense"}, "nonsense"),
    ],
)
def test_wrong_parts_are_refused(asked, message):
    model = clip_model()
    with pytest.raises(ValueError, match=message):
        model.set_attn_implementation(asked)
    assert attention_of(model) == {"text": "sdpa", "vision": "sdpa"} and mhla_modules(model) == []


def test_models_that_cannot_be_mhla_refuse_when_it_is_set():
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
    model = T5ForConditionalGeneration(T5Config(**sizes))
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match="T5ForConditionalGeneration cannot use attn_implementation='mhla'"):
        model.set_attn_implementation("mhla")
    assert model.config._attn_implementation == before and model.config.mhla is None


@pytest.mark.parametrize("given", [{"attn_implementation": "mhla"}, {"mhla": {"block_size": 4}}], ids=str)
def test_pipelines(given, tmp_path):
    directory = save_softmax("llama", tmp_path)
    expected = convert(AutoModelForCausalLM.from_pretrained(directory), given.get("mhla"))
    generate = pipeline("text-generation", model=str(directory), device="cpu", **given)
    assert generate.model.config.mhla == expected.config.mhla
    assert torch.equal(generate.model(TOKENS).logits, expected(TOKENS).logits)
    assert generate("Hello", max_new_tokens=2, do_sample=False)[0]["generated_text"].startswith("Hello")
    assert (
        len(mhla_modules(pipeline("text-generation", model=generate.model, tokenizer=generate.tokenizer).model)) == 3
    )


def test_pipelines_of_mhla_directories(tmp_path):
    directory = save_softmax("llama", tmp_path)
    convert(AutoModelForCausalLM.from_pretrained(directory)).save_pretrained(directory)
    load = lambda **given: pipeline("text-generation", model=str(directory), device="cpu", **given).model  # noqa: E731
    assert load(attn_implementation="mhla").config._attn_implementation == "mhla"
    assert load(attn_implementation="sdpa").config._attn_implementation == "sdpa"
    with pytest.raises(ValueError, match="is MHLA already"):
        load(mhla={"block_size": 4})


def test_pipelines_refuse_wrong_values(tmp_path):
    directory = str(save_softmax("llama", tmp_path))
    for given, message in (
        ({"attn_implementation": "MHLA"}, 'attn_implementation="MHLA"` is not supported'),
        ({"attn_implementation": "sdpa", "mhla": {}}, "attn_implementation='sdpa' is not one of 'mhla', 'softmax'"),
        ({"mhla": {"blok_size": 4}}, "Unknown mhla option blok_size"),
    ):
        with pytest.raises(ValueError, match=message):
            pipeline("text-generation", model=directory, device="cpu", **given)


@pytest.mark.slow
def test_pipelines_that_were_imported_before_the_package(tmp_path):
    directory = save_softmax("llama", tmp_path)
    program = """
import sys
from transformers import pipeline
import mhla_hf
model = pipeline("text-generation", model=sys.argv[1], attn_implementation="mhla", device="cpu").model
assert model.config._attn_implementation == "mhla" and any("mhla" in name for name, _ in model.named_modules())
"""
    run_program(program, directory)


def test_loading_gives_the_advice_once(tmp_path):
    directory = save_softmax("llama", tmp_path)
    with recorded_warnings() as warnings:
        model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="mhla")
    count = sum(".mhla." in name for name in model.state_dict())
    said = f"LlamaForCausalLM: {count} MHLA parameter(s) are newly initialised. {recovery_advice('LlamaForCausalLM')}"
    assert [message for message in warnings if "newly initialised" in message] == [said]
    model.save_pretrained(directory)
    with recorded_warnings() as warnings:
        AutoModelForCausalLM.from_pretrained(directory)
    assert warnings == []
    with recorded_warnings() as warnings:
        AutoModelForCausalLM.from_pretrained(directory, mhla={"output_gate": True})
    assert len(warnings) == 1 and warnings[0].endswith("leave the model's output as it was until they are fine-tuned.")


def test_a_softmax_model_that_shares_its_configuration_is_not_saved_as_mhla(tmp_path):
    first = copy.deepcopy(softmax_model("llama"))
    second = type(first)(first.config).eval()
    first.set_attn_implementation("mhla")
    with pytest.raises(ValueError, match="has no MHLA layers, but its configuration"):
        second.save_pretrained(tmp_path / "second")
    assert not (tmp_path / "second").exists()
    second.set_attn_implementation("mhla")
    second.save_pretrained(tmp_path / "second")
    assert mhla_modules(type(second).from_pretrained(tmp_path / "second"))
