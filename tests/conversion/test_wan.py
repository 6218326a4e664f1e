# SPDX-License-Identifier: Apache-2.0
"""Converting ordinary Wan directories: what comes out, what is refused, and that nothing half-done stays behind."""

import hashlib
import json
import re
import shutil
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from diffusers import DiffusionPipeline, WanTransformer3DModel
from safetensors.torch import load_file

import mhla_hf
from mhla_hf import MHLAConfig, MHLAWanTransformer3DModel
from mhla_hf.conversion import convert_pretrained
from mhla_hf.models.weight_files import to_stored
from mhla_hf.utils.files import list_files
from mhla_hf.utils.locations import local_origin
from mhla_hf.utils.tensor_files import (
    TensorEntry,
    plan_shards,
    read_entries,
    write_shards,
)
from tests import tiny
from tests.edits import edit_json, edit_weights


BLOCKS = (1, 2, 2)
EVERYTHING = {
    "blocks": BLOCKS,
    "feature_map": "hedgehog",
    "mixing_heads": "per_head",
    "output_norm": True,
    "output_gate": True,
    "lepe_kernel": 3,
    "window": "cross",
    "window_size": (1, 2, 2),
}


@pytest.fixture(scope="module")
def pipeline_dir(tmp_path_factory):
    """A tiny softmax pipeline on disk; tests do not change it."""
    folder = tmp_path_factory.mktemp("softmax") / "pipeline"
    tiny.wan_pipeline().save_pretrained(folder)
    (folder / "NOTICE.md").write_text("about this model\n")
    return folder


@pytest.fixture(scope="module")
def transformer_dir(pipeline_dir):
    return pipeline_dir / "transformer"


@pytest.fixture
def copied_transformer(transformer_dir, tmp_path):
    """A transformer directory that a test may damage."""
    return Path(shutil.copytree(transformer_dir, tmp_path / "damaged"))


def convert(source, destination, mhla=None, **options):
    return convert_pretrained(source, destination, mhla or {"blocks": BLOCKS}, progress=False, **options)


def assert_nothing_left(folder):
    """Neither a destination nor a temporary directory."""
    assert sorted(path.name for path in folder.iterdir() if path.name != "damaged") == []


# Safetensors one tensor at a time


def test_writer_agrees_with_the_library(tmp_path):
    tensors = {
        "half": torch.randn(3, 5).half(),
        "scalar": torch.tensor(2.0),
        "double": torch.randn(2, dtype=torch.float64),
        "empty": torch.zeros(0, 4),
        "brain": torch.randn(7).bfloat16(),
        "strided": torch.randn(4, 6).T,
    }
    entries = [TensorEntry(name, tuple(t.shape), t.dtype, lambda t=t: t) for name, t in tensors.items()]
    seen = []
    write_shards(tmp_path, {"w.safetensors": entries}, seen.append)
    loaded = load_file(tmp_path / "w.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)
    assert sum(seen) == sum(entry.nbytes for entry in entries)
    read = {entry.name: entry for entry in read_entries(tmp_path / "w.safetensors")}
    assert read["strided"].shape == (6, 4)
    assert torch.equal(read["half"].load(), tensors["half"])


def test_shards_are_written_one_at_a_time(tmp_path):
    alive, most = 0, 0

    class Counted(torch.Tensor):
        def __del__(self):
            nonlocal alive
            alive -= 1

    def load(size):
        nonlocal alive, most
        alive += 1
        most = max(most, alive)
        return torch.ones(size).as_subclass(Counted)

    sizes = (10, 20, 5, 100, 1)
    entries = [TensorEntry(str(size), (size,), torch.float16, partial(load, size)) for size in sizes]
    shards = plan_shards(entries, 2 * 30, stem="model", variant="fp16")
    names = [[entry.name for entry in shard] for shard in shards.values()]
    assert sorted(names) == [["1"], ["10", "20"], ["100"], ["5"]] or sorted(names)[-1] == ["5", "1"]
    write_shards(tmp_path, shards)
    assert most <= 2
    index = json.loads((tmp_path / "model.safetensors.index.fp16.json").read_text())
    assert set(index["weight_map"]) == set(map(str, sizes)) and index["metadata"]["total_size"] == 2 * sum(sizes)
    for file in shards:
        assert re.fullmatch(r"model\.fp16-0000\d-of-0000\d\.safetensors", file)
        assert {tensor.dtype for tensor in load_file(tmp_path / file).values()} == {torch.float16}


# A whole pipeline


def test_pipeline_generates_after_conversion(pipeline_dir, tmp_path):
    report = convert(pipeline_dir, tmp_path / "mhla", EVERYTHING)
    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "mhla")
    assert type(pipeline.transformer) is MHLAWanTransformer3DModel
    assert pipeline.transformer.mhla_layers == [0, 1]
    assert tiny.wan_video(pipeline).shape == (5, 16, 32, 3)
    assert report.components["transformer"].mhla_layers == [0, 1]
    assert list(tmp_path.iterdir()) == [tmp_path / "mhla"]


def test_everything_else_is_copied(pipeline_dir, tmp_path):
    convert(pipeline_dir, tmp_path / "mhla")
    changed = {"conversion.json", "model_index.json"}
    for path in list_files(pipeline_dir):
        if path.parts[0] != "transformer" and path.name not in changed:
            assert (tmp_path / "mhla" / path).read_bytes() == (pipeline_dir / path).read_bytes(), path
    before = json.loads((pipeline_dir / "model_index.json").read_text())
    after = json.loads((tmp_path / "mhla/model_index.json").read_text())
    assert after.pop("transformer") == ["mhla_hf", "MHLAWanTransformer3DModel"]
    assert before.pop("transformer") == ["diffusers", "WanTransformer3DModel"]
    assert before == after
    old = json.loads((pipeline_dir / "transformer/config.json").read_text())
    new = json.loads((tmp_path / "mhla/transformer/config.json").read_text())
    expected = {**old, "_class_name": "MHLAWanTransformer3DModel", "mhla": MHLAConfig(blocks=BLOCKS).to_dict()}
    assert new == to_stored({**expected, "_mhla_state": "converted"})


@pytest.mark.parametrize(
    "mhla", [EVERYTHING, {"block_size": (1, 1, 2), "grid": (3, 2, 4)}, {}], ids=["all", "size", "default"]
)
def test_same_as_converting_in_memory(transformer_dir, tmp_path, mhla):
    convert(transformer_dir, tmp_path / "mhla", mhla or MHLAConfig())
    streamed = MHLAWanTransformer3DModel.from_pretrained(tmp_path / "mhla")
    in_memory = mhla_hf.convert(WanTransformer3DModel.from_pretrained(transformer_dir), mhla)
    expected = in_memory.state_dict()
    assert streamed.state_dict().keys() == expected.keys()
    for name, tensor in streamed.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    assert streamed.config.mhla == in_memory.config.mhla
    # Equal weights at other addresses: BLAS may sum in another order.
    torch.testing.assert_close(tiny.wan_output(streamed), tiny.wan_output(in_memory), rtol=1e-5, atol=1e-5)


def test_subfolder_converts_the_transformer_alone(pipeline_dir, tmp_path):
    convert(pipeline_dir, tmp_path / "mhla", subfolder="transformer")
    assert sorted(path.name for path in (tmp_path / "mhla").iterdir()) == [
        "config.json",
        "conversion.json",
        "diffusion_pytorch_model.safetensors",
        "modeling_mhla.py",
    ]
    with pytest.raises(ValueError, match="subfolder='unet' is not in"):
        convert(pipeline_dir, tmp_path / "other", subfolder="unet")


def test_image_to_video(tmp_path):
    softmax = tiny.wan_transformer(image_to_video=True)
    softmax.save_pretrained(tmp_path / "softmax")
    convert(tmp_path / "softmax", tmp_path / "mhla")
    model = MHLAWanTransformer3DModel.from_pretrained(tmp_path / "mhla")
    assert tiny.wan_output(model, **tiny.wan_inputs(image_to_video=True)).isfinite().all()
    assert torch.equal(model.blocks[0].attn2.add_k_proj.weight, softmax.blocks[0].attn2.add_k_proj.weight)


# Files: shards, variants, types


@pytest.fixture
def sharded_dir(tmp_path):
    tiny.wan_transformer().save_pretrained(tmp_path / "damaged", max_shard_size="40KB")
    assert len(list((tmp_path / "damaged").glob("*.safetensors"))) > 2
    return tmp_path / "damaged"


def test_max_shard_size(sharded_dir, tmp_path):
    report = convert(sharded_dir, tmp_path / "mhla", max_shard_size="60KB")
    names = report.components["transformer"].weight_sets[0].files
    assert sorted(path.name for path in (tmp_path / "mhla").glob("*.safetensors")) == names and len(names) > 1
    for name in names:
        assert sum(tensor.nbytes for tensor in load_file(tmp_path / "mhla" / name).values()) <= 60_000
    index = json.loads((tmp_path / "mhla/diffusion_pytorch_model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == report.bytes_written
    streamed = MHLAWanTransformer3DModel.from_pretrained(tmp_path / "mhla")
    in_memory = mhla_hf.convert(WanTransformer3DModel.from_pretrained(sharded_dir), {"blocks": BLOCKS})
    torch.testing.assert_close(tiny.wan_output(streamed), tiny.wan_output(in_memory), rtol=1e-5, atol=1e-5)


def test_dtype_leaves_fp32_modules_alone(transformer_dir, tmp_path):
    report = convert(transformer_dir, tmp_path / "mhla", {"blocks": BLOCKS, "output_gate": True}, dtype="bf16")
    weights = load_file(tmp_path / "mhla/diffusion_pytorch_model.safetensors")
    original = load_file(transformer_dir / "diffusion_pytorch_model.safetensors")
    kept = set(MHLAWanTransformer3DModel._keep_in_fp32_modules)
    for name, tensor in weights.items():
        assert tensor.dtype == (torch.float32 if kept & set(name.split(".")) else torch.bfloat16), name
        if name in original:
            assert torch.equal(tensor, original[name].to(tensor.dtype)), name
    assert weights["scale_shift_table"].dtype == torch.float32
    assert weights["blocks.0.attn1.mhla.gate.weight"].dtype == torch.bfloat16
    counts = report.components["transformer"].weight_sets[0].dtypes
    assert counts["bfloat16"] + counts["float32"] == len(weights)


# conversion.json


def test_conversion_json(pipeline_dir, tmp_path):
    convert(pipeline_dir, tmp_path / "mhla", EVERYTHING)
    content = json.loads((tmp_path / "mhla/conversion.json").read_text())
    assert content["schema_version"] == 2
    # Nothing of this machine but the path of the source and its name, which are left out of what is pushed.
    origin = local_origin(pipeline_dir)
    assert {name: content["source"].pop(name) for name in origin} == origin
    assert content["source"] == {"location": pipeline_dir.name}
    assert str(tmp_path) not in json.dumps(content) and str(pipeline_dir) not in json.dumps(content)
    assert content["versions"]["torch"] == version("torch")
    assert content["versions"]["mhla-hf"] == mhla_hf.__version__
    part = content["components"]["transformer"]
    file = pipeline_dir / "transformer/diffusion_pytorch_model.safetensors"
    (weights,) = part["weight_sets"]
    assert weights["variant"] is None and weights["files"] == [file.name]
    assert part["mhla"] == MHLAConfig.from_dict(EVERYTHING).to_dict()
    written = load_file(tmp_path / "mhla/transformer/diffusion_pytorch_model.safetensors")
    assert weights["copied_tensors"] + len(part["initialised"]) == len(written)
    assert all(list(written[name].shape) == shape for name, shape in part["initialised"].items())
    assert "vae/config.json" in content["copied_files"]


def test_from_the_hub_cache(transformer_dir, tmp_path):
    """The layout of huggingface_hub's cache: snapshots of links to blobs named by their SHA-256."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "cache/models--someone--tiny-wan"
    snapshot = repository / "snapshots" / commit / "transformer"
    (repository / "blobs").mkdir(parents=True)
    (repository / "refs").mkdir()
    snapshot.mkdir(parents=True)
    (repository / "refs/main").write_text(commit)
    shutil.copy(transformer_dir / "config.json", snapshot)
    weights = transformer_dir / "diffusion_pytorch_model.safetensors"
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    shutil.copy(weights, repository / "blobs" / digest)
    (snapshot / weights.name).symlink_to(Path("../../../blobs") / digest)
    cache = {"cache_dir": tmp_path / "cache", "local_files_only": True}
    report = convert("someone/tiny-wan", tmp_path / "mhla", subfolder="transformer", **cache)
    assert report.source["commit"] == commit
    assert not (tmp_path / "mhla" / weights.name).is_symlink()
    MHLAWanTransformer3DModel.from_pretrained(tmp_path / "mhla")


# Refusals: one line each, and nothing left behind


def refused(source, tmp_path, message, mhla=None, **options):
    with pytest.raises(ValueError, match=message) as caught:
        convert(source, tmp_path / "mhla", mhla, **options)
    assert "\n" not in str(caught.value)
    assert_nothing_left(tmp_path)


def test_refuses_an_mhla_directory(transformer_dir, tmp_path):
    convert(transformer_dir, tmp_path / "damaged")
    refused(tmp_path / "damaged", tmp_path, "is a MHLAWanTransformer3DModel already")


def test_refuses_an_index_that_disagrees(pipeline_dir, tmp_path):
    folder = Path(shutil.copytree(pipeline_dir, tmp_path / "damaged"))
    edit_json(folder / "transformer/config.json", _class_name="AuraFlowTransformer2DModel")
    refused(folder, tmp_path, "AuraFlowTransformer2DModel has no MHLA version")


def test_refuses_quantised_configurations(copied_transformer, tmp_path):
    edit_json(copied_transformer / "config.json", quantization_config={"quant_method": "bitsandbytes"})
    refused(copied_transformer, tmp_path, r"quantised \(bitsandbytes\)")


def test_refuses_missing_shards(sharded_dir, tmp_path):
    next(sharded_dir.glob("*-00002-*.safetensors")).unlink()
    refused(sharded_dir, tmp_path, "00002-of-.*safetensors is missing")


def test_refuses_pickles(copied_transformer, tmp_path):
    (copied_transformer / "diffusion_pytorch_model.safetensors").unlink()
    refused(copied_transformer, tmp_path, "has no diffusion_pytorch_model")
    torch.save({}, copied_transformer / "diffusion_pytorch_model.bin")
    refused(copied_transformer, tmp_path, "only as diffusion_pytorch_model.bin")


def test_names_missing_and_unknown_tensors(copied_transformer, tmp_path):
    def change(weights):
        weights["blocks.1.attn1.to_z.weight"] = weights.pop("blocks.1.attn1.to_q.weight")
        weights["proj_out.bias"] = torch.zeros(3)

    edit_weights(copied_transformer / "diffusion_pytorch_model.safetensors", change)
    refused(
        copied_transformer,
        tmp_path,
        r"lacks blocks.1.attn1.to_q.weight; has tensors that the model does not know: blocks.1.attn1.to_z.weight; "
        r"has tensors of another shape: proj_out.bias \(3,\) instead of \(64,\)",
    )


def test_refuses_wrong_options(transformer_dir, tmp_path):
    refused(transformer_dir, tmp_path, "layers names 7, but the model has layers 0 to 1", layers="1,7")
    refused(transformer_dir, tmp_path, "layers names 5, but the model has", {"blocks": BLOCKS, "layers": [5]})
    refused(transformer_dir, tmp_path, "dtype='int4' is not one of", dtype="int4")
    refused(transformer_dir, tmp_path, "max_shard_size='big'", max_shard_size="big")
    refused(transformer_dir, tmp_path, r"blocks=\(2, 2\) must have one number for each axis", {"blocks": (2, 2)})
    refused(transformer_dir, tmp_path, "Unknown mhla option", {"block": BLOCKS})


# The destination


def test_destination_is_kept_unless_told(transformer_dir, tmp_path):
    folder = tmp_path / "mhla"
    folder.mkdir()
    convert(transformer_dir, folder)
    (folder / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not empty; .*--overwrite"):
        convert(transformer_dir, folder)
    assert (folder / "mine.txt").read_text() == "mine"
    convert(transformer_dir, folder, {"blocks": (1, 1, 1)}, overwrite=True)
    assert not (folder / "mine.txt").exists()
    assert MHLAWanTransformer3DModel.from_pretrained(folder).mhla_config.blocks == (1, 1, 1)
    assert list(tmp_path.iterdir()) == [folder]


def test_disk_space_is_checked_first(transformer_dir, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10))
    with pytest.raises(ValueError, match="needs .*, but 10 B are free"):
        convert(transformer_dir, tmp_path / "mhla", EVERYTHING)
