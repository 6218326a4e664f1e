# SPDX-License-Identifier: Apache-2.0
"""`attn_implementation="mhla"` and `mhla=` in every way of diffusers to load a model or pipeline."""

import importlib
import json

import pytest
import torch
from diffusers import (
    AutoencoderKLWan,
    AutoModel,
    AutoPipelineForText2Image,
    DiffusionPipeline,
    ModularPipeline,
    PixArtAlphaPipeline,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from diffusers.loaders.single_file import FromSingleFileMixin

import mhla_hf
from mhla_hf import MHLAPixArtTransformer2DModel, MHLAWanTransformer3DModel, load_pipeline
from mhla_hf.models import registry
from mhla_hf.models.registry import FAMILIES, recovery_advice
from mhla_hf.recovery import recipes
from tests import tiny_images
from tests.families.cases import WanCase
from tests.families.model_case import assert_same_parameters, recorded_warnings


OPTIONS = dict(WanCase.options)
MHLA = {"attn_implementation": "mhla", "mhla": OPTIONS}


@pytest.fixture(scope="module")
def mhla_dir(softmax_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mhla")
    load_pipeline(softmax_dir, mhla=OPTIONS).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("load", [DiffusionPipeline, WanPipeline], ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("given", [MHLA, {"mhla": OPTIONS}], ids=["both", "options alone"])
def test_pipelines(load, given, softmax_dir):
    expected = load_pipeline(softmax_dir, mhla=OPTIONS).transformer
    pipeline = load.from_pretrained(softmax_dir, torch_dtype=torch.float64, **given)
    assert type(pipeline) is WanPipeline and pipeline.transformer.dtype == torch.float64
    assert type(pipeline.transformer) is MHLAWanTransformer3DModel
    assert pipeline.transformer.config.mhla == expected.config.mhla
    assert_same_parameters(pipeline.transformer.float(), expected)


def test_the_class_that_is_asked_loads(softmax_dir):
    with recorded_warnings() as warnings:
        pipeline = WanImageToVideoPipeline.from_pretrained(softmax_dir, attn_implementation="mhla")
    assert type(pipeline) is WanImageToVideoPipeline and type(pipeline.transformer) is MHLAWanTransformer3DModel
    assert not any("will be ignored" in message for message in warnings)


def test_auto_pipelines(tmp_path):
    tiny_images.pixart_pipeline().save_pretrained(tmp_path)
    pipeline = AutoPipelineForText2Image.from_pretrained(str(tmp_path), attn_implementation="mhla")
    assert isinstance(pipeline, PixArtAlphaPipeline) or "PixArt" in type(pipeline).__name__
    assert type(pipeline.transformer) is MHLAPixArtTransformer2DModel


@pytest.mark.parametrize("value", ["softmax", None])
def test_softmax_and_none(value, softmax_dir, mhla_dir):
    plain = DiffusionPipeline.from_pretrained(softmax_dir, attn_implementation=value)
    model = WanTransformer3DModel.from_pretrained(softmax_dir, subfolder="transformer", attn_implementation=value)
    assert type(plain.transformer) is type(model) is WanTransformer3DModel
    for load, where in (
        (DiffusionPipeline, {}),
        (WanTransformer3DModel, {"subfolder": "transformer"}),
        (MHLAWanTransformer3DModel, {"subfolder": "transformer"}),
        (AutoModel, {"subfolder": "transformer"}),
    ):
        if value is None:
            loaded = load.from_pretrained(str(mhla_dir), attn_implementation=None, **where)
            assert type(getattr(loaded, "transformer", loaded)) is MHLAWanTransformer3DModel
            continue
        with pytest.raises(
            ValueError, match="MHLA checkpoint; attn_imp.* would drop its trained|is MHLA: load a softm"
        ):
            load.from_pretrained(mhla_dir, attn_implementation=value, **where)


def test_a_component_that_is_passed_in(softmax_dir):
    ours = MHLAWanTransformer3DModel.from_pretrained(softmax_dir, subfolder="transformer", mhla=OPTIONS)
    # diffusers drops optional components in the general class, as WanPipeline's transformers are.
    for load, given in ((WanPipeline, {"attn_implementation": "mhla"}), (WanPipeline, {}), (DiffusionPipeline, {})):
        assert load.from_pretrained(softmax_dir, transformer=ours, **given).transformer is ours
    softmax = WanTransformer3DModel.from_pretrained(softmax_dir, subfolder="transformer")
    with pytest.raises(ValueError, match="passed in as a WanTransformer3DModel; convert it before"):
        WanPipeline.from_pretrained(softmax_dir, transformer=softmax, attn_implementation="mhla")


def test_components_passed_to_an_mhla_index_print_nothing(mhla_dir):
    ours = MHLAWanTransformer3DModel.from_pretrained(mhla_dir, subfolder="transformer")
    with recorded_warnings() as warnings:
        for load in (WanPipeline.from_pretrained, load_pipeline):
            assert load(mhla_dir, transformer=ours).transformer is ours
    assert not any("non-standard module" in message for message in warnings)


@pytest.mark.parametrize(
    "cls", [WanTransformer3DModel, MHLAWanTransformer3DModel, AutoModel], ids=lambda c: c.__name__
)
@pytest.mark.parametrize("given", [MHLA, {"mhla": OPTIONS}], ids=["both", "options alone"])
def test_models(cls, given, softmax_dir):
    expected = load_pipeline(softmax_dir, mhla=OPTIONS).transformer
    with recorded_warnings() as warnings:
        loaded = cls.from_pretrained(str(softmax_dir), subfolder="transformer", **given)
    assert type(loaded) is MHLAWanTransformer3DModel
    assert_same_parameters(loaded, expected)
    assert [message for message in warnings if recovery_advice("WanTransformer3DModel") in message] == warnings[:1]
    built = cls.from_config(WanTransformer3DModel.load_config(softmax_dir, subfolder="transformer"), **given)
    assert type(built) is MHLAWanTransformer3DModel and built.mhla_config == loaded.mhla_config


@pytest.mark.parametrize("cls", [WanTransformer3DModel, MHLAWanTransformer3DModel], ids=lambda cls: cls.__name__)
def test_single_files(cls, softmax_dir):
    file = str(softmax_dir / "transformer/diffusion_pytorch_model.safetensors")
    loaded = cls.from_single_file(file, config=str(softmax_dir / "transformer"), **MHLA)
    assert type(loaded) is MHLAWanTransformer3DModel
    assert_same_parameters(loaded, load_pipeline(softmax_dir, mhla=OPTIONS).transformer)


@pytest.mark.parametrize("value", ["MHLA", "mlha", {"transformer": "mhla"}], ids=str)
def test_wrong_values_are_refused(value, softmax_dir):
    transformer, wrong = {"subfolder": "transformer", "attn_implementation": value}, "is not one of 'mhla', 'softmax'"
    config = WanTransformer3DModel.load_config(softmax_dir, subfolder="transformer")
    for load in (
        lambda: DiffusionPipeline.from_pretrained(softmax_dir, attn_implementation=value),
        lambda: load_pipeline(softmax_dir, attn_implementation=value),
        lambda: WanTransformer3DModel.from_pretrained(softmax_dir, **transformer),
        lambda: MHLAWanTransformer3DModel.from_pretrained(softmax_dir, **transformer),
        lambda: AutoModel.from_pretrained(softmax_dir, **transformer),
        lambda: WanTransformer3DModel.from_config(config, attn_implementation=value),
        lambda: WanTransformer3DModel.from_single_file("file.safetensors", attn_implementation=value),
    ):
        with pytest.raises(ValueError, match=wrong):
            load()
    with pytest.raises(ValueError, match="mhla options have no effect with attn_implementation=None"):
        WanTransformer3DModel.from_pretrained(softmax_dir, subfolder="transformer", attn_implementation=None, mhla={})


def test_models_without_an_mhla_version(softmax_dir, tmp_path):
    config = AutoencoderKLWan.load_config(softmax_dir, subfolder="vae")
    for load in (
        lambda: AutoencoderKLWan.from_pretrained(softmax_dir, subfolder="vae", attn_implementation="mhla"),
        lambda: AutoModel.from_pretrained(softmax_dir, subfolder="vae", attn_implementation="mhla"),
        lambda: AutoencoderKLWan.from_config(config, attn_implementation="mhla"),
    ):
        with pytest.raises(ValueError, match="AutoencoderKLWan has no MHLA version. Supported: Chroma"):
            load()
    other = AutoencoderKLWan.from_pretrained(softmax_dir, subfolder="vae", attn_implementation="anything")
    assert type(other) is AutoencoderKLWan
    index = json.loads((softmax_dir / "model_index.json").read_text())
    for name in ("vae", "text_encoder", "tokenizer", "scheduler"):
        (tmp_path / name).symlink_to(softmax_dir / name)
    (tmp_path / "model_index.json").write_text(json.dumps({**index, "transformer": [None, None]}))
    for given in ({"attn_implementation": "mhla"}, {"mhla": OPTIONS}):
        with pytest.raises(ValueError, match="No component of WanPipeline in .* has an MHLA version"):
            WanPipeline.from_pretrained(tmp_path, **given)
    with recorded_warnings() as warnings:
        pipeline = WanPipeline.from_pretrained(tmp_path, transformer=None, attn_implementation="anything")
    assert pipeline.transformer is None and any("will be ignored" in message for message in warnings)


def test_what_takes_no_request_says_so(softmax_dir):
    softmax = DiffusionPipeline.from_pretrained(softmax_dir)
    modular = ModularPipeline.from_pretrained(str(softmax_dir))
    for load in (
        lambda **given: WanImageToVideoPipeline.from_pipe(softmax, **given),
        lambda **given: FromSingleFileMixin.from_single_file("file.safetensors", **given),
        lambda **given: ModularPipeline.from_pretrained(str(softmax_dir), **given),
        modular.load_components,
    ):
        for given in ({"attn_implementation": "mhla"}, {"mhla": OPTIONS}):
            with pytest.raises(ValueError, match="convert the model afterwards by mhla_hf.convert"):
                load(**given)
    modular.load_components(attn_implementation={"transformer": "mhla"})
    assert type(modular.transformer) is MHLAWanTransformer3DModel and type(modular.vae) is AutoencoderKLWan


@pytest.mark.parametrize("name", ["mhla", "MHLA"])
def test_mhla_is_no_attention_backend(name):
    dispatch = importlib.import_module("diffusers.models.attention_dispatch")
    softmax = WanCase().make(WanTransformer3DModel)
    for model in (softmax, WanCase().make_mhla()):
        for args, given in (((name,), {}), ((), {"backend": name})):
            with pytest.raises(ValueError, match="MHLA is no attention backend: load with attn"):
                model.set_attention_backend(*args, **given)
    with pytest.raises(ValueError, match="MHLA is no attention backend"), dispatch.attention_backend(name):
        pass
    with dispatch.attention_backend("native"):
        softmax.set_attention_backend("native")


def test_indices_name_the_package_and_earlier_ones_load(mhla_dir, tmp_path):
    index = json.loads((mhla_dir / "model_index.json").read_text())
    assert index["transformer"] == ["mhla_hf", "MHLAWanTransformer3DModel"]
    for name in ("vae", "text_encoder", "tokenizer", "scheduler", "transformer"):
        (tmp_path / name).symlink_to(mhla_dir / name)
    earlier = {**index, "transformer": ["diffusers", "MHLAWanTransformer3DModel"]}
    (tmp_path / "model_index.json").write_text(json.dumps(earlier))
    expected = DiffusionPipeline.from_pretrained(mhla_dir).transformer
    for load in (DiffusionPipeline.from_pretrained, load_pipeline):
        assert_same_parameters(load(tmp_path).transformer, expected)


def test_advice_names_what_recovers_a_model():
    recovered = {name for name, family in FAMILIES.items() if family.training in recipes.FAMILIES}
    assert {name for name, family in FAMILIES.items() if family.recipe} == recovered
    expected = "Recover the model before you use it: mhla-hf recover MODEL OUTPUT, or mhla_hf.recover in Python."
    assert recovery_advice("LlamaForCausalLM") == recovery_advice("MHLAWanTransformer3DModel") == expected
    assert "since mhla_hf.recover does not take it yet" in recovery_advice("MHLAWanAnimateTransformer3DModel")
    assert "since mhla_hf.recover does not take it yet" in recovery_advice("CLIPModel", has_towers=True)
    assert "leave the model's output" in registry.recovery_advice("SanaTransformer2DModel", is_same=True)
    with recorded_warnings() as warnings:
        mhla_hf.convert(WanCase().make(WanTransformer3DModel), OPTIONS)
    assert len(warnings) == 1 and warnings[0].endswith(expected)


def test_auto_model_takes_its_arguments_by_name(softmax_dir):
    model = AutoModel.from_pretrained(pretrained_model_or_path=str(softmax_dir), subfolder="transformer")
    assert type(model) is WanTransformer3DModel
    config = dict(model.config)
    assert type(AutoModel.from_config(pretrained_model_name_or_path_or_dict=config)) is WanTransformer3DModel
    with pytest.raises(TypeError, match="pretrained_model_name_or_path"):
        DiffusionPipeline.from_pretrained()


def test_weights_that_are_no_safetensors_are_loaded_as_diffusers_does(softmax_dir, tmp_path):
    WanPipeline.from_pretrained(softmax_dir).save_pretrained(tmp_path / "bin", safe_serialization=False)
    assert type(DiffusionPipeline.from_pretrained(tmp_path / "bin", attn_implementation=None).vae) is AutoencoderKLWan
    pipe = DiffusionPipeline.from_pretrained(tmp_path / "bin", **MHLA)
    assert type(pipe.transformer) is MHLAWanTransformer3DModel
