# SPDX-License-Identifier: Apache-2.0
"""`mhla-hf bench quality`: small DiTs with softmax, linear attention and MHLA, trained from scratch and judged."""

from pathlib import Path
from typing import Annotated, Any

import typer

from .bench import parse_numbers


_MOST_THREADS = 1024


def quality_command(
    setting: Annotated[
        str, typer.Option(help="small (two CPU cores), large (a GPU) or smoke (seconds; its figures mean nothing).")
    ] = "small",
    output: Annotated[Path, typer.Option(help="Directory of the JSON file and the pictures.")] = Path("."),
    work: Annotated[
        Path | None,
        typer.Option(help="Where finished trainings are kept to go on from; runs/quality_dit-SETTING if left out."),
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="Such as 0,1,2.")] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Pictures per step.")] = None,
    guidance: Annotated[
        float | None, typer.Option(help="Guidance of the pictures that are shown; 1 for none.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; a GPU if there is one.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads; torch's choice if left out.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show the table only.")] = False,
) -> None:
    """Quality of MHLA beside softmax and linear attention: DiTs on handwritten digits, alike but for their attention.

    All start from the same weights and see the same data and noise. Reported are the noise-prediction loss on held-out
    digits, the Fréchet distance of samples on features of a small classifier, and sample pictures.
    """
    from dataclasses import replace

    import torch

    from ..utils.checkout import import_from_checkout

    SETTINGS = import_from_checkout("benchmarks.quality_dit", "mhla-hf bench quality").SETTINGS
    runner = import_from_checkout("benchmarks.quality_dit.runner", "mhla-hf bench quality")
    if setting not in SETTINGS:
        raise ValueError(f"setting={setting!r} must be one of {', '.join(SETTINGS)}.")
    if threads is not None:
        if not 1 <= threads <= _MOST_THREADS:
            raise ValueError(f"threads={threads} must be from 1 to {_MOST_THREADS}.")
        torch.set_num_threads(threads)
    given: dict[str, Any] = {"steps": steps, "batch_size": batch_size, "guidance_scale": guidance}
    given["seeds"] = None if seeds is None else parse_numbers(seeds, "seeds")
    options = replace(SETTINGS[setting], **{name: value for name, value in given.items() if value is not None})
    directory = work or Path("runs") / f"quality_dit-{setting}"
    measurement = runner.measure_quality(options, directory, setting=setting, device=device, show_progress=not quiet)
    stem = "quality_dit" if setting == "small" else f"quality_dit_{setting}"
    paths = runner.write_measurement(measurement, output, stem)
    _show(measurement.report)
    for path in paths:
        typer.echo(f"wrote {path}", err=True)


def _show(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    machine, classifier = report["machine"], report["classifier"]
    floor = classifier["frechet_distance_of_held_out_digits"]
    table = Table(title=f"{machine['device']}, {report['options']['steps']} steps, mean ± standard deviation of seeds")
    for column in ("attention", "held-out loss", f"Fréchet distance (digits {floor:.2f})", "class seen"):
        table.add_column(column, justify="left" if column == "attention" else "right")
    for variant, figures in report["summary"].items():
        table.add_row(
            variant,
            _figure(figures["held_out_loss"], "{:.5f}"),
            _figure(figures["frechet_distance"], "{:.2f}"),
            _figure(figures["class_accuracy"], "{:.1%}"),
        )
    Console(soft_wrap=True).print(table)


def _figure(figures: dict[str, float | None], form: str) -> str:
    deviation = figures["standard_deviation"]
    return form.format(figures["mean"]) + ("" if deviation is None else f" ± {form.format(deviation)}")
