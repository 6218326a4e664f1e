# SPDX-License-Identifier: Apache-2.0
"""`mhla-hf env`: what a report of a bug needs."""

from typing import Any

import typer

from .options import Device
from .output import JsonFile, write_report


def env_command(device: Device = None, json_file: JsonFile = None) -> None:
    """Show versions and settings for a bug report, as Markdown."""
    from ..ops.diagnosis import describe_environment
    from ..utils.machine import choose_device

    report = describe_environment(choose_device(device))
    write_report(json_file, report)
    typer.echo("\n".join(_markdown(report)))


def _markdown(report: dict[str, Any]) -> list[str]:
    from ..conversion.options import format_bytes

    machine = report["machine"]
    device = str(machine["device"])
    if "capability" in machine:
        device += f", compute capability {machine['capability']}, {format_bytes(machine['memory_bytes'])}"
    kernels: dict[str, list[str]] = {}
    for name, reason in report["kernels"].items():
        kernels.setdefault(reason or "run", []).append(name)
    facts = {
        "Platform": report["platform"],
        "Python": machine["python"],
        "Device": f"{device} ({machine['cpu_cores']} CPU cores, {machine['threads']} threads)",
        "CUDA": machine["cuda"] or "none",
        **{name: version or "not installed" for name, version in report["packages"].items()},
        "Kernels": "; ".join(f"{', '.join(names)}: {reason}" for reason, names in kernels.items()),
        **{f"Failed check of {name}": text for name, text in report["checks"]["failed"].items()},
        **{name: f"`{value}`" for name, value in report["environment"].items()},
    }
    lines = [f"- {name}: {' '.join(str(value).split())}" for name, value in facts.items()]
    accelerate = report["accelerate"]
    if not isinstance(accelerate, dict):
        return [*lines, f"- accelerate config: {accelerate or 'none'}"]
    return [*lines, "- accelerate config:", *(f"    - {name}: {value}" for name, value in accelerate.items())]
