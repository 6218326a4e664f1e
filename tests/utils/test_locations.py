# SPDX-License-Identifier: Apache-2.0
"""Hostile sources: what they name or link to outside of them is neither read nor written."""

import json
import os
import platform
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mhla_hf import load_pipeline
from mhla_hf.conversion import convert_pretrained, import_official
from mhla_hf.models.directory import ModelDirectory
from mhla_hf.training.parameters import export_model
from mhla_hf.utils.files import list_files
from mhla_hf.utils.locations import local_origin, recorded_directory
from tests import tiny
from tests.edits import edit_json


MHLA = {"blocks": (1, 2, 2)}
INDEX = "model_index.json"
WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def softmax(tmp_path_factory):
    folder = tmp_path_factory.mktemp("softmax") / "pipeline"
    tiny.wan_pipeline(num_layers=1).save_pretrained(folder)
    return folder


@pytest.fixture
def pipeline(softmax, tmp_path):
    """A pipeline that a test may change, beside a `victim` of the same kind."""
    shutil.copytree(softmax, tmp_path / "victim")
    return Path(shutil.copytree(softmax, tmp_path / "source"))


def tree(folder):
    """Every file below a folder with its content; links are not followed."""
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def refused(pipeline, message):
    """Converting fails in one line, and changes nothing beside the source."""
    folder = pipeline.parent
    before = tree(folder)
    with pytest.raises(ValueError, match=message) as caught:
        convert_pretrained(pipeline, folder / "mhla", MHLA, progress=False, overwrite=True)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
    assert tree(folder) == before
    assert not (folder / "mhla").exists()


def outside_names(folder):
    return [str(folder / "victim/transformer"), "../victim/transformer", "vae/../../victim/transformer"]


@pytest.mark.parametrize("number", range(2))
def test_component_names_stay_inside(number, pipeline, tmp_path):
    name = outside_names(tmp_path)[number]
    transformer = json.loads((pipeline / INDEX).read_text())["transformer"]
    edit_json(pipeline / INDEX, **{name: transformer, "transformer": ...})
    refused(pipeline, r"source/model_index\.json names '.*, which is no path inside")
    with pytest.raises(ValueError, match="which is no path inside"):
        load_pipeline(pipeline, mhla=MHLA)


def test_weight_maps_stay_inside(pipeline, tmp_path):
    name = f"../victim/transformer/{WEIGHTS}"
    index = pipeline / "transformer" / f"{WEIGHTS}.index.json"
    index.write_text(json.dumps({"weight_map": {"proj_out.bias": name}}))
    (pipeline / "transformer" / WEIGHTS).unlink()
    refused(pipeline, r"weight_map of .*index\.json names '.*, which is no path inside")
    with pytest.raises(ValueError, match="which is no path inside"):
        load_pipeline(pipeline, mhla=MHLA)
    with pytest.raises(ValueError, match="which is no path inside"):
        import_official(pipeline / "transformer", tmp_path / "out", progress=False)
    with pytest.raises(ValueError, match="names 7, which is no path inside"):
        index.write_text(json.dumps({"weight_map": {"proj_out.bias": 7}}))
        load_pipeline(pipeline, mhla=MHLA)


@pytest.mark.parametrize("where", ["assets/key.txt", f"transformer/{WEIGHTS}", "transformer"])
def test_links_out_of_the_source(where, pipeline, tmp_path):
    secret = tmp_path / "victim" / where
    if not secret.exists():
        secret = tmp_path / "victim" / "vae"
        if where.endswith("key.txt"):
            secret = tmp_path / "victim" / INDEX
    path = pipeline / where
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(secret)
    refused(pipeline, rf"{where} leads by a link to .*victim.*, outside .*source; put a copy there or remove the link")
    with pytest.raises(ValueError, match="leads by a link"):
        export_model(ModelDirectory.open(pipeline), tmp_path / "out", torch.nn.Linear(1, 1), {})
    assert not (tmp_path / "out").exists()


def test_links_inside(pipeline, tmp_path):
    (pipeline / "vae" / "again.json").symlink_to(pipeline / "vae" / "config.json")
    convert_pretrained(pipeline, tmp_path / "mhla", MHLA, progress=False)
    assert not any(path.is_symlink() for path in (tmp_path / "mhla").rglob("*"))
    assert (tmp_path / "mhla/vae/again.json").read_bytes() == (pipeline / "vae/config.json").read_bytes()
    (pipeline / "folder").symlink_to("vae")
    with pytest.raises(ValueError, match="folder is a link to a folder; put a copy there"):
        list_files(pipeline)


def test_the_hub_cache_links_to_its_own_blobs_alone(pipeline, tmp_path):
    repository = tmp_path / "models--owner--name"
    snapshot = repository / "snapshots" / ("a" * 40)
    shutil.copytree(pipeline, snapshot)
    (repository / "blobs").mkdir()
    for number, path in enumerate(list_files(snapshot)):
        blob = repository / "blobs" / f"{number:064x}"
        (snapshot / path).rename(blob)
        (snapshot / path).symlink_to(os.path.relpath(blob, (snapshot / path).parent))
    convert_pretrained(snapshot, tmp_path / "mhla", MHLA, progress=False)
    convert_pretrained(snapshot, tmp_path / "alone", MHLA, subfolder="transformer", progress=False)
    other = tmp_path / "models--owner--other" / "blobs" / "key"
    other.parent.mkdir(parents=True)
    other.write_text("secret")
    (snapshot / "key.txt").symlink_to(other)
    with pytest.raises(ValueError, match="outside"):
        list_files(snapshot)
    # Blobs that are a link themselves would make any folder one of the cache.
    (snapshot / "key.txt").unlink()
    (repository / "blobs").rename(tmp_path / "moved")
    (repository / "blobs").symlink_to(tmp_path / "moved")
    with pytest.raises(ValueError, match="outside"):
        list_files(snapshot)


@pytest.mark.parametrize("where", ["notes", f"transformer/{WEIGHTS}"])
def test_what_is_no_file_is_refused(where, pipeline):
    (pipeline / where).unlink(missing_ok=True)
    os.mkfifo(pipeline / where)
    with pytest.raises(ValueError, match=f"{where} is neither a regular file nor a folder; remove it"):
        convert_pretrained(pipeline, pipeline.parent / "mhla", MHLA, progress=False)


def test_links_to_nothing_are_refused(tmp_path):
    (tmp_path / "self").symlink_to("self")
    with pytest.raises((ValueError, OSError), match="self"):
        list_files(tmp_path)
    (tmp_path / "self").unlink()
    (tmp_path / "gone").symlink_to("nowhere")
    with pytest.raises(ValueError, match="gone does not exist or is a link to nothing"):
        list_files(tmp_path)


def test_checkpoints_with_links_out_of_their_folder(tmp_path):
    (tmp_path / "shards").mkdir()
    save_file({"a": torch.zeros(1)}, tmp_path / "secret.safetensors")
    (tmp_path / "shards" / "a.safetensors").symlink_to(tmp_path / "secret.safetensors")
    with pytest.raises(ValueError, match="leads by a link to"):
        import_official(tmp_path / "shards", tmp_path / "out", progress=False)


def test_paths_in_records_of_others_are_not_followed(tmp_path):
    (tmp_path / "private").mkdir()
    origin = local_origin(tmp_path / "private")
    assert recorded_directory(origin, tmp_path) == tmp_path / "private"
    for forged in ({"path": str(tmp_path)}, {"machine": platform.node()}):
        assert recorded_directory({**origin, **forged}, tmp_path) is None
    cached = tmp_path / "models--you--mhla" / "snapshots" / "0"
    assert recorded_directory(origin, cached) is None


def test_errors_of_the_hub_name_the_repository(monkeypatch):
    """Of the type that they have, so that who catches them still does."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    from mhla_hf.estimate import find_candidate
    from mhla_hf.utils.locations import download_repository

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(LocalEntryNotFoundError, match="^owner/name on the Hub: "):
        download_repository("owner/name")
    with pytest.raises(OSError, match="^Qwen/Qwen3-8B on the Hub: .* The preset qwen3-8b is the same model"):
        find_candidate("Qwen/Qwen3-8B")
