# SPDX-License-Identifier: Apache-2.0
"""`mhla-hf convert`, `import-official` and `models`."""

import json

import pytest

import mhla_hf
from mhla_hf import MHLAWanTransformer3DModel
from mhla_hf.models.registry import TransformersFamily
from mhla_hf.presets import PRESETS
from tests import GOLDEN, tiny
from tests.command_line import run_command


@pytest.fixture(scope="module")
def pipeline_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("softmax") / "pipeline"
    tiny.wan_pipeline(num_layers=3).save_pretrained(folder)
    return folder


def mhla_of(folder):
    return json.loads((folder / "config.json").read_text())["mhla"]


def test_every_option(pipeline_dir, tmp_path):
    expected = {
        "blocks": [1, 2, 2],
        "feature_map": "hedgehog",
        "normalizer": "none",
        "rope": "before_feature_map",
        "output_norm": True,
        "output_gate": True,
        "lepe_kernel": 3,
        "mixing_init": "gaussian",
        "mixing_heads": "per_head",
        "mixing_constraint": "nonnegative",
        "mixing_range": 2.0,
        "window": "cross",
        "window_size": [1, 2, 2],
    }
    words = ["--layers", "2/3", "--grid", "3x2x4", "--dtype", "bf16", "--max-shard-size", "1MB"]
    for name, value in expected.items():
        shown = ",".join(map(str, value)) if isinstance(value, list) else value
        words += [f"--{name.replace('_', '-')}"] if value is True else [f"--{name.replace('_', '-')}", shown]
    output = run_command("convert", pipeline_dir, tmp_path / "mhla", *words).output
    assert "2 of 3" in output and "1×2×2" in output and "mhla-hf recover" in output
    mhla = mhla_of(tmp_path / "mhla/transformer")
    expected |= {"layers": [1, 2], "grid": [3, 2, 4]}
    assert {name: mhla[name] for name in expected} == expected
    MHLAWanTransformer3DModel.from_pretrained(tmp_path / "mhla", subfolder="transformer")


def test_block_size_and_json(pipeline_dir, tmp_path):
    figures = tmp_path / "figures.json"
    options = ("--block-size", "7,6,13", "--json", figures)
    result = run_command("convert", pipeline_dir / "transformer", tmp_path / "mhla", *options)
    assert json.loads(figures.read_text()) == json.loads((tmp_path / "mhla/conversion.json").read_text())
    assert "of 7×6×13 tokens" in result.stdout
    mhla = mhla_of(tmp_path / "mhla")
    assert mhla["block_size"] == [7, 6, 13] and mhla["grid"] == list(MHLAWanTransformer3DModel.default_grid)


def test_unconvert(pipeline_dir, tmp_path):
    run_command("convert", pipeline_dir / "transformer", tmp_path / "mhla", "--quiet")
    assert "without MHLA" in run_command("unconvert", tmp_path / "mhla", tmp_path / "softmax").output
    assert "mhla" not in json.loads((tmp_path / "softmax/config.json").read_text())


def test_import_official(tmp_path):
    checkpoint = GOLDEN / "wan_hybrid_gated/model.safetensors"
    output = run_command("import-official", checkpoint, tmp_path / "out").output
    assert "2 of 3" in output and "calibrate" not in output and mhla_of(tmp_path / "out")["normalizer"] == "none"
    options = ("--overwrite", "-q", "--normalizer", "query", "--blocks", "5,5,6")
    run_command("import-official", checkpoint, tmp_path / "out", *options)
    mhla = mhla_of(tmp_path / "out")
    assert mhla["normalizer"] == "query" and mhla["blocks"] == [5, 5, 6]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--blocks", "1,2,2", "--block-size", "1,1,1"], "blocks or block_size, not both"),
        (["--layers", "0,3"], "--layers names 3, but the model has layers 0 to 2"),
        (["--mhla", '{"lepe": 3}'], "lepe"),
    ],
)
def test_mistakes_are_one_line(arguments, message, pipeline_dir, tmp_path):
    result = run_command("convert", pipeline_dir, tmp_path / "mhla", *arguments, code=None)
    assert result.exit_code in (1, 2) and result.stdout == ""
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1 and message in result.stderr
    assert not (tmp_path / "mhla").exists()


def test_models():
    output = run_command("models", columns=80).output
    assert max(map(len, output.splitlines())) <= 80
    for name, family in mhla_hf.supported_models().items():
        words = [name] if isinstance(family, TransformersFamily) else [name, family.mhla_class, *family.pipelines]
        assert not [word for word in words if word not in output]
    listed = json.loads(run_command("models", "--json").output)
    assert listed[0]["upstream"] == "WanTransformer3DModel"


def test_presets():
    listed = json.loads(run_command("models", "--presets", "--json").output)
    assert [entry["name"] for entry in listed] == list(PRESETS) and listed[0]["mhla"]["blocks"] == [4, 4]
    output = run_command("models", "--presets").output
    assert all(name in output for name in PRESETS)


def test_supported_models_print_as_a_list():
    models = mhla_hf.supported_models()
    lines = str(models).splitlines()
    assert repr(models) == str(models) and len(lines) == len(models)
    assert ["modernbert", "encoder", "sliding-window layers stay softmax"] in [
        line.split(maxsplit=2) for line in lines
    ]


def test_data_for_calibration_are_asked_for_before_anything_is_written(tmp_path):
    tiny.wan_transformer(num_layers=2).save_pretrained(tmp_path / "model")
    result = run_command("convert", tmp_path / "model", tmp_path / "out", "--calibrate", code=2)
    assert "error: --data must be given for --calibrate" in result.stderr
    assert not (tmp_path / "out").exists()


def test_it_names_the_options_that_recover_better(pipeline_dir, tmp_path):
    better = '--mhla \'{"feature_map": "hedgehog", "rope": "before_feature_map", "mixing_heads": "per_head"'
    first = run_command("convert", pipeline_dir, tmp_path / "first", "--blocks", "1,2,2")
    assert better in first.stdout
    chosen = "--blocks", "1,2,2", "--feature-map", "hedgehog", "--rope", "before_feature_map"
    assert "recover better" not in run_command("convert", pipeline_dir, tmp_path / "second", *chosen).stdout
