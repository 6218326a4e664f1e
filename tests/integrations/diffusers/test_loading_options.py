# SPDX-License-Identifier: Apache-2.0
"""Ways in which users of diffusers load, compile and adapt models: device maps, quantisation, LoRA with parameters."""

import copy

import pytest
import torch
from diffusers import (
    AutoModel,
    ChromaPipeline,
    DiffusionPipeline,
    LTX2Pipeline,
    LTXPipeline,
    SanaPipeline,
    WanPipeline,
)
from diffusers.training_utils import _collate_lora_metadata
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import load_file

from mhla_hf import MHLAWanTransformer3DModel, convert, load_pipeline
from tests import tiny, tiny_images, tiny_joint
from tests.families.adapter_checks import TARGETS
from tests.families.cases import LTX2Case, LTXCase, SanaCase, WanCase
from tests.families.model_case import OPTION_SETS, assert_fresh, assert_same_parameters, perturb_mhla, relative_error


OPTIONS = {**WanCase.options, "output_gate": True}


@pytest.fixture(scope="module")
def mhla_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mhla")
    pipeline = convert(tiny.wan_pipeline(), OPTIONS)
    perturb_mhla(pipeline.transformer)
    pipeline.save_pretrained(folder)
    return folder


# Pipelines


@pytest.mark.parametrize("arguments", [{}, {"max_memory": {"cpu": 10**9}}], ids=["plain", "max_memory"])
def test_balanced_device_map(arguments, softmax_dir, mhla_dir):
    plain = DiffusionPipeline.from_pretrained(mhla_dir, device_map="balanced", **arguments)
    loaded = load_pipeline(mhla_dir, device_map="balanced", **arguments)
    assert loaded.hf_device_map == plain.hf_device_map
    assert_same_parameters(loaded.transformer, plain.transformer)
    converted = load_pipeline(softmax_dir, device_map="balanced", mhla=OPTIONS, **arguments)
    assert type(converted.transformer) is MHLAWanTransformer3DModel
    assert_fresh(converted.transformer)


def test_wrong_options_show_before_anything_is_loaded(softmax_dir, tmp_path, monkeypatch):
    from transformers import UMT5EncoderModel

    def loaded(*arguments, **options):
        raise AssertionError("the text encoder was loaded")

    monkeypatch.setattr(UMT5EncoderModel, "from_pretrained", loaded)
    for mhla in ({"no_such": 1}, {"layers": [9]}, {"blocks": [4]}):
        with pytest.raises(ValueError):
            load_pipeline(softmax_dir, mhla=mhla)


def test_auto_model_builds_from_every_form_of_a_configuration(mhla_dir):
    folder = str(mhla_dir / "transformer")
    model = AutoModel.from_pretrained(folder)
    forms = (model.config, dict(model.config), AutoModel.load_config(folder), folder)
    for form in forms:
        built = AutoModel.from_config(form)
        assert type(built) is MHLAWanTransformer3DModel and built.mhla_config == model.mhla_config
    changed = AutoModel.from_config(model.config, mhla={"lepe_kernel": 3})
    assert changed.mhla_config == model.mhla_config.replace(lepe_kernel=3)


# Compiled models


@pytest.mark.parametrize("way", ["wrapper", "method", "blocks"])
def test_compiled_models_are_refused(way):
    pipeline = tiny.wan_pipeline()
    model = pipeline.transformer
    if way == "wrapper":
        pipeline.transformer = torch.compile(model)
    elif way == "method":
        model.compile()
    else:
        model.compile_repeated_blocks()
    for target in (pipeline, pipeline.transformer):
        with pytest.raises(ValueError, match=r"WanTransformer3DModel\) is compiled.* compile it afterwards"):
            convert(target, OPTIONS)
    assert not any(hasattr(block.attn1, "mhla") for block in model.blocks)
    mhla = copy.deepcopy(convert(tiny.wan_pipeline(), OPTIONS))
    mhla.transformer = torch.compile(mhla.transformer)
    with pytest.raises(ValueError, match="is MHLA already"):
        convert(mhla, OPTIONS)


# LoRA with MHLA parameters


PIPELINES = {
    "wan": (tiny.wan_pipeline, WanPipeline, WanCase()),
    "sana": (tiny_images.sana_pipeline, SanaPipeline, SanaCase()),
    "ltx": (tiny.ltx_pipeline, LTXPipeline, LTXCase()),
    "ltx2": (tiny.ltx2_pipeline, LTX2Pipeline, LTX2Case()),
}


@pytest.mark.parametrize("name", PIPELINES)
class TestLora:
    def pipeline(self, name, **options):
        make, _, case = PIPELINES[name]
        return convert(make(), {**case.options, **OPTION_SETS["everything"], **options})

    def trained(self, name):
        pipeline = self.pipeline(name)
        config = LoraConfig(r=4, target_modules=TARGETS, modules_to_save=["mhla"], init_lora_weights="gaussian")
        pipeline.transformer.add_adapter(config)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for key, parameter in pipeline.transformer.named_parameters():
                if "modules_to_save" in key or "lora_B" in key:
                    parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        return pipeline.transformer

    def save(self, name, model, folder, **metadata):
        weights = get_peft_model_state_dict(model)
        PIPELINES[name][1].save_lora_weights(folder, transformer_lora_layers=weights, **metadata)
        stored = load_file(folder / "pytorch_lora_weights.safetensors")
        assert sum(".mhla." in key for key in stored) == len(
            [key for key in model.state_dict() if ".mhla.modules_to_save." in key]
        )

    def test_saved_and_loaded_by_the_pipeline(self, name, tmp_path):
        case, model = PIPELINES[name][2], self.trained(name)
        expected = case.run(model)
        self.save(name, model, tmp_path, **_collate_lora_metadata({"transformer": model}))
        pipeline = self.pipeline(name)
        plain = case.run(pipeline.transformer)
        assert relative_error(expected, plain) > 1e-3
        pipeline.load_lora_weights(tmp_path, adapter_name="trained")
        torch.testing.assert_close(case.run(pipeline.transformer), expected)
        assert pipeline.get_active_adapters() == ["trained"]
        pipeline.disable_lora()
        torch.testing.assert_close(case.run(pipeline.transformer), plain)
        pipeline.enable_lora()
        torch.testing.assert_close(case.run(pipeline.transformer), expected)
        pipeline.load_lora_weights(tmp_path, adapter_name="again")
        with pytest.raises(ValueError, match="trained, again each carry .*only one of them can be active"):
            pipeline.set_adapters(["trained", "again"])
        pipeline.set_adapters(["trained", "again"], [0.0, 1.0])
        torch.testing.assert_close(case.run(pipeline.transformer), expected)
        pipeline.set_adapters(["trained", "again"], [0.0, 0.0])
        torch.testing.assert_close(case.run(pipeline.transformer), plain)
        pipeline.transformer.set_adapter("trained")
        pipeline.delete_adapters("trained")
        pipeline.set_adapters("again")
        torch.testing.assert_close(case.run(pipeline.transformer), expected)
        pipeline.unload_lora_weights()
        torch.testing.assert_close(case.run(pipeline.transformer), plain)
        assert set(pipeline.transformer.state_dict()) == set(self.pipeline(name).transformer.state_dict())

    def test_what_cannot_be_loaded_is_refused(self, name, tmp_path):
        make, _, case = PIPELINES[name]
        model = self.trained(name)
        self.save(name, model, tmp_path / "bare")
        self.save(name, model, tmp_path / "full", **_collate_lora_metadata({"transformer": model}))
        for pipeline, folder, message in (
            (self.pipeline(name), "bare", "needs? modules_to_save=.*save_lora_adapter"),
            (self.pipeline(name, lepe_kernel=5), "full", "not those of the transformer.*lepe"),
            (self.pipeline(name, layers=[1]), "full", "not those of the transformer.*blocks.0"),
            (make(), "full", "Invalid LoRA checkpoint"),
        ):
            before = set(pipeline.transformer.state_dict())
            with pytest.raises(ValueError, match=message):
                pipeline.load_lora_weights(tmp_path / folder)
            assert set(pipeline.transformer.state_dict()) == before


MADE = {
    "vace": tiny.vace_pipeline,
    "skyreels": tiny.skyreels_pipeline,
    "sana-video": tiny_images.sana_video_pipeline,
    "hunyuan": tiny_joint.hunyuan_video_pipeline,
    "hunyuan-1.5": tiny_joint.hunyuan_video_15_pipeline,
    "qwen": tiny_joint.qwen_image_pipeline,
    "flux": tiny_joint.flux_pipeline,
    "chroma": lambda: tiny_joint.chroma_pipeline(ChromaPipeline),
    **{name: make for name, (make, _, _) in PIPELINES.items()},
}


@pytest.mark.parametrize("name", [name for name in MADE if hasattr(MADE[name](), "load_lora_weights")])
def test_loras_in_memory_and_of_every_loader_stay_whole(name, tmp_path):
    """Those of the softmax model from a dict, which stays as it is, and those that carry MHLA's parameters."""
    pipeline = MADE[name]()
    pipeline.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False))
    weights = {f"transformer.{key}": value for key, value in get_peft_model_state_dict(pipeline.transformer).items()}
    other = convert(MADE[name]())
    given = dict(weights)
    other.load_lora_weights(pretrained_model_name_or_path_or_dict=given)
    assert given.keys() == weights.keys()
    loaded = get_peft_model_state_dict(other.transformer, adapter_name="default_0")
    assert {f"transformer.{key}" for key in loaded} == weights.keys()
    assert all(torch.equal(loaded[key.removeprefix("transformer.")], value) for key, value in weights.items())

    trained = convert(MADE[name]())
    trained.transformer.add_adapter(LoraConfig(r=2, lora_alpha=8, target_modules=["to_q"], modules_to_save=["mhla"]))
    perturb_mhla(trained.transformer)
    weights = get_peft_model_state_dict(trained.transformer)
    metadata = _collate_lora_metadata({"transformer": trained.transformer})
    type(trained).save_lora_weights(tmp_path / "whole", transformer_lora_layers=weights, **metadata)
    type(trained).save_lora_weights(tmp_path / "bare", transformer_lora_layers=weights)
    fresh = convert(MADE[name]())
    file = load_file(tmp_path / "bare" / "pytorch_lora_weights.safetensors")
    for source in (tmp_path / "bare", file):
        with pytest.raises(ValueError, match="holds MHLA parameters, which need modules_to_save"):
            fresh.load_lora_weights(source)
    own = {key.removeprefix("transformer."): value for key, value in file.items()}
    with pytest.raises(ValueError, match="holds MHLA parameters, which need modules_to_save"):
        fresh.transformer.load_lora_adapter(own, prefix=None)
    fresh = convert(MADE[name]())
    fresh.load_lora_weights(tmp_path / "whole", adapter_name="default")
    loaded = get_peft_model_state_dict(fresh.transformer)
    assert loaded.keys() == weights.keys() and any(".mhla." in key for key in weights)
    assert all(torch.equal(loaded[key], value) for key, value in weights.items())
    assert {layer.scaling["default"] for layer in fresh.transformer.modules() if hasattr(layer, "scaling")} == {4.0}


def test_authors_names_in_memory_load_as_on_softmax():
    names = "double_blocks.0.img_attn_qkv.lora_{}.weight"
    weights = {names.format("A"): torch.ones(2, 24), names.format("B"): torch.ones(72, 2)}
    pipeline = convert(tiny_joint.hunyuan_video_pipeline())
    given = dict(weights)
    pipeline.load_lora_weights(given)
    assert given.keys() == weights.keys()
    assert sum("lora_A" in key for key, _ in pipeline.transformer.named_parameters()) == 3


def test_weights_beside_mhla_parameters_are_not_dropped():
    pipeline = convert(tiny_joint.flux_pipeline())
    pipeline.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q"], modules_to_save=["mhla"]))
    own = get_peft_model_state_dict(pipeline.transformer)
    weights = {f"transformer.{key}": value for key, value in own.items()}
    weights["text_encoder.layers.0.q_proj.lora_A.weight"] = torch.ones(2, 4)
    with pytest.raises(ValueError, match="come with weights for other models"):
        convert(tiny_joint.flux_pipeline()).load_lora_weights(weights)
