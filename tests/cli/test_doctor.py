# SPDX-License-Identifier: Apache-2.0
"""`mhla-hf doctor` and `mhla-hf env`: what they say of models and of the installation, and their exit codes."""

from __future__ import annotations

import json
import platform
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mhla_hf.conversion import convert_pretrained
from mhla_hf.ops import backends, diagnosis
from mhla_hf.ops.kernel_cases import FAMILIES
from tests import tiny
from tests.command_line import run_command


pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles its kernels here")


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    monkeypatch.delenv("MHLA_HF_BACKEND", raising=False)


def run(*arguments: str, code: int = 0) -> str:
    return run_command("doctor", *arguments, code=code, columns=160).stdout


def test_it_says_why_the_kernels_do_not_run(monkeypatch):
    output = run()
    assert torch.__version__ in output and "triton" in output
    assert "Triton interprets its kernels on a CPU" in output
    monkeypatch.setattr(backends, "interprets_kernels", lambda: False)
    assert "the kernels run on GPUs, and the tensors are on cpu" in run()
    monkeypatch.setenv("MHLA_HF_BACKEND", "torch")
    output = run()
    assert "- MHLA_HF_BACKEND: torch" in output and ": MHLA_HF_BACKEND=torch" in output


@pytest.mark.parametrize("everything", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_kernels_are_examined(everything, tmp_path, monkeypatch):
    """The small form, with interpreted kernels: what is printed, the file, and the exit code."""
    from mhla_hf.gpu import examination

    checks, kinds = ("values", "strides", "repeats", "offsets"), FAMILIES
    if not everything:
        checks, kinds = ("offsets",), {name: FAMILIES[name] for name in ("hedgehog", "decode")}
        monkeypatch.setattr(examination, "CHECKS", {name: examination.CHECKS[name] for name in checks})
        monkeypatch.setattr(diagnosis, "FAMILIES", kinds)
    output = run("--gpu", "--json", str(tmp_path / "report.json"), code=3)
    report = json.loads((tmp_path / "report.json").read_text())
    rows = report["results"]
    assert f"{len(rows)} of {len(rows)} checks passed." in output
    # Nobody takes this for a GPU that is fine.
    note = "No GPU was found, and nothing ran on one: kernels were interpreted on the CPU, and nothing was timed."
    assert output.splitlines()[0] == output.splitlines()[-1] == report["note"] == note
    assert report["options"]["interpreted"] is True and not any("microseconds" in row for row in rows)
    assert {row["status"] for row in rows} == {"passed"} and all(row["detail"] or row["name"] for row in rows)
    assert {row["check"] for row in rows} == {"small inputs", *checks}
    families = {row["name"].split(",")[0] for row in rows if row["check"] == "small inputs"}
    assert families == set(kinds)
    assert report["machine"]["torch"] == torch.__version__ and report["environment"]["kernels"]["float32"]
    lines = [line for line in output.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(rows) and {line.count("|") for line in lines} == {10}
    first = "block" if everything else "hedgehog"
    assert lines[2].startswith(f"| small inputs | {first}, forward, float32, heads of 8 × 1, query | passed | ")


@pytest.mark.slow
def test_wrong_kernels_are_found(tmp_path, monkeypatch):
    from mhla_hf.gpu import examination
    from mhla_hf.ops.triton import block

    right = block.triton_block_mhla_attention
    monkeypatch.setattr(block, "triton_block_mhla_attention", lambda *args, **options: 1.1 * right(*args, **options))
    monkeypatch.setattr(examination, "CHECKS", {})
    monkeypatch.setattr(diagnosis, "FAMILIES", {"block": FAMILIES["block"]})
    output = run("--gpu", code=1)
    assert "output is off by 0.1 of its size" in output and "0 of 2 checks passed." in output
    monkeypatch.setenv("MHLA_HF_BACKEND", "torch")
    assert "MHLA_HF_BACKEND is set" in run_command("doctor", "--gpu", code=1).output


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    folder = tmp_path_factory.mktemp("doctor")
    tiny.wan_pipeline(num_layers=2).save_pretrained(folder / "softmax")
    options = {"blocks": (1, 2, 2), "layers": [1], "grid": (1, 4, 4)}
    convert_pretrained(folder / "softmax", folder / "pipeline", options, progress=False)
    return folder / "pipeline"


class TestModel:
    def test_a_good_one(self, pipeline, tmp_path):
        output = run(str(pipeline), "--json", str(tmp_path / "report.json"))
        assert output.startswith("WanPipeline") and output.rstrip().endswith("No problems.")
        lines = [line.split()[:2] for line in output.splitlines()]
        assert ["text_encoder", "UMT5EncoderModel"] in lines and ["vae", "AutoencoderKLWan"] in lines
        (transformer,) = (line for line in output.splitlines() if "MHLAWanTransformer3DModel" in line)
        assert "1 of 2" in transformer
        report = json.loads((tmp_path / "report.json").read_text())
        assert report["problems"] == [] and report["errors"] == report["warnings"] == 0
        part = next(part for part in report["models"] if part["name"] == "transformer")
        assert part["mhla_layers"] == 1 and part["num_layers"] == 2 and part["options"]["blocks"] == [1, 2, 2]
        weights = load_file(pipeline / "transformer/diffusion_pytorch_model.safetensors").values()
        assert part["parameters"] == sum(tensor.numel() for tensor in weights)
        assert part["nbytes"] == sum(tensor.nbytes for tensor in weights)
        assert part["dtypes"] == {"float32": len(weights)}

    def test_a_bad_one(self, pipeline, tmp_path):
        folder = Path(shutil.copytree(pipeline, tmp_path / "copy"))
        (folder / "scheduler/scheduler_config.json").unlink()
        torch.save({}, folder / "optimizer.pt")
        path = folder / "vae/diffusion_pytorch_model.safetensors"
        tensors = load_file(path)
        tensors["quant_conv.bias"][0] = torch.nan
        save_file(tensors, path)
        output = run(str(folder), "--json", str(tmp_path / "report.json"), code=1)
        *_, scheduler, values, pickles, last = output.splitlines()
        assert scheduler.startswith("error model_index.json: names the component scheduler, whose folder is missing")
        weights = "vae/diffusion_pytorch_model.safetensors"
        assert values.startswith(
            f"error {weights}: has NaN or infinite values: quant_conv.bias (1 NaN, 0 infinite of 32 values); "
        )
        assert pickles.startswith("warning .: has pickles (optimizer.pt)") and last == "2 errors and 1 warning."
        report = json.loads((tmp_path / "report.json").read_text())
        assert report["errors"] == 2 and report["warnings"] == 1
        assert [problem["file"] for problem in report["problems"]] == ["model_index.json", weights, "."]
        assert "1 error and 1 warning." in run(str(folder), "--no-values", code=1)

    def test_failure_signatures_are_warnings(self, pipeline, tmp_path):
        folder = Path(shutil.copytree(pipeline, tmp_path / "copy"))
        path = folder / "transformer/diffusion_pytorch_model.safetensors"
        tensors = load_file(path)
        tensors["blocks.1.attn1.mhla.mixing"].fill_(0.25)
        save_file(tensors, path, metadata={"format": "pt"})
        output = run(str(folder), "--json", str(tmp_path / "report.json"))
        warning, last = output.splitlines()[-2:]
        assert warning.startswith(
            "warning transformer: blocks.1.attn1: uniform-mixing: its mixing weights differ from equal ones by 0.00%, "
        )
        assert last == "1 warning."
        report = json.loads((tmp_path / "report.json").read_text())
        assert report["errors"] == 0 and report["warnings"] == 1
        (signature,) = report["failure_signatures"]
        assert (signature["name"], signature["layer"], signature["figure"]) == ("uniform-mixing", "blocks.1.attn1", 0)


class TestEnvironment:
    def test_it_is_markdown_to_paste(self, monkeypatch, tmp_path):
        monkeypatch.setenv("MHLA_HF_DEBUG", "0")
        result = run_command("env", "--json", tmp_path / "report.json")
        lines = result.output.splitlines()
        assert all(line.lstrip().startswith("- ") for line in lines)
        assert f"    - torch: {torch.__version__}" in lines and "    - MHLA_HF_DEBUG: 0" in lines
        report = json.loads((tmp_path / "report.json").read_text())
        assert {"peft", "gradio"} < set(report["packages"]) and report["platform"] == platform.platform()
        assert report["machine"]["torch"] == torch.__version__ and report["kernels"]["float32"]
