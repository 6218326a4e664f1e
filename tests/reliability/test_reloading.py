# SPDX-License-Identifier: Apache-2.0
"""A saved and reloaded model computes the same bits, wherever both hold their weights at equally aligned addresses.

safetensors maps files into memory, where a tensor starts at any multiple of 4 bytes. torch's matrix products on a CPU
add up in another order there than at the addresses that torch itself allocates, in softmax models as well.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline, ModelMixin, WanTransformer3DModel
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer, TrainingArguments

import mhla_hf
from mhla_hf.conversion import convert_pretrained
from mhla_hf.demo import base_pipeline_directory
from mhla_hf.hub.checks import check_directory
from mhla_hf.hub.push import prepare_push
from mhla_hf.models.directory import ModelDirectory
from mhla_hf.recovery.calibration import calibrate_directory
from mhla_hf.training.parameters import load_model
from tests import tiny
from tests.families.cases import CASES

from ..integrations.transformers.mhla_models import NEEDS_ADD_ADAPTER, mhla_model, mhla_modules
from ..integrations.transformers.tiny_models import FAMILIES, inputs, softmax_model


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def aligned(model: torch.nn.Module) -> torch.nn.Module:
    """The model with copies of its weights, which torch aligns."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def floats_as(inputs: dict, dtype: torch.dtype) -> dict:
    floats = {name for name, value in inputs.items() if isinstance(value, torch.Tensor) and value.is_floating_point()}
    return {name: value.to(dtype) if name in floats else value for name, value in inputs.items()}


def assert_same_bits(model: torch.nn.Module, reloaded: torch.nn.Module, inputs: dict) -> None:
    assert type(reloaded) is type(model)
    for (name, tensor), (other, loaded) in zip(model.state_dict().items(), reloaded.state_dict().items(), strict=True):
        assert name == other and loaded.dtype == tensor.dtype and torch.equal(loaded, tensor), name
    for (name, tensor), (_, loaded) in zip(model.named_buffers(), reloaded.named_buffers(), strict=True):
        assert loaded.dtype == tensor.dtype and torch.equal(loaded, tensor), name
    with torch.no_grad():
        expected, output = (aligned(x)(**inputs)[0] for x in (model, reloaded))
    assert expected.isfinite().all() and torch.equal(output, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["bert", "vit", "llama"])
def test_models_of_transformers(name, dtype, tmp_path):
    sizes = {"window_size": (2, 2), "sink_tokens": 1} if name == "vit" else {"window_size": 3, "sink_tokens": 2}
    options = {"window": "adjacent", "window_share": "query", **sizes}
    mhla_model(name, **options).save_pretrained(tmp_path / "first")
    # `model.to(dtype)` would also round the frequencies of rotary embeddings, which loading computes in float32.
    model = FAMILIES[name].model_class.from_pretrained(tmp_path / "first", dtype=DTYPES[dtype]).eval()
    model.save_pretrained(tmp_path / "second")
    reloaded = type(model).from_pretrained(tmp_path / "second", dtype="auto").eval()
    assert_same_bits(model, reloaded, floats_as(inputs(name), DTYPES[dtype]))


def test_weights_of_mixed_dtypes_are_not_rounded(tmp_path):
    model = mhla_model("bert")
    rounded = copy.deepcopy(model).to(torch.bfloat16)
    for module, exact in zip(mhla_modules(rounded), mhla_modules(model), strict=True):
        module.float().load_state_dict(exact.state_dict())
    rounded.save_pretrained(tmp_path)
    # Loading gives all weights one dtype.
    reloaded = type(model).from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert_same_bits(rounded.float(), reloaded, inputs("bert"))


def test_calibrated_model(tmp_path):
    model = mhla_model("bert", feature_map="hedgehog")
    mhla_hf.calibrate(model, [inputs("bert", seed=seed) for seed in range(4)], fit_steps=2)
    model.save_pretrained(tmp_path)
    assert_same_bits(model, type(model).from_pretrained(tmp_path).eval(), inputs("bert"))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: type(case).__name__)
def test_models_of_diffusers(case, dtype, tmp_path):
    case.make_mhla().to(DTYPES[dtype]).save_pretrained(tmp_path / "first")
    # Loading keeps some weights in float32: of these the second copy is one.
    model = case.mhla_class.from_pretrained(tmp_path / "first", torch_dtype=DTYPES[dtype])
    model.save_pretrained(tmp_path / "second")
    reloaded = case.mhla_class.from_pretrained(tmp_path / "second", torch_dtype=DTYPES[dtype])
    assert_same_bits(model, reloaded, floats_as(case.inputs(), DTYPES[dtype]))


@pytest.mark.parametrize("mhla", [False, True], ids=["softmax", "mhla"])
def test_wan_pipeline(mhla, tmp_path):
    pipeline = DiffusionPipeline.from_pretrained(base_pipeline_directory())
    if mhla:
        mhla_hf.convert(pipeline, blocks=(5, 4, 4), layers="2/3")
    assert mhla != (type(pipeline.transformer) is WanTransformer3DModel)
    pipeline.save_pretrained(tmp_path)
    videos = []
    for copied in (pipeline, DiffusionPipeline.from_pretrained(tmp_path)):
        for part in (copied.transformer, copied.text_encoder, copied.vae):
            aligned(part)
        copied.set_progress_bar_config(disable=True)
        seed = torch.Generator().manual_seed(0)
        videos.append(
            copied("3", height=32, width=32, num_frames=5, num_inference_steps=2, generator=seed, output_type="pt")
        )
    assert torch.equal(videos[0].frames, videos[1].frames)


OUT = r"adapters in its weights \(.*base_layer.*unload_lora_weights\(\) of the pipeline.*merge_and_unload\(\) of peft"
BLOCKS = {"blocks": (1, 2, 2), "grid": (3, 2, 4)}


def lora(*targets: str) -> LoraConfig:
    return LoraConfig(r=2, target_modules=list(targets), init_lora_weights=False)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("part", ["transformer", "transformer_2"])
def test_pipelines_are_not_saved_with_a_lora_in_them(part, fused, tmp_path):
    pipeline = tiny.wan_pipeline(second_transformer=True)
    mhla_hf.convert(pipeline, {"transformer": BLOCKS})
    model = getattr(pipeline, part)
    model.add_adapter(lora("to_q"))
    if fused:
        model.fuse_lora()
    for saved in (pipeline, *([model] if part == "transformer" else [])):
        with pytest.raises(ValueError, match=f"This {type(model).__name__} has {OUT}"):
            saved.save_pretrained(tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    pipeline.unload_lora_weights() if part == "transformer" else model.unload_lora()
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    pipeline.save_pretrained(tmp_path / "saved")
    state = getattr(DiffusionPipeline.from_pretrained(tmp_path / "saved"), part).state_dict()
    assert state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in state)


def test_a_saved_pipeline_with_a_lora_in_it_says_how_to_take_it_out(tmp_path):
    pipeline = mhla_hf.convert(tiny.wan_pipeline(), BLOCKS)
    pipeline.save_pretrained(tmp_path)
    pipeline.transformer.add_adapter(lora("to_q"))
    ModelMixin.save_pretrained(pipeline.transformer, tmp_path / "transformer")
    for load in (mhla_hf.load_pipeline, DiffusionPipeline.from_pretrained):
        with pytest.raises(ValueError, match=OUT):
            load(tmp_path)
    problems = check_directory(tmp_path)
    assert [problem.file for problem in problems] == ["transformer/diffusion_pytorch_model.safetensors"]
    for refused in (lambda: prepare_push(tmp_path, "you/model"), lambda: calibrate_directory(tmp_path, samples=4)):
        with pytest.raises(ValueError, match="unload_lora_weights"):
            refused()


def test_a_softmax_model_saved_with_a_lora_in_it_is_not_converted(tmp_path):
    model = tiny.wan_transformer()
    model.add_adapter(lora("to_q"))
    model.save_pretrained(tmp_path / "softmax")
    with pytest.raises(ValueError, match=OUT):
        convert_pretrained(tmp_path / "softmax", tmp_path / "mhla", progress=False, **BLOCKS)
    with pytest.raises(ValueError, match=OUT):
        WanTransformer3DModel.from_pretrained(tmp_path / "softmax", attn_implementation="mhla", mhla=BLOCKS)
    path = tmp_path / "softmax" / "diffusion_pytorch_model.safetensors"
    with pytest.raises(ValueError, match=OUT):
        type(mhla_hf.convert(tiny.wan_transformer(), BLOCKS)).from_single_file(path, config=tmp_path / "softmax")


@pytest.mark.parametrize("how", ["inject", "peft", "Trainer", "state_dict"])
def test_models_of_transformers_are_not_saved_with_adapters_among_their_weights(how, tmp_path):
    model = mhla_hf.convert(softmax_model("llama"), block_size=4)
    adapt = get_peft_model if how == "peft" else lambda model, config: inject_adapter_in_model(config, model)
    adapted = adapt(model, lora("q_proj"))
    arguments = TrainingArguments(str(tmp_path / "run"), report_to=[], use_cpu=True)
    save = {
        "Trainer": lambda: Trainer(model, arguments).save_model(str(tmp_path / "out")),
        "state_dict": lambda: model.save_pretrained(tmp_path / "out", state_dict=dict(model.state_dict())),
    }.get(how, lambda: model.save_pretrained(tmp_path / "out"))
    with pytest.raises(ValueError, match=f"This LlamaForCausalLM has {OUT}"):
        save()
    assert not list(Path(tmp_path).glob("out/*.safetensors"))
    # A merged state is what it says, whatever the model holds.
    merged = mhla_hf.convert(softmax_model("llama"), block_size=4).state_dict()
    model.save_pretrained(tmp_path / "merged", state_dict=dict(merged))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict().keys() == merged.keys()
    if how == "peft":
        adapted.merge_and_unload().save_pretrained(tmp_path / "out")
        assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config._attn_implementation == "mhla"


def test_a_saved_model_of_transformers_with_adapters_in_it_is_refused_by_name(tmp_path):
    model = mhla_hf.convert(softmax_model("llama"), block_size=4)
    model.save_pretrained(tmp_path)
    inject_adapter_in_model(lora("q_proj"), model)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=OUT):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    assert "merge_and_unload" in str(check_directory(tmp_path))


@NEEDS_ADD_ADAPTER
def test_adapters_that_are_saved_aside_load_as_before(tmp_path):
    mhla_hf.convert(softmax_model("llama"), block_size=4).save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    model.add_adapter(lora("q_proj"))
    model.save_pretrained(tmp_path / "adapter")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    with torch.no_grad():
        torch.testing.assert_close(again(**inputs("llama")).logits, model(**inputs("llama")).logits)


def test_directories_with_an_adapter_beside_the_model_are_not_written_without_the_model(tmp_path):
    mhla_hf.convert(softmax_model("llama"), block_size=4).save_pretrained(tmp_path)
    get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path), lora("q_proj")).save_pretrained(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("words " * 200)
    with pytest.raises(ValueError, match=OUT):
        load_model(ModelDirectory.read(tmp_path))
    with pytest.raises(ValueError, match=OUT):
        calibrate_directory(tmp_path, data=tmp_path / "texts")
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}


@NEEDS_ADD_ADAPTER
def test_a_component_of_adapters_alone_is_named(tmp_path):
    tiny.wan_pipeline().save_pretrained(tmp_path / "softmax")
    pipeline = mhla_hf.load_pipeline(tmp_path / "softmax", attn_implementation="mhla", mhla=BLOCKS)
    pipeline.text_encoder.add_adapter(lora("q"))
    pipeline.save_pretrained(tmp_path / "mhla")
    # It loads where its base is.
    again = mhla_hf.load_pipeline(tmp_path / "mhla").text_encoder
    assert isinstance(again, PreTrainedModel) and any("lora_A" in name for name, _ in again.named_parameters())
    (problem,) = check_directory(tmp_path / "mhla")
    assert problem.file == "text_encoder" and "unload_lora_weights()" in problem.message
