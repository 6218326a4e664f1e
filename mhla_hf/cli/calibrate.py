# SPDX-License-Identifier: Apache-2.0
"""`mhla-hf calibrate` and `mhla-hf select-layers`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .card import write_first_card
from .help import DIRECTORY, FILE
from .options import (
    OPTIONS,
    PROBE,
    SIZES,
    Component,
    Overwrite,
    Quiet,
    given,
    mhla_fields,
    options_for_components,
    with_options,
)
from .output import JsonFile, write_report


if TYPE_CHECKING:
    from ..recovery.calibration import CalibrationReport
    from ..recovery.selection import SelectionReport


@with_options(PROBE, SIZES)
def calibrate_command(
    directory: Annotated[Path, typer.Argument(help="Output of mhla-hf convert.")],
    *,
    output: Annotated[
        Path | None,
        typer.Option(help="Directory to write. Default: the model is changed in place.", metavar=DIRECTORY),
    ] = None,
    memory_limit: Annotated[
        str, typer.Option(help="Memory for sums, such as 800MB; with more, fewer passes are made.", metavar="SIZE")
    ] = "4GB",
    force: Annotated[
        bool, typer.Option("--force", help="Calibrate a model that was already trained or calibrated, too.")
    ] = False,
    overwrite: Overwrite = False,
    json_file: JsonFile = None,
    quiet: Quiet = False,
    **options: Any,
) -> None:
    """Fit a converted model to its original without training.

    Feature maps, convolutions, gains and output projections are solved for in closed form, from a few passes over a
    few samples.
    """
    from ..recovery.directories import calibrate_directory

    with batch_progress("calibrating", not quiet) as progress:
        report = calibrate_directory(
            directory,
            output=output,
            memory_limit=memory_limit,
            force=force,
            overwrite=overwrite,
            progress=progress,
            **given(options, {**PROBE, **SIZES}),
        )
    write_first_card(output or directory)
    write_report(json_file, report.to_dict())
    if not quiet:
        show_calibration(report, output or directory)


@with_options(OPTIONS, PROBE, SIZES)
def select_layers_command(
    source: Annotated[str, typer.Argument(help="Directory of a softmax pipeline or model, or Hub id owner/name.")],
    *,
    keep: Annotated[
        str | None,
        typer.Option(help="How many layers stay softmax: a number, or a share such as 25%.", metavar="N|N%"),
    ] = None,
    latency: Annotated[
        str | None,
        typer.Option(
            help="Keep as many softmax layers as this share of the softmax model's time allows, such as 80%.",
            metavar="N%",
        ),
    ] = None,
    component: Component = None,
    mhla: Annotated[
        str | None,
        typer.Option(help="Options as JSON or a JSON file, as for mhla-hf convert.", metavar="JSON"),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw a bar chart into this PNG file; needs matplotlib.", metavar=FILE)
    ] = None,
    json_file: JsonFile = None,
    quiet: Quiet = False,
    **options: Any,
) -> None:
    """Select the layers that should stay softmax.

    Layers are ranked by the error that calibrated MHLA leaves there. The others are printed as mhla-hf convert takes
    them: --layers 1,2,4.
    """
    from ..recovery.directories import select_layers_of

    if options["layers"] is not None:
        raise ValueError("layers is the result of this command; leave it out.")
    with batch_progress("selecting layers", not quiet) as progress:
        report = select_layers_of(
            source,
            options_for_components(mhla, mhla_fields(options)),
            component=component,
            keep=keep,
            latency=latency,
            progress=progress,
            probe=given(options, {**PROBE, **SIZES}),
        )
    write_report(json_file, report.to_dict())
    if plot is not None:
        draw_selection(report, plot)
    if not quiet:
        _show_selection(report)
    typer.echo(f"--layers {report.option}")


def show_calibration(report: "CalibrationReport", directory: Path) -> None:
    """Prints what calibration did, layer by layer."""
    from rich.console import Console
    from rich.table import Table

    table = Table("layer", "error before", "error after", "changed")
    for layer in report.layers:
        changed = ", ".join(layer.changed) or layer.note
        table.add_row(layer.name, f"{layer.error_before:.4f}", f"{layer.error_after:.4f}", changed)
    console = Console(soft_wrap=True)
    console.print(table)
    console.print(
        f"Wrote {directory}: held-out error of the layers' outputs {report.error_before:.4f} before, "
        f"{report.error_after:.4f} after, relative to their variance ({report.seconds:.1f} s).",
        highlight=False,
    )


@contextmanager
def batch_progress(text: str, shown: bool) -> Iterator[Callable[[int, int], None]]:
    """A progress bar over batches on standard error, told (done, all)."""
    from rich.console import Console
    from rich.progress import Progress

    bar = Progress(console=Console(stderr=True, quiet=not shown), disable=not shown)
    task: Any = bar.add_task(text, total=None)

    def update(done: int, total: int) -> None:
        # Not before there is something to show: mistakes are found first.
        bar.start()
        bar.update(task, completed=done, total=total)

    try:
        yield update
    finally:
        if bar.live.is_started:
            bar.stop()


def _show_selection(report: "SelectionReport") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("layer", "error of the layer", "restored by softmax", "softmax ms", "MHLA ms", "")
    for layer in report.layers:
        table.add_row(
            str(layer.index),
            f"{layer.error:.4f}",
            f"{layer.restored:.4f}",
            f"{layer.softmax_ms:.2f}",
            f"{layer.mhla_ms:.2f}",
            "softmax" if layer.kept else "",
        )
    console = Console(stderr=True, soft_wrap=True)
    console.print(table)
    console.print(
        f"Error of the model's output: {report.errors[0]:.4f} with every layer MHLA, {report.errors[-1]:.4f} so. "
        f"Time of a batch: softmax {report.softmax_ms:.1f} ms, MHLA {report.mhla_ms:.1f}, so {report.chosen_ms:.1f}.",
        highlight=False,
    )


def draw_selection(report: "SelectionReport", path: Path) -> None:
    """Draws a bar chart of each layer's error after calibration, and of the error that keeping it softmax restores.

    Args:
        report: See `select_layers`.
        path: PNG file to write.
    """
    from ..utils.figures import new_figure, save_figure

    places = range(len(report.layers))
    figure = new_figure(max(6.0, 0.35 * len(report.layers)), 5.5)
    upper, lower = figure.subplots(2, 1, sharex=True)
    colours = ["#444444" if layer.kept else "#1f77b4" for layer in report.layers]
    upper.bar(places, [layer.error for layer in report.layers], color=colours)
    upper.set_ylabel("error of the layer")
    lower.bar(places, [layer.restored for layer in report.layers], color=colours)
    lower.set_ylabel("model error restored\nby softmax there")
    lower.axhline(0, color="black", linewidth=0.6)
    lower.set_xticks(list(places), [str(layer.index) for layer in report.layers])
    lower.set_xlabel("layer")
    kept = ", ".join(map(str, sorted(report.order))) or "none"
    upper.set_title(f"Calibrated MHLA layers; kept softmax (grey): {kept}")
    save_figure(figure, path)
