# SPDX-License-Identifier: Apache-2.0
"""`mhla-hf doctor`: why the kernels run or do not, and whether they compute what they should."""

from typing import Annotated, Any

import typer

from .options import Device
from .output import JsonFile, write_report


def doctor_command(
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Run all kernels on small inputs and compare them with plain torch.")
    ] = False,
    device: Device = None,
    json_file: JsonFile = None,
) -> None:
    """Show whether the kernels run on this machine, and test them.

    Versions, the device and the reason why kernels do not run are shown. With --kernels all of them are tested; the
    exit code is 1 if one fails.
    """
    from ..benchmarks.diagnosis import check_kernels, describe_installation, forget_failures, markdown_table
    from ..utils.machine import choose_device

    chosen = choose_device(device)
    report = describe_installation(chosen)
    _show_installation(report)
    rows: list[dict[str, Any]] = []
    write_report(json_file, report, final=not kernels)
    if kernels:
        report["results"] = rows
        from rich.console import Console

        # To the terminal alone: what is piped into a file is the tables.
        with Console(stderr=True).status("Compiling and running kernels: this takes minutes.") as status:
            for row in check_kernels(chosen):
                rows.append(row)
                # A kernel may end the process, and what came before it is worth keeping.
                write_report(json_file, report, final=False)
                status.update(f"{row['family']} kernels, {row['direction']}, {row['dtype']}, width {row['width']}")
        write_report(json_file, report)
        _show_kernels(rows)
        typer.echo(f"To paste into an issue:\n\n{_facts_line(report)}\n\n{markdown_table(rows)}")
    failed = sum(row["status"] == "failed" for row in rows)
    if kernels:
        typer.echo(f"\n{len(rows) - failed} of {len(rows)} runs passed.")
    if failed:
        raise typer.Exit(1)
    if rows:
        # Whatever was wrong before is mended.
        forget_failures(chosen)


def _show_installation(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape

    from ..conversion.options import format_bytes

    console = Console(soft_wrap=True)
    machine, checks = report["machine"], report["checks"]
    for name, value in machine.items():
        if name not in ("date", "memory_bytes") and value is not None:
            console.print(f"{name:<14} {escape(str(value))}", highlight=False)
    if "memory_bytes" in machine:
        console.print(f"{'memory':<14} {format_bytes(machine['memory_bytes'])}", highlight=False)
    for name, value in report["environment"].items():
        console.print(f"{name} = {escape(value)}", highlight=False)
    for name, reason in report["kernels"].items():
        verdict = "[green]kernels[/]" if reason is None else f"plain torch: {escape(reason)}"
        console.print(f"{name:<14} {verdict}", highlight=False)
    state = "none on this device"
    if checks["on"]:
        kept = (
            "without a home directory to keep verdicts" if checks["file"] is None else f"verdicts in {checks['file']}"
        )
        state = f"before the first use of each family; {kept}"
    console.print(f"{'kernel checks':<14} {escape(state)}", highlight=False)
    for name, text in checks["failed"].items():
        console.print(f"[red]failed[/] {escape(name)}: {escape(text)}", highlight=False)


def _show_kernels(rows: list[dict[str, Any]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from ..benchmarks.diagnosis import describe_errors

    table = Table("kernels", "direction", "type", "width", "status", "largest relative errors", box=SIMPLE_HEAD)
    for row in rows:
        colour = "green" if row["status"] == "passed" else "red"
        status = f"[{colour}]{row['status']}[/]"
        cells = row["family"], row["direction"], row["dtype"], str(row["width"]), status, escape(describe_errors(row))
        table.add_row(*cells)
    Console().print(table)


def _facts_line(report: dict[str, Any]) -> str:
    machine = report["machine"]
    names = ("capability", "cuda", "torch", "triton", "mhla-hf", "kernels")
    facts = ", ".join(f"{name} {machine[name]}" for name in names if machine.get(name) is not None)
    return f"{machine['device']}: {facts}"
