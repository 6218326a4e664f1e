# SPDX-License-Identifier: Apache-2.0
"""`mhla-hf bench decode`: memory and time of decoding on this machine, MHLA against softmax."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer


app = typer.Typer(help="Compare MHLA with other attention on this machine.", no_args_is_help=True)

JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")]
PlotFile = Annotated[Path | None, typer.Option("--plot", help="Draw them into this PNG file; needs matplotlib.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show the table only.")]

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
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float32, bfloat16, float16, or several: float32,bfloat16. bfloat16 on a GPU and float32 on a CPU if "
            "left out."
        ),
    ] = None,
    cache: Annotated[
        str, typer.Option(help="dynamic (a KV cache then copies itself for every token) or static (made at once).")
    ] = "dynamic",
    tokens: Annotated[int, typer.Option(help="Timed tokens.")] = 128,
    warmup: Annotated[int, typer.Option(help="Tokens before them that are not timed.")] = 8,
    batch_size: Annotated[int, typer.Option(help="Sequences side by side.")] = 1,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; a GPU if there is one.")] = None,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
    quiet: Quiet = False,
) -> None:
    """Memory of the MHLA cache against the KV cache, and seconds per decoded token with both, at each context.

    The MHLA cache is filled by random tokens that run through the model in parts, the KV cache with random keys and
    values; prompts are not timed. Times are medians; all caches take turns token by token.
    """
    options: dict[str, Any] = {
        "model": model, "hidden_size": hidden_size, "layers": layers, "heads": heads, "kv_heads": kv_heads,
        "block_size": block_size, "feature_map": feature_map, "contexts": parse_numbers(contexts, "contexts"),
        "dtypes": None if dtype is None else tuple(name.strip() for name in dtype.split(",")),
        "cache": cache, "tokens": tokens,
        "warmup": warmup, "batch_size": batch_size, "device": device,
    }  # fmt: skip

    from ..benchmarks import DecodeOptions, measure_decoding

    check_outputs(json_file, plot_file)
    report = measure_decoding(DecodeOptions(**options), progress_printer(quiet))
    _show(report)
    write_report(report, json_file, plot_file)


def progress_printer(quiet: bool) -> Callable[[str], None] | None:
    """What tells on standard error what is measured next; None if that is not wanted."""
    return None if quiet else lambda what: typer.echo(f"measuring {what}", err=True)


def check_outputs(json_file: Path | None, plot_file: Path | None) -> None:
    """Checks that a report can be written before anything is measured for it.

    Raises:
        ValueError: If a file is a directory, or a picture is wanted and there is no matplotlib.
    """
    for name, file in (("json", json_file), ("plot", plot_file)):
        if file is not None and file.is_dir():
            raise ValueError(f"{name}={str(file)!r} is a directory; give a file.")
    if plot_file is not None and find_spec("matplotlib") is None:
        raise ValueError("plot needs matplotlib (pip install matplotlib).")


def write_report(report: dict[str, Any], json_file: Path | None, plot_file: Path | None) -> None:
    """Writes a report's figures and their picture where they are wanted, the figures first."""
    from ..benchmarks.plots import plot_report
    from ..utils.files import write_json

    if json_file is not None:
        write_json(json_file, report)
    if plot_file is not None:
        plot_report(report, plot_file)


def parse_numbers(text: str, name: str) -> tuple[int, ...]:
    """Numbers separated by commas.

    Raises:
        ValueError: If `text` is anything else; the message calls it `name`.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) < 10 for part in parts):
        raise ValueError(f"{name}={text!r:.100} must be numbers below 10⁹ separated by commas, such as 2048,8192.")
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
