# SPDX-License-Identifier: Apache-2.0
"""`mhla-hf recover`."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..recovery.recipes import STAGES, DataOptions
from .options import HUB, Option, given, with_options


if TYPE_CHECKING:
    from ..recovery.recover import RecoveryReport

_RECIPE = "Recipe"
_TYPES: dict[str, Any] = {"int": int, "float": float}


_OVERRIDES = {
    f"{section}__{item.name}": Option(
        next((kind for prefix, kind in _TYPES.items() if str(item.type).startswith(prefix)), str),
        item.metadata["help"],
        f"{_RECIPE}: {section}",
    )
    for section, options in {"data": DataOptions, **STAGES}.items()
    for item in dataclasses.fields(options)  # type: ignore[arg-type]
}


@with_options(HUB, _OVERRIDES)
def recover_command(
    source: Annotated[
        str, typer.Argument(help="Pipeline of diffusers or model of transformers: directory or Hub id.")
    ],
    output: Annotated[Path, typer.Argument(help="Directory to make.")],
    *,
    data: Annotated[
        str | None,
        typer.Option(
            help="Folder of videos or images with captions or classes; for text a folder of .txt, .md, .rst or .py "
            "files, a .jsonl file or the id of a data set; 'digits'; or 'generated' for samples of the original."
        ),
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="Text file with one prompt a line, for samples of the original.")
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(help="YAML file, or name of a recipe of the package. Default: that of the model's family."),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(help="'fast' for ReLU, faster and recovering less; 'paper' for the settings of the paper."),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(help="Which layers become MHLA: all, 1,2,4, 2/3, or auto:2/3.", rich_help_panel=_RECIPE),
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option(
            help="Share of layers that stays softmax, such as 25%: the worst to replace.", rich_help_panel=_RECIPE
        ),
    ] = None,
    window: Annotated[
        str | None, typer.Option(help="Softmax window beside MHLA: block, adjacent or cross.", rich_help_panel=_RECIPE)
    ] = None,
    budget: Annotated[
        float | None, typer.Option(help="That many times the steps, such as 0.5 or 2.", rich_help_panel=_RECIPE)
    ] = None,
    stages: Annotated[
        str | None,
        typer.Option(help=f"Only these, separated by commas: {', '.join(STAGES)}.", rich_help_panel=_RECIPE),
    ] = None,
    component: Annotated[str | None, typer.Option(help="Which transformer of the pipeline.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run in OUTPUT.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    device: Annotated[str, typer.Option(help="auto takes the GPU if there is one; or cpu.")] = "auto",
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 100,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no summary.")] = False,
    **options: Any,
) -> None:
    """Convert a model to MHLA and make it as good as the original: calibrate, match, distill.

    Can be killed and run again with --resume. OUTPUT becomes a directory for from_pretrained, with a report.
    """
    from ..recovery.recover import recover
    from .train import _digit_videos

    changes = {name.replace("__", "."): value for name, value in given(options, _OVERRIDES).items()}
    report = recover(
        source,
        output,
        data,
        prompts=prompts,
        recipe=recipe,
        preset=preset,
        layers=layers,
        keep=keep,
        window=window,
        budget=budget,
        stages=None if stages is None else [name.strip() for name in stages.split(",")],
        changes=changes,
        component=component,
        resume=resume,
        seed=seed,
        device=device,
        save_every=save_every,
        progress=not quiet,
        digit_videos=_digit_videos,
        **given(options, HUB),
    )
    if not quiet:
        _show(report)


def _show(report: "RecoveryReport") -> None:
    from rich.console import Console
    from rich.table import Table

    from ..recovery.report import LABELS, rows

    console = Console()
    states = rows(report.to_dict())
    if states:
        names = list(dict.fromkeys(name for _, figures, _ in states for name in figures))
        table = Table(title="Held-out quality")
        table.add_column("model")
        for name in names:
            table.add_column(LABELS.get(name, name), justify="right")
        table.add_column("CPU seconds", justify="right")
        for title, figures, seconds in states:
            cells = [_cell(name, figures) for name in names]
            table.add_row(title, *cells, "" if seconds is None else f"{seconds:.0f}")
        console.print(table)
    console.print(f"Model: {report.output}; figures: {report.output / 'report.json'}", highlight=False, soft_wrap=True)


def _cell(name: str, figures: dict[str, float]) -> str:
    if name not in figures:
        return ""
    return f"{figures[name]:+.1f}" if name.endswith("percent") else f"{figures[name]:.4f}"
