# SPDX-License-Identifier: Apache-2.0
"""Quality of small DiTs with softmax, linear attention and MHLA, trained from scratch on handwritten digits.

    python -m benchmarks.quality_dit --jobs 2 --output benchmarks/results

The models differ in attention alone: same weights, data and noise. The report has the loss on held-out digits, the
Fréchet distance of samples on features of a small classifier, how often that sees the class asked for, how far samples
are from the scans of training, and sample images.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.programs import make_parser, numbers, run_program
from mhla_hf.cli.output import show_table

from .options import SETTINGS
from .report import with_deviation
from .runner import measure_quality, write_measurement


def main() -> None:
    """Run the program."""
    parser = make_parser(__doc__, has_report=False)
    parser.add_argument("--setting", default="small", choices=SETTINGS, help="small: two CPU cores; large: a GPU")
    parser.add_argument("--output", type=Path, default=Path(), help="directory of the JSON file and the images")
    parser.add_argument("--work", type=Path, help="directory of finished trainings (runs/quality_dit-SETTING)")
    parser.add_argument("--seeds", type=numbers, help="seeds, separated by commas, such as 0,1,2")
    parser.add_argument("--steps", type=int, help="training steps")
    parser.add_argument("--batch-size", type=int, help="images per step")
    parser.add_argument("--guidance", type=float, dest="guidance_scale", help="guidance of the images that are shown")
    parser.add_argument("--threads", type=int, help="CPU threads; torch's choice by default")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time, each with its share of the cores")
    run_program(parser, compare)


def compare(
    *,
    setting: str,
    output: Path,
    work: Path | None = None,
    device: str | None = None,
    threads: int | None = None,
    jobs: int = 1,
    progress: Callable[[str], None] | None = None,
    **changes: Any,
) -> None:
    """Run the comparison, print its table and write its files.

    Args:
        setting: One of `SETTINGS`.
        output: Directory of the files.
        work: Directory of finished trainings; `runs/quality_dit-SETTING` by default.
        device: Device to run on; None for a GPU if there is one.
        threads: CPU threads; None for torch's choice.
        jobs: Trainings at a time, each in a process with its share of the cores.
        progress: Show bars unless None.
        **changes: Changes to the options of the setting.

    Raises:
        ValueError: If an option is out of range; before any work.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    options = replace(SETTINGS[setting], **changes)
    start = time.perf_counter()
    directory = work or Path("runs") / f"quality_dit-{setting}"
    measurement = measure_quality(
        options, directory, setting=setting, device=device, jobs=jobs, show_progress=progress is not None
    )
    stem = "quality_dit" if setting == "small" else f"quality_dit_{setting}"
    paths = write_measurement(measurement, output, stem)
    _show(measurement.report)
    names = ", ".join(str(path) for path in paths)
    print(f"wrote {names} after {(time.perf_counter() - start) / 60:.1f} minutes")


def _show(report: dict[str, Any]) -> None:
    floor = report["classifier"]["frechet_distance_of_held_out_digits"]
    forms = {
        "held_out_loss": "{:.5f}",
        "frechet_distance": "{:.2f}",
        "class_accuracy": "{:.1%}",
        "nearest_distance": "{:.2f}",
    }
    rows = [
        [variant, *(with_deviation(figures[name], form) for name, form in forms.items())]
        for variant, figures in report["summary"].items()
    ]
    titles = ["attention", "held-out loss", f"Fréchet distance (digits {floor:.2f})", "class seen", "nearest scan"]
    steps = report["options"]["steps"]
    title = f"{report['machine']['device']}, {steps} steps, mean ± standard deviation of seeds"
    show_table((dict(zip(titles, row)) for row in rows), title=title)


if __name__ == "__main__":
    main()
