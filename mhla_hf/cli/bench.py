# SPDX-License-Identifier: Apache-2.0
"""`mhla-hf bench`: time and memory on this machine, MHLA beside other attention."""

from collections.abc import Callable
from typing import Annotated, Any

import typer

from .options import DTYPES, Device, Quiet, completion, listed
from .output import JsonFile, write_report


app = typer.Typer(help="Measure time and memory on this machine.", no_args_is_help=True)

_MODELS = ("ordinary", "mhla-torch", "mhla-triton")
_OPERATORS = ("mhla-torch", "mhla-triton", "softmax", "softmax-flash", "softmax-cudnn", "linear")
# Columns of a table that is not shown on a terminal.
_FILE_WIDTH = 130


def _names(help: str, values: tuple[str, ...] = ()) -> Any:
    return typer.Option(help=help, metavar="NAMES", autocompletion=completion(values) if values else None)


Dtype = Annotated[
    str | None,
    typer.Option(
        help=f"{listed(DTYPES)}. Default: bfloat16 on a GPU, float32 on a CPU.",
        metavar="NAME",
        autocompletion=completion(DTYPES),
    ),
]
Quick = Annotated[bool, typer.Option("--quick", help="Measure one size in a tenth of the time, to see that it works.")]
Seconds = Annotated[float, typer.Option(help="Approximate time for all runs of one size.", metavar="SECONDS")]


@app.callback()
def bench() -> None:
    pass


@app.command("op")
def operator_command(
    shapes: Annotated[
        str | None,
        _names("Shapes, separated by commas, such as wan,causal-32k. Default: those that suit the device."),
    ] = None,
    contestants: Annotated[
        str | None,
        _names(f"Contestants, separated by commas: {', '.join(_OPERATORS)}. Default: all.", _OPERATORS),
    ] = None,
    dtype: Dtype = None,
    device: Device = "auto",
    backward: Annotated[bool, typer.Option(help="Measure forward and backward together as well.")] = True,
    seconds: Seconds = 3.0,
    quick: Quick = False,
    json_file: JsonFile = None,
    quiet: Quiet = False,
) -> None:
    """Measure the attention operator at the sizes of models.

    Contestants take turns and inputs change from run to run; times are medians.
    """
    from ..bench import BenchOptions, measure_operator

    options = BenchOptions(dtype=dtype, device=device, seconds=seconds, quick=quick)
    report = measure_operator(options, _split(shapes), _split(contestants), backward, None if quiet else _announce)
    for name, shape in report["shapes"].items():
        for direction in ("forward", "forward+backward")[: 2 if backward else 1]:
            rows = [row for row in report["results"] if (row["shape"], row["direction"]) == (name, direction)]
            sizes = f"B {shape['batch']}, T {shape['tokens']:,}, H {shape['heads']}, K {shape['width']}"
            title = f"{name}, {direction}: {sizes}, {shape['num_blocks']:,} blocks; {_place(report)}"
            _show(title, rows, {"contestant": _contestant}, "memory", "speedup_over_softmax")
    _show_reasons(report["results"], "shape")
    write_report(json_file, report)


@app.command("model")
def model_command(
    models: Annotated[
        str | None, _names("Models, separated by commas, such as wan,dit-512. Default: those that suit the device.")
    ] = None,
    contestants: Annotated[
        str | None, _names(f"Contestants, separated by commas: {', '.join(_MODELS)}. Default: all.", _MODELS)
    ] = None,
    dtype: Dtype = None,
    device: Device = "auto",
    compiled: Annotated[bool, typer.Option("--compile", help="Compile the transformer blocks.")] = False,
    seconds: Seconds = 15.0,
    quick: Quick = False,
    json_file: JsonFile = None,
    quiet: Quiet = False,
) -> None:
    """Measure models with random weights: own attention and MHLA."""
    from ..bench import BenchOptions, measure_models

    options = BenchOptions(dtype=dtype, device=device, seconds=seconds, quick=quick)
    backend = "inductor" if compiled else None
    report = measure_models(options, _split(models), _split(contestants), backend, None if quiet else _announce)
    show_models(report, "forward pass")
    write_report(json_file, report)


def show_models(report: dict[str, Any], step: str) -> None:
    """Print the table of a report of `measure_models`, and why contestants were not measured."""
    compiled = ", blocks compiled" if report["options"]["compile_backend"] else ""
    columns = {"model": lambda row: row["model"], "attention": _attention, "tokens": lambda row: f"{row['tokens']:,}"}
    title = f"{step}, {_place(report)}{compiled}"
    _show(title, report["results"], columns, "memory beyond weights", "speedup_over_ordinary")
    _show_reasons(report["results"], "model")


def _show(
    title: str,
    rows: list[dict[str, Any]],
    columns: dict[str, Callable[[dict[str, Any]], str]],
    memory: str,
    speedup: str,
) -> None:
    from rich.table import Table

    from ..conversion.options import format_bytes

    table = Table(title=title, title_justify="left")
    for column in (*columns, "time", "20–80 %", memory, speedup.replace("speedup_over_", "vs ")):
        table.add_column(column, justify="left" if column in columns else "right", overflow="fold")
    for row in rows:
        if row["reason"] is None:
            table.add_row(
                *(value(row) for value in columns.values()),
                f"{_number(row['milliseconds'])} ms",
                f"{_number(row['milliseconds_20'])}–{_number(row['milliseconds_80'])}",
                "?" if row["peak_memory_bytes"] is None else format_bytes(row["peak_memory_bytes"]),
                f"{row[speedup]:.2f}×" if speedup in row else "",
            )
    print_wide(table)


def _show_reasons(rows: list[dict[str, Any]], case: str) -> None:
    reasons: dict[tuple[str, str], dict[str, None]] = {}
    for row in rows:
        if row["reason"] is not None:
            reasons.setdefault((row["contestant"], row["reason"]), {})[row[case]] = None
    for (contestant, reason), names in reasons.items():
        where = "" if len(names) == len({row[case] for row in rows}) else f" ({', '.join(names)})"
        print_wide(f"not measured: {contestant}{where}: {reason}")


def print_wide(content: Any) -> None:
    """Print a table or text to the terminal, or to a file or pipe at a width that fits the tables."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=max(console.width, _FILE_WIDTH))
    console.print(content, highlight=False, markup=False, soft_wrap=isinstance(content, str))


def _contestant(row: dict[str, Any]) -> str:
    return row["contestant"] + (f", normaliser {row['normalizer']}" if row["normalizer"] else "")


def _attention(row: dict[str, Any]) -> str:
    return row["contestant"] if row["attention"] == "mhla" else f"{row['contestant']} ({row['attention']})"


def _place(report: dict[str, Any]) -> str:
    return f"{report['machine']['device']}, {report['options']['dtype']}"


def _number(milliseconds: float) -> str:
    return f"{milliseconds:.3f}" if milliseconds < 100 else f"{milliseconds:,.0f}"


def _announce(case: str) -> None:
    typer.echo(f"measuring {case}", err=True)


def _split(names: str | None) -> list[str] | None:
    return None if names is None else [name.strip() for name in names.split(",")]
