# SPDX-License-Identifier: Apache-2.0
"""`mhla-hf bench decode`: memory and time of decoding on this machine, MHLA against softmax."""

from pathlib import Path
from typing import Annotated, Any

import typer


app = typer.Typer(help="Compare MHLA with softmax attention on this machine.", no_args_is_help=True)

RANDOM = "Random model"
MHLA = "MHLA"


@app.callback()
def bench() -> None:
    pass


@app.command("decode")
def decode_command(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Directory or Hub id of a causal language model; a Llama with random weights if left out."
        ),
    ] = None,
    hidden_size: Annotated[int, typer.Option(rich_help_panel=RANDOM)] = 256,
    layers: Annotated[int, typer.Option(rich_help_panel=RANDOM)] = 4,
    heads: Annotated[int, typer.Option(rich_help_panel=RANDOM)] = 4,
    kv_heads: Annotated[
        int | None, typer.Option(help="As many as --heads if left out.", rich_help_panel=RANDOM)
    ] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens of a block.", rich_help_panel=MHLA)] = None,
    feature_map: Annotated[
        str | None, typer.Option(help="relu, elu, exp, hedgehog or identity.", rich_help_panel=MHLA)
    ] = None,
    contexts: Annotated[str, typer.Option(help="Tokens in the cache before decoding starts.")] = "2048,8192,32768",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16, or several: float32,bfloat16.")] = "float32",
    cache: Annotated[
        str, typer.Option(help="dynamic (a KV cache then copies itself for every token) or static (made at once).")
    ] = "dynamic",
    tokens: Annotated[int, typer.Option(help="Timed tokens.")] = 128,
    warmup: Annotated[int, typer.Option(help="Tokens before them that are not timed.")] = 8,
    batch_size: Annotated[int, typer.Option(help="Sequences side by side.")] = 1,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; a GPU if there is one.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show the table only.")] = False,
) -> None:
    """Memory of the MHLA cache against the KV cache, and seconds per decoded token with both, at each context.

    The MHLA cache is filled by random tokens that run through the model in parts, the KV cache with random keys and
    values; prompts are not timed. Times are medians; all caches take turns token by token.
    """
    options: dict[str, Any] = {
        "model": model, "hidden_size": hidden_size, "layers": layers, "heads": heads, "kv_heads": kv_heads,
        "block_size": block_size, "feature_map": feature_map, "contexts": parse_numbers(contexts, "contexts"),
        "dtypes": tuple(name.strip() for name in dtype.split(",")), "cache": cache, "tokens": tokens,
        "warmup": warmup, "batch_size": batch_size, "device": device,
    }  # fmt: skip

    from ..benchmarks import DecodeOptions, measure_decoding
    from ..files import write_json

    progress = None if quiet else lambda what: typer.echo(f"measuring {what}", err=True)
    report = measure_decoding(DecodeOptions(**options), progress)
    _show(report)
    if json_file is not None:
        write_json(json_file, report)


def parse_numbers(text: str, name: str) -> tuple[int, ...]:
    """Numbers separated by commas.

    Raises:
        ValueError: If `text` is anything else; the message calls it `name`.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"{name}={text!r} must be numbers separated by commas, such as 2048,8192.")
    return tuple(int(part) for part in parts)


def _show(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from ..conversion.options import format_bytes

    table = Table(
        title=f"{report['model']['class']}, {report['machine']['device']}, {report['options']['cache']} cache"
    )
    for column in ("dtype", "context", "MHLA cache", "KV cache", "ratio", "MHLA time", "softmax time"):
        table.add_column(column, justify="left" if column == "dtype" else "right")
    for row in report["results"]:
        mhla, softmax = row["mhla"], row["softmax"]
        table.add_row(
            row["dtype"],
            f"{row['context']:,}",
            format_bytes(mhla["cache_bytes"]),
            format_bytes(softmax["cache_bytes"]),
            f"{mhla['cache_bytes'] / softmax['cache_bytes']:.2f}",
            *(f"{1e3 * figures['seconds_per_token']:.2f} ms" for figures in (mhla, softmax)),
        )
    console = Console(soft_wrap=True)
    console.print(table)
    contexts = sorted(report["options"]["contexts"])
    if len(contexts) > 1:
        for dtype, growth in report["growth"].items():
            console.print(
                f"{dtype}: from {contexts[0]:,} to {contexts[-1]:,} tokens a decoded token takes "
                f"{growth['mhla']:.2f} times as long with MHLA, {growth['softmax']:.2f} times with softmax.",
                highlight=False,
            )
