# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.kernels`, with interpreted kernels at small sizes where there is no GPU."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from benchmarks.kernels import host
from benchmarks.kernels.sweep import sweep_cases
from benchmarks.kernels.timing import time_cases
from mhla_hf.gpu.cases import CASES, kernel_cases
from mhla_hf.gpu.examination import Report, run_checks
from mhla_hf.ops.backends import TRITON_INSTALLED
from tests import ROOT


pytestmark = [pytest.mark.slow, pytest.mark.skipif(not TRITON_INSTALLED, reason="needs triton")]


@pytest.fixture
def report(tmp_path):
    return Report("test", tmp_path / "report.json", seconds=600)


def stored(report: Report) -> dict:
    return json.loads(report.path.read_text(encoding="utf-8"))


def test_cases_are_chosen_by_their_beginning():
    assert [case.name for case in kernel_cases(quick=True)] == list(CASES)
    assert [case.name for case in kernel_cases(["wan fused"], quick=True)] == ["wan fused", "wan fused train"]
    with pytest.raises(ValueError, match="cases='won' is not one of 'wan none', 'wan query'"):
        list(kernel_cases(["won"]))
    for case in kernel_cases(quick=True):
        assert case.shape.causal == CASES[case.name].shape.causal and case.shape.tokens <= 60


@pytest.mark.parametrize("name", ["wan fused", "wan hedgehog train", "dit-512 query train", "causal-2k query"])
def test_cases_compute_what_torch_computes(name):
    case = next(kernel_cases([name], quick=True))
    for got, expected in zip(case.run(), case.run(backend="torch"), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_times(report):
    time_cases(kernel_cases(["wan query"], quick=True), report)
    rows = {row["case"]: row for row in stored(report)["results"]}
    assert list(rows) == ["wan query", "wan query train"]
    assert rows["wan query"]["target_milliseconds"] == 0.20
    assert all(row["milliseconds"] > 0 and row["host_milliseconds"] > 0 for row in rows.values())


def test_checks_pass(report):
    assert run_checks(["offsets", "streams", "scale", "graphs", "compiled"], report)
    assert {row["check"] for row in stored(report)["results"]} >= {"offsets"}


def test_sweeps_measure_each_kernel_by_itself(report):
    sweep_cases([next(kernel_cases(["wan none"], quick=True))], report)
    rows = stored(report)["results"]
    assert rows[0]["overrides"] == {} and rows[0]["error"] == 0
    tried = [name for row in rows for name in row["overrides"] if len(row["overrides"]) == 1]
    assert {"outer_kernel", "attend_kernel"} <= set(tried)
    assert all(row["milliseconds"] > 0 for row in rows)


def test_the_program(tmp_path):
    path = tmp_path / "time.json"
    command = [sys.executable, "-m", "benchmarks.kernels", "time", "--quick", "--cases"]
    done = subprocess.run([*command, "causal-2k", "--json", path], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [row["case"] for row in json.loads(path.read_text(encoding="utf-8"))["results"]] == ["causal-2k query"]
    done = subprocess.run([*command, "won"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("error: cases='won' is not one of")


def test_host_times_without_a_gpu(tmp_path):
    """Triton's own launcher on a stub: every case launches, and calls without gradients do not record any."""
    path = tmp_path / "host.json"
    assert host.run_on_stub(str(path)) == 0
    rows = {row["case"]: row for row in json.loads(path.read_text(encoding="utf-8"))["results"]}
    assert len(rows) == 12 and all(row["launches"] >= 2 and row["microseconds"] > 0 for row in rows.values())
    assert sum(rows["layer, causal, forward"]["shares"].values()) == pytest.approx(1, abs=0.01)


def test_host_needs_a_compiler(monkeypatch):
    monkeypatch.setattr(host.shutil, "which", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(ValueError, match="C compiler"):
        host.run_on_stub()
    monkeypatch.setenv("CC", "false")
    with pytest.raises(ValueError, match="false does not compile cuda_stub.c"):
        host.run_on_stub()
