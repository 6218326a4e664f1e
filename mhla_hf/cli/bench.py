# SPDX-License-Identifier: Apache-2.0
"""`mhla-hf bench`: time and memory on this machine, MHLA beside other attention."""

from typing import Any

import typer

from .options import DTYPES, Device, Quiet, listed, option
from .output import JsonFile, say, show_table, write_report


app = typer.Typer(help="Measure time and memory on this machine.", no_args_is_help=True)

_MODELS = ("ordinary", "mhla-torch", "mhla-triton")
_OPERATORS = ("mhla-torch", "mhla-triton", "softmax", "softmax-flash", "softmax-cudnn", "linear")

_DTYPE = option(f"{listed(DTYPES)}. Default: bfloat16 on a GPU, float32 on a CPU.", values=DTYPES)
_QUICK = option("Measure one size in a tenth of the time, to see that it works.", "--quick", default=False)


@app.callback()
def bench() -> None:
    pass


def _contestants(names: tuple[str, ...]) -> Any:
    return option(
        f"Contestants, separated by commas: {', '.join(names)}. Default: all.", values=names, metavar="NAMES"
    )


def _cases(what: str, examples: str) -> Any:
    return option(
        f"{what}, separated by commas, such as {examples}. Default: those that suit the device.", metavar="NAMES"
    )


def _seconds(default: float) -> Any:
    return option("Approximate time for all runs of one size.", default=default, metavar="SECONDS")


@app.command("op")
def operator_command(
    shapes: str | None = _cases("Shapes", "wan,causal-32k"),
    contestants: str | None = _contestants(_OPERATORS),
    dtype: str | None = _DTYPE,
    device: Device = "auto",
    backward: bool = option("Measure forward and backward together as well.", default=True),
    seconds: float = _seconds(3.0),
    quick: bool = _QUICK,
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
            columns = {"contestant": "contestant", "normaliser": "normalizer"}
            _show(title, rows, columns, "memory", "speedup_over_softmax")
    _show_reasons(report["results"], "shape")
    write_report(json_file, report)


@app.command("model")
def model_command(
    models: str | None = _cases("Models", "wan,dit-512"),
    contestants: str | None = _contestants(_MODELS),
    dtype: str | None = _DTYPE,
    device: Device = "auto",
    compiled: bool = option("Compile the transformer blocks.", "--compile", default=False),
    seconds: float = _seconds(15.0),
    quick: bool = _QUICK,
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
    columns = {name: name for name in ("model", "contestant", "attention", "tokens")}
    title = f"{step}, {_place(report)}{compiled}"
    _show(title, report["results"], columns, "memory beyond weights", "speedup_over_ordinary")
    _show_reasons(report["results"], "model")


def _show(title: str, rows: list[dict[str, Any]], columns: dict[str, str], memory: str, speedup: str) -> None:
    from ..conversion.options import format_bytes

    cells = [
        [
            *(row[key] for key in columns.values()),
            f"{_number(row['milliseconds'])} ms",
            f"{_number(row['milliseconds_20'])}–{_number(row['milliseconds_80'])}",
            None if row["peak_memory_bytes"] is None else format_bytes(row["peak_memory_bytes"]),
            f"{row[speedup]:.2f}×" if speedup in row else None,
        ]
        for row in rows
        if row["reason"] is None
    ]
    show_table([*columns, "time", "20–80 %", memory, speedup.replace("speedup_over_", "vs ")], cells, title=title)


def _show_reasons(rows: list[dict[str, Any]], case: str) -> None:
    reasons: dict[tuple[str, str], dict[str, None]] = {}
    for row in rows:
        if row["reason"] is not None:
            reasons.setdefault((row["contestant"], row["reason"]), {})[row[case]] = None
    for (contestant, reason), names in reasons.items():
        where = "" if len(names) == len({row[case] for row in rows}) else f" ({', '.join(names)})"
        say(f"not measured: {contestant}{where}: {reason}")


def _place(report: dict[str, Any]) -> str:
    return f"{report['machine']['device']}, {report['options']['dtype']}"


def _number(milliseconds: float) -> str:
    return f"{milliseconds:.3f}" if milliseconds < 100 else f"{milliseconds:,.0f}"


def _announce(case: str) -> None:
    typer.echo(f"measuring {case}", err=True)


def _split(names: str | None) -> list[str] | None:
    return None if names is None else [name.strip() for name in names.split(",")]
