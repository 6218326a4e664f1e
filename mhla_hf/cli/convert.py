# SPDX-License-Identifier: Apache-2.0
"""`mhla-hf convert` and `mhla-hf import-official`."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..config import CHOICES
from .automatic_layers import AUTO, automatic_layers
from .conversion_options import LAYOUT, OPTIONS, listed, mhla_fields, options_for_components, with_conversion_options


if TYPE_CHECKING:
    from ..conversion import ConversionReport
    from ..conversion.report import ComponentReport

_WEIGHTS = "Weights"
_SOURCE = "Hub"
_ORIGINAL = "Original weights of Wan"
_COMPONENTS = "Pipelines of several transformers"

Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace DESTINATION if it is there.")]
Dtype = Annotated[
    str | None,
    typer.Option(help="Cast the weights to float32, bfloat16 or float16.", rich_help_panel=_WEIGHTS),
]
MaxShardSize = Annotated[str | None, typer.Option(help="Largest weight file, such as 5GB.", rich_help_panel=_WEIGHTS)]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit.", rich_help_panel=_SOURCE)]
Token = Annotated[str | None, typer.Option(help="Access token; by default the stored one.", rich_help_panel=_SOURCE)]
CacheDir = Annotated[Path | None, typer.Option(help="Where downloads go.", rich_help_panel=_SOURCE)]
Grid = Annotated[str | None, typer.Option(help=OPTIONS["grid"].help, rich_help_panel=LAYOUT)]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar, no summary.")]


@with_conversion_options
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
            help="The one to convert, such as transformer_2; of a file, its name in --base.",
            rich_help_panel=_COMPONENTS,
        ),
    ] = None,
    mhla: Annotated[
        str | None,
        typer.Option(
            help='Options as JSON or a JSON file, also by component: {"transformer": {"blocks": [3,5,10]}, '
            '"transformer_2": null}. Those not named, or null, stay softmax; other options hold for all.',
            rich_help_panel=_COMPONENTS,
        ),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(help="Pipeline that the file belongs to, directory or Hub id.", rich_help_panel=_ORIGINAL),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="Directory of the model's config.json, if --base is not given.", rich_help_panel=_ORIGINAL),
    ] = None,
    dtype: Dtype = None,
    variant: Annotated[
        str | None,
        typer.Option(help="Only these weight files, such as fp16.", rich_help_panel=_WEIGHTS),
    ] = None,
    max_shard_size: MaxShardSize = None,
    subfolder: Annotated[str | None, typer.Option(help="Only this folder of SOURCE.", rich_help_panel=_SOURCE)] = None,
    revision: Revision = None,
    token: Token = None,
    cache_dir: CacheDir = None,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate", help="Fit the result to the original without training, as mhla-hf calibrate does."
        ),
    ] = False,
    data: Annotated[
        str | None, typer.Option(help="For --calibrate and --layers auto:...: see mhla-hf calibrate.")
    ] = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    **options: Any,
) -> None:
    """Convert a pipeline, a model of diffusers or transformers, or original weights of Wan to MHLA.

    The result needs fine-tuning; SANA's makes the same pictures as before until then.
    """
    from ..conversion import convert_pretrained

    automatic = (options["layers"] or "").strip().startswith(AUTO)
    if data is not None and not calibrate and not automatic:
        raise ValueError("data has no effect without --calibrate or --layers auto:...")
    if automatic:
        hub = {"revision": revision, "token": token, "cache_dir": cache_dir, "subfolder": subfolder}
        fields = options_for_components(mhla, mhla_fields(options))
        options["layers"] = automatic_layers(
            options["layers"], source, fields, component=component, data=data, hub=hub, quiet=quiet
        )
    report = convert_pretrained(
        source,
        destination,
        options_for_components(mhla, mhla_fields(options)),
        component=component,
        base=base,
        config=config,
        layers=options["layers"],
        dtype=dtype,
        variant=variant,
        subfolder=subfolder,
        revision=revision,
        token=token,
        cache_dir=cache_dir,
        max_shard_size=max_shard_size,
        overwrite=overwrite,
        progress=not quiet,
    )
    if not quiet:
        _show(report)
    if calibrate:
        _calibrate(destination, data, quiet)


def _calibrate(directory: Path, data: str | None, quiet: bool) -> None:
    from ..recovery.directories import calibrate_directory
    from .calibrate import batch_progress, show_calibration

    with batch_progress("calibrating", not quiet) as progress:
        calibration = calibrate_directory(directory, data=data, progress=progress)
    if not quiet:
        show_calibration(calibration, directory)


def import_official_command(
    checkpoint: Annotated[Path, typer.Argument(help="Safetensors file, directory of shards, or torch file.")],
    destination: Annotated[Path, typer.Argument(help="Directory to write.")],
    blocks: Annotated[
        str | None,
        typer.Option(
            help="Number of blocks: frames,height,width. By default 3,5,10 for 150 blocks.", rich_help_panel=LAYOUT
        ),
    ] = None,
    grid: Grid = None,
    normalizer: Annotated[
        str, typer.Option(help=f"Normaliser of the weights: {listed(CHOICES['normalizer'])}.")
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
    revision: Revision = None,
    token: Token = None,
    cache_dir: CacheDir = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Convert the authors' Wan-MHLA checkpoint to a diffusers transformer, or a whole pipeline with --base."""
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
        revision=revision,
        token=token,
        cache_dir=cache_dir,
        overwrite=overwrite,
        progress=not quiet,
    )
    if not quiet:
        _show(report)


def _show(report: "ConversionReport") -> None:
    from rich.console import Console
    from rich.table import Table

    from ..conversion.options import format_bytes
    from ..conversion.report import FILE_NAME

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
    written = f"{format_bytes(report.bytes_written)} in {report.seconds:.1f} s"
    console.print(f"Wrote {report.destination} ({written}); {FILE_NAME} says what came from where.", highlight=False)
    fresh = {name: part for name, part in report.components.items() if part.initialised}
    if fresh:
        console.print(_advice(report.destination, fresh), highlight=False)


def _advice(destination: Path, fresh: "dict[str, ComponentReport]") -> str:
    """What to do about the new parameters of components."""
    from ..config import MHLAConfig
    from ..models.registry import MHLA_CLASSES

    commands = {_training_command(destination, name, part) for name, part in fresh.items()}
    command = commands.pop() if len(commands) == 1 else None
    how = "the model" if command is None else f"with {command}"
    families = [(part, MHLA_CLASSES.get(part.target_class)) for part in fresh.values()]
    same = [
        family is not None and family.load_class().starts_as_upstream(MHLAConfig.from_dict(part.mhla))
        for part, family in families
    ]
    if all(same):
        return f"The new parameters leave the model's output as it was. To make use of them, fine-tune {how}."
    return f"The new parameters are untrained: fine-tune {how}."


def _training_command(destination: Path, name: str, part: "ComponentReport") -> str | None:
    """The command that trains a component; None if there is none for it."""
    from ..training.families import objective_class
    from ..utils.json_files import read_json

    # A model alone has no folder of its own.
    folder = destination / name if (destination / name).is_dir() else destination
    try:
        objective = objective_class(part.target_class)
        objective.check_config(read_json(folder / "config.json", "the model's configuration"))
    except ValueError:
        return None
    return f"mhla-hf train {objective.family().name}"


def _blocks(options: Mapping[str, Any]) -> str:
    """How a table calls the blocks of some options."""
    if options["blocks"]:
        return "×".join(map(str, options["blocks"]))
    return f"of {'×'.join(map(str, options['block_size']))} tokens"
