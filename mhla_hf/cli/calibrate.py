# SPDX-License-Identifier: Apache-2.0
"""`mhla-hf calibrate`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer


if TYPE_CHECKING:
    from ..recovery.calibration import CalibrationReport

_PROBE = "Probe"
_SIZE = "Samples of a pipeline"

Data = Annotated[
    str | None,
    typer.Option(
        help="Texts (a folder, a JSONL file, a data set's id), pictures (a folder or digits), or the cache of a "
        "training. Pipelines need none: they make samples.",
        rich_help_panel=_PROBE,
    ),
]
Samples = Annotated[int, typer.Option(help="Samples of the probe.", rich_help_panel=_PROBE)]
BatchSize = Annotated[int, typer.Option(help="Samples of a batch, of --data.", rich_help_panel=_PROBE)]
Seed = Annotated[int, typer.Option(help="Seed of the probe.", rich_help_panel=_PROBE)]
Prompts = Annotated[
    list[str] | None, typer.Option("--prompt", help="What to make; repeat it for several.", rich_help_panel=_SIZE)
]
Height = Annotated[int | None, typer.Option(help="Pixels.", rich_help_panel=_SIZE)]
Width = Annotated[int | None, typer.Option(help="Pixels.", rich_help_panel=_SIZE)]
Frames = Annotated[int | None, typer.Option(help="Frames of videos.", rich_help_panel=_SIZE)]
Steps = Annotated[int | None, typer.Option(help="Denoising steps.", rich_help_panel=_SIZE)]


def given(**options: Any) -> dict[str, Any]:
    """The options that are not `None`."""
    return {name: value for name, value in options.items() if value is not None}


def calibrate_command(
    directory: Annotated[Path, typer.Argument(help="What mhla-hf convert wrote.")],
    *,
    output: Annotated[Path | None, typer.Option(help="Directory to write, instead of DIRECTORY itself.")] = None,
    data: Data = None,
    samples: Samples = 32,
    batch_size: BatchSize = 4,
    seed: Seed = 0,
    prompt: Prompts = None,
    height: Height = None,
    width: Width = None,
    num_frames: Frames = None,
    steps: Steps = None,
    memory_limit: Annotated[str, typer.Option(help="Memory for sums; more takes fewer passes.")] = "4GB",
    device: Annotated[str | None, typer.Option(help="Such as cpu or cuda.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Also a model that was trained or calibrated.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace --output if it is there.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar, no summary.")] = False,
) -> None:
    """Fit a converted model to its original in closed form: no training, a few passes over a few samples."""
    from ..recovery.directories import calibrate_directory

    with batch_progress("calibrating", not quiet) as progress:
        report = calibrate_directory(
            directory,
            output=output,
            data=data,
            samples=samples,
            batch_size=batch_size,
            seed=seed,
            prompts=prompt or None,
            memory_limit=memory_limit,
            force=force,
            overwrite=overwrite,
            device=device,
            progress=progress,
            **given(height=height, width=width, num_frames=num_frames, steps=steps),
        )
    if not quiet:
        show_calibration(report, output or directory)


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

    with Progress(console=Console(stderr=True), disable=not shown) as bar:
        task: Any = bar.add_task(text, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
