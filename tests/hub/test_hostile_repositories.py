# SPDX-License-Identifier: Apache-2.0
"""Repositories that were made to harm: every way of loading, converting and checking refuses them in one line."""

from __future__ import annotations

import json
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline, WanTransformer3DModel
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from mhla_hf import MHLAWanTransformer3DModel, load_pipeline
from mhla_hf.conversion import convert_pretrained
from mhla_hf.hub.checks import check_directory
from tests import tiny


BLOCKS = {"blocks": (1, 2, 2)}
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}


class Opened:
    """Pickled, it makes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A pipeline and a language model, with softmax and as MHLA."""
    folder = tmp_path_factory.mktemp("made")
    tiny.wan_pipeline(num_layers=1).save_pretrained(folder / "softmax-pipeline")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=32)).save_pretrained(folder / "softmax-model")
    convert_pretrained(folder / "softmax-pipeline", folder / "pipeline", BLOCKS, progress=False)
    convert_pretrained(folder / "softmax-model", folder / "model", {}, progress=False)
    return folder


# Ways in which the weights of a folder are replaced.


def weights_of(folder: Path) -> Path:
    (path,) = folder.glob("*.safetensors")
    return path


def index_names(name: str) -> Callable[[Path], None]:
    """Moves the weights out of the directory, and has an index name them there."""

    def change(folder: Path) -> None:
        path, outside = weights_of(folder), Path(*folder.parts[: folder.parts.index("copy")]) / "outside.safetensors"
        path.rename(outside)
        up = "../" * (len(folder.parts) - len(outside.parent.parts))
        file = name.format(up=up, outside=outside)
        content = {"metadata": {}, "weight_map": dict.fromkeys(load_file(outside), file)}
        path.with_name(f"{path.name}.index.json").write_text(json.dumps(content))

    return change


def pickled(folder: Path) -> None:
    path = weights_of(folder)
    name = "pytorch_model.bin" if path.name == "model.safetensors" else "diffusion_pytorch_model.bin"
    torch.save(load_file(path), folder / name)
    path.unlink()


def pickled_code(folder: Path) -> None:
    pickled(folder)
    (path,) = folder.glob("*.bin")
    path.write_bytes(pickle.dumps(Opened(Path(*folder.parts[: folder.parts.index("copy")]) / "opened"), protocol=2))


def tensor_of_10_gigabytes(folder: Path) -> None:
    entry = {"dtype": "F32", "shape": [50_000, 50_000], "data_offsets": [0, 10**10]}
    header = json.dumps({"x": entry}).encode()
    weights_of(folder).write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 64)


def unknown_option(folder: Path) -> None:
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, "mhla": {**content.get("mhla", {}), "speed": "fast"}}))


OUTSIDE, PICKLES = "no path inside|not allowed", "only as .*\\.bin|If its weights are .bin"
ATTACKS: dict[str, tuple[Callable[[Path], None], str]] = {
    "index-above": (index_names("{up}outside.safetensors"), OUTSIDE),
    "index-absolute": (index_names("{outside}"), OUTSIDE),
    "pickled-code": (pickled_code, PICKLES),
    "tensor-of-10-GB": (tensor_of_10_gigabytes, "is truncated or not"),
    "unknown-option": (unknown_option, "Unknown mhla option.* speed"),
}

LOADERS: dict[str, dict[str, Callable[[Path], Any]]] = {
    "pipeline": {
        "DiffusionPipeline": DiffusionPipeline.from_pretrained,
        "load_pipeline": load_pipeline,
        "model": lambda folder: MHLAWanTransformer3DModel.from_pretrained(folder / "transformer"),
        "subfolder": lambda folder: MHLAWanTransformer3DModel.from_pretrained(folder, subfolder="transformer"),
        "softmax-class": lambda folder: WanTransformer3DModel.from_pretrained(folder / "transformer"),
    },
    "model": {
        "AutoModelForCausalLM": AutoModelForCausalLM.from_pretrained,
        "AutoModel": AutoModel.from_pretrained,
        "class": LlamaForCausalLM.from_pretrained,
    },
}


@pytest.fixture
def attacked(made, tmp_path):
    def attack(name: str, attack: str) -> Path:
        folder = Path(shutil.copytree(made / name, tmp_path / "copy"))
        ATTACKS[attack][0](folder / "transformer" if "pipeline" in name else folder)
        return folder

    yield attack
    assert not (tmp_path / "opened").exists()


def refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises((ValueError, OSError), match=message) as caught:
        call()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 700


@pytest.mark.parametrize(("name", "loader"), [(name, loader) for name in LOADERS for loader in LOADERS[name]])
@pytest.mark.parametrize("attack", ATTACKS)
def test_loading(attack, name, loader, attacked):
    folder = attacked(name, attack)
    refused(lambda: LOADERS[name][loader](folder), ATTACKS[attack][1])


@pytest.mark.parametrize("name", ["pipeline", "model"])
@pytest.mark.parametrize("attack", ATTACKS)
def test_doctor(attack, name, attacked):
    folder = attacked(name, attack)
    errors = [problem for problem in check_directory(folder) if problem.level == "error"]
    assert len(errors) == 1
    refused(lambda: (_ for _ in ()).throw(ValueError(str(errors[0]))), ATTACKS[attack][1])


SOFTMAX_ATTACKS = [attack for attack in ATTACKS if attack != "unknown-option"]


@pytest.mark.parametrize("name", ["softmax-pipeline", "softmax-model"])
@pytest.mark.parametrize("attack", SOFTMAX_ATTACKS)
def test_converting(attack, name, attacked, tmp_path):
    folder = attacked(name, attack)
    options = BLOCKS if "pipeline" in name else {}
    refused(lambda: convert_pretrained(folder, tmp_path / "out", options, progress=False), ATTACKS[attack][1])
    assert not (tmp_path / "out").exists()
