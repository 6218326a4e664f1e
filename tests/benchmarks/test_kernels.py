# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.kernels`, with interpreted kernels at small sizes where there is no GPU."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from benchmarks.kernels.cases import CASES, kernel_cases
from benchmarks.kernels.checks import CHECKS, Outcome, relative_error, run_checks
from benchmarks.kernels.report import Report
from benchmarks.kernels.sweep import _measured, overridden_launches, sweep_cases
from benchmarks.kernels.timing import time_cases
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
    assert {"groups", "outer_kernel", "attend_kernel"} <= set(tried)
    assert all(row["milliseconds"] > 0 for row in rows)


def test_a_candidate_that_changes_results_is_none(report, capsys):
    case = next(kernel_cases(["wan none"], quick=True))
    (expected,) = case.run()
    with overridden_launches() as overrides:
        assert _measured(case, (expected + 1,), overrides, {}, report) == float("inf")
        choice = {"attend_kernel": {"BLOCK_TOKENS": 24}}
        assert _measured(case, (expected,), overrides, choice, report) == float("inf")
    assert "WRONG" in capsys.readouterr().out and report.results[1]["reason"]
    # Launches are as they were.
    torch.testing.assert_close(case.run()[0], expected, rtol=0, atol=0)


def test_what_is_wrong_fails(report, monkeypatch, capsys):
    def fail():
        yield Outcome("first", True)
        raise RuntimeError("an illegal memory access. Compile with")

    monkeypatch.setitem(CHECKS, "wrong", lambda: iter([Outcome("bits", False, "0.5")]))
    monkeypatch.setitem(CHECKS, "broken", fail)
    assert not run_checks(["wrong", "broken"], report)
    assert [(row["name"], row["passed"]) for row in report.results] == [
        ("bits", False), ("first", True), ("broken", False)
    ]  # fmt: skip
    assert capsys.readouterr().out.endswith("failed:\nwrong: bits\nbroken: broken\n")
    assert relative_error(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 3.0])) == pytest.approx(1 / 18**0.5)


def test_the_program(tmp_path):
    path = tmp_path / "time.json"
    command = [sys.executable, "-m", "benchmarks.kernels", "time", "--quick", "--cases"]
    done = subprocess.run([*command, "causal-2k", "--json", path], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [row["case"] for row in json.loads(path.read_text(encoding="utf-8"))["results"]] == ["causal-2k query"]
    done = subprocess.run([*command, "won"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("error: cases='won' is not one of")
