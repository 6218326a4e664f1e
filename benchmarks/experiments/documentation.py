# SPDX-License-Identifier: Apache-2.0
"""Tables of the pages in `docs/results`, made from the JSON files of the experiments."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.pages import table_row, with_sections
from benchmarks.quality_dit.report import table_rows
from mhla_hf.utils.files import read_json

from .registry import experiment_names, find_experiment


RESULTS = Path(__file__).resolve().parents[1] / "results"
PAGES = Path(__file__).resolve().parents[2] / "docs" / "results"


def tables(results: Path = RESULTS) -> dict[str, str]:
    """Markdown tables of all reports that are there, by the name of their section."""
    found: dict[str, str] = {}
    for name in experiment_names():
        file = results / f"{name}.json"
        if file.is_file():
            report = read_json(file, "the report of an experiment:")
            found.update({section: f"{text}\n\n{_source(report)}" for section, text in _tables(name, report).items()})
    quality = results / "quality_dit.json"
    if quality.is_file():
        report = read_json(quality, "the report of the small DiTs:")
        found["image-quality"] = f"{markdown_table(*table_rows(report))}\n\n{_source_of_quality(report)}"
    return found


def with_tables(text: str, sections: Mapping[str, str]) -> str:
    """Text with what is between markers, `<!-- results: NAME -->` and `<!-- end -->`, replaced by tables.

    Raises:
        ValueError: If a marker names no section.
    """

    def section(name: str) -> str:
        if name not in sections:
            raise ValueError(f"There is no section {name!r}. Sections: {', '.join(sections)}.")
        return sections[name]

    return with_sections(text, "results", section)


def beside(text: str, page: Path, results: Path) -> str:
    """Text of the page with its links to plots and JSON files leading from `page` to `results`."""
    found = Path(os.path.relpath(results.resolve(), page.resolve().parent)).as_posix()
    return text.replace("](../../benchmarks/results/", f"]({found}/")


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    return "\n".join(table_row(*cells) for cells in (header, ["---"] * len(header), *rows))


def _tables(name: str, report: Mapping[str, Any]) -> Mapping[str, str]:
    return find_experiment(name).tables(report)


def _source(report: Mapping[str, Any]) -> str:
    """Where the figures of a table come from."""
    name, machine = report["experiment"], report["machine"]
    seconds = sum(case["seconds"] for case in report["cases"].values())
    return (
        f"*`python -m benchmarks.experiments run {name}` on {machine['device']}, {machine['date']}, "
        f"torch {machine['torch']}; {seconds / 60:.0f} minutes of one process with {machine['threads']} "
        f"thread{'s' if machine['threads'] != 1 else ''} each time "
        f"([JSON](../../benchmarks/results/{name}.json)).*"
    )


def _source_of_quality(report: Mapping[str, Any]) -> str:
    machine, seeds = report["runs"][0]["machine"], len(report["options"]["seeds"])
    minutes = sum(run["training_cpu_seconds"] for run in report["runs"]) / 60
    means = f"Means of {seeds} seeds, ± standard deviation" if seeds > 1 else "One seed"
    return (
        f"*{means}. `python -m benchmarks.quality_dit` on {machine['device']}, {machine['date']}, torch "
        f"{machine['torch']}; {minutes:.0f} CPU minutes of training "
        f"([JSON](../../benchmarks/results/quality_dit.json)).*"
    )
