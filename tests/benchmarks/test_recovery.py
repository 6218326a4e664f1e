# SPDX-License-Identifier: Apache-2.0
"""How `benchmarks/recovery.py` resumes."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from benchmarks import recovery


pytestmark = pytest.mark.slow


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs MHLA on the demo's Wan with two seeds, and returns the cases that were measured."""
    measured: list[str] = []

    def pretend(command, **options):
        measured.append(command[command.index("--case") + 1])
        figures = {
            "converted": {"above_softmax_percent": 200.0},
            "match": {"above_softmax_percent": 10.0 + len(measured)},
        }
        result = {"figures": figures, "seconds": {"match": {"cpu_seconds": 1.0}}, "recipe": {}}
        return SimpleNamespace(stdout=f"RESULT {json.dumps(result)}\n", stderr="")

    monkeypatch.setattr(recovery.subprocess, "run", pretend)

    def run(*options: str) -> list[str]:
        measured.clear()
        arguments = ["--models", "digits", "--variants", "mhla", "--seeds", "2", *options]
        monkeypatch.setattr("sys.argv", ["recovery.py", "--json", str(tmp_path / "recovery.json"), *arguments])
        recovery.main()
        return list(measured)

    return run


def test_results_are_kept_and_measured_again_for_a_new_work_directory(run, tmp_path):
    cases = ["digits/mhla/0", "digits/mhla/1"]
    assert run() == cases
    assert run() == []
    stored = json.loads((tmp_path / "recovery.json").read_text())
    stored["results"]["digits/relu/0"] = stored["results"]["digits/mhla/0"]
    (tmp_path / "recovery.json").write_text(json.dumps(stored))
    work = tmp_path / "work"
    assert run("--work", str(work)) == cases
    (work / "digits-mhla-0.json").unlink()
    assert run("--work", str(work)) == cases[:1]
    results = json.loads((tmp_path / "recovery.json").read_text())["results"]
    assert set(results) == {*cases, "digits/relu/0"}
    assert (tmp_path / "recovery.png").is_file()
