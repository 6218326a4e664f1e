# SPDX-License-Identifier: Apache-2.0
"""`mhla-hf calibrate` and `convert --calibrate`: probes that pipelines make, and the files that are written."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import mhla_hf
from mhla_hf.cli.main import app
from mhla_hf.conversion import convert_pretrained
from mhla_hf.recovery.calibration import calibrate_directory
from mhla_hf.training.data.probes import mhla_components, pipeline_batches
from tests import tiny, tiny_images
from tests.recovery.sources import model_directory, text_folder


PIPELINES = {
    "wan": (tiny.wan_pipeline, {"blocks": [1, 2, 2], "grid": [3, 2, 4]}),
    "vace": (tiny.vace_pipeline, {"blocks": [1, 2, 2], "grid": [3, 2, 4]}),
    "ltx": (tiny.ltx_pipeline, {"blocks": [3, 2, 2], "grid": [3, 4, 8]}),
    "ltx2": (tiny.ltx2_pipeline, {"blocks": [3, 2, 2], "grid": [3, 4, 8]}),
    "dit": (tiny_images.dit_pipeline, {"blocks": [2, 2]}),
}


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in sorted(folder.rglob("*.safetensors")):
        found.update({f"{path.parent.name}/{name}": tensor for name, tensor in load_file(path).items()})
    return found


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """A converted Wan pipeline in shards; tests copy it."""
    folder = tmp_path_factory.mktemp("converted")
    tiny.wan_pipeline().save_pretrained(folder / "softmax")
    convert_pretrained(
        folder / "softmax", folder / "mhla", {"blocks": (1, 2, 2), "grid": (3, 2, 4), "lepe_kernel": 3},
        max_shard_size=60_000, dtype="bfloat16", progress=False,
    )  # fmt: skip
    return folder / "mhla"


@pytest.mark.parametrize("name", PIPELINES)
def test_pipelines_make_their_own_probe(name):
    make, options = PIPELINES[name]
    pipeline = mhla_hf.convert(make(), options)
    batches = pipeline_batches(pipeline, samples=8, steps=4)
    again = pipeline_batches(pipeline, samples=8, steps=4)["transformer"]
    assert list(batches) == list(mhla_components(pipeline)) == ["transformer"]
    assert len(batches["transformer"]) == 8
    for batch, other in zip(batches["transformer"], again, strict=True):
        assert torch.equal(batch["hidden_states"], other["hidden_states"])
    # The calls of one sample stand four apart, at other noise levels.
    first, second = (batches["transformer"][place]["timestep"].flatten()[0] for place in (0, 4))
    assert first != second
    report = mhla_hf.calibrate(pipeline, samples=8, steps=4)
    assert report.batches == 8 and all(layer.name.startswith("transformer.") for layer in report.layers)
    assert report.error_after < report.error_before


def test_two_experts():
    pipeline = mhla_hf.convert(tiny.wan_pipeline(second_transformer=True), PIPELINES["wan"][1])
    with pytest.raises(ValueError, match=r"transformer_2 is not called in 1 denoising steps; take more of them"):
        mhla_hf.calibrate(pipeline, samples=8, steps=1)
    report = mhla_hf.calibrate(pipeline, samples=8, steps=6)
    assert {layer.name.partition(".")[0] for layer in report.layers} == {"transformer", "transformer_2"}


def test_pipelines_that_need_images_are_refused():
    pipeline = mhla_hf.convert(tiny.wan_pipeline(image_to_video=True), PIPELINES["wan"][1])
    with pytest.raises(ValueError, match="makes no samples from prompts or classes alone"):
        mhla_hf.calibrate(pipeline, samples=8, steps=4)


def test_a_source_is_not_written_to(tmp_path):
    """The output shares files with its source by links, also those that `save_pretrained` writes."""
    softmax, source, output = (tmp_path / name for name in ("softmax", "mhla", "calibrated"))
    model_directory("llama", softmax)
    convert_pretrained(softmax, source, {"block_size": 4}, progress=False)
    edited = json.dumps({"max_new_tokens": 7, "pad_token_id": 3})
    (source / "generation_config.json").write_text(edited)
    before = {path: path.read_bytes() for path in source.rglob("*") if path.is_file()}
    calibrate_directory(source, output=output, data=str(text_folder(tmp_path / "texts")), samples=8)
    assert {path: path.read_bytes() for path in source.rglob("*") if path.is_file()} == before
    assert (output / "generation_config.json").read_text() == edited


def test_directory(converted, tmp_path):
    output = tmp_path / "calibrated"
    before = tensors(converted)
    arguments = ["calibrate", str(converted), str(output), "--samples", "8", "--json", str(tmp_path / "figures.json")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "held-out error of the layers' outputs" in result.stdout
    figures = json.loads((tmp_path / "figures.json").read_text())
    record = json.loads((output / "conversion.json").read_text())
    original = json.loads((converted / "conversion.json").read_text())
    assert {name: record[name] for name in original} == original
    layers = record["calibration"]["layers"]
    assert [layer["name"] for layer in layers] == ["blocks.0.attn1", "blocks.1.attn1"]
    assert [layer["name"] for layer in figures["layers"]] == ["blocks.0.attn1", "blocks.1.attn1"]
    assert all(layer["error_after"] < layer["error_before"] for layer in layers if layer["changed"])
    after = tensors(output)
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in after.items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in before.items()
    }
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed and all(".attn1." in name for name in changed)
    files = [{path.relative_to(root) for path in root.rglob("*")} for root in (converted, output)]
    assert files[1] == files[0] | {Path("README.md")} and any("-of-" in path.name for path in files[0])
    assert tensors(converted).keys() == before.keys()
    mhla_hf.load_pipeline(output, attn_implementation=None)

    with pytest.raises(ValueError, match="has been calibrated: its projections are not those of the original"):
        calibrate_directory(output, samples=8)
    with pytest.raises(ValueError, match="is not empty"):
        calibrate_directory(converted, output=output, samples=8)
    stopped = tensors(output)

    def stop(done, count):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate_directory(output, samples=8, force=True, progress=stop)
    assert all(torch.equal(tensor, stopped[name]) for name, tensor in tensors(output).items())
    config = output / "transformer" / "config.json"
    assert json.loads(config.read_text())["_mhla_state"] == "calibrated"
    config.write_text(config.read_text().replace('"_mhla_state": "calibrated",', ""))
    with pytest.raises(ValueError, match="has been trained"):
        calibrate_directory(output, samples=8)
    calibrate_directory(output, samples=8, force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["calibrated", "figures.json"]


def test_convert_and_calibrate_a_language_model(tmp_path):
    model_directory("llama", tmp_path / "softmax")
    texts = text_folder(tmp_path / "texts")
    arguments = ["convert", str(tmp_path / "softmax"), str(tmp_path / "mhla"), "--block-size", "4"]
    result = CliRunner().invoke(app, [*arguments, "--calibrate", "--data", str(texts)])
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "mhla" / "conversion.json").read_text())["calibration"]
    assert record["probe"]["data"] == str(texts) and len(record["layers"]) == 3


def test_mistakes_with_directories(tmp_path, converted):
    with pytest.raises(FileNotFoundError, match="missing"):
        calibrate_directory(tmp_path / "missing")
    with pytest.raises(ValueError, match=r"data must be given: .* is a model without a pipeline"):
        calibrate_directory(converted / "transformer")
    with pytest.raises(ValueError, match="prompts: of no use beside data"):
        calibrate_directory(converted, data="cache", prompts=["a dog"])
