# SPDX-License-Identifier: Apache-2.0
"""The experiments: every one runs at its smallest size, and the documentation shows what the reports say."""

from __future__ import annotations

import json
import math

import pytest

from benchmarks.experiments import runner
from benchmarks.experiments.documentation import PAGES, tables, with_tables
from benchmarks.experiments.experiment import SETTINGS, Case
from benchmarks.experiments.registry import experiment_names, find_experiment


pytestmark = pytest.mark.slow


def double(number, device):
    return {"doubled": 2 * number, "device": str(device)}


@pytest.mark.parametrize("name", experiment_names())
def test_experiment_runs(name, tmp_path):
    report = runner.run_experiment(name, "smoke", tmp_path / "work", jobs=2, device="cpu", show_progress=False)
    written = runner.write_report(report, tmp_path)
    assert [path.name for path in written] == [f"{name}_smoke.json", f"{name}_smoke.png"]
    assert json.loads(written[0].read_text()) == json.loads(json.dumps(report))
    assert written[1].read_bytes().startswith(b"\x89PNG")
    for text in find_experiment(name).tables(report).values():
        assert text.startswith("| ")
        assert "nan" not in text.lower().split()


@pytest.mark.parametrize("name", experiment_names())
@pytest.mark.parametrize("setting", SETTINGS)
def test_cases_are_json_and_different(name, setting):
    cases = find_experiment(name).cases(setting)
    assert cases and len({case.key for case in cases.values()}) == len(cases)
    for case in cases.values():
        json.dumps(dict(case.options), allow_nan=False)


def test_finished_cases_are_kept(tmp_path):
    case = Case(f"{__name__}:double", {"number": 4})
    text = json.dumps([case.function, dict(case.options)])
    runner.run_case(text, tmp_path / f"{case.key}.json", "cpu", 1)
    stored = json.loads((tmp_path / f"{case.key}.json").read_text())
    assert stored["figures"] == {"doubled": 8, "device": "cpu"} and stored["options"] == {"number": 4}
    assert stored["seconds"] >= 0 and math.isfinite(stored["seconds"])


def test_results_pages_show_the_reports():
    texts = [page.read_text(encoding="utf-8") for page in PAGES.glob("*.md")]
    sections = tables()
    assert [with_tables(text, sections) for text in texts] == texts
    for section in sections:
        assert sum(f"<!-- results: {section} -->" in text for text in texts) == 1
