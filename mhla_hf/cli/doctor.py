# SPDX-License-Identifier: Apache-2.0
"""`mhla-hf doctor`, which checks a model's directory or the kernels, and `mhla-hf env`, for bug reports."""

from collections import Counter
from typing import TYPE_CHECKING, Any

import typer

from .options import HUB, Device, argument, given, option, with_options
from .output import JsonFile, say, show_table, write_report


if TYPE_CHECKING:
    from ..hub.checks import DirectoryCheck, Problem


@with_options(HUB)
def doctor_command(
    model: str | None = argument(
        "MODEL", "Directory or Hub id of a pipeline or model to check. Default: none.", default=None
    ),
    *,
    no_values: bool = option(
        "Skip the search for NaN and infinite values in MODEL's weights.", "--no-values", default=False
    ),
    gpu: bool = option(
        "Check the kernels on this machine's GPU and time them, within five minutes.", "--gpu", default=False
    ),
    device: Device = "auto",
    json_file: JsonFile = None,
    **options: Any,
) -> None:
    """Check a model's directory, or this machine's kernels.

    With MODEL, doctor checks files, index, configuration and weights, and says what is missing, damaged or
    contradictory and what to do. Warnings name layers whose mixing weights show a failure of training, such as
    uniform-mixing. Without MODEL, it shows versions, the device and why kernels do not run.

    With --gpu, it compiles the kernels, compares them with plain torch at the sizes of models, and times them beside
    plain torch and softmax attention. What it prints is Markdown to paste into an issue. Without a GPU, it interprets
    the kernels at small sizes on the CPU, which says nothing about a GPU.

    The exit code is 1 if something is wrong, 0 for warnings, and 3 for --gpu if no GPU was found.

    Examples:

        mhla-hf doctor wan-mhla
        mhla-hf doctor user/wan-mhla --json report.json
        mhla-hf doctor --gpu --json gpu.json
    """
    if model is None and gpu:
        _examine_kernels(device, json_file)
    elif model is None:
        _describe_installation(device, json_file)
    elif gpu:
        raise typer.BadParameter("--gpu checks this machine: give it without MODEL")
    else:
        _check_model(model, not no_values, json_file, given(options, HUB))


def _check_model(model: str, values: bool, json_file: JsonFile, hub: dict[str, Any]) -> None:
    from dataclasses import asdict

    from ..analysis.signatures import directory_signatures
    from ..hub.checks import DirectoryCheck, Problem
    from ..utils.locations import find_directory

    directory, origin = find_directory(model, **hub)
    check = DirectoryCheck(directory, values=values, progress=True)
    problems = list(check.problems)
    errors = sum(problem.level == "error" for problem in problems)
    signatures = [] if errors else directory_signatures(directory)
    problems += [
        Problem(folder.relative_to(directory).as_posix(), str(signature), "warning")
        for folder, signature in signatures
    ]
    report = {
        "source": origin,
        "class_name": check.class_name,
        "models": check.models,
        "problems": [asdict(problem) for problem in problems],
        "failure_signatures": [signature.to_dict() for _, signature in signatures],
    }
    write_report(json_file, {**report, "errors": errors, "warnings": len(problems) - errors})
    _show_description(check)
    _show_problems(problems)
    if errors:
        raise typer.Exit(1)


def _show_description(check: "DirectoryCheck") -> None:
    from ..utils.messages import format_bytes

    rows = [
        {
            "component": model["name"],
            "class": model["class_name"],
            "MHLA layers": f"{model['mhla_layers']} of {model['num_layers']}" if model["mhla_layers"] else None,
            "parameters": f"{model['parameters']:,}",
            "types": ", ".join(model["dtypes"]),
            "size": format_bytes(model["nbytes"]),
        }
        for model in check.models
    ]
    show_table(rows, title=check.class_name)


def _show_problems(problems: "list[Problem]") -> None:
    for problem in problems:
        say(
            f"{problem.level} {problem.file}: {problem.message}", style="red" if problem.level == "error" else "yellow"
        )
    numbers = Counter(problem.level for problem in problems)
    counts = [f"{number} {level}{'s' * (number > 1)}" for level, number in sorted(numbers.items())]
    say(f"{' and '.join(counts) or 'No problems'}.", style="" if counts else "green")


def _describe_installation(device: str, json_file: JsonFile) -> None:
    from ..ops.diagnosis import describe_environment
    from ..utils.machine import choose_device

    report = describe_environment(choose_device(device))
    _show_environment(report)
    write_report(json_file, report)


def _examine_kernels(device: str, json_file: JsonFile) -> None:
    import os

    import torch

    from ..utils.machine import choose_device

    chosen = choose_device(device)
    if torch.cuda.is_available() != (chosen.type == "cuda"):
        raise typer.BadParameter("--gpu runs on the GPU that there is: give it without --device")
    if chosen.type == "cpu":
        # Triton reads this when it is imported.
        os.environ.setdefault("TRITON_INTERPRET", "1")
    from rich.console import Console

    from ..gpu.examination import SECONDS, Report, examine_kernels, markdown_table
    from ..ops.diagnosis import describe_environment

    # To the terminal alone: what is piped into a file is Markdown.
    with Console(stderr=True).status("Compiling kernels: this takes minutes.") as status:
        report = Report("doctor", json_file, SECONDS, status.update)
        if note := report.content.get("note"):
            typer.echo(note)
        report.content["environment"] = describe_environment(chosen)
        passed = examine_kernels(report)
    _show_environment({name: part for name, part in report.content.items() if name not in ("results", "left_out")})
    failed = sum(row["status"] == "failed" for row in report.results)
    count = len(report.results)
    typer.echo("\n" + "\n".join(markdown_table(report.results)) + f"\n\n{count - failed} of {count} checks passed.")
    if report.content["left_out"]:
        typer.echo(f"Skipped (time limit reached): {', '.join(report.content['left_out'])}.")
    if note:
        typer.echo(note)
    if note or not passed:
        raise typer.Exit(3 if passed else 1)


def env_command(device: Device = "auto", json_file: JsonFile = None) -> None:
    """Show versions and settings for a bug report, as Markdown."""
    _describe_installation(device, json_file)


def _show_environment(report: dict[str, Any], indent: str = "") -> None:
    """Print a report as nested Markdown lists."""
    for name, value in report.items():
        if isinstance(value, dict):
            typer.echo(f"{indent}- {name}:")
            _show_environment(value, f"{indent}    ")
        else:
            typer.echo(f"{indent}- {name}: {' '.join(str(value).split())}")
