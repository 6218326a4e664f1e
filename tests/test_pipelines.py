# SPDX-License-Identifier: Apache-2.0
"""Pipelines: `load_pipeline`, conversion in place, plain diffusers loading, text- and image-to-video."""

import json
import os
import subprocess
import sys
import textwrap

import accelerate
import numpy as np
import pytest
import torch
from diffusers import (
    DiffusionPipeline,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
    WanVideoToVideoPipeline,
)
from diffusers.configuration_utils import ConfigMixin
from diffusers.hooks import apply_layerwise_casting
from peft import LoraConfig, get_peft_model_state_dict
from PIL import Image

from mhla_hf import MHLAConfig, MHLAWanTransformer3DModel, convert, load_pipeline
from mhla_hf.utils import files
from tests import ROOT, tiny
from tests.families.adapter_checks import randomize_lora
from tests.families.model_case import assert_same_parameters, perturb_mhla, recorded_warnings
from tests.tiny import wan_video


MHLA = {"blocks": [2, 1, 2]}


def image(height=16, width=32):
    values = np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


@pytest.fixture(scope="module")
def mhla_dir(tmp_path_factory):
    """A trained MHLA pipeline."""
    folder = tmp_path_factory.mktemp("mhla")
    pipeline = tiny.wan_pipeline(MHLAWanTransformer3DModel, mhla=MHLA)
    perturb_mhla(pipeline.transformer)
    pipeline.save_pretrained(folder)
    return folder


# Values of attn_implementation


def test_mhla_from_an_ordinary_pipeline(softmax_dir):
    with recorded_warnings() as warnings:
        pipeline = load_pipeline(softmax_dir, mhla=MHLA)
    assert type(pipeline) is WanPipeline and type(pipeline.transformer) is MHLAWanTransformer3DModel
    assert pipeline.transformer.mhla_config == MHLAConfig(**MHLA)
    assert len(warnings) == 1 and "Recover the model before you use it: mhla-hf recover" in warnings[0]
    stock = WanPipeline.from_pretrained(softmax_dir)
    assert_same_parameters(pipeline.transformer, stock.transformer, only_common=True)
    assert np.abs(wan_video(pipeline) - wan_video(stock)).max() > 1e-4


def test_the_package_reads_each_file_and_builds_the_model_once(softmax_dir, monkeypatch):
    reads, built = [], []
    read_text, load_config, install = (
        files._read_text,
        ConfigMixin.load_config,
        MHLAWanTransformer3DModel._install_mhla,
    )

    def counted_read(path, what):
        reads.append(path.relative_to(softmax_dir).as_posix())
        return read_text(path, what)

    def counted_load(cls, *args, **kwargs):
        # Not what diffusers reads for itself.
        if "mhla_hf" in sys._getframe(1).f_code.co_filename:
            reads.append(cls.__name__)
        return load_config.__func__(cls, *args, **kwargs)

    monkeypatch.setattr(files, "_read_text", counted_read)
    monkeypatch.setattr(ConfigMixin, "load_config", classmethod(counted_load))
    monkeypatch.setattr(
        MHLAWanTransformer3DModel, "_install_mhla", lambda model, mhla: (built.append(mhla), install(model, mhla))
    )
    load_pipeline(softmax_dir, mhla=MHLA)
    assert sorted(reads) == ["model_index.json", "transformer/config.json", "vae/config.json"] and len(built) == 1


@pytest.mark.parametrize("attn_implementation", [None, "mhla"])
def test_mhla_checkpoint_loads_as_saved(attn_implementation, mhla_dir):
    with recorded_warnings() as warnings:
        pipeline = load_pipeline(mhla_dir, attn_implementation)
    assert warnings == []
    assert type(pipeline.transformer) is MHLAWanTransformer3DModel
    assert_same_parameters(pipeline.transformer, MHLAWanTransformer3DModel.from_pretrained(mhla_dir / "transformer"))


@pytest.mark.parametrize("attn_implementation", [None, "softmax"])
def test_ordinary_checkpoint_stays_softmax(attn_implementation, softmax_dir):
    pipeline = load_pipeline(softmax_dir, attn_implementation)
    assert type(pipeline.transformer) is WanTransformer3DModel
    np.testing.assert_allclose(wan_video(pipeline), wan_video(tiny.wan_pipeline()), atol=1e-5)


def test_options_override_those_of_an_mhla_checkpoint(mhla_dir):
    pipeline = load_pipeline(mhla_dir, mhla={"normalizer": "none"})
    assert pipeline.transformer.mhla_config == MHLAConfig(**MHLA, normalizer="none")
    assert_same_parameters(pipeline.transformer, load_pipeline(mhla_dir).transformer)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"attn_implementation": "flash"}, "attn_implementation='flash' is not one of 'mhla', 'softmax', None"),
        ({"attn_implementation": "softmax"}, "transformer of .* is an MHLA checkpoint"),
        ({"attn_implementation": None, "mhla": MHLA}, "mhla options have no effect"),
        ({"mhla": {"blocks": [1, 1, 1]}}, "blocks"),
        ({"mhla": {"no_such": 1}}, "no_such"),
        ({"quantization_config": object()}, "quantization_config"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_load_pipeline_refuses(arguments, message, mhla_dir):
    with pytest.raises(ValueError, match=message):
        load_pipeline(mhla_dir, **arguments)


def test_a_model_without_a_pipeline_is_named(softmax_dir):
    with pytest.raises(ValueError, match="transformer is a model without a pipeline: load it with from_pretrained"):
        load_pipeline(softmax_dir / "transformer")


# Arguments that are passed on


@pytest.mark.filterwarnings("ignore:`torch_dtype` is deprecated")
@pytest.mark.parametrize("argument", ["torch_dtype", "dtype"])
@pytest.mark.parametrize("source", ["softmax_dir", "mhla_dir"])
def test_dtype(argument, source, request):
    pipeline = load_pipeline(request.getfixturevalue(source), **{argument: torch.bfloat16})
    assert pipeline.transformer.dtype == pipeline.text_encoder.dtype == pipeline.vae.dtype == torch.bfloat16
    assert pipeline.transformer.blocks[0].attn1.mhla.mixing.dtype == torch.float32
    assert wan_video(pipeline).shape == (5, 16, 32, 3)


def test_variant(mhla_dir, softmax_dir, tmp_path):
    load_pipeline(mhla_dir).save_pretrained(tmp_path / "all", variant="fp16")
    assert (tmp_path / "all/transformer/diffusion_pytorch_model.fp16.safetensors").is_file()
    pipeline = load_pipeline(tmp_path / "all", variant="fp16")
    assert_same_parameters(pipeline.transformer, load_pipeline(mhla_dir).transformer)
    # A variant of some components only: the others are loaded from their ordinary files.
    load_pipeline(softmax_dir, None).save_pretrained(tmp_path / "some")
    load_pipeline(softmax_dir, None).vae.save_pretrained(tmp_path / "some/vae", variant="fp16")
    assert type(load_pipeline(tmp_path / "some", variant="fp16").transformer) is MHLAWanTransformer3DModel
    with pytest.raises(ValueError, match="variant"):
        load_pipeline(mhla_dir, variant="no_such_variant")


def test_device_map(softmax_dir):
    pipeline = load_pipeline(softmax_dir, mhla=MHLA, device_map="cpu")
    assert not any(parameter.is_meta for parameter in pipeline.transformer.parameters())
    np.testing.assert_allclose(wan_video(pipeline), wan_video(load_pipeline(softmax_dir, mhla=MHLA)), atol=1e-5)


def test_components_of_the_caller(mhla_dir):
    transformer = tiny.wan_transformer(MHLAWanTransformer3DModel, mhla={"blocks": [1, 1, 1]})
    scheduler = UniPCMultistepScheduler(use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=5.0)
    pipeline = load_pipeline(mhla_dir, transformer=transformer, scheduler=scheduler, tokenizer=None)
    assert pipeline.transformer is transformer and pipeline.scheduler is scheduler and pipeline.tokenizer is None


# Shapes of video


@pytest.mark.parametrize("with_image_encoder", [True, False], ids=["wan2.1", "wan2.2"])
def test_image_to_video(with_image_encoder, tmp_path):
    if with_image_encoder:
        softmax = tiny.wan_pipeline(image_to_video=True)
    else:
        # Wan 2.2: the image reaches the model through its latents alone.
        parts = {name: part for name, part in tiny.wan_pipeline().components.items() if name != "transformer_2"}
        parts["transformer"] = tiny.wan_transformer(in_channels=36)
        softmax = WanImageToVideoPipeline(**parts, image_encoder=None, image_processor=None)
    softmax.save_pretrained(tmp_path / "softmax")
    pipeline = load_pipeline(tmp_path / "softmax", mhla=MHLA)
    assert type(pipeline) is WanImageToVideoPipeline
    assert (pipeline.image_encoder is not None) == with_image_encoder
    perturb_mhla(pipeline.transformer)
    video = wan_video(pipeline, image=image())
    assert video.shape == (5, 16, 32, 3)
    mirrored = wan_video(pipeline, image=image().transpose(Image.Transpose.FLIP_LEFT_RIGHT))
    assert np.abs(video - mirrored).max() > 1e-5
    pipeline.save_pretrained(tmp_path / "mhla")
    again = DiffusionPipeline.from_pretrained(tmp_path / "mhla")
    assert type(again) is WanImageToVideoPipeline and type(again.transformer) is MHLAWanTransformer3DModel
    np.testing.assert_allclose(wan_video(again, image=image()), video, atol=1e-5)


def test_two_transformers(tmp_path):
    """Wan 2.2 has a second transformer for the low noise levels."""
    tiny.wan_pipeline(second_transformer=True).save_pretrained(tmp_path / "softmax")
    pipeline = load_pipeline(tmp_path / "softmax", mhla=MHLA)
    for name in ("transformer", "transformer_2"):
        component = getattr(pipeline, name)
        assert type(component) is MHLAWanTransformer3DModel
        stock = WanTransformer3DModel.from_pretrained(tmp_path / "softmax", subfolder=name)
        assert_same_parameters(component, stock, only_common=True)
    video = wan_video(pipeline)
    pipeline.save_pretrained(tmp_path / "mhla")
    again = load_pipeline(tmp_path / "mhla", None)
    assert type(again.transformer_2) is MHLAWanTransformer3DModel and again.config.boundary_ratio == 0.9
    np.testing.assert_allclose(wan_video(again), video, atol=1e-5)
    own = tiny.wan_transformer(MHLAWanTransformer3DModel, mhla=MHLA)
    assert load_pipeline(tmp_path / "mhla", transformer_2=own).transformer_2 is own
    stock = tiny.wan_transformer()
    with pytest.raises(ValueError, match="transformer_2 of .* is an MHLA checkpoint"):
        load_pipeline(tmp_path / "mhla", "softmax", transformer=stock)
    with pytest.raises(ValueError, match="transformer, which is passed in as"):
        load_pipeline(tmp_path / "mhla", "softmax", transformer=own)


# Conversion in place


def test_convert_in_place_then_save_and_reload(tmp_path):
    pipeline = tiny.wan_pipeline(second_transformer=True)
    transformer = pipeline.transformer
    assert convert(pipeline, MHLA) is pipeline and pipeline.transformer is transformer
    perturb_mhla(transformer)
    video = wan_video(pipeline)
    pipeline.save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    assert index["transformer"] == ["mhla_hf", "MHLAWanTransformer3DModel"]
    assert index["transformer_2"] == index["transformer"]
    again = DiffusionPipeline.from_pretrained(tmp_path)
    assert_same_parameters(again.transformer, transformer)
    np.testing.assert_allclose(wan_video(again), video, atol=1e-5)
    with pytest.raises(ValueError, match="MHLA already"):
        convert(pipeline, MHLA)


def test_convert_of_a_half_converted_pipeline_touches_nothing():
    pipeline = tiny.wan_pipeline(second_transformer=True)
    convert(pipeline.transformer_2, MHLA)
    with pytest.raises(ValueError, match="transformer_2 .* MHLA already"):
        convert(pipeline, MHLA)
    assert type(pipeline.transformer) is WanTransformer3DModel


def test_convert_of_an_offloaded_pipeline_touches_nothing():
    pipeline = tiny.wan_pipeline(second_transformer=True)
    apply_layerwise_casting(pipeline.transformer_2, torch.float32, torch.float32)
    with pytest.raises(ValueError, match="transformer_2 .* has hooks .*remove_all_hooks"):
        convert(pipeline, MHLA)
    assert type(pipeline.transformer) is type(pipeline.transformer_2) is WanTransformer3DModel
    np.testing.assert_allclose(wan_video(pipeline), wan_video(tiny.wan_pipeline(second_transformer=True)), atol=1e-5)
    # Hooks that the pipeline put on come off again, and then it converts.
    pipeline = tiny.wan_pipeline()
    accelerate.cpu_offload_with_hook(pipeline.transformer, torch.device("cpu"))
    with pytest.raises(ValueError, match="transformer .* has hooks .*remove_all_hooks"):
        convert(pipeline, MHLA)
    pipeline.remove_all_hooks()
    expected = wan_video(convert(tiny.wan_pipeline(), MHLA))
    np.testing.assert_allclose(wan_video(convert(pipeline, MHLA)), expected, atol=1e-5)


def test_convert_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match="no MHLA version"):
        convert(tiny.wan_vae(), MHLA)
    pipeline = tiny.wan_pipeline()
    pipeline.register_modules(transformer=None)
    with pytest.raises(ValueError, match="No component of this WanPipeline"):
        convert(pipeline, MHLA)


# Other pipelines of the same parts


def test_from_pipe_takes_mhla_transformers_over(mhla_dir):
    pipeline = load_pipeline(mhla_dir)
    with recorded_warnings() as warnings:
        other = WanVideoToVideoPipeline.from_pipe(pipeline)
    assert not [message for message in warnings if "switched over" in message]
    assert type(other) is WanVideoToVideoPipeline and other.transformer is pipeline.transformer
    given = tiny.wan_transformer(MHLAWanTransformer3DModel, mhla=MHLA)
    assert WanVideoToVideoPipeline.from_pipe(pipeline, transformer=given).transformer is given


# LoRA through the pipeline


def test_lora_weights_of_a_pipeline(mhla_dir, tmp_path):
    trained = load_pipeline(mhla_dir)
    targets = ["to_q", "to_k", "to_v", "to_out.0"]
    trained.transformer.add_adapter(LoraConfig(r=2, lora_alpha=2, target_modules=targets))
    randomize_lora(trained.transformer)
    WanPipeline.save_lora_weights(tmp_path, transformer_lora_layers=get_peft_model_state_dict(trained.transformer))
    expected = wan_video(trained)
    pipeline = load_pipeline(mhla_dir)
    plain = wan_video(pipeline)
    assert np.abs(plain - expected).max() > 1e-4
    with recorded_warnings() as warnings:
        pipeline.load_lora_weights(tmp_path)
    assert not [message for message in warnings if "key" in message.lower()]
    np.testing.assert_allclose(wan_video(pipeline), expected, atol=1e-5)
    pipeline.fuse_lora()
    np.testing.assert_allclose(wan_video(pipeline), expected, atol=1e-4)
    pipeline.unfuse_lora()
    pipeline.unload_lora_weights()
    np.testing.assert_allclose(wan_video(pipeline), plain, atol=1e-4)


# Plain diffusers in another process


@pytest.mark.slow
def test_plain_diffusers_generates_the_same_in_a_fresh_process(mhla_dir, tmp_path):
    # The other order of imports is that of the Hub's tests.
    program = f"""
        import mhla_hf, diffusers
        import numpy, torch
        from diffusers import DiffusionPipeline
        pipeline = DiffusionPipeline.from_pretrained({str(mhla_dir)!r})
        assert type(pipeline.transformer).__name__ == "MHLAWanTransformer3DModel"
        assert pipeline.transformer.mhla_layers == [0, 1]
        video = pipeline(
            prompt="a three moves left", height=16, width=32, num_frames=5, num_inference_steps=2,
            generator=torch.Generator().manual_seed(0), output_type="np", max_sequence_length=16,
        ).frames[0]
        numpy.save({str(tmp_path / "video.npy")!r}, video)
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    np.testing.assert_allclose(np.load(tmp_path / "video.npy"), wan_video(load_pipeline(mhla_dir)), atol=1e-5)
