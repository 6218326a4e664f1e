# SPDX-License-Identifier: Apache-2.0
"""`mhla-hf convert`, `import-official` and `models`."""

import json

import pytest
from typer.testing import CliRunner

import mhla_hf
from mhla_hf import MHLAWanTransformer3DModel
from mhla_hf.cli.main import app
from mhla_hf.models.registry import TransformersFamily
from mhla_hf.presets import PRESETS
from tests import GOLDEN, tiny


@pytest.fixture(scope="module")
def pipeline_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("softmax") / "pipeline"
    tiny.wan_pipeline(num_layers=3).save_pretrained(folder)
    return folder


def run(*arguments, code=0, columns=200):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": str(columns)})
    assert result.exit_code == code, result.output
    return result


def mhla_of(folder):
    return json.loads((folder / "config.json").read_text())["mhla"]


def test_every_option(pipeline_dir, tmp_path):
    output = run(
        "convert", pipeline_dir, tmp_path / "mhla", "--blocks", "1,2,2", "--layers", "2/3", "--grid", "3x2x4",
        "--feature-map", "hedgehog", "--normalizer", "none", "--rope", "before_feature_map", "--output-norm",
        "--output-gate", "--lepe-kernel", "3", "--mixing-init", "gaussian", "--mixing-heads", "per_head",
        "--mixing-constraint", "nonnegative", "--mixing-range", "2", "--window", "cross", "--window-size", "1,2,2",
        "--dtype", "bf16", "--max-shard-size", "1MB",
    ).output  # fmt: skip
    assert "2 of 3" in output and "1×2×2" in output and "mhla-hf recover" in output
    mhla = mhla_of(tmp_path / "mhla/transformer")
    expected = {
        "blocks": [1, 2, 2],
        "layers": [1, 2],
        "grid": [3, 2, 4],
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
    assert {name: mhla[name] for name in expected} == expected
    MHLAWanTransformer3DModel.from_pretrained(tmp_path / "mhla", subfolder="transformer")


def test_block_size_and_json(pipeline_dir, tmp_path):
    figures = tmp_path / "figures.json"
    options = ("--block-size", "7,6,13", "--json", figures)
    result = run("convert", pipeline_dir / "transformer", tmp_path / "mhla", *options)
    assert json.loads(figures.read_text()) == json.loads((tmp_path / "mhla/conversion.json").read_text())
    assert "of 7×6×13 tokens" in result.stdout
    mhla = mhla_of(tmp_path / "mhla")
    assert mhla["block_size"] == [7, 6, 13] and mhla["grid"] == list(MHLAWanTransformer3DModel.default_grid)


def test_unconvert(pipeline_dir, tmp_path):
    run("convert", pipeline_dir / "transformer", tmp_path / "mhla", "--quiet")
    assert "without MHLA" in run("unconvert", tmp_path / "mhla", tmp_path / "softmax").output
    assert "mhla" not in json.loads((tmp_path / "softmax/config.json").read_text())


def test_import_official(tmp_path):
    checkpoint = GOLDEN / "wan_hybrid_gated/model.safetensors"
    output = run("import-official", checkpoint, tmp_path / "out").output
    assert "2 of 3" in output and "calibrate" not in output and mhla_of(tmp_path / "out")["normalizer"] == "none"
    options = ("--overwrite", "-q", "--normalizer", "query", "--blocks", "5,5,6")
    run("import-official", checkpoint, tmp_path / "out", *options)
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
    result = CliRunner().invoke(app, ["convert", str(pipeline_dir), str(tmp_path / "mhla"), *arguments])
    assert result.exit_code in (1, 2) and result.stdout == ""
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1 and message in result.stderr
    assert not (tmp_path / "mhla").exists()


def test_models():
    output = run("models", columns=80).output
    assert max(map(len, output.splitlines())) <= 80
    for name, family in mhla_hf.supported_models().items():
        words = [name] if isinstance(family, TransformersFamily) else [name, family.mhla_class, *family.pipelines]
        assert not [word for word in words if word not in output]
    listed = json.loads(run("models", "--json").output)
    assert listed[0]["upstream"] == "WanTransformer3DModel"


def test_presets():
    listed = json.loads(run("models", "--presets", "--json").output)
    assert [entry["name"] for entry in listed] == list(PRESETS) and listed[0]["mhla"]["blocks"] == [4, 4]
    output = run("models", "--presets").output
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
    result = CliRunner().invoke(app, ["convert", str(tmp_path / "model"), str(tmp_path / "out"), "--calibrate"])
    assert result.exit_code == 2 and "error: --data must be given for --calibrate" in result.stderr
    assert not (tmp_path / "out").exists()


def test_it_names_the_options_that_recover_better(pipeline_dir, tmp_path):
    better = '--mhla \'{"feature_map": "hedgehog", "rope": "before_feature_map", "mixing_heads": "per_head"'
    first = CliRunner().invoke(app, ["convert", str(pipeline_dir), str(tmp_path / "first"), "--blocks", "1,2,2"])
    assert first.exit_code == 0 and better in first.stdout
    chosen = [str(pipeline_dir), str(tmp_path / "second"), "--blocks", "1,2,2", "--feature-map", "hedgehog"]
    second = CliRunner().invoke(app, ["convert", *chosen, "--rope", "before_feature_map"])
    assert second.exit_code == 0 and "recover better" not in second.stdout
