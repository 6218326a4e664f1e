# SPDX-License-Identifier: Apache-2.0
"""`check_directory`: nothing to say of good directories, and one clear line for each kind of damage."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, ViTConfig, ViTModel

from mhla_hf import MHLAWanTransformer3DModel
from mhla_hf.conversion import convert_pretrained
from mhla_hf.hub.checks import check_directory
from mhla_hf.hub.problems import Findings
from mhla_hf.hub.weight_checks import check_values
from mhla_hf.models.source import read_source
from mhla_hf.models.stub import stub_files
from mhla_hf.utils.tensor_files import count_values
from tests import tiny


SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
MIXING = "blocks.0.attn1.mhla.mixing"
WAN = "transformer/diffusion_pytorch_model"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A converted pipeline of two shards, a bare model, and converted models of transformers."""
    folder = tmp_path_factory.mktemp("made")
    tiny.wan_pipeline().save_pretrained(folder / "softmax")
    convert_pretrained(folder / "softmax", folder / "pipeline", {"blocks": (1, 2, 2)}, progress=False)
    convert_pretrained(
        folder / "softmax", folder / "shards", {"blocks": (1, 2, 2)}, max_shard_size="100KB", progress=False
    )
    tiny.wan_transformer(MHLAWanTransformer3DModel, mhla={"blocks": (1, 2, 2)}).save_pretrained(folder / "bare")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=32, tie_word_embeddings=True)).save_pretrained(folder / "llama")
    tiny.character_tokenizer().save_pretrained(folder / "llama")
    BertModel(BertConfig(**SIZES, vocab_size=32)).save_pretrained(folder / "bert")
    ViTModel(ViTConfig(**SIZES, image_size=8, patch_size=2)).save_pretrained(folder / "vit")
    for name in ("llama", "bert", "vit"):
        convert_pretrained(folder / name, folder / f"{name}-mhla", {}, progress=False)
    return folder


@pytest.fixture
def copied(made, tmp_path):
    return lambda name: Path(shutil.copytree(made / name, tmp_path / name))


def lines(folder: Path, level: str = "error", **options) -> list[str]:
    problems = check_directory(folder, **options)
    for problem in problems:
        assert "\n" not in str(problem) and len(str(problem)) < 700 and str(folder) not in str(problem)
    assert problems == sorted(problems, key=lambda problem: (problem.level, problem.file, problem.message))
    return [str(problem) for problem in problems if problem.level == level]


def edit_json(path: Path, **changes) -> None:
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in content.items() if value != "REMOVED"}))


def edit_weights(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize("name", ["softmax", "pipeline", "shards", "bare", "llama", "llama-mhla"])
def test_good_directories(name, made):
    assert check_directory(made / name) == []


@pytest.mark.parametrize("name", ["pipeline", "bare", "llama-mhla"])
def test_directories_as_they_are_on_the_hub(name, copied):
    folder = copied(name)
    for file, content in stub_files(read_source(folder)).items():
        (folder / file).write_text(content)
    assert check_directory(folder) == []


@pytest.mark.parametrize("name", ["bert", "bert-mhla", "vit", "vit-mhla"])
def test_models_without_what_prepares_their_inputs(name, made):
    missing = "tokenizer" if "bert" in name else "preprocessor_config.json"
    assert lines(made / name) == []
    (warning,) = lines(made / name, "warning")
    assert warning.startswith(f"the directory: has no {missing}; save ")


def test_what_is_no_model(tmp_path):
    assert lines(tmp_path / "nothing") == ["the directory: is not a directory."]
    assert "has neither model_index.json (a pipeline) nor config.json" in lines(tmp_path)[0]


DAMAGES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    # Values.
    "integer-mixing": (
        "bare",
        lambda root: _edit_bare(
            root, lambda tensors: tensors.update({MIXING: (100 * tensors[MIXING]).to(torch.int8)})
        ),
        f"holds MHLA parameters that are not of a floating-point type: {MIXING} (I8)",
    ),
    # Files.
    "no-folder": ("pipeline", lambda root: shutil.rmtree(root / "vae"), "the component vae, whose folder is missing"),
    "no-config": ("pipeline", lambda root: (root / "vae/config.json").unlink(), "vae: has no config.json"),
    "no-weights": (
        "pipeline",
        lambda root: (root / f"{WAN}.safetensors").unlink(),
        "transformer: has no diffusion_pytorch_model*.safetensors",
    ),
    "no-scheduler": (
        "pipeline",
        lambda root: (root / "scheduler/scheduler_config.json").unlink(),
        "scheduler: has no scheduler_config.json; download",
    ),
    "no-vocabulary": (
        "pipeline",
        lambda root: (root / "tokenizer/tokenizer.json").unlink(),
        "tokenizer: has no tokenizer.json",
    ),
    "no-tokenizer": (
        "pipeline",
        lambda root: edit_json(root / "model_index.json", tokenizer=[None, None]),
        "model_index.json: has no tokenizer, which WanPipeline needs",
    ),
    "no-shard": (
        "shards",
        lambda root: next(root.glob(f"{WAN}-00002*")).unlink(),
        f"{WAN}.safetensors.index.json: lists files that are missing: diffusion_pytorch_model-00002-of-",
    ),
    "half-json": (
        "pipeline",
        lambda root: (root / "tokenizer/tokenizer_config.json").write_text('{"a": '),
        "tokenizer/tokenizer_config.json: is not valid JSON",
    ),
    # The pipeline's index.
    "unknown-pipeline": (
        "pipeline",
        lambda root: edit_json(root / "model_index.json", _class_name="NoPipeline"),
        "model_index.json: is for NoPipeline, which diffusers ",
    ),
    "unknown-component": (
        "pipeline",
        lambda root: edit_json(root / "model_index.json", vae=["diffusers", "NoVAE"]),
        "model_index.json: calls vae a NoVAE of diffusers, which is not installed here or unknown",
    ),
    "two-classes": (
        "pipeline",
        lambda root: edit_json(root / "model_index.json", transformer=["diffusers", "WanTransformer3DModel"]),
        "calls transformer a WanTransformer3DModel, but transformer/config.json says MHLAWanTransformer3DModel",
    ),
    "component-outside": (
        "pipeline",
        lambda root: edit_json(root / "model_index.json", **{"../victim": ["diffusers", "AutoencoderKLWan"]}),
        "model_index.json: names '../victim', which is no path inside",
    ),
    # Weight files.
    "truncated": (
        "bare",
        lambda root: _truncate(root / "diffusion_pytorch_model.safetensors", -8),
        "diffusion_pytorch_model.safetensors: is truncated or not a safetensors file",
    ),
    "length-of-10-GB": (
        "bare",
        lambda root: (root / "diffusion_pytorch_model.safetensors").write_bytes(struct.pack("<Q", 10**10) + b'{"x":'),
        "diffusion_pytorch_model.safetensors: is truncated or not a safetensors file",
    ),
    "pickles-alone": (
        "llama-mhla",
        lambda root: (root / "model.safetensors").rename(root / "pytorch_model.bin"),
        "the directory: has its weights only as pytorch_model.bin; those can run code when read",
    ),
    "index-outside": (
        "shards",
        lambda root: _edit_map(root, lambda names: names.update(x="../../victim.safetensors")),
        f"{WAN}.safetensors.index.json: names '../../victim.safetensors', which is no path inside transformer",
    ),
    "index-absolute": (
        "shards",
        lambda root: _edit_map(root, lambda names: names.update(x="/etc/passwd")),
        "names '/etc/passwd', which is no path inside",
    ),
    "index-of-other-keys": (
        "shards",
        lambda root: _edit_map(root, lambda names: names.update(nothing=min(names.values()))),
        "index.json: lists tensors that are not in their file: nothing (diffusion_pytorch_model-00001-of-",
    ),
    "link-outside": (
        "pipeline",
        lambda root: (root / "vae/key.json").symlink_to("/etc/hostname"),
        "the directory: vae/key.json leads by a link to /etc/hostname, outside",
    ),
    "duplicate": (
        "shards",
        lambda root: _add_to_last_shard(root, "proj_out.bias", torch.zeros(1)),
        "holds tensors that another file has too: proj_out.bias (in diffusion_pytorch_model-00001-of-",
    ),
    # Configurations.
    "unknown-option": (
        "bare",
        lambda root: _edit_options(root, speed="fast"),
        "config.json: Unknown mhla option speed. Known options: feature_map, ",
    ),
    "unknown-value": (
        "bare",
        lambda root: _edit_options(root, feature_map="x"),
        "config.json: feature_map='x' is not one of 'relu'",
    ),
    "unknown-option-of-transformers": (
        "llama-mhla",
        lambda root: _edit_options(root, speed="fast"),
        "config.json: Unknown mhla option speed. Known options: feature_map, ",
    ),
    "no-options": (
        "bare",
        lambda root: edit_json(root / "config.json", mhla="REMOVED"),
        "config.json: has no entry 'mhla', although the weights hold MHLA parameters",
    ),
    "no-options-of-transformers": (
        "llama-mhla",
        lambda root: edit_json(root / "config.json", mhla="REMOVED"),
        "config.json: has no entry 'mhla', although the weights hold MHLA parameters",
    ),
    "softmax-class": (
        "bare",
        lambda root: edit_json(root / "config.json", _class_name="WanTransformer3DModel"),
        "config.json: says _class_name='WanTransformer3DModel', which would drop the MHLA weights; it should say",
    ),
    "layers": (
        "bare",
        lambda root: edit_json(root / "config.json", num_layers=3),
        "config.json: num_layers=3, but the weights have layers up to 1",
    ),
    "size": (
        "bare",
        lambda root: edit_json(root / "config.json", ffn_dim="x"),
        "config.json: ffn_dim='x' must be",
    ),
    "size-of-transformers": (
        "llama-mhla",
        lambda root: edit_json(root / "config.json", hidden_size=10**12),
        "config.json: hidden_size=1000000000000 is more than",
    ),
    "count-of-a-part": (
        "pipeline",
        lambda root: edit_json(root / "vae/config.json", num_res_blocks=10**9),
        "vae/config.json: num_res_blocks=1000000000 is more than 1000",
    ),
    "not-a-name": (
        "bert",
        lambda root: edit_json(root / "config.json", architectures=[1]),
        "config.json: 'architectures' must be a list of class names",
    ),
    "no-kind": (
        "bert",
        lambda root: edit_json(root / "config.json", model_type="REMOVED"),
        "config.json: does not say",
    ),
    "unknown-class": (
        "bert",
        lambda root: edit_json(root / "config.json", architectures=["NoModel"]),
        "config.json: the directory is a NoModel, which transformers",
    ),
    # Names, shapes and values of weights.
    "missing": (
        "bare",
        lambda root: _edit_bare(root, lambda tensors: tensors.pop("proj_out.bias")),
        "diffusion_pytorch_model.safetensors: lacks proj_out.bias; write or download",
    ),
    "missing-of-transformers": (
        "llama-mhla",
        lambda root: edit_weights(root / "model.safetensors", lambda tensors: tensors.pop("model.norm.weight")),
        "model.safetensors: lacks model.norm.weight",
    ),
    "not-converted": (
        "bare",
        lambda root: _edit_bare(root, lambda tensors: [tensors.pop(n) for n in list(tensors) if ".mhla." in n]),
        "config.json: describes an MHLA model, but the weights hold no MHLA parameters",
    ),
    "layer-left-out": (
        "bare",
        lambda root: _edit_options(root, layers=[0]),
        "has trained MHLA tensors that the entry 'mhla' of config.json leaves out: blocks.1.attn1.mhla.mixing",
    ),
    "other-blocks": (
        "bare",
        lambda root: _edit_options(root, blocks=[1, 2, 1]),
        "blocks.0.attn1.mhla.mixing (4, 4) instead of (2, 2)",
    ),
    "shape": (
        "llama-mhla",
        lambda root: edit_weights(
            root / "model.safetensors", lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)})
        ),
        "model.norm.weight (3,) instead of (16,)",
    ),
    "nan": (
        "pipeline",
        lambda root: edit_weights(
            root / "vae/diffusion_pytorch_model.safetensors",
            lambda tensors: tensors["quant_conv.bias"][:3].copy_(torch.tensor([torch.nan, torch.inf, -torch.inf])),
        ),
        "vae/diffusion_pytorch_model.safetensors: quant_conv.bias has 1 NaN and 2 infinite of 32 values",
    ),
}


def _truncate(path: Path, keep: int) -> None:
    path.write_bytes(path.read_bytes()[:keep])


def _edit_map(root: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = root / f"{WAN}.safetensors.index.json"
    content = json.loads(index.read_text())
    change(content["weight_map"])
    index.write_text(json.dumps(content))


def _add_to_last_shard(root: Path, name: str, tensor: torch.Tensor) -> None:
    shards = sorted((root / "transformer").glob("*.safetensors"))
    owner = next(shard for shard in shards if name in load_file(shard))
    other = next(shard for shard in reversed(shards) if shard != owner)
    edit_weights(other, lambda tensors: tensors.update({name: tensor}))


def _write_single_file(folder: Path) -> None:
    tensors = {name: tensor for shard in folder.glob("*.safetensors") for name, tensor in load_file(shard).items()}
    save_file(tensors, folder / "diffusion_pytorch_model.safetensors")


def _edit_options(root: Path, **changes) -> None:
    edit_json(root / "config.json", mhla={**json.loads((root / "config.json").read_text())["mhla"], **changes})


def _edit_bare(root: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    edit_weights(root / "diffusion_pytorch_model.safetensors", change)


@pytest.mark.parametrize("case", DAMAGES)
def test_damage_is_named(case, copied):
    name, damage, message = DAMAGES[case]
    folder = copied(name)
    damage(folder)
    found = lines(folder)
    assert any(message in line for line in found), found
    # One cause is not reported over and over.
    assert len(found) <= 2, found


WARNINGS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "pickle-beside": (
        "llama-mhla",
        lambda root: torch.save({}, root / "training_args.bin"),
        "training_args.bin: is a pickle, which can run code when read",
    ),
    "pickles-beside": (
        "llama-mhla",
        lambda root: [torch.save({}, root / name) for name in ("scheduler.pt", "optimizer.pt")],
        "the directory: has pickles (optimizer.pt, scheduler.pt), which can run code when read",
    ),
    "total-size": (
        "shards",
        lambda root: edit_json(root / f"{WAN}.safetensors.index.json", metadata={"total_size": 7}),
        "says total_size=7, but the tensors have ",
    ),
    "not-listed": (
        "shards",
        lambda root: _edit_map(root, lambda names: names.pop("proj_out.bias")),
        "does not list proj_out.bias",
    ),
    "single-file-beside": (
        "shards",
        lambda root: _write_single_file(root / "transformer"),
        "lists shards beside a single file of the same weights",
    ),
    "float64": (
        "bare",
        lambda root: _edit_bare(root, lambda tensors: tensors.update({"proj_out.bias": torch.zeros(64).double()})),
        "holds float64 tensors: proj_out.bias",
    ),
    "two-halves": (
        "bare",
        lambda root: _edit_bare(
            root,
            lambda tensors: tensors.update(
                {
                    "proj_out.bias": tensors["proj_out.bias"].half(),
                    "proj_out.weight": tensors["proj_out.weight"].bfloat16(),
                }
            ),
        ),
        "mixes float16 and bfloat16",
    ),
    "variant-only": (
        "llama-mhla",
        lambda root: (root / "model.safetensors").rename(root / "model.fp16.safetensors"),
        "the directory: has weights of variant='fp16' alone, which from_pretrained reads where that is given",
    ),
    "integers": (
        "bare",
        lambda root: _edit_bare(root, lambda tensors: tensors.update({"proj_out.bias": torch.zeros(64).long()})),
        "holds other types in place of floating-point parameters: proj_out.bias (I64)",
    ),
    "unknown-tensor": (
        "llama-mhla",
        lambda root: edit_weights(root / "model.safetensors", lambda tensors: tensors.update(other=torch.ones(1))),
        "model.safetensors: has tensors that the model does not know: other",
    ),
    "quantised": (
        "llama-mhla",
        lambda root: edit_json(root / "config.json", quantization_config={"quant_method": "x"}),
        "config.json: describes quantised weights, whose names and shapes are not checked",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WARNINGS)
def test_warnings(case, copied):
    name, change, message = WARNINGS[case]
    folder = copied(name)
    change(folder)
    assert any(message in line for line in lines(folder, "warning")), lines(folder, "warning")
    assert lines(folder) == []


def test_weights_that_are_left_out(copied):
    """A directory whose weights are in files that are not checked, since they are not uploaded, has none."""
    root = copied("bare")
    names = list(load_file(root / "diffusion_pytorch_model.safetensors"))
    (root / "logs").mkdir()
    (root / "diffusion_pytorch_model.safetensors").rename(root / "logs/weights.safetensors")
    index = root / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "logs/weights.safetensors")}))
    assert lines(root) == []
    (line,) = lines(root, skip=lambda name: name.startswith("logs/"))
    assert "lists files that are left out of an upload: logs/weights.safetensors; write the weights" in line


def test_values_are_left_out_on_demand(copied, capfd):
    folder = copied("bare")
    _edit_bare(folder, lambda tensors: tensors["proj_out.bias"].fill_(torch.nan))
    assert lines(folder, values=False, progress=True) == []
    assert "checking" not in capfd.readouterr().err
    assert len(lines(folder, progress=True)) == 1
    assert "checking weights" in capfd.readouterr().err


def test_progress_counts_every_byte(copied):
    folder = copied("bare")
    paths = list(folder.glob("*.safetensors"))
    counted: list[int] = []
    check_values(paths, Findings(folder), counted.append)
    assert sum(counted) == sum(path.stat().st_size for path in paths)


def test_many_broken_tensors_are_counted(copied):
    folder = copied("bare")
    _edit_bare(folder, lambda tensors: [tensor.view(-1)[:1].fill_(torch.nan) for tensor in tensors.values()])
    *named, rest = lines(folder)
    count = len(load_file(folder / "diffusion_pytorch_model.safetensors"))
    assert len(named) == 5 and f"has {count - 5} more tensors with NaN or infinite values." in "".join((*named, rest))


def test_names_in_an_index_that_are_written_differently(copied):
    folder = copied("shards")
    _edit_map(folder, lambda names: names.update({name: f"./{file}" for name, file in names.items()}))
    assert lines(folder) == []


def test_several_problems_at_once(copied):
    folder = copied("pipeline")
    (folder / "scheduler/scheduler_config.json").unlink()
    _truncate(folder / "text_encoder/model.safetensors", 20)
    edit_json(folder / "transformer/config.json", mhla={"speed": 1})
    found = lines(folder)
    assert [line.split(":")[0] for line in found] == [
        "scheduler",
        "text_encoder/model.safetensors",
        "transformer/config.json",
    ]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_values_of_every_type(dtype, tmp_path):
    rows = torch.randn(4, 9).to(dtype)
    rows[1, 3] = torch.nan
    rows[2, :2] = torch.tensor([torch.inf, -torch.inf])
    rows[3, 6:] = torch.tensor([-torch.inf, torch.nan, torch.nan])
    tensors = {str(index): row for index, row in enumerate(rows)}
    others = {"empty": torch.zeros(0, 2, dtype=dtype), "integers": torch.ones(2).int()}
    save_file({**tensors, **others}, tmp_path / "model.safetensors")
    counts = {entry.name: (entry.nans, entry.infinities) for entry in count_values(tmp_path / "model.safetensors")}
    assert counts == {"0": (0, 0), "1": (1, 0), "2": (0, 2), "3": (2, 1), "empty": (0, 0), "integers": (0, 0)}
