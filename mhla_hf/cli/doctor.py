# SPDX-License-Identifier: Apache-2.0
"""`mhla-hf doctor`: what is wrong with a model's directory, or whether the kernels run as they should."""

from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import HUB, Device, given, with_options
from .output import JsonFile, write_report


if TYPE_CHECKING:
    from ..hub.checks import Problem
    from ..hub.description import DirectoryDescription


@with_options(HUB, last=True)
def doctor_command(
    model: Annotated[
        str | None, typer.Argument(help="Directory or Hub id of a pipeline or model to check. Default: none.")
    ] = None,
    *,
    no_values: Annotated[
        bool, typer.Option("--no-values", help="Do not look for NaN and infinite values in MODEL's weights.")
    ] = False,
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Run all kernels on small inputs and compare them with plain torch.")
    ] = False,
    device: Device = None,
    json_file: JsonFile = None,
    **options: Any,
) -> None:
    """Check a model's directory, or the kernels on this machine.

    With MODEL, its files, index, configuration and weights are checked: what is missing, damaged or contradictory,
    and what to do. Warnings name layers whose mixing weights show a failure of training, such as uniform-mixing.
    Without, versions, the device and the reason why kernels do not run are shown; with --kernels all of them are
    tested. The exit code is 1 if something is wrong, and 0 for warnings.
    """
    hub = given(options, HUB)
    if model is not None:
        if kernels or device is not None:
            name = "kernels" if kernels else "device"
            raise ValueError(f"--{name} has no effect with MODEL; leave one of them out.")
        _check_model(model, not no_values, json_file, hub)
        return
    if hub or no_values:
        name = min(hub).replace("_", "-") if hub else "no-values"
        raise ValueError(f"--{name} has no effect without MODEL.")
    _check_installation(kernels, device, json_file)


def _check_model(model: str, values: bool, json_file: JsonFile, hub: dict[str, Any]) -> None:
    from dataclasses import asdict

    from ..analysis.diagnosis import directory_signatures
    from ..hub.checks import Problem, check_directory
    from ..hub.description import describe_directory
    from ..utils.locations import find_directory

    directory, origin = find_directory(model, **hub)
    problems = check_directory(directory, values=values, progress=True)
    description = describe_directory(directory)
    errors = sum(problem.level == "error" for problem in problems)
    signatures = [] if errors else directory_signatures(directory)
    problems += [
        Problem(folder.relative_to(directory).as_posix(), str(signature), "warning")
        for folder, signature in signatures
    ]
    report = {
        "source": origin,
        **description.to_dict(),
        "problems": [asdict(problem) for problem in problems],
        "failure_signatures": [signature.to_dict() for _, signature in signatures],
    }
    write_report(json_file, {**report, "errors": errors, "warnings": len(problems) - errors})
    _show_description(description)
    _show_problems(problems)
    if errors:
        raise typer.Exit(1)


def _show_description(description: "DirectoryDescription") -> None:
    from rich.console import Console
    from rich.markup import escape

    from ..conversion.options import format_bytes

    console = Console(soft_wrap=True)
    if description.class_name:
        console.print(f"[bold]{escape(description.class_name)}[/]", highlight=False)
    for model in description.models:
        facts = [model.class_name]
        if model.mhla_layers:
            softmax = "" if model.num_layers is None else f", {max(0, model.num_layers - model.mhla_layers)} softmax"
            facts.append(f"{model.mhla_layers} MHLA{softmax} layers")
            facts.append(f"blocks {model.blocks}")
        facts += [f"{model.parameters:,} parameters", " and ".join(model.dtypes), format_bytes(model.nbytes)]
        line = "; ".join(filter(None, facts))
        console.print(f"  {escape(model.name)}: {escape(line)}", highlight=False)


def _show_problems(problems: "list[Problem]") -> None:
    from rich.console import Console
    from rich.markup import escape

    console = Console(soft_wrap=True)
    for problem in problems:
        colour = "red" if problem.level == "error" else "yellow"
        text = f"[{colour}]{problem.level}[/] [bold]{escape(problem.file)}[/]: {escape(problem.message)}"
        console.print(text, highlight=False)
    numbers = Counter(problem.level for problem in problems)
    counts = [f"{number} {level}{'s' * (number > 1)}" for level, number in sorted(numbers.items())]
    console.print(f"{' and '.join(counts)}." if counts else "[green]No problems.[/]", highlight=False)


def _check_installation(kernels: bool, device: str | None, json_file: JsonFile) -> None:
    from ..ops.diagnosis import check_kernels, describe_installation, forget_failures, markdown_table
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

    from ..ops.diagnosis import describe_errors

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
