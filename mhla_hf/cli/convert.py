# SPDX-License-Identifier: Apache-2.0
"""`mhla-hf convert`, `mhla-hf unconvert` and `mhla-hf import-official`."""

from collections.abc import Mapping
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..config import CHOICES
from .calibrate import batch_progress, show_calibration
from .card import write_first_card
from .help import DIRECTORY
from .options import (
    DTYPES,
    HUB,
    LAYOUT,
    OPTIONS,
    Overwrite,
    Quiet,
    completion,
    given,
    listed,
    mhla_fields,
    options_for_components,
    with_options,
)
from .output import JsonFile, write_report


if TYPE_CHECKING:
    from ..conversion import ConversionReport

_WEIGHTS = "Weights"
_SOURCE = "Hub"
_ORIGINAL = "Original weights of Wan"
_COMPONENTS = "Pipelines of several transformers"

Dtype = Annotated[
    str | None,
    typer.Option(
        help=f"Cast the weights to {listed(DTYPES)}. Default: as they are.",
        metavar="NAME",
        rich_help_panel=_WEIGHTS,
        autocompletion=completion(DTYPES),
    ),
]
MaxShardSize = Annotated[
    str | None,
    typer.Option(
        help="Largest weight file, such as 5GB. Default: as in the source.", metavar="SIZE", rich_help_panel=_WEIGHTS
    ),
]
Grid = Annotated[
    str | None,
    typer.Option(help=OPTIONS["grid"].help, metavar=OPTIONS["grid"].metavar, rich_help_panel=LAYOUT),
]


@with_options(OPTIONS, HUB)
def convert_command(
    source: Annotated[
        str,
        typer.Argument(
            help="Directory of a pipeline or model, Hub id owner/name, or original Wan weights (.safetensors, .gguf)."
        ),
    ],
    destination: Annotated[Path, typer.Argument(help="Directory to write.")],
    *,
    component: Annotated[
        str | None,
        typer.Option(
            help="The transformer to convert, such as transformer_2; of a file, its name in --base.",
            metavar="NAME",
            rich_help_panel=_COMPONENTS,
        ),
    ] = None,
    mhla: Annotated[
        str | None,
        typer.Option(
            help='Options as JSON or a JSON file, also by component: {"transformer": {"blocks": [3,5,10]}, '
            '"transformer_2": null}. Those not named, or null, stay softmax; other options hold for all.',
            metavar="JSON",
            rich_help_panel=_COMPONENTS,
        ),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(help="Pipeline that the file belongs to, directory or Hub id.", rich_help_panel=_ORIGINAL),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="Directory of the model's config.json, if --base is not given.",
            metavar=DIRECTORY,
            rich_help_panel=_ORIGINAL,
        ),
    ] = None,
    dtype: Dtype = None,
    variant: Annotated[
        str | None,
        typer.Option(help="Only these weight files, such as fp16.", metavar="NAME", rich_help_panel=_WEIGHTS),
    ] = None,
    max_shard_size: MaxShardSize = None,
    subfolder: Annotated[
        str | None, typer.Option(help="Only this folder of SOURCE.", metavar="NAME", rich_help_panel=_SOURCE)
    ] = None,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate", help="Fit the result to the original without training, as mhla-hf calibrate does."
        ),
    ] = False,
    data: Annotated[
        str | None, typer.Option(help="Samples for --calibrate and --layers auto:..., as for mhla-hf calibrate.")
    ] = None,
    overwrite: Overwrite = False,
    json_file: JsonFile = None,
    quiet: Quiet = False,
    **options: Any,
) -> None:
    """Convert a model or pipeline to MHLA.

    SOURCE may be a pipeline, a model of diffusers or transformers, or a file with original weights of Wan. The result
    needs fine-tuning; SANA's makes the same images as before until then.
    """
    from ..conversion import convert_pretrained
    from ..conversion.options import automatic_share

    fields, layers = options_for_components(mhla, mhla_fields(options)), options["layers"]
    share = None if layers is None else automatic_share(layers)
    if data is not None and not calibrate and share is None:
        raise ValueError("data has no effect without --calibrate or --layers auto:...")
    hub = given(options, HUB)
    if share is not None:
        layers = "all" if share == 1 else _select(source, fields, component, data, share, hub, subfolder, quiet)
    report = convert_pretrained(
        source,
        destination,
        fields,
        component=component,
        base=base,
        config=config,
        layers=layers,
        dtype=dtype,
        variant=variant,
        subfolder=subfolder,
        max_shard_size=max_shard_size,
        overwrite=overwrite,
        progress=not quiet,
        finish=partial(write_first_card, destination=destination),
        **hub,
    )
    if not quiet:
        _show(report)
    if calibrate:
        _calibrate(destination, data, quiet)
        write_first_card(destination)
    _write_record(json_file, destination)


@with_options(HUB)
def unconvert_command(
    source: Annotated[
        str, typer.Argument(metavar="MODEL", help="Directory of an MHLA pipeline or model, or Hub id owner/name.")
    ],
    destination: Annotated[Path, typer.Argument(metavar="OUTPUT", help="Directory to write.")],
    *,
    original: Annotated[
        str | None,
        typer.Option(
            help="The softmax original of a model that was calibrated or trained, directory or Hub id. Default: the "
            "one that conversion.json names.",
            metavar="NAME",
        ),
    ] = None,
    overwrite: Overwrite = False,
    json_file: JsonFile = None,
    quiet: Quiet = False,
    **options: Any,
) -> None:
    """Write the softmax original of an MHLA model or pipeline.

    A model that is only converted has the pretrained weights itself. Those of a calibrated or trained one are taken
    from its original.
    """
    from rich.console import Console

    from ..conversion import unconvert_pretrained

    report = unconvert_pretrained(
        source, destination, original=original, overwrite=overwrite, progress=not quiet, **given(options, HUB)
    )
    if not quiet:
        models = ", ".join(f"{name} ({part.target_class})" for name, part in report.components.items())
        Console(soft_wrap=True).print(f"Wrote {report.destination}: {models} without MHLA.", highlight=False)
    _write_record(json_file, destination)


def _select(
    source: str,
    mhla: dict[str, Any],
    component: str | None,
    data: str | None,
    share: Fraction,
    hub: dict[str, Any],
    subfolder: str | None,
    quiet: bool,
) -> str:
    """Selects the layers for `--layers auto:p/q` on a probe."""
    from ..recovery.directories import select_layers_of

    with batch_progress("selecting layers", not quiet) as progress:
        report = select_layers_of(
            source,
            mhla,
            component=component,
            probe={"data": data},
            hub={**hub, "subfolder": subfolder},
            keep=float(1 - share),
            progress=progress,
        )
    return report.option


def _write_record(json_file: Path | None, directory: Path) -> None:
    """Writes what the directory records of its conversion."""
    from ..models.source import CONVERSION_RECORD
    from ..utils.json_files import read_json

    if json_file is not None:
        write_report(json_file, read_json(directory / CONVERSION_RECORD, CONVERSION_RECORD))


def _calibrate(directory: Path, data: str | None, quiet: bool) -> None:
    from ..recovery.directories import calibrate_directory

    with batch_progress("calibrating", not quiet) as progress:
        calibration = calibrate_directory(directory, data=data, progress=progress)
    if not quiet:
        show_calibration(calibration, directory)


@with_options(HUB)
def import_official_command(
    checkpoint: Annotated[Path, typer.Argument(help="Safetensors file, directory of shards, or torch file.")],
    destination: Annotated[Path, typer.Argument(help="Directory to write.")],
    *,
    blocks: Annotated[
        str | None,
        typer.Option(
            help="Number of blocks: frames,height,width. Default: 3,5,10 where the weights have 150 blocks.",
            metavar=OPTIONS["blocks"].metavar,
            rich_help_panel=LAYOUT,
        ),
    ] = None,
    grid: Grid = None,
    normalizer: Annotated[
        str,
        typer.Option(
            help=f"Normaliser that the weights were trained with: {listed(CHOICES['normalizer'])}.",
            metavar="NAME",
            autocompletion=completion(CHOICES["normalizer"]),
        ),
    ] = "none",
    base: Annotated[
        str | None,
        typer.Option(help="Wan pipeline, directory or Hub id, to take the other components from."),
    ] = None,
    num_heads: Annotated[
        int | None,
        typer.Option(help="Number of heads, where the weights do not tell and heads are not 128 wide."),
    ] = None,
    dtype: Dtype = None,
    max_shard_size: MaxShardSize = None,
    overwrite: Overwrite = False,
    json_file: JsonFile = None,
    quiet: Quiet = False,
    **options: Any,
) -> None:
    """Convert a Wan-MHLA checkpoint of the paper's authors.

    It becomes a transformer of diffusers, or with --base a whole pipeline.
    """
    from ..conversion import import_official
    from ..conversion.options import parse_axes

    report = import_official(
        checkpoint,
        destination,
        blocks=parse_axes(blocks, "blocks"),
        grid=parse_axes(grid, "grid"),
        normalizer=normalizer,
        base=base,
        num_heads=num_heads,
        dtype=dtype,
        max_shard_size=max_shard_size,
        overwrite=overwrite,
        progress=not quiet,
        finish=partial(write_first_card, destination=destination),
        **given(options, HUB),
    )
    if not quiet:
        _show(report)
    _write_record(json_file, destination)


def _show(report: "ConversionReport") -> None:
    from rich.console import Console
    from rich.table import Table

    from ..conversion.options import format_bytes
    from ..conversion.report import advice

    table = Table("component", "MHLA layers", "blocks", "copied", "new parameters", "types")
    for name, part in report.components.items():
        # Options of a model with several towers are by tower.
        towers = {"": part.mhla} if "block_size" in part.mhla else part.mhla
        blocks = "\n".join(_blocks(options) for options in towers.values())
        for weights in part.weight_sets:
            table.add_row(
                name if weights.variant is None else f"{name} ({weights.variant})",
                f"{len(part.mhla_layers)} of {part.num_layers}",
                blocks,
                f"{weights.copied_parameters:,}",
                f"{part.initialised_parameters:,}",
                ", ".join(f"{dtype} {count}" for dtype, count in weights.dtypes.items()),
            )
    console = Console(soft_wrap=True)
    console.print(table)
    for name, part in report.components.items():
        if part.mhla.get("grid"):
            tokens = "×".join(map(str, part.mhla["grid"]))
            console.print(f"{name}: blocks {_blocks(part.mhla)} on a grid of {tokens} tokens", highlight=False)
        if part.warning:
            console.print(f"Warning: {part.warning}", style="yellow", highlight=False)
    written = f"{format_bytes(report.bytes_written)} in {report.seconds:.1f} s"
    console.print(f"Wrote {report.destination} ({written}); conversion.json records the sources.", highlight=False)
    next_step = advice(report)
    if next_step is not None:
        console.print(next_step, highlight=False)


def _blocks(options: Mapping[str, Any]) -> str:
    """Blocks of some options, for a table."""
    if options["blocks"]:
        return "×".join(map(str, options["blocks"]))
    return f"of {'×'.join(map(str, options['block_size']))} tokens"
