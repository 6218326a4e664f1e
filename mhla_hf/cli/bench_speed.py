# SPDX-License-Identifier: Apache-2.0
"""`mhla-hf bench op`, `bench model` and `bench train`: time and memory on this machine, against other attention."""

from pathlib import Path
from typing import Annotated, Any

import typer

from .bench import JsonFile, PlotFile, Quiet, check_outputs, progress_printer, write_report


# Columns of a table that is not shown on a terminal.
_FILE_WIDTH = 130

Device = Annotated[str | None, typer.Option(help="cpu or cuda; a GPU if there is one.")]
Dtype = Annotated[
    str | None, typer.Option(help="bfloat16, float16 or float32; bfloat16 on a GPU and float32 on a CPU if left out.")
]
Quick = Annotated[bool, typer.Option("--quick", help="A few sizes and rounds, to see that it works.")]
Compile = Annotated[bool, typer.Option("--compile", help="Compile the transformer blocks of all contestants.")]
Models = Annotated[
    str | None,
    typer.Option(help="Such as wan,dit-512; those that suit the device if left out."),
]
Variants = Annotated[str | None, typer.Option(help="Of ordinary,mhla-torch,mhla-triton; all if left out.")]
Seconds = Annotated[float | None, typer.Option(help="Time for the rounds of one size, about.")]


def operator_command(
    shapes: Annotated[
        str | None,
        typer.Option(help="Such as wan,causal-32k; those that suit the device if left out."),
    ] = None,
    contestants: Annotated[
        str | None,
        typer.Option(help="Such as mhla-triton,softmax-cudnn; all usual ones if left out."),
    ] = None,
    dtype: Dtype = None,
    device: Device = None,
    backward: Annotated[bool, typer.Option(help="Measure forward and backward together too.")] = True,
    seconds: Seconds = None,
    quick: Quick = False,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
    quiet: Quiet = False,
) -> None:
    """The operator by itself: MHLA, softmax and linear attention at the sizes of models, against a memory copy.

    Contestants take turns and inputs change from run to run; times are medians. The floor is what a copy takes to
    move queries, keys, values and outputs once, and their gradients once with a backward pass.
    """
    from ..benchmarks.operator import OperatorOptions, measure_operator

    check_outputs(json_file, plot_file)
    options: dict[str, Any] = {"dtype": dtype, "device": device, "backward": backward, "quick": quick}
    options.update(shapes=_names(shapes), contestants=_names(contestants))
    report = measure_operator(OperatorOptions(**_given(options, seconds)), progress_printer(quiet))
    _show_operator(report)
    write_report(report, json_file, plot_file)


def model_command(
    models: Models = None,
    contestants: Variants = None,
    dtype: Dtype = None,
    device: Device = None,
    compiled: Compile = False,
    seconds: Seconds = None,
    quick: Quick = False,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
    quiet: Quiet = False,
) -> None:
    """The forward pass of whole models with random weights: their own attention against MHLA, in the same run."""
    options = {"models": _names(models), "dtype": dtype, "device": device, "quick": quick}
    _measure_models({**options, "step": "forward"}, contestants, compiled, seconds, json_file, plot_file, quiet)


def train_command(
    models: Models = None,
    contestants: Variants = None,
    dtype: Dtype = None,
    device: Device = None,
    compiled: Compile = False,
    checkpointing: Annotated[
        bool, typer.Option(help="Keep the inputs of transformer blocks only and compute the rest again.")
    ] = True,
    optimizer: Annotated[bool, typer.Option("--optimizer", help="End each step with one of AdamW.")] = False,
    seconds: Seconds = None,
    quick: Quick = False,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
    quiet: Quiet = False,
) -> None:
    """A training step of whole models with random weights: their own attention against MHLA, in the same run."""
    options = {"models": _names(models), "dtype": dtype, "device": device, "quick": quick}
    options.update(step="train", checkpointing=checkpointing, optimizer=optimizer)
    _measure_models(options, contestants, compiled, seconds, json_file, plot_file, quiet)


def _measure_models(
    options: dict[str, Any],
    contestants: str | None,
    compiled: bool,
    seconds: float | None,
    json_file: Path | None,
    plot_file: Path | None,
    quiet: bool,
) -> None:
    from ..benchmarks.models import ModelOptions, measure_models

    check_outputs(json_file, plot_file)
    if contestants is not None:
        options["contestants"] = _names(contestants)
    if compiled:
        options["compile_backend"] = "inductor"
    report = measure_models(ModelOptions(**_given(options, seconds)), progress_printer(quiet))
    _show_models(report)
    write_report(report, json_file, plot_file)


def _names(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(name.strip() for name in text.split(","))


def _given(options: dict[str, Any], seconds: float | None) -> dict[str, Any]:
    return options if seconds is None else {**options, "seconds": seconds}


def _show_operator(report: dict[str, Any]) -> None:
    from ..conversion.options import format_bytes

    columns = ("contestant", "normaliser", "time", "20–80 %", "TFLOP/s", "GB/s", "of floor", "memory", "vs softmax")
    machine, options = report["machine"], report["options"]
    _print(f"{machine['device']}, {options['dtype']}, copy {report['copy_bandwidth'] / 1e9:,.1f} GB/s")
    for shape in report["shapes"].values():
        for direction in dict.fromkeys(row["direction"] for row in report["results"]):
            rows = [row for row in report["results"] if (row["shape"], row["direction"]) == (shape["name"], direction)]
            floor = next((row["floor_milliseconds"] for row in rows if row["reason"] is None), None)
            title = (
                f"{shape['name']}, {direction}: B {shape['batch']}, T {shape['tokens']:,}, H {shape['heads']}, "
                f"K {shape['width']}, {shape['num_blocks']:,} blocks"
            )
            table = _table(f"{title}, floor {_time(floor)}" if floor is not None else title, columns, left=2)
            for row in (row for row in rows if row["reason"] is None):
                names = row["contestant"], row["normalizer"] or ""
                memory, speedup = row["peak_memory_bytes"], row["speedup_over_softmax"]
                table.add_row(
                    *names,
                    _time(row["milliseconds"]),
                    _range(row),
                    f"{row['teraflops_per_second']:.3g}",
                    f"{row['gigabytes_per_second']:,.3g}",
                    f"{row['share_of_floor']:.1%}",
                    "?" if memory is None else format_bytes(memory),
                    "" if speedup is None else f"{speedup:.2f}×",
                )
            _print(table)
    _show_reasons(report["results"], "shape")


def _show_models(report: dict[str, Any]) -> None:
    from ..conversion.options import format_bytes

    machine, options = report["machine"], report["options"]
    what = "forward pass" if report["benchmark"] == "model" else "training step"
    compiled = ", blocks compiled" if options["compile_backend"] else ""
    columns = ("model", "attention", "tokens", "time", "20–80 %", "memory beyond weights", "vs ordinary")
    table = _table(f"{what}, {machine['device']}, {options['dtype']}{compiled}", columns, left=2)
    for row in report["results"]:
        name = row["contestant"] if row["attention"] == "mhla" else f"{row['contestant']} ({row['attention']})"
        cells = [row["model"], name, f"{row['tokens']:,}"]
        if row["reason"] is not None:
            continue
        memory, speedup = row["peak_memory_bytes"], row["speedup_over_ordinary"]
        cells += [_time(row["milliseconds"]), _range(row)]
        cells += ["?" if memory is None else format_bytes(memory), "" if speedup is None else f"{speedup:.2f}×"]
        table.add_row(*cells)
    _print(table)
    _show_reasons(report["results"], "model")


def _show_reasons(rows: list[dict[str, Any]], case: str) -> None:
    """What was not measured and why, a line for each contestant and reason."""
    cases: dict[tuple[str, str], dict[str, None]] = {}
    for row in rows:
        if row["reason"] is not None:
            cases.setdefault((row["contestant"], row["reason"]), {})[row[case]] = None
    everywhere = len({row[case] for row in rows})
    for (contestant, reason), names in cases.items():
        where = "" if len(names) == everywhere else f" ({', '.join(names)})"
        _print(f"not measured: {contestant}{where}: {reason}")


def _table(title: str, columns: tuple[str, ...], left: int) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < left else "right", overflow="fold")
    return table


def _time(milliseconds: float) -> str:
    return f"{_number(milliseconds)} ms"


def _range(row: dict[str, Any]) -> str:
    return f"{_number(row['milliseconds_20'])}–{_number(row['milliseconds_80'])}"


def _number(milliseconds: float) -> str:
    return f"{milliseconds:.3f}" if milliseconds < 100 else f"{milliseconds:,.0f}"


def _print(what: Any) -> None:
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        # Files and pipes have no width of their own that a table would have to fit.
        console = Console(width=max(console.width, _FILE_WIDTH))
    console.print(what, highlight=False, markup=False, soft_wrap=isinstance(what, str))
