# SPDX-License-Identifier: Apache-2.0
"""`mhla-hf doctor`: what it says about the installation, its tables of kernels, and its exit code."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from mhla_hf.benchmarks import diagnosis
from mhla_hf.cli.main import app
from mhla_hf.ops.kernel_cases import FAMILIES
from mhla_hf.ops.kernel_check import VerdictFile


pytest.importorskip("triton")
RUNS = sum(1 + case.has_gradients for case in FAMILIES.values())
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles its kernels here")


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("MHLA_HF_HOME", str(tmp_path))
    monkeypatch.delenv("MHLA_HF_BACKEND", raising=False)
    monkeypatch.setattr(diagnosis, "INTERPRETED_DTYPES", (torch.float32,))


@pytest.fixture
def errors(monkeypatch):
    """Sets the relative error of the outputs of each family, or what it raises."""
    outcomes: dict[str, float | Exception] = {}

    def kernel_errors(family, device, dtype, width, *, backward):
        outcome = outcomes.get(family, 1e-6)
        if isinstance(outcome, Exception):
            raise outcome
        return {"output": outcome, **({"gradient of key": 2e-6} if backward else {})}

    monkeypatch.setattr(diagnosis, "kernel_errors", kernel_errors)
    return outcomes


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["doctor", *arguments], env={"COLUMNS": "160"})
    assert result.exit_code == code, result.output
    return result.output


def test_it_says_why_the_kernels_do_not_run(monkeypatch):
    output = run()
    assert torch.__version__ in output and "triton" in output
    assert "float32        plain torch: Triton interprets its kernels on a CPU" in output
    monkeypatch.setattr(diagnosis, "INTERPRETED", False)
    assert "plain torch: they run on GPUs, and there is none here" in run()
    monkeypatch.setenv("MHLA_HF_BACKEND", "torch")
    output = run()
    assert "MHLA_HF_BACKEND = torch" in output and "plain torch: MHLA_HF_BACKEND=torch" in output


def test_kernels_need_a_gpu_or_the_interpreter(monkeypatch):
    monkeypatch.setattr(diagnosis, "INTERPRETED", False)
    output = run("--kernels", code=1)
    assert "cannot be checked here: they run on GPUs, and there is none here. With TRITON_INTERPRET=1" in output


def test_all_kernels_pass(tmp_path):
    output = run("--kernels", "--json", str(tmp_path / "report.json"))
    assert f"{RUNS} of {RUNS} runs passed." in output
    report = json.loads((tmp_path / "report.json").read_text())
    rows = report["results"]
    assert {row["family"] for row in rows} == set(FAMILIES)
    assert {row["status"] for row in rows} == {"passed"} and all(row["errors"] for row in rows)
    assert report["machine"]["torch"] == torch.__version__ and report["kernels"]["float32"]
    lines = [line for line in output.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(rows)
    assert lines[2].startswith("| block | forward | float32 | 8 | passed | output ")
    assert lines[3].count(",") == 6  # the output and the gradients of five tensors of tokens and of the weights


def test_a_failure_exits_with_one(errors):
    errors.update(block=0.5, causal=RuntimeError("out of resource | shared\nmemory"))
    output = run("--kernels", code=1)
    assert f"{RUNS - 4} of {RUNS} runs passed." in output
    assert "| block | backward | float32 | 8 | failed | output is off by 0.5 of its size, more than 0.005; " in output
    assert "| causal | forward | float32 | 8 | failed | RuntimeError: out of resource / shared |" in output


def test_failures_that_were_found_before_are_shown_and_forgotten_once_all_pass(errors):
    verdicts = VerdictFile(torch.device("cpu"))
    verdicts.add("block forward torch.float32 8 8", "wrong")
    errors["block"] = 0.5
    assert "failed block forward torch.float32 8 8: wrong" in run("--kernels", code=1)
    assert verdicts.read()
    del errors["block"]
    run("--kernels")
    assert not verdicts.read()


def test_the_setting_of_tf32_is_put_back():
    with pytest.raises(KeyError), diagnosis._tf32(True):
        raise KeyError
    assert torch.get_float32_matmul_precision() == "highest"
