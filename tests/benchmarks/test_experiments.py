# SPDX-License-Identifier: Apache-2.0
"""The experiments: every one runs at its smallest size, and the documentation shows what the reports say."""

from __future__ import annotations

import json
import math
import os

import pytest
import torch

from benchmarks.experiments import documentation, runner
from benchmarks.experiments.__main__ import main
from benchmarks.experiments.documentation import PAGE, beside, markdown_table, tables, with_tables
from benchmarks.experiments.experiment import SETTINGS, Case, Experiment
from benchmarks.experiments.registry import experiment_names, find_experiment


def double(number, device):
    return {"doubled": 2 * number, "device": str(device)}


def describe(device, work):
    return {"work": str(work), "device": str(device), "process": os.getpid()}


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


def test_kept_cases_are_announced_with_their_date(tmp_path, monkeypatch, capsys):
    case = Case(f"{__name__}:double", {"number": 4})
    experiment = Experiment(
        title="",
        cases=lambda setting: {"doubled": case},
        summarize=lambda figures: figures,
        plot=lambda report, path: None,
        tables=lambda report: {},
    )
    monkeypatch.setattr(runner, "find_experiment", lambda name: experiment)
    runner.run_experiment("doubled", "smoke", tmp_path, device="cpu")
    assert "have a result" not in capsys.readouterr().err
    file = tmp_path / f"{case.key}.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "date": "2020-02-03"}))
    report = runner.run_experiment("doubled", "smoke", tmp_path, device="cpu")
    assert f"doubled: 1 of 1 cases have a result in {tmp_path}; remove it" in capsys.readouterr().err
    assert report["machine"]["date"] == report["cases"]["doubled"]["date"] == "2020-02-03"


@pytest.mark.parametrize("setting", ["cpu", "smoke"])
def test_cases_run_in_processes_of_their_own(setting, tmp_path, monkeypatch):
    experiment = Experiment(
        title="",
        cases=lambda setting: {"described": Case(f"{__name__}:describe", {})},
        summarize=lambda figures: figures,
        plot=lambda report, path: None,
        tables=lambda report: {},
    )
    monkeypatch.setattr(runner, "find_experiment", lambda name: experiment)
    threads = torch.get_num_threads()
    report = runner.run_experiment("described", setting, tmp_path, device="cpu", show_progress=False)
    found = report["summary"]["described"]
    assert found["work"] == str(tmp_path) and found["device"] == "cpu"
    assert (found["process"] == os.getpid()) == (setting == "smoke")
    assert torch.get_num_threads() == threads


def test_keys_follow_the_options():
    assert Case("m:f", {"a": 1, "b": 2}).key == Case("m:f", {"b": 2, "a": 1}).key
    assert Case("m:f", {"a": 1}).key != Case("m:f", {"a": 2}).key
    assert Case("m:f", {"a": 1}).key != Case("m:g", {"a": 1}).key


def test_unknown_experiment_names_the_known_ones(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["run", "rankk"])
    assert "'rankk' is not an experiment. Experiments: " in str(stop.value)


def test_results_page_shows_the_reports():
    text = PAGE.read_text(encoding="utf-8")
    sections = tables()
    assert with_tables(text, sections) == text
    for section in sections:
        assert f"<!-- results: {section} -->" in text


def test_page_elsewhere_shows_the_plots_beside_it(tmp_path):
    link = "![plot](../benchmarks/results/rank.png)"
    assert beside(link, tmp_path / "results.md", tmp_path / "figures") == "![plot](figures/rank.png)"
    assert beside(link, PAGE, documentation.RESULTS) == link


def test_marker_without_a_report_is_an_error():
    with pytest.raises(ValueError, match="no section 'other'"):
        with_tables("<!-- results: other -->\n<!-- end -->", {"rank": ""})


def test_markdown_table():
    assert markdown_table(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"
    assert documentation.RESULTS.is_dir()
