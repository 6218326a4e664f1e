# SPDX-License-Identifier: Apache-2.0
"""`mhla-hf select-layers`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .calibrate import BatchSize, Data, Frames, Height, Prompts, Samples, Seed, Steps, Width, batch_progress, given
from .conversion_options import mhla_fields, options_for_components, with_conversion_options


if TYPE_CHECKING:
    from ..recovery.selection import SelectionReport


@with_conversion_options
def select_layers_command(
    source: Annotated[str, typer.Argument(help="Directory of a softmax pipeline or model, or Hub id owner/name.")],
    *,
    keep: Annotated[str | None, typer.Option(help="Layers to keep softmax: a number, or a share such as 25%.")] = None,
    latency: Annotated[
        str | None, typer.Option(help="Keep as many as this share of the softmax model's time allows, such as 80%.")
    ] = None,
    component: Annotated[str | None, typer.Option(help="Of a pipeline with several, such as transformer_2.")] = None,
    mhla: Annotated[str | None, typer.Option(help="Options as JSON or a JSON file, as for mhla-hf convert.")] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG file of a bar chart to write.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="JSON file of all figures to write.")] = None,
    data: Data = None,
    samples: Samples = 32,
    batch_size: BatchSize = 4,
    seed: Seed = 0,
    prompt: Prompts = None,
    height: Height = None,
    width: Width = None,
    num_frames: Frames = None,
    steps: Steps = None,
    device: Annotated[str | None, typer.Option(help="Such as cpu or cuda.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the layers alone.")] = False,
    **options: Any,
) -> None:
    """Find out which layers are best kept softmax, and print the others as --layers of mhla-hf convert takes them."""
    from ..recovery.directories import select_layers_of
    from ..utils.files import write_json

    if options["layers"] is not None:
        raise ValueError("layers is what this command finds out; leave it out.")
    with batch_progress("selecting layers", not quiet) as progress:
        report = select_layers_of(
            source,
            options_for_components(mhla, mhla_fields(options)),
            component=component,
            data=data,
            samples=samples,
            batch_size=batch_size,
            seed=seed,
            prompts=prompt or None,
            device=device,
            call_options=given(height=height, width=width, num_frames=num_frames, steps=steps),
            keep=keep,
            latency=latency,
            progress=progress,
        )
    if json_file is not None:
        write_json(json_file, report.to_dict())
    if plot is not None:
        draw_selection(report, plot)
    if not quiet:
        _show(report)
    typer.echo(f"--layers {report.option}")


def _show(report: "SelectionReport") -> None:
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
    """Writes a bar chart: what each layer costs after calibration, and what keeping it softmax restores.

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
