# SPDX-License-Identifier: Apache-2.0
"""`mhla-hf bench model` and `bench train`: their rows, files and images, and the models that they make."""

from __future__ import annotations

import json
from dataclasses import replace

import diffusers
import pytest
import torch
from typer.testing import CliRunner

from mhla_hf.benchmarks.model_cases import MODEL_CASES, ModelCase
from mhla_hf.benchmarks.models import VARIANTS, ModelOptions, measure_models
from mhla_hf.benchmarks.plots import plot_report
from mhla_hf.benchmarks.shapes import choose_cases
from mhla_hf.cli.main import app


CPU = torch.device("cpu")
WAN = replace(MODEL_CASES["wan-small"], latents=(16, 2, 8, 8), tokens=32, mhla={"blocks": (1, 2, 2)})
DIT = replace(
    MODEL_CASES["dit-512-small"],
    sizes={**MODEL_CASES["dit-512-small"].sizes, "sample_size": 8},
    latents=(4, 8, 8),
    tokens=16,
)
SANA = replace(
    MODEL_CASES["sana-1024-small"],
    sizes={**MODEL_CASES["sana-1024-small"].sizes, "sample_size": 8},
    latents=(32, 8, 8),
    tokens=64,
)
FAST = {"device": "cpu", "seconds": 0.01, "quick": True}


@pytest.mark.parametrize("case", [WAN, DIT, SANA], ids=lambda case: case.name)
@pytest.mark.parametrize("step", ["forward", "train"])
def test_rows(case: ModelCase, step: str):
    report = measure_models(ModelOptions(**FAST, step=step, optimizer=True), cases=[case])
    rows = {row["contestant"]: row for row in report["results"]}
    assert list(rows) == list(VARIANTS)
    assert rows["ordinary"]["attention"] == case.attention and rows["mhla-torch"]["attention"] == "mhla"
    assert "run on GPUs" in rows["mhla-triton"]["reason"]
    for name in ("ordinary", "mhla-torch"):
        row = rows[name]
        assert row["reason"] is None, row["reason"]
        assert row["milliseconds_20"] <= row["milliseconds"] <= row["milliseconds_80"]
        assert row["peak_memory_bytes"] > 0 and row["runs"] >= 2
        ratio = rows["ordinary"]["milliseconds"] / row["milliseconds"]
        assert row["speedup_over_ordinary"] == pytest.approx(ratio)
    blocks = case.sizes["num_layers"]
    assert rows["mhla-torch"]["parameters"] > rows["ordinary"]["parameters"] + blocks
    json.dumps(report)


class TooLarge(ModelCase):
    """Has inputs that no device has room for."""

    def inputs(self, dtype, device, seed):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 TiB.")


def test_a_model_too_large_for_the_device_does_not_cost_the_others():
    too_large = TooLarge(**{**vars(SANA), "name": "too-large"})
    options = ModelOptions(**FAST, contestants=("ordinary", "mhla-torch"))
    rows = measure_models(options, cases=[too_large, SANA])["results"]
    assert {row["reason"] for row in rows[:2]} == {"OutOfMemoryError: CUDA out of memory"}
    assert [row["reason"] for row in rows[2:]] == [None, None]


def test_half_precision_keeps_what_the_class_keeps():
    report = measure_models(ModelOptions(**FAST, dtype="bfloat16", contestants=("mhla-torch",)), cases=[WAN])
    (row,) = report["results"]
    assert row["reason"] is None, row["reason"]
    assert row["speedup_over_ordinary"] is None


def test_blocks_are_compiled_on_demand():
    options = ModelOptions(**FAST, contestants=("ordinary", "mhla-torch"), compile_backend="aot_eager")
    report = measure_models(options, cases=[DIT])
    assert all(row["reason"] is None for row in report["results"])
    assert report["options"]["compile_backend"] == "aot_eager"


def test_models_that_fail_are_rows():
    broken = replace(DIT, name="broken", classes=None)
    wrong = replace(DIT, name="wrong", sizes={**DIT.sizes, "norm_type": "layer"})
    report = measure_models(ModelOptions(**FAST, contestants=("ordinary",)), cases=[broken, wrong, DIT])
    first, second, third = report["results"]
    assert first["reason"] and second["reason"].startswith("NotImplementedError: ")
    assert third["reason"] is None


@pytest.mark.parametrize("name", MODEL_CASES)
def test_token_counts_and_classes(name):
    case = MODEL_CASES[name]
    patch = {"WanTransformer3DModel": 4, "DiTTransformer2DModel": 4, "SanaTransformer2DModel": 1}[case.model_class]
    channels, *grid = case.latents
    assert case.tokens * patch == torch.Size(grid).numel()
    assert hasattr(diffusers, case.model_class)
    tiny = replace(case, batch=1, latents=(channels, *(2 for _ in grid)))
    inputs = tiny.inputs(torch.float32, CPU, seed=0)
    assert set(inputs) >= {"hidden_states", "timestep"}
    assert ("class_labels" in inputs) == (case.classes is not None)


def test_devices_have_models_of_their_own():
    small = {case.name for case in choose_cases("models", MODEL_CASES, None, CPU, quick=False)}
    large = {case.name for case in choose_cases("models", MODEL_CASES, None, torch.device("cuda"), quick=False)}
    assert small | large == set(MODEL_CASES) and not small & large
    quick = choose_cases("models", MODEL_CASES, None, CPU, quick=True)
    assert 0 < len(quick) <= len(small) and all(case.quick for case in quick)


def test_plots(tmp_path):
    report = measure_models(ModelOptions(**FAST, step="train", checkpointing=False), cases=[DIT, SANA])
    plot_report(report, tmp_path / "train.png")
    assert (tmp_path / "train.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("command", ["model", "train"])
def test_command(command, tmp_path):
    file, image = tmp_path / "report.json", tmp_path / "report.png"
    arguments = ["bench", command, "--models", "sana-1024-small", "--quick", "--seconds", "0.01", "--device", "cpu"]
    result = CliRunner().invoke(app, [*arguments, "--json", str(file), "--plot", str(image), "--quiet"])
    assert result.exit_code == 0, result.output
    report = json.loads(file.read_text())
    assert report["benchmark"] == command
    assert "ordinary (linear)" in result.stdout and "mhla-torch" in result.stdout
    assert "not measured: mhla-triton: " in result.stdout
    assert image.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "flux"], "models='flux' must be one of wan, "),
        (["--contestants", "softmax"], "contestants='softmax' must be one of ordinary, mhla-torch, mhla-triton"),
        (["--dtype", "int8"], "dtype='int8' must be one of"),
        (["--plot", "."], "plot='.' is a directory"),
    ],
)
def test_mistakes_are_one_line(arguments, message):
    result = CliRunner().invoke(app, ["bench", "train", *arguments])
    assert result.exit_code == 1
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_unknown_step():
    with pytest.raises(ValueError, match="step='sample' must be one of forward, train"):
        ModelOptions(step="sample")
