# SPDX-License-Identifier: Apache-2.0
"""`check_directory`: nothing to say of good directories, and one clear line for each kind of damage."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from mhla_hf import MHLAWanTransformer3DModel
from mhla_hf.conversion import convert_pretrained
from mhla_hf.hub.checks import check_directory
from mhla_hf.models.directory import ModelDirectory
from mhla_hf.models.stub import stub_files
from mhla_hf.utils.tensor_files import count_values
from tests import tiny
from tests.edits import edit_json, edit_weights


SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
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
    convert_pretrained(folder / "llama", folder / "llama-mhla", {}, progress=False)
    return folder


@pytest.fixture
def copied(made, tmp_path):
    return lambda name: Path(shutil.copytree(made / name, tmp_path / name))


def errors(folder: Path) -> list[str]:
    problems = check_directory(folder)
    for problem in problems:
        assert "\n" not in str(problem) and len(str(problem)) < 700 and str(folder) not in str(problem)
    assert problems == sorted(problems, key=lambda problem: (problem.level, problem.file, problem.message))
    return [str(problem) for problem in problems if problem.level == "error"]


@pytest.mark.parametrize("name", ["softmax", "pipeline", "shards", "bare", "llama", "llama-mhla"])
def test_good_directories(name, made):
    assert check_directory(made / name) == []


@pytest.mark.parametrize("name", ["pipeline", "bare", "llama-mhla"])
def test_directories_as_they_are_on_the_hub(name, copied):
    folder = copied(name)
    for file, content in stub_files(ModelDirectory.read(folder)).items():
        (folder / file).write_text(content)
    assert check_directory(folder) == []


def test_pipelines_with_their_own_code(copied):
    folder = copied("pipeline")
    edit_json(folder / "model_index.json", _class_name=["pipeline", "MyPipeline"])
    (problem,) = check_directory(folder)
    assert problem.level == "warning" and "its own code, which is not run" in problem.message


DAMAGES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    # Files.
    "no-folder": ("pipeline", lambda root: shutil.rmtree(root / "vae"), "the component vae, whose folder is missing"),
    "no-shard": (
        "shards",
        lambda root: next(root.glob(f"{WAN}-00002*")).unlink(),
        "is missing, although the checkpoint needs it",
    ),
    # The pipeline's index.
    "component-outside": (
        "pipeline",
        lambda root: edit_json(root / "model_index.json", **{"../victim": ["diffusers", "AutoencoderKLWan"]}),
        "model_index.json: names '../victim', which is no path inside",
    ),
    # Weight files.
    "link-outside": (
        "pipeline",
        lambda root: (root / "vae/key.json").symlink_to("/etc/hostname"),
        "the directory: vae/key.json leads by a link to /etc/hostname, outside",
    ),
    # Configurations.
    "no-options": (
        "bare",
        lambda root: edit_json(root / "config.json", mhla=...),
        "config.json: has no entry 'mhla', although the weights hold MHLA parameters",
    ),
    "softmax-class": (
        "bare",
        lambda root: edit_json(root / "config.json", _class_name="WanTransformer3DModel"),
        "config.json: says _class_name='WanTransformer3DModel', which would drop the MHLA weights; it should say",
    ),
    # Names, shapes and values of weights.
    "missing": (
        "bare",
        lambda root: _edit_bare(root, lambda tensors: tensors.pop("proj_out.bias")),
        "diffusion_pytorch_model.safetensors: lacks proj_out.bias; write or download",
    ),
    "not-converted": (
        "bare",
        lambda root: _edit_bare(root, lambda tensors: [tensors.pop(n) for n in list(tensors) if ".mhla." in n]),
        "config.json: describes an MHLA model, but the weights hold no MHLA parameters",
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
        "has NaN or infinite values: quant_conv.bias (1 NaN, 2 infinite of 32 values); take earlier weights",
    ),
}


def _edit_options(root: Path, **changes) -> None:
    edit_json(root / "config.json", mhla={**json.loads((root / "config.json").read_text())["mhla"], **changes})


def _edit_bare(root: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    edit_weights(root / "diffusion_pytorch_model.safetensors", change)


@pytest.mark.parametrize("case", DAMAGES)
def test_damage_is_named(case, copied):
    name, damage, message = DAMAGES[case]
    folder = copied(name)
    damage(folder)
    found = errors(folder)
    assert any(message in line for line in found), found
    # One cause is not reported over and over.
    assert len(found) <= 2, found


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_values_of_every_type(dtype, tmp_path):
    rows = torch.randn(4, 9).to(dtype)
    rows[1, 3] = torch.nan
    rows[2, :2] = torch.tensor([torch.inf, -torch.inf])
    rows[3, 6:] = torch.tensor([-torch.inf, torch.nan, torch.nan])
    tensors = {str(index): row for index, row in enumerate(rows)}
    others = {"empty": torch.zeros(0, 2, dtype=dtype), "integers": torch.ones(2).int()}
    save_file({**tensors, **others}, tmp_path / "model.safetensors")
    counts = {entry.name: tuple(found) for entry, *found in count_values(tmp_path / "model.safetensors")}
    assert counts == {"0": (0, 0), "1": (1, 0), "2": (0, 2), "3": (2, 1), "empty": (0, 0), "integers": (0, 0)}
