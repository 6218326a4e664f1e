# SPDX-License-Identifier: Apache-2.0
"""`mhla-hf convert` and `mhla-hf import-official`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer


if TYPE_CHECKING:
    from ..conversion import ConversionReport

_LAYOUT = "Blocks"
_OPERATOR = "Operator"
_WEIGHTS = "Weights"
_SOURCE = "Hub"

Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace DESTINATION if it is there.")]
Dtype = Annotated[
    str | None,
    typer.Option(help="Cast the transformer to float32, bfloat16 or float16.", rich_help_panel=_WEIGHTS),
]
MaxShardSize = Annotated[str | None, typer.Option(help="Largest weight file, such as 5GB.", rich_help_panel=_WEIGHTS)]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit.", rich_help_panel=_SOURCE)]
Token = Annotated[str | None, typer.Option(help="Access token; by default the stored one.", rich_help_panel=_SOURCE)]
CacheDir = Annotated[Path | None, typer.Option(help="Where downloads go.", rich_help_panel=_SOURCE)]
Grid = Annotated[
    str | None,
    typer.Option(help="Token grid the weights are for: frames,height,width in tokens.", rich_help_panel=_LAYOUT),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar, no summary.")]


def convert_command(
    source: Annotated[str, typer.Argument(help="Pipeline or transformer directory, or Hub id owner/name.")],
    destination: Annotated[Path, typer.Argument(help="Directory to write.")],
    blocks: Annotated[
        str | None,
        typer.Option(help="Number of blocks: frames,height,width, such as 3,5,10.", rich_help_panel=_LAYOUT),
    ] = None,
    block_size: Annotated[
        str | None, typer.Option(help="Tokens of a block instead, such as 7,6,5.", rich_help_panel=_LAYOUT)
    ] = None,
    grid: Grid = None,
    layers: Annotated[
        str,
        typer.Option(
            help="Which layers become MHLA: all, indices such as 1,2,4, or a fraction: 2/3 keeps 0, 3, 6, … softmax.",
            rich_help_panel=_LAYOUT,
        ),
    ] = "all",
    feature_map: Annotated[
        str | None, typer.Option(help="relu, elu, exp, hedgehog or identity.", rich_help_panel=_OPERATOR)
    ] = None,
    rope: Annotated[
        str | None, typer.Option(help="after_feature_map or before_feature_map.", rich_help_panel=_OPERATOR)
    ] = None,
    normalizer: Annotated[
        str | None, typer.Option(help="query, block_query or none.", rich_help_panel=_OPERATOR)
    ] = None,
    mixing_init: Annotated[
        str | None,
        typer.Option(help="linear, cos, exp, gaussian, local or uniform.", rich_help_panel=_OPERATOR),
    ] = None,
    mixing_heads: Annotated[str | None, typer.Option(help="shared or per_head.", rich_help_panel=_OPERATOR)] = None,
    mixing_constraint: Annotated[
        str | None, typer.Option(help="none or nonnegative.", rich_help_panel=_OPERATOR)
    ] = None,
    mixing_range: Annotated[
        float | None,
        typer.Option(help="Blocks at which the locality bias reaches its floor.", rich_help_panel=_OPERATOR),
    ] = None,
    output_norm: Annotated[
        bool, typer.Option("--output-norm", help="RMSNorm on each head's output.", rich_help_panel=_OPERATOR)
    ] = False,
    gate: Annotated[bool, typer.Option("--gate", help="SiLU output gate.", rich_help_panel=_OPERATOR)] = False,
    lepe: Annotated[
        int | None,
        typer.Option(help="Kernel size of a depthwise convolution of the values.", rich_help_panel=_OPERATOR),
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
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Convert a diffusers pipeline or transformer to MHLA, streaming its weights. The result needs fine-tuning."""
    from ..config import MHLAConfig
    from ..conversion import convert_pretrained
    from ..conversion.options import parse_axes

    given: dict[str, Any] = {
        "blocks": parse_axes(blocks, "blocks"),
        "block_size": parse_axes(block_size, "block_size"),
        "grid": parse_axes(grid, "grid"),
        "feature_map": feature_map,
        "rope": rope,
        "normalizer": normalizer,
        "mixing_init": mixing_init,
        "mixing_heads": mixing_heads,
        "mixing_constraint": mixing_constraint,
        "mixing_range": mixing_range,
        "output_norm": output_norm or None,
        "output_gate": gate or None,
        "lepe_kernel": lepe,
    }
    report = convert_pretrained(
        source,
        destination,
        MHLAConfig.from_dict({name: value for name, value in given.items() if value is not None}),
        layers=layers,
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


def import_official_command(
    checkpoint: Annotated[Path, typer.Argument(help="Safetensors file, directory of shards, or torch file.")],
    destination: Annotated[Path, typer.Argument(help="Directory to write.")],
    blocks: Annotated[
        str | None,
        typer.Option(
            help="Number of blocks: frames,height,width. By default 3,5,10 for 150 blocks.", rich_help_panel=_LAYOUT
        ),
    ] = None,
    grid: Grid = None,
    normalizer: Annotated[
        str, typer.Option(help="What the weights were trained with: none, block_query or query.")
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
    from ..conversion.provenance import FILE_NAME

    table = Table("component", "MHLA layers", "blocks", "copied", "new parameters", "types")
    for name, part in report.components.items():
        counts, sizes = part.mhla["blocks"], part.mhla["block_size"]
        table.add_row(
            name,
            f"{len(part.mhla_layers)} of {part.num_layers}",
            "×".join(map(str, counts)) if counts else f"of {'×'.join(map(str, sizes))} tokens",
            f"{part.copied_parameters:,}",
            f"{part.initialised_parameters:,}",
            ", ".join(f"{dtype} {count}" for dtype, count in part.dtypes.items()),
        )
    console = Console(soft_wrap=True)
    console.print(table)
    written = f"{format_bytes(report.bytes_written)} in {report.seconds:.1f} s"
    console.print(f"Wrote {report.destination} ({written}); {FILE_NAME} says what came from where.", highlight=False)
    if any(part.initialised for part in report.components.values()):
        console.print("The new parameters are untrained: fine-tune with mhla-hf train wan.", highlight=False)
