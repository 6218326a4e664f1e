# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with sizes, types and files that are not what they claim: one short line, and no memory spent."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mhla_hf import MHLAWanTransformer3DModel, load_pipeline
from mhla_hf.conversion import convert_pretrained, import_official
from tests import GOLDEN, tiny


OFFICIAL = GOLDEN / "wan_hybrid_gated/model.safetensors"
BLOCKS = {"blocks": (1, 2, 2)}
# Far less than what the checkpoints ask for, far more than what refusing them takes.
MEMORY = 2 * 2**30


@pytest.fixture(autouse=True)
def limited_memory():
    """Lets an allocation of gigabytes fail at once instead of taking the machine down."""
    resource = pytest.importorskip("resource")
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else None
    if pages is None:
        pytest.skip("how much memory the process has is known on Linux only")
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture(scope="module")
def pipeline_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("softmax") / "pipeline"
    tiny.wan_pipeline().save_pretrained(folder)
    return folder


@pytest.fixture
def pipeline(pipeline_dir, tmp_path):
    return Path(shutil.copytree(pipeline_dir, tmp_path / "source"))


@pytest.fixture(scope="module")
def mhla_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mhla")
    tiny.wan_transformer(MHLAWanTransformer3DModel, mhla=BLOCKS).save_pretrained(folder)
    return folder


def refused(call, *names, allowed=ValueError):
    """The message of an error of one short line that names these."""
    with pytest.raises(allowed) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message and len(message) < 700, message
    assert all(name in message for name in names), message
    return message


def convert(source, tmp_path, mhla=None, **options):
    convert_pretrained(source, tmp_path / "out", mhla or BLOCKS, progress=False, **options)


def edit_json(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def official(weights, tmp_path, **options):
    save_file(weights, tmp_path / "checkpoint.safetensors")
    return lambda: import_official(tmp_path / "checkpoint.safetensors", tmp_path / "out", progress=False, **options)


# Checkpoints of the MHLA authors


@pytest.mark.parametrize("number", ["7", "999999999", "9" * 5000])
def test_layers_with_huge_numbers(number, tmp_path):
    weights = load_file(OFFICIAL)
    weights[f"blocks.{number}.self_attn.q.weight"] = torch.ones(1)
    refused(official(weights, tmp_path), "blocks.")


def test_many_layers(tmp_path):
    weights = load_file(OFFICIAL)
    weights.update({f"blocks.{index}.x": torch.ones(1) for index in range(5000)})
    refused(official(weights, tmp_path), "blocks.4999")


def test_long_names(tmp_path):
    length = 2_000_000
    weights = load_file(OFFICIAL)
    refused(official({**weights, "x" * length: torch.ones(1)}, tmp_path), "xxx...xxx")
    refused(official({"model." * (length // 6) + "x": torch.ones(1)}, tmp_path), "not MHLA")


def test_empty_tensors(tmp_path):
    name = "time_embedding.0.weight"
    weights = load_file(OFFICIAL)
    weights[name] = torch.zeros(0, *weights[name].shape[1:])
    refused(official(weights, tmp_path), name, "empty")


def test_a_wide_convolution(tmp_path):
    weights = load_file(OFFICIAL)
    for name in [name for name in weights if name.endswith("lepe.weight")]:
        weights[name] = torch.zeros(weights[name].shape[0], 1, 1, 1, 301)
    if not any(name.endswith("lepe.weight") for name in weights):
        for name in [name for name in weights if name.endswith("block_attn.conv.weight")]:
            prefix = name.removesuffix("block_attn.conv.weight")
            weights[f"{prefix}lepe.weight"] = torch.zeros(48, 1, 1, 1, 301)
            weights[f"{prefix}lepe.bias"] = torch.zeros(48)
    refused(official(weights, tmp_path), "lepe_kernel=301")


@pytest.mark.parametrize("blocks", [(150, 150, 1), (1, 1)])
def test_blocks_that_are_not_those_of_the_weights(blocks, tmp_path):
    refused(official(load_file(OFFICIAL), tmp_path, blocks=blocks), "blocks=")


def test_a_lie_in_the_header(tmp_path):
    path = tmp_path / "checkpoint.safetensors"
    for length in (10 * 10**9, 2**63 - 1, 90 * 10**6):
        path.write_bytes(struct.pack("<Q", length) + b'{"x":')
        refused(lambda: import_official(path, tmp_path / "out", progress=False), str(path), "truncated or not")
    header = json.dumps({"x": {"dtype": "F32", "shape": [10**5, 10**5], "data_offsets": [0, 4 * 10**10]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 64)
    refused(lambda: import_official(path, tmp_path / "out", progress=False), str(path), "truncated or not")


def test_views_that_share_out_one_storage_are_taken(tmp_path):
    weights = load_file(OFFICIAL)
    sizes = [tensor.numel() for tensor in weights.values()]
    parts = torch.cat([tensor.flatten() for tensor in weights.values()]).split(sizes)
    shared = {name: part.view(tensor.shape) for (name, tensor), part in zip(weights.items(), parts)}
    torch.save(shared, tmp_path / "checkpoint.pt")
    import_official(tmp_path / "checkpoint.pt", tmp_path / "out", progress=False)


# Configurations of diffusers models

WRONG_CONFIG = {
    "num_layers": 10**6,
    "patch_size": [1, 10**12, 1],
    "num_attention_heads": "2",
    "attention_head_dim": 10**15,
    "rope_max_seq_len": 2**16 + 1,
    "ffn_dim": -4,
    "eps": True,
    "image_dim": 10**12,
}


@pytest.mark.parametrize(("name", "value"), WRONG_CONFIG.items())
def test_wrong_entries_of_a_configuration(name, value, pipeline, tmp_path, mhla_dir):
    edit_json(pipeline / "transformer/config.json", **{name: value})
    where = str(pipeline / "transformer/config.json")
    refused(lambda: convert(pipeline, tmp_path), where, name)
    refused(lambda: load_pipeline(pipeline, mhla=BLOCKS), name)
    loaded = Path(shutil.copytree(mhla_dir, tmp_path / "mhla"))
    edit_json(loaded / "config.json", **{name: value})
    refused(lambda: MHLAWanTransformer3DModel.from_pretrained(loaded), name)


@pytest.mark.parametrize("count", [1, 3])
def test_layers_that_contradict_the_weights(count, pipeline, tmp_path, mhla_dir):
    edit_json(pipeline / "transformer/config.json", num_layers=count)
    refused(lambda: convert(pipeline, tmp_path), f"num_layers={count}", "layers up to 1")
    refused(lambda: load_pipeline(pipeline, mhla=BLOCKS), f"num_layers={count}", "layers up to 1")
    loaded = Path(shutil.copytree(mhla_dir, tmp_path / "mhla"))
    edit_json(loaded / "config.json", num_layers=count)
    refused(lambda: MHLAWanTransformer3DModel.from_pretrained(loaded), f"num_layers={count}", "layers up to 1")


@pytest.mark.parametrize(
    "change",
    [
        {"quantization_config": "int8"},
        {"architectures": [1]},
        {"mhla": {"blocks": "x" * 10_000}},
    ],
    ids=str,
)
def test_entries_of_the_wrong_shape(change, pipeline, tmp_path):
    edit_json(pipeline / "transformer/config.json", **change)
    if "mhla" in change:
        refused(lambda: load_pipeline(pipeline, mhla=BLOCKS))
    else:
        refused(lambda: convert(pipeline, tmp_path), *change)


def test_truncated_components_that_are_copied(pipeline, tmp_path):
    path = next((pipeline / "vae").glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-8])
    refused(lambda: convert(pipeline, tmp_path), str(path), "truncated or not")
    assert not (tmp_path / "out").exists()


# Options


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"blocks": (10**9, 10**9, 10**9)}, "blocks"),
        ({"grid": (10**9, 10**9, 10**9)}, "grid"),
        ({"lepe_kernel": 10001}, "lepe_kernel"),
        ({"layers": [10**9]}, "layers"),
        ({"x" * 10_000: 1}, "Unknown"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_options_that_no_model_can_have(options, name, pipeline_dir, tmp_path):
    refused(lambda: convert(pipeline_dir, tmp_path, options), name)
    refused(lambda: load_pipeline(pipeline_dir, mhla=options), name)


def test_more_new_parameters_than_old_ones(pipeline_dir, tmp_path):
    # 16 M² numbers in two layers, beside some ten thousand.
    options = {"blocks": (100, 100, 1), "grid": (200, 200, 2)}
    refused(lambda: convert(pipeline_dir, tmp_path, options), "add", "parameters")
    refused(lambda: load_pipeline(pipeline_dir, mhla=options), "add", "parameters")
