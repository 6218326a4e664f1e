# SPDX-License-Identifier: Apache-2.0
"""Wan 2.2: options for each expert, one converted and the other not, LoRA on both, and the 5B model's timesteps."""

import json
import shutil

import pytest
import torch
from diffusers import DiffusionPipeline, WanImageToVideoPipeline, WanPipeline, WanTransformer3DModel
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import load_file

from mhla_hf import MHLAWanTransformer3DModel, convert, convert_pretrained, load_pipeline
from tests import tiny
from tests.command_line import run_command
from tests.families.adapter_checks import TARGETS, randomize_lora
from tests.families.model_case import assert_same_parameters, perturb_mhla, relative_error
from tests.test_pipelines import image
from tests.tiny import wan_video


FIRST, SECOND = {"blocks": [2, 1, 2]}, {"blocks": [1, 2, 2], "output_gate": True}
BOTH = {"transformer": FIRST, "transformer_2": SECOND}
EXPERTS = ("transformer", "transformer_2")


@pytest.fixture(scope="module")
def softmax_dir(tmp_path_factory):
    """A Wan 2.2 pipeline of two softmax experts; tests do not change it."""
    folder = tmp_path_factory.mktemp("wan2.2") / "softmax"
    tiny.wan_pipeline(second_transformer=True).save_pretrained(folder)
    return folder


def loaded(softmax_dir, destination, mhla):
    load_pipeline(softmax_dir, mhla=mhla).save_pretrained(destination)


def converted_in_place(softmax_dir, destination, mhla):
    convert(DiffusionPipeline.from_pretrained(softmax_dir), mhla).save_pretrained(destination)


def converted_on_disk(softmax_dir, destination, mhla):
    convert_pretrained(softmax_dir, destination, mhla, progress=False)


def converted_by_command(softmax_dir, destination, mhla):
    run_command("convert", softmax_dir, destination, "--mhla", json.dumps(mhla), "-q")


WAYS = pytest.mark.parametrize("way", [loaded, converted_in_place, converted_by_command])


@WAYS
def test_each_expert_has_its_own_options(way, softmax_dir, tmp_path):
    way(softmax_dir, tmp_path / "mhla", BOTH)
    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "mhla")
    for name, options in BOTH.items():
        expert = getattr(pipeline, name)
        assert type(expert) is MHLAWanTransformer3DModel
        assert list(expert.mhla_config.blocks) == options["blocks"]
        assert expert.mhla_config.output_gate == options.get("output_gate", False)
        stock = WanTransformer3DModel.from_pretrained(softmax_dir, subfolder=name)
        assert_same_parameters(expert, stock, only_common=True)
    assert pipeline.config.boundary_ratio == 0.9


@pytest.mark.parametrize(
    ("way", "mhla"),
    [
        (loaded, {"transformer": FIRST}),
        (converted_in_place, {"transformer": None, "transformer_2": FIRST}),
        (converted_on_disk, {"transformer_2": FIRST}),
        (converted_by_command, {"transformer": FIRST, "transformer_2": None}),
    ],
)
def test_one_expert_is_converted_and_the_other_is_not(way, mhla, softmax_dir, tmp_path):
    name, remaining = sorted(EXPERTS, key=lambda expert: mhla.get(expert) is None)
    way(softmax_dir, tmp_path / "mhla", mhla)
    index = json.loads((tmp_path / "mhla" / "model_index.json").read_text())
    assert index[name][1] == "MHLAWanTransformer3DModel" and index[remaining][1] == "WanTransformer3DModel"
    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "mhla")
    assert type(getattr(pipeline, name)) is MHLAWanTransformer3DModel
    kept = getattr(pipeline, remaining)
    assert type(kept) is WanTransformer3DModel
    assert_same_parameters(kept, WanTransformer3DModel.from_pretrained(softmax_dir, subfolder=remaining))
    wan_video(pipeline)
    # Loading it for MHLA keeps the choice, until the other expert is named.
    again = load_pipeline(tmp_path / "mhla")
    assert type(getattr(again, name)) is MHLAWanTransformer3DModel
    assert type(getattr(again, remaining)) is WanTransformer3DModel
    both = load_pipeline(tmp_path / "mhla", mhla={remaining: SECOND})
    assert all(type(getattr(both, expert)) is MHLAWanTransformer3DModel for expert in EXPERTS)


def test_one_expert_after_the_other(softmax_dir, tmp_path):
    convert_pretrained(softmax_dir, tmp_path / "one", FIRST, component="transformer", progress=False)
    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "one")
    perturb_mhla(pipeline.transformer)
    pipeline.save_pretrained(tmp_path / "trained")
    arguments = ["--component", "transformer_2", "--blocks", "1,2,2", "--output-gate", "--quiet"]
    run_command("convert", tmp_path / "trained", tmp_path / "two", *arguments)
    again = DiffusionPipeline.from_pretrained(tmp_path / "two")
    assert_same_parameters(again.transformer, pipeline.transformer)
    assert again.transformer_2.mhla_config.blocks == (1, 2, 2) and again.transformer_2.mhla_config.output_gate
    # In memory: the one that is left.
    convert(pipeline, {"transformer_2": SECOND})
    assert_same_parameters(pipeline.transformer_2, again.transformer_2)


@pytest.mark.parametrize("convert_them", [loaded, converted_on_disk])
@pytest.mark.parametrize(
    ("mhla", "message"),
    [
        ({"transformer_3": FIRST}, "names 'transformer_3', .* can be MHLA: transformer, transformer_2"),
        ({"transformer": FIRST, "vae": FIRST}, "names 'vae', .* can be MHLA: transformer, transformer_2"),
        ({"transformer": FIRST, "blocks": [1, 2, 2]}, "names 'blocks', which is an option"),
        (
            {"transformer": FIRST, "transformer_2": "softmax"},
            "options must be a dict .*'softmax'|'softmax' must be options",
        ),
        ({"transformer": None, "transformer_2": None}, "leaves every component as it is"),
        ({"transformer": FIRST, "transformer_2": {"bloks": 3}}, "bloks"),
        ({"transformer": FIRST, "transformer_2": {"layers": [7]}}, "layers"),
    ],
    ids=["unknown", "not a denoiser", "mixed", "no options", "nothing", "wrong option", "wrong layer"],
)
def test_mistakes_are_refused_before_any_work(convert_them, mhla, message, softmax_dir, tmp_path):
    with pytest.raises(ValueError, match=message) as caught:
        convert_them(softmax_dir, tmp_path / "mhla", mhla)
    assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)
    assert not (tmp_path / "mhla").exists()


# LoRA


def add_lora(expert, seed):
    torch.manual_seed(seed)
    expert.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=TARGETS, init_lora_weights="gaussian"))
    randomize_lora(expert)


@torch.no_grad()
def outputs(pipeline):
    return [getattr(pipeline, name)(**tiny.wan_inputs(), return_dict=False)[0] for name in EXPERTS]


def test_lora_on_both_experts(softmax_dir, tmp_path):
    pipeline = load_pipeline(softmax_dir, mhla=BOTH)
    pipeline.save_pretrained(tmp_path / "mhla")
    plain = outputs(pipeline)
    for seed, name in enumerate(EXPERTS):
        add_lora(getattr(pipeline, name), seed)
        weights = get_peft_model_state_dict(getattr(pipeline, name))
        # As users of Wan 2.2 do: diffusers writes one file for each expert.
        WanPipeline.save_lora_weights(tmp_path / name, transformer_lora_layers=weights)
    expected = outputs(pipeline)
    assert all(relative_error(one, other) > 1e-3 for one, other in zip(expected, plain))
    again = DiffusionPipeline.from_pretrained(tmp_path / "mhla")
    again.load_lora_weights(tmp_path / "transformer", adapter_name="high")
    torch.testing.assert_close(outputs(again), [expected[0], plain[1]])
    again.load_lora_weights(tmp_path / "transformer_2", adapter_name="low", load_into_transformer_2=True)
    torch.testing.assert_close(outputs(again), expected)
    assert again.get_list_adapters() == {"transformer": ["high"], "transformer_2": ["low"]}
    wan_video(again)
    again.fuse_lora(components=list(EXPERTS))
    torch.testing.assert_close(outputs(again), expected, rtol=1e-4, atol=1e-5)
    again.unfuse_lora(components=list(EXPERTS))
    again.unload_lora_weights()
    torch.testing.assert_close(outputs(again), plain, rtol=1e-4, atol=1e-5)


# Wan 2.2 5B: one transformer, and a timestep for every token


@pytest.mark.parametrize("with_image", [False, True], ids=["text", "image"])
def test_a_timestep_for_each_token(with_image, tmp_path):
    parts = {name: part for name, part in tiny.wan_pipeline().components.items() if name != "transformer_2"}
    if with_image:
        softmax = WanImageToVideoPipeline(**parts, image_encoder=None, image_processor=None, expand_timesteps=True)
    else:
        softmax = WanPipeline(**parts, expand_timesteps=True)
    softmax.save_pretrained(tmp_path / "softmax")
    converted_on_disk(tmp_path / "softmax", tmp_path / "mhla", FIRST)
    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "mhla")
    assert pipeline.config.expand_timesteps and type(pipeline.transformer) is MHLAWanTransformer3DModel
    assert pipeline.transformer_2 is None
    wan_video(pipeline, **({"image": image()} if with_image else {}))


def test_conversion_copies_the_other_expert_byte_for_byte(softmax_dir, tmp_path):
    source = shutil.copytree(softmax_dir, tmp_path / "softmax")
    report = convert_pretrained(source, tmp_path / "mhla", {"transformer": FIRST}, dtype="bfloat16", progress=False)
    assert list(report.components) == ["transformer"]
    weights = "transformer_2/diffusion_pytorch_model.safetensors"
    assert (tmp_path / "mhla" / weights).read_bytes() == (source / weights).read_bytes()
    assert weights in report.copied_files
    stored = load_file(tmp_path / "mhla" / "transformer" / "diffusion_pytorch_model.safetensors")
    assert stored["blocks.0.attn1.to_q.weight"].dtype == torch.bfloat16
