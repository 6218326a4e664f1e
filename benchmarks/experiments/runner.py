# SPDX-License-Identifier: Apache-2.0
"""Runs experiments: cases side by side in processes of their own, kept results, JSON file and plot.

A stopped run resumes from the results of the cases that it finished. They are known by function and options alone, so
they stay after a change of the code; removing their directory measures everything again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from mhla_hf.utils.files import read_json, write_json
from mhla_hf.utils.machine import choose_device, machine_facts

from .experiment import Case
from .registry import find_experiment


def run_experiment(
    name: str,
    setting: str,
    work: Path,
    *,
    jobs: int = 1,
    device: str | None = None,
    show_progress: bool = True,
) -> dict[str, Any]:
    """Runs the cases of an experiment that have no result yet.

    Those of the setting `smoke` run in this process, since starting one would take longer than they do.

    Args:
        name: Name of the experiment.
        setting: One of `SETTINGS`.
        work: Directory of the cases' results.
        jobs: Cases at a time, each with a share of the cores.
        device: Device to run on; `None` for a GPU if there is one.
        show_progress: Show on standard error how many cases have a result already, and a bar.

    Returns:
        The report: `experiment`, `title`, `setting`, `machine` with the date of the last case, `summary`, and `cases`,
        which holds for each label the `options`, the `date`, the `seconds` and the `figures`.

    Raises:
        ValueError: If there is no such experiment or device.
        RuntimeError: If a case fails; the message has the end of what it printed.
    """
    experiment, target = find_experiment(name), choose_device(device)
    cases = dict(experiment.cases(setting))
    work.mkdir(parents=True, exist_ok=True)
    pending = {case.key: case for case in cases.values() if not _file(work, case).is_file()}
    threads = max(1, (os.cpu_count() or 1) // jobs)
    console, finished = Console(stderr=True), len(cases) - len(pending)
    if show_progress and finished:
        remedy = "remove it to measure again, as after a change of the code"
        console.print(f"{name}: {finished} of {len(cases)} cases have a result in {work}; {remedy}", soft_wrap=True)
    with Progress(console=console, disable=not show_progress) as progress:
        task = progress.add_task(name, total=len(pending))

        def measure(case: Case) -> None:
            run = _run_here if setting == "smoke" else _run_in_process
            run(case, _file(work, case), target, threads)
            progress.advance(task)

        with ThreadPoolExecutor(1 if setting == "smoke" else jobs) as pool:
            try:
                list(pool.map(measure, pending.values()))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    stored = {label: read_json(_file(work, case), "the result of a case:") for label, case in cases.items()}
    machine = machine_facts(target)
    machine["date"] = max(result.get("date", machine["date"]) for result in stored.values())
    return {
        "experiment": name,
        "title": experiment.title,
        "setting": setting,
        "machine": {**machine, "threads": threads},
        "summary": experiment.summarize({label: result["figures"] for label, result in stored.items()}),
        "cases": stored,
    }


def write_report(report: Mapping[str, Any], output: Path) -> list[Path]:
    """Writes a report and its plot; settings other than `cpu` are part of the files' names.

    Returns:
        Paths of both.
    """
    name, setting = report["experiment"], report["setting"]
    stem = name if setting == "cpu" else f"{name}_{setting}"
    output.mkdir(parents=True, exist_ok=True)
    paths = [output / f"{stem}.json", output / f"{stem}.png"]
    write_json(paths[0], report)
    find_experiment(name).plot(report, paths[1])
    return paths


def run_case(text: str, file: Path, device: str, threads: int) -> None:
    """Runs a case, given as JSON, in this process, and writes its result."""
    torch.set_num_threads(threads)
    function, options = json.loads(text)
    case = Case(function, options)
    start = time.perf_counter()
    figures = case.run(torch.device(device), file.parent)
    seconds = round(time.perf_counter() - start, 2)
    write_json(file, {"options": options, "date": date.today().isoformat(), "seconds": seconds, "figures": figures})


def _run_here(case: Case, file: Path, device: torch.device, threads: int) -> None:
    before = torch.get_num_threads()
    try:
        run_case(_text(case), file, str(device), threads)
    finally:
        torch.set_num_threads(before)


def _run_in_process(case: Case, file: Path, device: torch.device, threads: int) -> None:
    command = [sys.executable, "-m", __package__ or "", "case", _text(case), str(file), str(device), str(threads)]
    root = str(Path(__file__).resolve().parents[2])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": str(threads),
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{case.function} with {dict(case.options)} failed:\n{done.stderr[-3000:]}")


def _text(case: Case) -> str:
    return json.dumps([case.function, dict(case.options)])


def _file(work: Path, case: Case) -> Path:
    return work / f"{case.key}.json"
