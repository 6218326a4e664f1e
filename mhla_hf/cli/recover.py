# SPDX-License-Identifier: Apache-2.0
"""`mhla-hf recover`."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..config import CHOICES
from ..recovery.recipes import STAGES, DataOptions, recipe_names
from ..utils.model_cards import CARD
from .card import write_first_card
from .convert import Dtype
from .help import FILE
from .options import (
    HUB,
    OPTIONS,
    Component,
    DeviceOrAuto,
    Option,
    Quiet,
    Seed,
    completion,
    field_help,
    given,
    listed,
    mhla_fields,
    with_options,
)
from .output import JsonFile, write_report


if TYPE_CHECKING:
    from ..recovery.recover import RecoveryReport

_RECIPE = "Recipe"
_TYPES: dict[str, Any] = {"int": int, "float": float}


_OVERRIDES = {
    f"{section}__{item.name}": Option(
        next((kind for prefix, kind in _TYPES.items() if str(item.type).startswith(prefix)), str),
        field_help(item, default=False),
        f"{_RECIPE}: {section}",
        choices=item.metadata.get("choices", ()),
    )
    for section, options in {"data": DataOptions, **STAGES}.items()
    for item in dataclasses.fields(options)  # type: ignore[arg-type]
}


_BLOCKS = {name: OPTIONS[name] for name in ("blocks", "block_size")}


@with_options(HUB, _BLOCKS, _OVERRIDES, last=True)
def recover_command(
    source: Annotated[
        str, typer.Argument(help="Pipeline of diffusers or model of transformers: directory or Hub id.")
    ],
    output: Annotated[Path, typer.Argument(help="Directory to write.")],
    *,
    data: Annotated[
        str | None,
        typer.Option(
            help="Folder of videos or images with captions or classes; for text a folder of .txt, .md, .rst or .py "
            "files, a .jsonl file or the id of a data set; 'digits'; or 'generated' for samples of the original."
        ),
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="Text file with one prompt a line, for --data generated.", metavar=FILE)
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help="YAML file, or name of a recipe of the package. Default: that of the model's family.",
            metavar="NAME",
            autocompletion=completion(recipe_names),
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            help="fast for ReLU, which is faster and recovers less; paper for the settings of the paper.",
            metavar="NAME",
            autocompletion=completion(("fast", "paper")),
        ),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            help="Which layers become MHLA: all, indices such as 1,2,4, a fraction such as 2/3, or auto:2/3, which "
            "keeps those softmax that matter most.",
            metavar="LAYERS",
            rich_help_panel=_RECIPE,
            autocompletion=completion(("all", "1/2", "2/3", "3/4", "auto:")),
        ),
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option(
            help="Share of layers that stays softmax, such as 25%: those that matter most.",
            metavar="N%",
            rich_help_panel=_RECIPE,
        ),
    ] = None,
    window: Annotated[
        str | None,
        typer.Option(
            help=f"Exact softmax near each token beside MHLA: {listed(CHOICES['window'])}.",
            metavar="NAME",
            rich_help_panel=_RECIPE,
            autocompletion=completion(CHOICES["window"]),
        ),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(help="Factor on the steps of all stages, such as 0.5 or 2.", rich_help_panel=_RECIPE),
    ] = None,
    stages: Annotated[
        str | None,
        typer.Option(
            help=f"Stages to run, separated by commas: {', '.join(STAGES)}. Default: those of the recipe.",
            metavar="NAMES",
            rich_help_panel=_RECIPE,
            autocompletion=completion(STAGES),
        ),
    ] = None,
    dtype: Dtype = None,
    component: Component = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run in OUTPUT.")] = False,
    seed: Seed = 0,
    device: DeviceOrAuto = "auto",
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 100,
    json_file: JsonFile = None,
    quiet: Quiet = False,
    **options: Any,
) -> None:
    """Convert a model and recover the quality of the original.

    The model is calibrated, matched, distilled and fine-tuned, as its recipe says. A run that was stopped continues
    with --resume. OUTPUT becomes a directory for from_pretrained, with a report.
    """
    from ..recovery.recover import recover

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
        dtype=dtype,
        budget=budget,
        stages=None if stages is None else [name.strip() for name in stages.split(",")],
        changes=changes,
        component=component,
        resume=resume,
        seed=seed,
        device=device,
        save_every=save_every,
        progress=not quiet,
        **mhla_fields(given(options, _BLOCKS)),
        **given(options, HUB),
    )
    if not (report.output / CARD).exists():
        # A finished run that is resumed keeps the card that it has.
        write_first_card(report.output)
    write_report(json_file, report.to_dict())
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
