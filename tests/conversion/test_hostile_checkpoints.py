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

from mhla_hf import load_pipeline
from mhla_hf.conversion import convert_pretrained, import_official
from tests import GOLDEN
from tests.edits import edit_json, refused


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


@pytest.fixture
def pipeline(softmax_dir, tmp_path):
    return Path(shutil.copytree(softmax_dir, tmp_path / "source"))


def convert(source, tmp_path, mhla=None, **options):
    convert_pretrained(source, tmp_path / "out", mhla or BLOCKS, progress=False, **options)


def official(weights, tmp_path, **options):
    save_file(weights, tmp_path / "checkpoint.safetensors")
    return lambda: import_official(tmp_path / "checkpoint.safetensors", tmp_path / "out", progress=False, **options)


# Checkpoints of the MHLA authors


@pytest.mark.parametrize("number", ["7", "999999999", "9" * 5000])
def test_layers_with_huge_numbers(number, tmp_path):
    weights = load_file(OFFICIAL)
    weights[f"blocks.{number}.self_attn.q.weight"] = torch.ones(1)
    refused(official(weights, tmp_path), "blocks.")


def test_a_lie_in_the_header(tmp_path):
    path = tmp_path / "checkpoint.safetensors"
    for length in (10 * 10**9, 2**63 - 1, 90 * 10**6):
        path.write_bytes(struct.pack("<Q", length) + b'{"x":')
        refused(lambda: import_official(path, tmp_path / "out", progress=False), str(path), "truncated or not")
    header = json.dumps({"x": {"dtype": "F32", "shape": [10**5, 10**5], "data_offsets": [0, 4 * 10**10]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 64)
    refused(lambda: import_official(path, tmp_path / "out", progress=False), str(path), "truncated or not")


# Configurations of diffusers models


@pytest.mark.parametrize(
    "change",
    [
        {"quantization_config": "int8"},
        {"mhla": {"blocks": "x" * 10_000}},
    ],
    ids=str,
)
def test_entries_of_the_wrong_shape(change, pipeline, tmp_path):
    edit_json(pipeline / "transformer/config.json", **change)
    if "mhla" in change:
        refused(lambda: load_pipeline(pipeline, mhla=BLOCKS))
    else:
        refused(lambda: convert(pipeline, tmp_path), "is quantised")


def test_truncated_components_that_are_copied(pipeline, tmp_path):
    path = next((pipeline / "vae").glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-8])
    refused(lambda: convert(pipeline, tmp_path), str(path), "truncated or not")
    assert not (tmp_path / "out").exists()
