# SPDX-License-Identifier: Apache-2.0
"""`mhla-hf check-lora`: where the weights of real LoRA files go, and how far outputs move."""

from __future__ import annotations

import json
import shutil
from typing import Any

import peft
import pytest
import torch
from diffusers import WanPipeline, WanTransformer3DModel
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from mhla_hf.cli.main import app
from mhla_hf.conversion import convert_pretrained
from mhla_hf.lora_check import check_lora
from mhla_hf.lora_check.lora import read_lora
from mhla_hf.lora_check.probing import diffusion_probes, outputs, probe_grid, transformers_probes
from mhla_hf.models.wan import MHLAWanTransformer3DModel
from tests import forget_path
from tests.integrations.transformers.tiny_models import softmax_model
from tests.models.adapter_checks import TARGETS, randomize_lora
from tests.models.cases import DiTCase, PixArtCase, SanaCase, SanaVideoCase, WanCase
from tests.tiny import wan_transformer


@pytest.fixture(scope="module")
def wan(tmp_path_factory):
    """A Wan with one MHLA layer of two, the softmax model beside it that it was made from, and LoRAs of that."""
    path = tmp_path_factory.mktemp("wan")
    softmax = wan_transformer()
    softmax.save_pretrained(path / "original")
    convert_pretrained(path / "original", path / "converted", {"blocks": [2, 2, 2], "layers": [1]}, progress=False)
    softmax.add_adapter(
        LoraConfig(r=4, lora_alpha=8, target_modules=[*TARGETS, "ffn.net.2"], alpha_pattern={"blocks.1.attn1.to_q": 2})
    )
    randomize_lora(softmax)
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
    config = LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj", "v_proj", "up_proj"], use_rslora=True)
    adapted = peft.get_peft_model(softmax, config)
    randomize_lora(adapted)
    adapted.save_pretrained(path / "lora")
    return path


def expected_movement(model: Any, plain: Any, probes: Any) -> list[float]:
    pairs = zip(outputs(model.eval(), probes), outputs(plain.eval(), probes))
    return [float((moved - before).norm() / before.norm()) for moved, before in pairs]


def test_all_weights_of_a_wan_lora_apply(wan):
    report = check_lora(wan / "converted", wan / "model-lora", samples=3, max_tokens=100)
    # Two matrices for each of four projections of two attentions, and for one of the feed-forward, in two layers.
    assert report.counts == {
        "MHLA layer": 8, "softmax layer": 8, "other module": 20, "MHLA parameter": 0, "nothing": 0,
    }  # fmt: skip
    assert report.weights["blocks.1.attn1.to_q.lora_A.weight"].kind == "MHLA layer"
    assert report.weights["blocks.0.attn1.to_q.lora_A.weight"].kind == "softmax layer"
    assert report.weights["blocks.1.attn2.to_q.lora_A.weight"].kind == "other module"
    assert report.has_original and report.original == "original" and len(report.probes) == 3
    assert report.grid is not None and len(report.grid) == 3


def test_norms_and_movements_are_those_of_diffusers(wan):
    report = check_lora(wan / "converted", wan / "model-lora", samples=2, max_tokens=100)
    models = []
    for cls, folder in ((MHLAWanTransformer3DModel, "converted"), (WanTransformer3DModel, "original")):
        plain, adapted = cls.from_pretrained(wan / folder), cls.from_pretrained(wan / folder)
        adapted.load_lora_adapter(wan / "model-lora", prefix=None, use_safetensors=True)
        models.append((adapted, plain))
    for name, module in report.modules.items():
        layer = models[0][0].get_submodule(name)
        change = layer.get_delta_weight("default_0").detach().norm()
        assert module.relative_change == pytest.approx(
            float(change / layer.base_layer.weight.detach().norm()), rel=1e-4
        )
    probes = diffusion_probes("wan", models[0][1].config, report.grid, 2, 0)
    mhla, original = (expected_movement(*pair, probes) for pair in models)
    assert [probe.mhla for probe in report.probes] == pytest.approx(mhla, rel=1e-3)
    assert [probe.original for probe in report.probes] == pytest.approx(original, rel=1e-3)
    for probe in report.probes:
        assert 0 < probe.noise_level < 1 and 0.1 < probe.cosine <= 1 and 0.1 < probe.ratio < 10


def test_pipeline_and_kohya_files(wan, tmp_path):
    # Without peft's metadata, the rank stands for alpha.
    report = check_lora(wan / "converted", wan / "pipeline-lora", samples=0)
    assert report.counts["nothing"] == 0 and not report.probes
    plain = {name: module.relative_change for name, module in report.modules.items()}
    weights = load_file(wan / "pipeline-lora" / "pytorch_lora_weights.safetensors")
    # One file for both transformers of Wan 2.2.
    both = {**weights, **{name.replace("transformer", "transformer_2", 1): value for name, value in weights.items()}}
    save_file({name: value.clone() for name, value in both.items()}, tmp_path / "both.safetensors")
    report = check_lora(wan / "converted", tmp_path / "both.safetensors", samples=0)
    assert len(report.weights) == 36 and len(report.others) == 36
    second = read_lora(tmp_path / "both.safetensors", component="transformer_2", family="wan")
    assert second.weights.keys() == report.weights.keys() and second.others[0].startswith("transformer.")
    alone = read_lora(wan / "pipeline-lora", component="transformer_2", family="wan")
    assert alone.weights.keys() == report.weights.keys() and not alone.others
    names = {
        "attn1": "self_attn", "attn2": "cross_attn", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "o",
        "ffn.net.2": "ffn.2",
    }  # fmt: skip
    kohya = {}
    for layer in range(2):
        stem = f"lora_unet_blocks_{layer}"
        for part in ("ffn_0", "ffn_2"):
            sizes = (24, 32) if part == "ffn_0" else (32, 24)
            kohya[f"{stem}_{part}.lora_down.weight"] = torch.zeros(4, sizes[0])
            kohya[f"{stem}_{part}.lora_up.weight"] = torch.zeros(sizes[1], 4)
            kohya[f"{stem}_{part}.alpha"] = torch.tensor(2.0)
        for attention in ("attn1", "attn2"):
            for projection in TARGETS:
                module = f"transformer.blocks.{layer}.{attention}.{projection}"
                target = f"{stem}_{names[attention]}_{names[projection]}"
                kohya[f"{target}.lora_down.weight"] = weights[f"{module}.lora_A.weight"].clone()
                kohya[f"{target}.lora_up.weight"] = weights[f"{module}.lora_B.weight"].clone()
                kohya[f"{target}.alpha"] = torch.tensor(2.0)
    save_file(kohya, tmp_path / "kohya.safetensors")
    report = check_lora(wan / "converted", tmp_path / "kohya.safetensors", samples=0)
    assert report.counts["nothing"] == 0
    for name, module in report.modules.items():
        if "attn" in name:
            assert module.relative_change == pytest.approx(plain[name] / 2, rel=1e-5), name


def test_llama(llama):
    report = check_lora(llama / "converted", llama / "lora", samples=2, max_tokens=100)
    assert report.counts == {
        "MHLA layer": 8, "softmax layer": 4, "other module": 6, "MHLA parameter": 0, "nothing": 0,
    }  # fmt: skip
    assert report.has_original and report.grid is None
    original = softmax_model("llama").from_pretrained(llama / "original")
    adapted = peft.PeftModel.from_pretrained(
        softmax_model("llama").from_pretrained(llama / "original"), llama / "lora"
    )
    probes = transformers_probes(original, 2, 0, 100)
    expected = expected_movement(adapted.merge_and_unload(), original, probes)
    assert [probe.original for probe in report.probes] == pytest.approx(expected, rel=1e-3)
    assert all(probe.noise_level is None and probe.cosine > 0 for probe in report.probes)


def test_mhla_parameters_of_an_adapter_replace_those_of_the_model(wan, tmp_path):
    model = MHLAWanTransformer3DModel.from_pretrained(wan / "converted")
    model.add_adapter(LoraConfig(r=2, target_modules=["to_q"], modules_to_save=["mhla"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name:
                parameter.add_(torch.rand_like(parameter))
    model.save_lora_adapter(tmp_path / "lora")
    report = check_lora(wan / "converted", tmp_path / "lora", samples=1, max_tokens=100)
    assert report.counts["MHLA parameter"] > 0 == report.counts["nothing"]
    # Its LoRA itself is untrained, so that the softmax model stays as it is.
    assert report.probes[0].mhla > 1e-4 and report.probes[0].original == 0 and report.probes[0].ratio is None


def test_weights_without_a_place_are_named(wan, tmp_path):
    weights = load_file(wan / "model-lora" / "pytorch_lora_weights.safetensors")
    changed = {name.replace("blocks.0.attn1", "blocks.7.attn1"): value for name, value in weights.items()}
    changed["blocks.1.attn1.to_v.lora_A.weight"] = torch.zeros(4, 20)
    del changed["blocks.1.attn1.to_k.lora_B.weight"]
    save_file(changed, tmp_path / "lora.safetensors")
    report = check_lora(wan / "converted", tmp_path / "lora.safetensors", samples=0)
    reasons = {name: target.reason for name, target in report.weights.items() if target.reason}
    assert report.counts["nothing"] == len(reasons) == 8 + 2 + 1
    assert reasons["blocks.7.attn1.to_q.lora_A.weight"] == "no such module"
    assert reasons["blocks.1.attn1.to_v.lora_B.weight"] == "matrices 24×4 and 4×20 for a weight 24×24"
    assert reasons["blocks.1.attn1.to_k.lora_A.weight"].startswith("only lora_A.weight of the pair")


def test_without_the_original(wan, tmp_path):
    shutil.copytree(wan / "converted", tmp_path / "alone")
    forget_path(tmp_path / "alone")
    report = check_lora(tmp_path / "alone", wan / "model-lora", samples=1, max_tokens=100)
    assert not report.has_original and "original is neither on the Hub nor on this machine" in report.original
    assert report.probes[0].mhla > 0 and report.probes[0].cosine is None
    given = check_lora(tmp_path / "alone", wan / "model-lora", original=wan / "original", samples=1, max_tokens=100)
    assert given.has_original and given.probes[0].mhla == report.probes[0].mhla
    (tmp_path / "alone" / "conversion.json").unlink()
    assert (
        "no record of its conversion"
        in check_lora(tmp_path / "alone", wan / "model-lora", samples=1, max_tokens=100).original
    )
    with pytest.raises(ValueError, match="has no softmax model for transformer"):
        check_lora(tmp_path / "alone", wan / "model-lora", original=wan / "converted", samples=1, max_tokens=100)


def test_command(wan, tmp_path):
    arguments = [
        "check-lora",
        str(wan / "converted"),
        str(wan / "model-lora"),
        "--samples",
        "2",
        "--max-tokens",
        "100",
        "--device",
        "cpu",
    ]
    result = CliRunner().invoke(app, [*arguments, "--json", str(tmp_path / "report.json")])
    assert result.exit_code == 0, result.output
    for words in (
        "all 36 weights apply to transformer",
        "MHLA layers",
        "softmax layers",
        "cosine",
        "Original: original",
    ):
        assert words in result.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["counts"]["MHLA layer"] == 8 and len(report["probes"]) == 2
    assert report["weights"]["blocks.1.attn1.to_q.lora_A.weight"] == {"kind": "MHLA layer", "layer": 1, "reason": ""}
    assert report["modules"]["blocks.1.attn1.to_q"]["relative_change"] > 0


def write(path, tensors, config=None):
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    if config is not None:
        (path / "adapter_config.json").write_text(json.dumps(config))
    return path


PAIR = {
    "transformer.blocks.0.attn1.to_q.lora_A.weight": torch.zeros(2, 24),
    "transformer.blocks.0.attn1.to_q.lora_B.weight": torch.zeros(24, 2),
}
FILES: dict[str, tuple[Any, str]] = {
    "missing": (None, "is neither a directory nor a file"),
    "pickle": ("lora.bin", "is not a .safetensors file"),
    "empty": ("folder", "has no .safetensors file"),
    "text": ("lora.safetensors", "cannot be read as safetensors"),
    "model": ({"proj_out.weight": torch.zeros(2, 2)}, "holds no LoRA weights, but proj_out.weight"),
    "dora": ({**PAIR, "blocks.0.attn1.to_q.lora_magnitude_vector": torch.zeros(24)}, "is a DoRA adapter"),
    "other": ({"transformer_2.proj_out.lora_A.weight": torch.zeros(2, 24)}, "has nothing for transformer"),
    "unknown": ({"a.lora_A.weight": torch.zeros(2, 24), "a.lora_B.weight": torch.zeros(24, 2)}, "None of the 2"),
    "names": ({"lora_unet_blocks_0_self_attn_q.lora_down.weight": torch.zeros(2, 24)}, "diffusers cannot convert"),
    "nan": ({name: value * float("nan") for name, value in PAIR.items()}, "to_q.lora_A.weight is not finite"),
    "alpha of two": ({**PAIR, "transformer.blocks.0.attn1.to_q.alpha": torch.ones(2)}, "not one number"),
    "no rank": ({name: value[:0] if "_A" in name else value[:, :0] for name, value in PAIR.items()}, "24×0 and 0×24"),
    "one axis": ({name: value.flatten() for name, value in PAIR.items()}, "matrices 48 and 48"),
    "kind": ((PAIR, {"peft_type": "LOHA"}), "only LoRA is checked"),
    "alpha": ((PAIR, {"peft_type": "LORA", "lora_alpha": "8"}), "lora_alpha"),
    "infinite": ((PAIR, {"lora_alpha": float("inf")}), "'lora_alpha' must be a number of at most"),
    "alphas": ((PAIR, {"alpha_pattern": {"to_q": True}}), "'alpha_pattern' must be a number of at most"),
    "pattern": ((PAIR, {"alpha_pattern": {"(a+)+b": 2}}), "which is no name of a module"),
}


@pytest.mark.parametrize("case", FILES)
def test_wrong_files_give_one_line(wan, tmp_path, case):
    content, message = FILES[case]
    path = tmp_path / "lora"
    if isinstance(content, tuple):
        write(path, *content)
    elif isinstance(content, dict):
        write(path, content)
    elif content is not None:
        path = tmp_path / content
        path.mkdir() if content == "folder" else path.write_text("no weights")
    result = CliRunner().invoke(app, ["check-lora", str(wan / "converted"), str(path), "--samples", "0"])
    assert result.exit_code == 1 and result.exception.__class__ is SystemExit
    assert message in " ".join(result.output.split()), result.output
    assert len(result.stderr.strip().splitlines()) <= 1 or "[transformers]" in result.stderr, result.stderr


def test_softmax_models_are_refused(wan, llama):
    with pytest.raises(ValueError, match="has no MHLA model .*convert it first"):
        check_lora(wan / "original", wan / "model-lora")
    with pytest.raises(ValueError, match="has no MHLA model .*convert it first"):
        check_lora(llama / "original", llama / "lora")
    with pytest.raises(ValueError, match="has no adapter_config.json beside it"):
        check_lora(llama / "converted", wan / "model-lora")
    with pytest.raises(ValueError, match="component='text_encoder' is not a component of .* that can be MHLA"):
        check_lora(wan / "converted", wan / "model-lora", component="text_encoder")
    with pytest.raises(ValueError, match="samples=-1 must be"):
        check_lora(wan / "converted", wan / "model-lora", samples=-1)


def test_wrong_models_give_one_line(wan, llama, tmp_path):
    shutil.copytree(llama / "converted", tmp_path / "llama")
    config = json.loads((tmp_path / "llama" / "config.json").read_text())
    (tmp_path / "llama" / "config.json").write_text(json.dumps({**config, "architectures": ["AutoTokenizer"]}))
    shutil.copytree(wan / "converted", tmp_path / "wan")
    weights = next((tmp_path / "wan").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-8])
    for model, lora, message in (
        (tmp_path / "llama", llama / "lora", "is a AutoTokenizer, which transformers"),
        (tmp_path / "wan", wan / "model-lora", "are damaged"),
        (tmp_path / "none", wan / "model-lora", "is neither a directory nor a Hub id"),
        (wan / "model-lora", wan / "model-lora", "has neither model_index.json"),
    ):
        result = CliRunner().invoke(app, ["check-lora", str(model), str(lora)])
        assert result.exit_code == 1 and message in " ".join(result.output.split()), result.output


def test_probes_are_cut_to_the_most_tokens():
    assert probe_grid((21, 30, 52), 32760) == (21, 30, 52)
    assert probe_grid((21, 30, 52), 2048) == (11, 8, 13)
    assert probe_grid((3, 1), 1) == (1, 1)


@pytest.mark.parametrize("family", ["wan", "dit", "pixart", "sana", "sana-video"])
def test_probes_fit_every_family(family):
    cases = {"wan": WanCase, "dit": DiTCase, "pixart": PixArtCase, "sana": SanaCase, "sana-video": SanaVideoCase}
    case = cases[family]()
    model = case.make_mhla().eval()
    grid = model.config_grid(model.config) or model.mhla_config.grid or (2, 2, 2)
    probes = diffusion_probes(family, model.config, grid, 2, 0)
    for cls in (model, case.make().eval()):
        assert all(output.isfinite().all() for output in outputs(cls, probes))


def test_probes_of_image_to_video_and_of_transformers():
    model = wan_transformer(image_to_video=True).eval()
    (output,) = outputs(model, diffusion_probes("wan", model.config, (2, 2, 3), 1, 0))
    assert output.shape == (1, 16, 2, 4, 6)
    for name, shape in (("bert", 3), ("vit", 3)):
        model = softmax_model(name).eval()
        (output,) = outputs(model, transformers_probes(model, 1, 0, 20))
        assert output.dim() == shape and output.isfinite().all()
