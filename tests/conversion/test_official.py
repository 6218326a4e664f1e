# SPDX-License-Identifier: Apache-2.0
"""Importing checkpoints in the authors' format: their stored outputs, every size and option, and exact refusals."""

import json
import re
from collections import OrderedDict

import pytest
import torch
from diffusers import DiffusionPipeline
from safetensors.torch import load_file, save_file

from mhla_hf import MHLAWanTransformer3DModel
from mhla_hf.conversion import import_official
from mhla_hf.conversion.official import widen_kernel
from tests import GOLDEN, tiny
from tests.conversion.original_cases import authors_name
from tests.tiny import wan_output


WANS = ("wan_hybrid_gated", "wan_full_plain")


def authors_checkpoint(model):
    """The weights of one of our models as the authors' code would save them."""
    weights = {}
    for name, tensor in model.state_dict().items():
        tensor = tensor.clone()
        if name.endswith(".mixing"):
            tensor = tensor[:, :, None, None]
        weights[authors_name(name)] = tensor.contiguous()
    return weights


def official_model(image_to_video=False, **options):
    """A tiny model with the options that the authors' Wan weights have, every parameter random."""
    mhla = {"blocks": (3, 1, 2), "feature_map_eps": 1e-6, "normalizer": "none", "output_norm": True, **options}
    overrides = {"mhla": mhla, "rope_max_seq_len": 1024}
    model = tiny.wan_transformer(MHLAWanTransformer3DModel, image_to_video=image_to_video, **overrides)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for module in model.mhla_modules().values():
            for parameter in module.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 + 0.1)
    return model


def run(source, destination, **options):
    return import_official(source, destination, progress=False, **options)


def assert_reproduces(folder, golden):
    inputs = load_file(GOLDEN / golden / "io.safetensors")
    expected = inputs.pop("output")
    output = wan_output(MHLAWanTransformer3DModel.from_pretrained(folder), **inputs)
    assert (output - expected).norm() / expected.norm() < 1e-4
    assert (output - expected).abs().max() / expected.abs().max() < 1e-4


# The authors' own modules


@pytest.mark.parametrize("golden", WANS)
def test_reproduces_the_authors_output(golden, tmp_path):
    report = run(GOLDEN / golden / "model.safetensors", tmp_path / "out")
    assert_reproduces(tmp_path / "out", golden)
    theirs = json.loads((GOLDEN / golden / "config.json").read_text())
    ours = json.loads((tmp_path / "out/config.json").read_text())
    assert ours["_class_name"] == "MHLAWanTransformer3DModel"
    assert report.components["transformer"].mhla_layers == theirs["linear_attn_idx"]
    assert ours["mhla"]["output_gate"] == theirs["is_gated"]
    assert ours["mhla"]["blocks"] == theirs["block_layout"]
    assert (ours["num_layers"], ours["num_attention_heads"]) == (theirs["num_layers"], theirs["num_heads"])
    assert ours["num_attention_heads"] * ours["attention_head_dim"] == theirs["dim"]
    for ours_name, theirs_name in {"in_channels": "in_dim", "out_channels": "out_dim"}.items():
        assert ours[ours_name] == theirs[theirs_name]
    for name in ("patch_size", "ffn_dim", "freq_dim", "text_dim"):
        assert ours[name] == theirs[name], name
    assert not any(name.startswith("_use") for name in ours)


@pytest.mark.parametrize(
    ("prefix", "nested"),
    [("", ()), ("module._orig_mod.", ("state_dict",)), ("model.diffusion_model.", ("state_dict", "model"))],
)
def test_torch_files(prefix, nested, tmp_path):
    weights = load_file(GOLDEN / "wan_hybrid_gated/model.safetensors")
    content = OrderedDict((prefix + name, tensor) for name, tensor in weights.items())
    for name in reversed(nested):
        content = {name: content, "epoch": 3, "optimizer": {"lr": 1e-5}}
    torch.save(content, tmp_path / "checkpoint.pt")
    run(tmp_path / "checkpoint.pt", tmp_path / "out")
    if nested == ("state_dict",):
        assert_reproduces(tmp_path / "out", "wan_hybrid_gated")
    written = load_file(tmp_path / "out/diffusion_pytorch_model.safetensors")
    assert torch.equal(written["proj_out.weight"], weights["head.head.weight"])


@pytest.mark.parametrize("with_index", [True, False])
def test_sharded_directories(with_index, tmp_path):
    folder = tmp_path / "shards"
    folder.mkdir()
    weights = load_file(GOLDEN / "wan_hybrid_gated/model.safetensors")
    names = sorted(weights)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, held in parts.items():
        save_file({name: weights[name] for name in held}, folder / file)
    if with_index:
        weight_map = {name: file for file, held in parts.items() for name in held}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        save_file({"other": torch.zeros(1)}, folder / "not_in_the_index.safetensors")
    run(folder, tmp_path / "out")
    assert_reproduces(tmp_path / "out", "wan_hybrid_gated")


# Every size and option, there and back


@pytest.mark.parametrize(
    ("options", "image_to_video"),
    [
        ({}, False),
        ({"output_gate": True, "lepe_kernel": 3, "layers": [1]}, False),
        ({"lepe_kernel": 5, "normalizer": "query"}, False),
        ({"normalizer": "block_query", "output_gate": True}, False),
        ({"output_gate": True}, True),
    ],
    ids=["plain", "gate lepe hybrid", "lepe query", "block_query", "image to video"],
)
def test_every_option_survives(options, image_to_video, tmp_path):
    model = official_model(image_to_video, **options)
    save_file(authors_checkpoint(model), tmp_path / "authors.safetensors")
    run(
        tmp_path / "authors.safetensors",
        tmp_path / "out",
        blocks=(3, 1, 2),
        normalizer=options.get("normalizer", "none"),
    )
    loaded = MHLAWanTransformer3DModel.from_pretrained(tmp_path / "out")
    assert loaded.config.mhla == model.config.mhla
    shown = {name: value for name, value in model.config.items() if not name.startswith("_")}
    assert {name: loaded.config[name] for name in shown} == {
        name: list(value) if isinstance(value, tuple) else value for name, value in shown.items()
    }
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    inputs = tiny.wan_inputs(image_to_video=image_to_video)
    torch.testing.assert_close(wan_output(loaded, **inputs), wan_output(model, **inputs), rtol=1e-4, atol=1e-5)


def test_convolutions_within_frames(tmp_path):
    """A 3x3 kernel over height and width is a 3x3x3 one whose other frames are zero."""
    model = official_model(lepe_kernel=3)
    weights = authors_checkpoint(model)
    for name in [name for name in weights if name.endswith("lepe.weight")]:
        flat = weights[name][:, :, 1].contiguous()
        model.get_parameter(name.replace("self_attn.lepe", "attn1.mhla.lepe")).data = widen_kernel(
            flat, (24, 1, 3, 3, 3)
        )
        weights[name] = flat
    save_file(weights, tmp_path / "authors.safetensors")
    run(tmp_path / "authors.safetensors", tmp_path / "out", blocks=(3, 1, 2))
    loaded = MHLAWanTransformer3DModel.from_pretrained(tmp_path / "out")
    kernel = loaded.blocks[0].attn1.mhla.lepe.weight
    assert torch.equal(kernel[:, :, 1], weights["blocks.0.self_attn.lepe.weight"])
    assert kernel[:, :, [0, 2]].abs().max() == 0
    inputs = tiny.wan_inputs()
    torch.testing.assert_close(wan_output(loaded, **inputs), wan_output(model, **inputs), rtol=1e-4, atol=1e-5)


# A whole pipeline


def test_base_gives_the_other_components(tmp_path):
    tiny.wan_pipeline().save_pretrained(tmp_path / "base")
    model = official_model(output_gate=True)
    save_file(authors_checkpoint(model), tmp_path / "authors.safetensors")
    report = run(tmp_path / "authors.safetensors", tmp_path / "out", blocks=(3, 1, 2), base=tmp_path / "base")
    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "out")
    assert type(pipeline.transformer) is MHLAWanTransformer3DModel
    assert torch.equal(pipeline.transformer.proj_out.weight, model.proj_out.weight)
    tiny.wan_video(pipeline, num_frames=9, num_inference_steps=1)
    assert report.source == {"location": "authors.safetensors", "base": {"location": "base"}}
    assert sorted(report.copied_files)[-1] == "vae/diffusion_pytorch_model.safetensors"
    assert [path.name for path in (tmp_path / "out/transformer").glob("*.safetensors")] == [
        "diffusion_pytorch_model.safetensors"
    ]


# Refusals


def refused(change, message, tmp_path, golden="wan_hybrid_gated", **options):
    weights = load_file(GOLDEN / golden / "model.safetensors")
    change(weights)
    save_file(weights, tmp_path / "changed.safetensors")
    with pytest.raises(ValueError, match=message) as caught:
        run(tmp_path / "changed.safetensors", tmp_path / "out", **options)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["changed.safetensors"]


@pytest.mark.parametrize(
    ("name", "in_diffusers"),
    [
        ("blocks.2.self_attn.g.bias", "blocks.2.attn1.mhla.gate.bias"),
        ("blocks.0.cross_attn.norm_k.weight", "blocks.0.attn2.norm_k.weight"),
        ("head.modulation", "scale_shift_table"),
        ("patch_embedding.weight", "patch_embedding.weight"),
    ],
)
def test_names_what_is_missing(name, in_diffusers, tmp_path):
    refused(lambda weights: weights.pop(name), f"lacks {re.escape(in_diffusers)}", tmp_path)


def test_mixing_matrices_must_agree(tmp_path):
    name = "blocks.2.self_attn.block_attn.conv.weight"
    for shape in ((150, 151, 1, 1), (150, 150, 3, 3)):
        refused(
            lambda weights, shape=shape: weights.update({name: torch.zeros(shape)}),
            re.escape(f"{name} (150, 15"),
            tmp_path,
        )
        (tmp_path / "changed.safetensors").unlink()


class Innocent:
    """Something that a pickle would have to import."""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"state_dict": {"weight": torch.zeros(1)}, "hook": Innocent()}, "could run code when read"),
        (torch.zeros(3), "holds no tensors, or views"),
        ({"weight": torch.zeros(1), "step": 3}, "holds step; only plain tensors"),
        ({"weight": torch.zeros(1, dtype=torch.int8)}, "holds weight; only plain tensors"),
        ({"weight": torch.ones(1).expand(10**6, 10**6)}, "repeat stored numbers"),
        ({"weight": torch.eye(3).to_sparse()}, "holds weight; only plain tensors"),
        ({"weight": torch.ones(10**6, 10**6, device="meta")}, "holds weight; only plain tensors"),
    ],
    ids=["code", "no dict", "a number", "quantised", "expanded", "sparse", "meta"],
)
def test_refuses_torch_files(content, message, tmp_path):
    torch.save(content, tmp_path / "checkpoint.pt")
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "checkpoint.pt", tmp_path / "out")


def test_refuses_broken_directories(tmp_path):
    folder = tmp_path / "shards"
    folder.mkdir()
    weights = load_file(GOLDEN / "wan_full_plain/model.safetensors")
    save_file(weights, folder / "a.safetensors")
    save_file({"head.head.bias": weights["head.head.bias"]}, folder / "b.safetensors")
    for name, content, message in (
        ("notes.txt", "", "holds head.head.bias, which another file holds"),
        ("x.safetensors.index.json", "{}", "has no weight_map"),
        ("x.safetensors.index.json", '{"weight_map": {"a": "gone.safetensors"}}', "gone.safetensors does not exist"),
        ("y.safetensors.index.json", "{}", "must have safetensors files, with one index at most"),
    ):
        (folder / name).write_text(content)
        with pytest.raises(ValueError, match=message):
            run(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
