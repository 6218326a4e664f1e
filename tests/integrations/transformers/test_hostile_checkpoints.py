# SPDX-License-Identifier: Apache-2.0
"""Configurations of transformers models that contradict their weights or are damaged: one short line each."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from mhla_hf.conversion import convert_pretrained
from tests.edits import edit_json, refused


OPTIONS = {"block_size": [4]}
SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 32,
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A decoder and an encoder with softmax, and the decoder as MHLA."""
    folder = tmp_path_factory.mktemp("sources")
    torch.manual_seed(0)
    sizes = {**SIZES, "max_position_embeddings": 64}
    LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=1)).save_pretrained(folder / "llama")
    BertModel(BertConfig(**sizes)).save_pretrained(folder / "bert")
    convert_pretrained(folder / "llama", folder / "mhla", OPTIONS, progress=False)
    return folder


@pytest.fixture
def copied(sources, tmp_path):
    def copy(name: str, **changes) -> Path:
        folder = Path(shutil.copytree(sources / name, tmp_path / name))
        edit_json(folder / "config.json", **changes)
        return folder

    return copy


def convert(source, tmp_path, mhla=None):
    convert_pretrained(source, tmp_path / "out", mhla or OPTIONS, progress=False)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_fewer_layers_than_the_weights_have(count, name, copied, tmp_path):
    folder = copied(name, num_hidden_layers=count)
    refused(lambda: convert(folder, tmp_path), "layers.2" if name == "llama" else "layer.2", f"={count}")
    refused(
        lambda: AutoModel.from_pretrained(folder, attn_implementation="mhla", mhla=OPTIONS), "leaves out", f"={count}"
    )


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_more_layers_than_the_weights_have(name, copied, tmp_path):
    folder = copied(name, num_hidden_layers=5)
    refused(lambda: convert(folder, tmp_path), "lacks", ".3.", "more")
    refused(lambda: AutoModel.from_pretrained(folder, attn_implementation="mhla", mhla=OPTIONS), "asks for", "=5")


@pytest.mark.parametrize("count", [1, 5])
def test_layers_of_mhla_checkpoints(count, copied):
    folder = copied("mhla", num_hidden_layers=count)
    refused(lambda: AutoModelForCausalLM.from_pretrained(folder), f"num_hidden_layers={count}")


def test_what_transformers_may_leave_out_still_loads(copied, tmp_path):
    for name in ("llama", "mhla"):
        AutoModel.from_pretrained(copied(name), attn_implementation="mhla", mhla=OPTIONS)
    # Without the prefix of the base model, and without a head.
    folder = copied("bert")
    weights = load_file(folder / "model.safetensors")
    save_file({name: x for name, x in weights.items() if "pooler" not in name}, folder / "model.safetensors")
    AutoModel.from_pretrained(folder, attn_implementation="mhla", mhla=OPTIONS)
    convert(folder, tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_hidden_layers", "three"),
        ("num_hidden_layers", 10**6),
        ("hidden_size", 0),
        ("num_attention_heads", 3),
        ("max_position_embeddings", 10**9),
        ("vocab_size", 10**15),
        ("head_dim", "x"),
    ],
)
def test_wrong_sizes(name, value, copied, tmp_path):
    folder = copied("llama", **{name: value})
    refused(lambda: convert(folder, tmp_path), str(folder))


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_more_new_parameters_than_old_ones(name, sources, tmp_path):
    options = {"block_size": [1], "grid": [8192], "mixing_storage": "matrix", "mixing_tail": "constant"}
    refused(lambda: convert(sources / name, tmp_path, options), "add", "parameters", "block_size")
    load = lambda: AutoModel.from_pretrained(sources / name, attn_implementation="mhla", mhla=options)  # noqa: E731
    refused(load, "add", "parameters", "block_size")


def test_a_million_layers_are_refused_before_they_are_built(copied):
    folder = copied("llama", num_hidden_layers=10**6)
    load = AutoModelForCausalLM.from_pretrained
    refused(lambda: load(folder, attn_implementation="mhla", mhla=OPTIONS), "num_hidden_layers")


@pytest.mark.parametrize(
    "change",
    [
        {"num_labels": 10**8},
        {"model_type": "swin", "depths": [2, 10**6]},
        {"model_type": "kosmos-2", "text_config": {"layers": 10**6}},
    ],
    ids=str,
)
def test_counts_of_modules_are_refused_before_they_are_made(change, copied, tmp_path):
    folder = copied("llama", **change)
    refused(lambda: convert(folder, tmp_path), str(folder / "config.json"), "at most")


@pytest.mark.parametrize(
    "change",
    [
        {"architectures": [1]},
        {"model_type": "x" * 10_000},
        {"quantization_config": "int8"},
        {"rope_parameters": "x"},
    ],
    ids=lambda value: str(value)[:40],
)
def test_entries_of_the_wrong_shape(change, copied, tmp_path):
    folder = copied("llama", **change)
    refused(lambda: convert(folder, tmp_path))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_resize_of_sequences(name, sources, tmp_path):
    options = {**OPTIONS, "resize": "blocks"}
    refused(lambda: convert(sources / name, tmp_path, options), "resize")
    refused(lambda: AutoModel.from_pretrained(sources / name, attn_implementation="mhla", mhla=options), "resize")
