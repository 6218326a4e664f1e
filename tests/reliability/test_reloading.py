# SPDX-License-Identifier: Apache-2.0
"""A saved and reloaded model computes the same bits, wherever both hold their weights at equally aligned addresses.

safetensors maps files into memory, where a tensor starts at any multiple of 4 bytes. torch's matrix products on a CPU
add up in another order there than at the addresses that torch itself allocates, in softmax models as well.
"""

from __future__ import annotations

import copy

import pytest
import torch
from diffusers import DiffusionPipeline, WanTransformer3DModel

import mhla_hf
from mhla_hf.demo import base_pipeline_directory
from tests.models.cases import CASES

from ..integrations.transformers.mhla_models import mhla_model, mhla_modules
from ..integrations.transformers.tiny_models import FAMILIES, inputs


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
    options = {"window": "adjacent", "window_size": 3} if name == "llama" else {}
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
