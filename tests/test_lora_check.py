# SPDX-License-Identifier: Apache-2.0
"""`mhla-hf check-lora`: where the weights of real LoRA files go."""

from __future__ import annotations

import json
from typing import Any

import peft
import pytest
import torch
from diffusers import WanPipeline
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import mhla_hf
from mhla_hf.cli.main import app
from mhla_hf.conversion import convert_pretrained
from mhla_hf.families.wan import MHLAWanTransformer3DModel
from mhla_hf.lora_check import check_lora
from tests.families.adapter_checks import TARGETS
from tests.integrations.diffusers.test_loading_options import MADE
from tests.integrations.transformers.tiny_models import softmax_model
from tests.tiny import wan_pipeline, wan_transformer


@pytest.fixture(scope="module")
def wan(tmp_path_factory):
    """A Wan with one MHLA layer of two, and LoRAs of its softmax original."""
    path = tmp_path_factory.mktemp("wan")
    softmax = wan_transformer()
    softmax.save_pretrained(path / "original")
    convert_pretrained(path / "original", path / "converted", {"blocks": [2, 2, 2], "layers": [1]}, progress=False)
    softmax.add_adapter(LoraConfig(r=4, target_modules=[*TARGETS, "ffn.net.2"]))
    softmax.save_lora_adapter(path / "model-lora")
    layers = peft.get_peft_model_state_dict(softmax)
    WanPipeline.save_lora_weights(path / "pipeline-lora", transformer_lora_layers=layers)
    return path


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    softmax = softmax_model("llama")
    softmax.save_pretrained(path / "original")
    convert_pretrained(path / "original", path / "converted", {"block_size": [4], "layers": [0, 2]}, progress=False)
    adapted = peft.get_peft_model(softmax, LoraConfig(r=2, target_modules=["q_proj", "v_proj", "up_proj"]))
    adapted.save_pretrained(path / "lora")
    return path


def test_all_weights_of_a_wan_lora_apply(wan):
    for lora in ("model-lora", "pipeline-lora"):
        report = check_lora(wan / "converted", wan / lora)
        # Two matrices for each of four projections of two attentions, and for one of the feed-forward, in two layers.
        assert report.counts == {
            "MHLA layer": 8, "other module": 28, "MHLA parameter": 0, "nothing": 0,
        }  # fmt: skip
        assert report.weights["blocks.1.attn1.to_q.lora_A.weight"].kind == "MHLA layer"
        assert report.weights["blocks.0.attn1.to_q.lora_A.weight"].kind == "other module"
        assert report.weights["blocks.1.attn2.to_q.lora_A.weight"].kind == "other module"


@pytest.mark.parametrize("prefix", ["transformer.", "", "base_model.model."])
def test_the_report_names_the_call_that_loads_as_many(wan, tmp_path, prefix):
    weights = load_file(wan / "model-lora" / "pytorch_lora_weights.safetensors")
    save_file({prefix + name: value for name, value in weights.items()}, tmp_path / "lora.safetensors")
    report = check_lora(wan / "converted", tmp_path / "lora.safetensors")
    assert report.counts["nothing"] == 0 and len(report.weights) == len(weights)
    pipeline = wan_pipeline()
    pipeline.register_modules(transformer=MHLAWanTransformer3DModel.from_pretrained(wan / "converted"))
    if prefix == "transformer.":
        assert report.loader == "load_lora_weights"
    else:
        assert report.loader == f"transformer.load_lora_adapter(..., prefix={prefix[:-1] or None!r})"
        pipeline.load_lora_weights(tmp_path / "lora.safetensors")
        assert not [name for name, _ in pipeline.transformer.named_parameters() if "lora_" in name]
    if prefix == "transformer.":
        pipeline.load_lora_weights(tmp_path / "lora.safetensors")
    else:
        pipeline.transformer.load_lora_adapter(tmp_path, weight_name="lora.safetensors", prefix=prefix[:-1] or None)
    loaded = peft.get_peft_model_state_dict(pipeline.transformer, adapter_name="default_0")
    assert loaded.keys() == report.weights.keys()


@pytest.mark.parametrize("name", ["proj_out.weight", "norm"])
@pytest.mark.parametrize("family", ["wan", "ltx", "hunyuan", "sana", "qwen", "flux", "chroma"])
def test_weights_saved_in_full_are_counted_for_the_loader_that_takes_them(family, name, tmp_path):
    make = MADE[family]
    pipeline = mhla_hf.convert(make())
    model = pipeline.transformer
    model.save_pretrained(tmp_path / "mhla")
    names = [each for each, _ in model.named_parameters() if ".mhla." not in each]
    norm = next((each for each in names if "norm_q.weight" in each or "norm" in each), "proj_out.weight")
    name = norm if name == "norm" else name
    full = torch.full_like(dict(model.named_parameters())[name], 0.3)
    model.add_adapter(LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False))
    layers = {f"transformer.{key}": value for key, value in peft.get_peft_model_state_dict(model).items()}
    save_file({**layers, f"transformer.{name}": full.detach()}, tmp_path / "lora.safetensors")
    report = check_lora(tmp_path / "mhla", tmp_path / "lora.safetensors")
    assert len(report.weights) == len(layers) + 1 and not report.counts["nothing"]
    fresh = mhla_hf.convert(make())
    if report.loader == "load_lora_weights":
        assert family in ("flux", "chroma")
        fresh.load_lora_weights(tmp_path / "lora.safetensors")
    else:
        assert report.loader == "transformer.load_lora_adapter(..., prefix='transformer')"
        with pytest.raises(ValueError, match="Invalid LoRA checkpoint"):
            fresh.load_lora_weights(tmp_path / "lora.safetensors")
        fresh.transformer.load_lora_adapter(tmp_path, weight_name="lora.safetensors", prefix="transformer")
    assert torch.equal(dict(fresh.transformer.named_parameters())[name], full)
    loaded = {key for key, _ in fresh.transformer.named_parameters() if ".lora_" in key}
    assert len(loaded) == len(layers)


def test_the_second_expert_takes_weights_saved_in_full_by_its_own_method(tmp_path):
    pipeline = mhla_hf.convert(wan_pipeline(second_transformer=True), blocks=[2, 2, 2])
    pipeline.save_pretrained(tmp_path / "mhla")
    full = {"transformer.proj_out.weight": pipeline.transformer_2.proj_out.weight.detach() + 1}
    save_file({**PAIR, **full}, tmp_path / "lora.safetensors")
    report = check_lora(tmp_path / "mhla", tmp_path / "lora.safetensors", component="transformer_2")
    assert report.loader == "transformer_2.load_lora_adapter(..., prefix='transformer')"
    pipeline.transformer_2.load_lora_adapter(tmp_path, weight_name="lora.safetensors", prefix="transformer")
    assert torch.equal(pipeline.transformer_2.proj_out.weight, full["transformer.proj_out.weight"])
    assert report.counts["other module"] + report.counts["MHLA layer"] == 3


def test_the_loader_of_a_folder_of_peft_keeps_alpha(wan, tmp_path):
    def base():
        return MHLAWanTransformer3DModel.from_pretrained(wan / "converted")

    config = LoraConfig(r=2, lora_alpha=16, target_modules=["to_q"], init_lora_weights=False)
    trained = peft.get_peft_model(base(), config)
    trained.save_pretrained(tmp_path)
    report = check_lora(wan / "converted", tmp_path)
    assert report.loader == "PeftModel" and report.counts["nothing"] == 0
    model, other = base(), base()
    peft.PeftModel.from_pretrained(model, tmp_path)
    other.load_lora_adapter(tmp_path, prefix="base_model.model", weight_name="adapter_model.safetensors")
    scales = [each.blocks[0].attn1.to_q.scaling for each in (trained, model, other)]
    assert [list(scale.values()) for scale in scales] == [[8.0], [8.0], [1.0]]


def test_weights_that_diffusers_leaves_out_are_counted(wan, tmp_path):
    authors = "diffusion_model.blocks.0.self_attn.{}"
    weights = {}
    for name in ("q", "k", "v", "o"):
        weights[authors.format(f"{name}.lora_down.weight")] = torch.zeros(2, 24)
        weights[authors.format(f"{name}.lora_up.weight")] = torch.zeros(24, 2)
        weights[authors.format(f"{name}.alpha")] = torch.tensor(4.0)
    dropped = [authors.format("norm_q.diff"), "diffusion_model.patch_embedding.diff"]
    save_file({**weights, **{name: torch.zeros(24) for name in dropped}}, tmp_path / "lora.safetensors")
    report = check_lora(wan / "converted", tmp_path / "lora.safetensors")
    assert [name for name, target in report.weights.items() if target.reason] == sorted(dropped)
    assert report.counts["other module"] == 8
    own = {f"transformer.{name}": value for name, value in PAIR_OF_MODEL.items()}
    own["transformer.blocks.0.attn1.to_q.dora_scale"] = torch.ones(24)
    save_file(own, tmp_path / "dora.safetensors")
    report = check_lora(wan / "converted", tmp_path / "dora.safetensors")
    assert report.weights["transformer.blocks.0.attn1.to_q.dora_scale"].reason == "diffusers leaves it out"
    assert report.counts["other module"] == 2 and report.counts["nothing"] == 1


PAIR_OF_MODEL = {
    "blocks.0.attn1.to_q.lora_A.weight": torch.zeros(2, 24),
    "blocks.0.attn1.to_q.lora_B.weight": torch.zeros(24, 2),
}


def test_llama(llama):
    report = check_lora(llama / "converted", llama / "lora")
    assert report.counts == {
        "MHLA layer": 8, "other module": 10, "MHLA parameter": 0, "nothing": 0,
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["embedding", "new tokens", "trainable tokens", "trainable tokens alone"])
def test_adapters_of_embeddings_apply_as_peft_loads_them(llama, kind, tmp_path):
    def base(tied):
        model = AutoModelForCausalLM.from_pretrained(llama / "converted")
        if tied:
            model.config.tie_word_embeddings = True
            model.tie_weights()
        return model

    config = {
        "embedding": lambda: LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"]),
        "new tokens": lambda: LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"]),
        "trainable tokens": lambda: LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[1, 3]),
        "trainable tokens alone": lambda: peft.TrainableTokensConfig(token_indices=[1, 3]),
    }[kind]
    for tied in (False, True):
        model = peft.get_peft_model(base(tied), config())
        model.save_pretrained(tmp_path / f"{tied}")
        report = check_lora(llama / "converted", tmp_path / f"{tied}")
        names = load_file(tmp_path / f"{tied}" / "adapter_model.safetensors")
        assert {f"base_model.model.{name}" for name in report.weights} == names.keys()
        assert report.counts["nothing"] == 0, report.weights
    wrong = {name: torch.zeros(*value.shape[:-1], value.shape[-1] + 1) for name, value in names.items()}
    save_file(wrong, tmp_path / "wrong.safetensors")
    with pytest.raises(ValueError, match="None of the"):
        check_lora(llama / "converted", tmp_path / "wrong.safetensors")


def test_mhla_parameters_of_an_adapter_apply(wan, tmp_path):
    model = MHLAWanTransformer3DModel.from_pretrained(wan / "converted")
    model.add_adapter(LoraConfig(r=2, target_modules=["to_q"], modules_to_save=["mhla"]))
    model.save_lora_adapter(tmp_path / "lora")
    report = check_lora(wan / "converted", tmp_path / "lora")
    assert report.counts["MHLA parameter"] > 0 == report.counts["nothing"]


def test_command_names_weights_that_do_not_apply(wan, tmp_path):
    weights = load_file(wan / "model-lora" / "pytorch_lora_weights.safetensors")
    changed = {name.replace("blocks.0.attn1", "blocks.7.attn1"): value for name, value in weights.items()}
    changed["blocks.1.attn1.to_v.lora_A.weight"] = torch.zeros(4, 20)
    del changed["blocks.1.attn1.to_k.lora_B.weight"]
    save_file(changed, tmp_path / "lora.safetensors")
    arguments = ["check-lora", str(wan / "converted"), str(tmp_path / "lora.safetensors")]
    result = CliRunner().invoke(app, [*arguments, "--json", str(tmp_path / "report.json")])
    assert result.exit_code == 0, result.output
    for words in ("24 of 35 weights apply to transformer", "MHLA layers", "no such module"):
        assert words in result.output
    report = json.loads((tmp_path / "report.json").read_text())
    reasons = {name: target["reason"] for name, target in report["weights"].items() if target["reason"]}
    assert report["counts"]["nothing"] == len(reasons) == 8 + 2 + 1
    assert reasons["blocks.7.attn1.to_q.lora_A.weight"] == "no such module"
    assert reasons["blocks.1.attn1.to_v.lora_B.weight"] == "matrices 24×4 and 4×20 for a weight 24×24"
    assert reasons["blocks.1.attn1.to_k.lora_A.weight"].startswith("only lora_A.weight of the pair")


PAIR = {
    "transformer.blocks.0.attn1.to_q.lora_A.weight": torch.zeros(2, 24),
    "transformer.blocks.0.attn1.to_q.lora_B.weight": torch.zeros(24, 2),
}
FILES: dict[str, tuple[Any, str]] = {
    "missing": (None, "does not exist"),
    "lora.bin": ("no weights", "has no .safetensors file"),
    "lora.safetensors": ("no weights", "is truncated or not a safetensors file"),
    "model": ({"proj_out.weight": torch.zeros(2, 2)}, "holds no LoRA weights, but proj_out.weight"),
    "other": ({"transformer_2.proj_out.lora_A.weight": torch.zeros(2, 24)}, "has nothing for transformer"),
    "unknown": ({"a.lora_A.weight": torch.zeros(2, 24), "a.lora_B.weight": torch.zeros(24, 2)}, "None of the 2"),
    "names": ({"lora_unet_blocks_0_self_attn_q.lora_down.weight": torch.zeros(2, 24)}, "diffusers cannot convert"),
    "one axis": ({name: value.flatten() for name, value in PAIR.items()}, "matrices 48 and 48"),
}


@pytest.mark.parametrize("name", FILES)
def test_wrong_files_give_one_line(wan, tmp_path, name):
    content, message = FILES[name]
    path = tmp_path / name
    if isinstance(content, dict):
        path.mkdir()
        save_file(content, path / "adapter_model.safetensors")
    elif content is not None:
        path.write_text(content)
    result = CliRunner().invoke(app, ["check-lora", str(wan / "converted"), str(path)])
    assert result.exit_code == 1 and message in " ".join(result.output.split()), result.output
    assert len(result.stderr.strip().splitlines()) <= 1 or "[transformers]" in result.stderr, result.stderr
