# SPDX-License-Identifier: Apache-2.0
"""Conversions and their probes take the size of the samples that a model was made for."""

import json

import diffusers
import pytest

import mhla_hf
from mhla_hf.demo import base_pipeline_directory
from mhla_hf.families.sana import MHLASanaVideoTransformer3DModel
from mhla_hf.training.data.probes import mhla_components, pipeline_batches, sample_size
from tests.command_line import run_command
from tests.tiny import wan_pipeline


OWN = {"_sample_frames": 5, "_sample_height": 16, "_sample_width": 16}


def on_disk(source, tmp_path, options):
    destination = tmp_path / "converted"
    mhla_hf.convert_pretrained(source, destination, options, progress=False, overwrite=True)
    return mhla_hf.load_pipeline(destination)


def while_loading(source, tmp_path, options):
    return mhla_hf.load_pipeline(source, mhla=options)


def in_memory(source, tmp_path, options):
    return mhla_hf.convert(diffusers.DiffusionPipeline.from_pretrained(source), options)


WAYS = pytest.mark.parametrize("convert", [on_disk, while_loading, in_memory])


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if "in one block" in record.getMessage()]


@WAYS
def test_blocks_are_for_the_own_size(convert, tmp_path, caplog):
    pipeline = convert(base_pipeline_directory(), tmp_path, None)
    options = pipeline.transformer.mhla_config
    assert (options.blocks, options.grid) == ((1, 4, 4), (5, 8, 8))
    assert pipeline.transformer.mhla_modules()[0].layout_for((5, 8, 8)).blocks == (1, 4, 4)
    assert not warnings_of(caplog)
    pipeline.save_pretrained(tmp_path / "saved")
    stored = json.loads((tmp_path / "saved/transformer/config.json").read_text())
    assert {name: stored[name] for name in OWN} == OWN


def test_models_that_were_saved_without_a_grid_are_sampled_at_the_own_size():
    pipeline = mhla_hf.load_pipeline(base_pipeline_directory(), mhla={"blocks": [5, 4, 4], "grid": None})
    assert pipeline.transformer.mhla_config.grid is None
    batches = pipeline_batches(pipeline, samples=4, steps=2)["transformer"]
    assert {tuple(batch["hidden_states"].shape[2:]) for batch in batches} == {(5, 16, 16)}


def test_the_command_shows_blocks_and_tokens(tmp_path):
    def run(*options):
        result = run_command("convert", base_pipeline_directory(), tmp_path / "out", "--overwrite", *options)
        record = json.loads((tmp_path / "out/conversion.json").read_text())
        return result.stdout, record["components"]["transformer"]["warning"]

    output, warning = run()
    assert "1×4×4 on 5×8×8" in output
    assert not warning and "Warning" not in output
    output, warning = run("--grid", "21,60,104")
    assert "3×10×12 on 21×60×104" in output
    assert "all 5×8×8 tokens of a sample are in one block" in warning and f"Warning: {warning}" in output


@WAYS
def test_the_autoencoder_tells_the_grid_where_the_model_does_not(convert, tmp_path):
    """As Wan 2.2 TI2V-5B: sides 16 times smaller, so that 480 × 832 make 15 × 26 tokens."""
    pipeline = wan_pipeline()
    pipeline.vae.register_to_config(scale_factor_spatial=16)
    pipeline.save_pretrained(tmp_path / "softmax")
    pipeline = convert(tmp_path / "softmax", tmp_path, None)
    assert pipeline.transformer.mhla_config.grid == (21, 15, 26)
    expected = {"height": 480, "width": 832, "num_frames": 81}
    assert sample_size(pipeline, mhla_components(pipeline)) == expected


@pytest.mark.parametrize(
    ("config", "compression", "grid"),
    [
        ({}, None, (21, 30, 52)),
        ({"sample_size": 30, "patch_size": [1, 2, 2]}, (4, 8), (21, 30, 52)),
        ({"sample_size": 22, "patch_size": [1, 1, 1]}, (8, 32), (11, 22, 38)),
        ({"sample_size": 30, "sample_frames": 3, "sample_height": 8, "sample_width": 12}, (4, 8), (3, 4, 6)),
    ],
)
def test_sana_video(config, compression, grid):
    assert MHLASanaVideoTransformer3DModel.reference_grid(config, compression) == grid
