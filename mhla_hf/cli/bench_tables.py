# SPDX-License-Identifier: Apache-2.0
"""Tables of the reports of `mhla-hf bench`."""

from typing import Any

from rich.console import Console
from rich.table import Table


# Columns of a table that is not shown on a terminal.
_FILE_WIDTH = 130


def show_operator(report: dict[str, Any]) -> None:
    """Prints a table for each shape and direction of a report of `measure_operator`."""
    from ..conversion.options import format_bytes

    columns = ("contestant", "normaliser", "time", "20–80 %", "TFLOP/s", "GB/s", "of floor", "memory", "vs softmax")
    _print(f"{_place(report)}, copy {report['copy_bandwidth'] / 1e9:,.1f} GB/s")
    for shape in report["shapes"].values():
        for direction in dict.fromkeys(row["direction"] for row in report["results"]):
            rows = [row for row in report["results"] if (row["shape"], row["direction"]) == (shape["name"], direction)]
            title = (
                f"{shape['name']}, {direction}: B {shape['batch']}, T {shape['tokens']:,}, H {shape['heads']}, "
                f"K {shape['width']}, {shape['num_blocks']:,} blocks"
            )
            measured = [row for row in rows if row["reason"] is None]
            if measured:
                title += f", floor {_time(measured[0]['floor_milliseconds'])}"
            table = _table(title, columns, left=2)
            for row in measured:
                memory, speedup = row["peak_memory_bytes"], row["speedup_over_softmax"]
                table.add_row(
                    row["contestant"],
                    row["normalizer"] or "",
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


def show_models(report: dict[str, Any]) -> None:
    """Prints the table of a report of `measure_models`."""
    from ..conversion.options import format_bytes

    step = "forward pass" if report["benchmark"] == "model" else "training step"
    compiled = ", blocks compiled" if report["options"]["compile_backend"] else ""
    columns = ("model", "attention", "tokens", "time", "20–80 %", "memory beyond weights", "vs ordinary")
    table = _table(f"{step}, {_place(report)}{compiled}", columns, left=2)
    for row in report["results"]:
        if row["reason"] is not None:
            continue
        memory, speedup = row["peak_memory_bytes"], row["speedup_over_ordinary"]
        table.add_row(
            row["model"],
            row["contestant"] if row["attention"] == "mhla" else f"{row['contestant']} ({row['attention']})",
            f"{row['tokens']:,}",
            _time(row["milliseconds"]),
            _range(row),
            "?" if memory is None else format_bytes(memory),
            "" if speedup is None else f"{speedup:.2f}×",
        )
    _print(table)
    _show_reasons(report["results"], "model")


def show_decoding(report: dict[str, Any]) -> None:
    """Prints the table of a report of `measure_decoding`, and how times grow with the context."""
    from ..conversion.options import format_bytes

    title = f"{report['model']['class']}, {report['machine']['device']}, {report['options']['cache']} cache"
    columns = ("dtype", "context", "MHLA cache", "KV cache", "ratio", "MHLA time", "softmax time")
    table = _table(title, columns, left=1)
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
    _print(table)
    contexts = sorted(report["options"]["contexts"])
    if len(contexts) > 1:
        for dtype, growth in report["growth"].items():
            _print(
                f"{dtype}: from {contexts[0]:,} to {contexts[-1]:,} tokens a decoded token takes "
                f"{growth['mhla']:.2f} times as long with MHLA, {growth['softmax']:.2f} times with softmax."
            )


def _show_reasons(rows: list[dict[str, Any]], case: str) -> None:
    """Prints a line for each contestant that was not measured, with the reason."""
    cases: dict[tuple[str, str], dict[str, None]] = {}
    for row in rows:
        if row["reason"] is not None:
            cases.setdefault((row["contestant"], row["reason"]), {})[row[case]] = None
    everywhere = len({row[case] for row in rows})
    for (contestant, reason), names in cases.items():
        where = "" if len(names) == everywhere else f" ({', '.join(names)})"
        _print(f"not measured: {contestant}{where}: {reason}")


def _place(report: dict[str, Any]) -> str:
    return f"{report['machine']['device']}, {report['options']['dtype']}"


def _table(title: str, columns: tuple[str, ...], left: int) -> Table:
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


def _print(content: str | Table) -> None:
    console = Console()
    if not console.is_terminal:
        # Files and pipes have no width that a table would have to fit.
        console = Console(width=max(console.width, _FILE_WIDTH))
    console.print(content, highlight=False, markup=False, soft_wrap=isinstance(content, str))
