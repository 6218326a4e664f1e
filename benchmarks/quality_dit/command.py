# SPDX-License-Identifier: Apache-2.0
"""The comparison as `mhla-hf bench quality` runs it."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from .options import SETTINGS
from .report import with_deviation
from .runner import measure_quality, write_measurement


_MOST_THREADS = 1024


def compare(
    setting: str,
    output: Path,
    work: Path | None,
    given: dict[str, Any],
    *,
    device: str | None,
    threads: int | None,
    jobs: int,
    quiet: bool,
) -> None:
    """Runs the comparison, prints its table and writes its files.

    Args:
        setting: One of `SETTINGS`.
        output: Directory of the files.
        work: Directory of finished trainings; `runs/quality_dit-SETTING` by default.
        given: Changes to the options of the setting; values of None are left out.
        device: Device to run on; None for a GPU if there is one.
        threads: CPU threads; None for torch's choice.
        jobs: Trainings at a time, each in a process with its share of the cores.
        quiet: Show the table only.

    Raises:
        ValueError: If an argument or option is out of range; before any work.
    """
    if setting not in SETTINGS:
        raise ValueError(f"setting={setting!r} must be one of {', '.join(SETTINGS)}.")
    if threads is not None:
        if not 1 <= threads <= _MOST_THREADS:
            raise ValueError(f"threads={threads} must be from 1 to {_MOST_THREADS}.")
        torch.set_num_threads(threads)
    options = replace(SETTINGS[setting], **{name: value for name, value in given.items() if value is not None})
    start = time.perf_counter()
    directory = work or Path("runs") / f"quality_dit-{setting}"
    measurement = measure_quality(
        options, directory, setting=setting, device=device, jobs=jobs, show_progress=not quiet
    )
    stem = "quality_dit" if setting == "small" else f"quality_dit_{setting}"
    paths = write_measurement(measurement, output, stem)
    _show(measurement.report)
    names = ", ".join(str(path) for path in paths)
    typer.echo(f"wrote {names} after {(time.perf_counter() - start) / 60:.1f} minutes", err=True)


def _show(report: dict[str, Any]) -> None:
    machine, classifier = report["machine"], report["classifier"]
    floor = classifier["frechet_distance_of_held_out_digits"]
    table = Table(title=f"{machine['device']}, {report['options']['steps']} steps, mean ± standard deviation of seeds")
    for column in (
        "attention",
        "held-out loss",
        f"Fréchet distance (digits {floor:.2f})",
        "class seen",
        "nearest scan",
    ):
        table.add_column(column, justify="left" if column == "attention" else "right")
    for variant, figures in report["summary"].items():
        table.add_row(
            variant,
            with_deviation(figures["held_out_loss"], "{:.5f}"),
            with_deviation(figures["frechet_distance"], "{:.2f}"),
            with_deviation(figures["class_accuracy"], "{:.1%}"),
            with_deviation(figures["nearest_distance"], "{:.2f}"),
        )
    Console(soft_wrap=True).print(table)
