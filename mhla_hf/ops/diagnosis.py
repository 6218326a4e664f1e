# SPDX-License-Identifier: Apache-2.0
"""Diagnosis of the Triton kernels on a device: why they run or not, and the error of each."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..utils.compat import installed_versions
from ..utils.machine import machine_facts
from .backends import (
    ENVIRONMENT_VARIABLE,
    INTERPRETED,
    INTERPRETED_DTYPES,
    TRITON_INSTALLED,
    auto_obstacle,
    triton_obstacle,
)
from .kernel_cases import FAMILIES, kernel_errors
from .kernel_check import VerdictFile, environment, first_line, is_checked, judge


TYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "tf32": torch.float32,
}
"""Types of tokens by name; `"tf32"` is float32 whose products run through TF32."""
# Widths of heads for the first type, and for the others. 72 is that of DiT-XL/2, which is no multiple of 16.
_WIDTHS, _OTHER_WIDTHS = (64, 72, 128), (64,)
_INTERPRETED_WIDTHS = (8,)
_PACKAGES = (
    "mhla-hf", "torch", "transformers", "diffusers", "accelerate", "peft", "triton", "safetensors", "huggingface_hub",
    "tokenizers", "numpy", "kernels", "gradio",
)  # fmt: skip


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Describe what a bug report needs, for JSON.

    Args:
        device: The device that models would run on.

    Returns:
        `machine`, `platform`, `packages` (versions by name, None if not installed), `environment` (the variables of
        this package and Triton's), `kernels` (for each dtype the reason why they do not run, None where they run),
        `checks` (whether there are any, the file of verdicts, and those that say that kernels failed), and
        accelerate's configuration in `accelerate` (None if there is none).
    """
    machine = {**machine_facts(device), **installed_versions("peft")}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        machine["capability"] = f"{properties.major}.{properties.minor}"
        machine["memory_bytes"] = properties.total_memory
    machine["kernels"] = environment(device)["kernels"]
    verdicts = VerdictFile(device)
    ours = [name for name in sorted(os.environ) if name.startswith("MHLA_HF_") or name == "TRITON_INTERPRET"]
    return {
        "machine": machine,
        "platform": platform.platform(),
        "packages": installed_versions(*_PACKAGES),
        "environment": {name: os.environ[name] for name in ours if os.environ[name]},
        "kernels": {name: _obstacle(name, device) for name in TYPES},
        "checks": {
            "on": is_checked(device),
            "file": None if verdicts.path is None else str(verdicts.path),
            "failed": {name: text for name, text in verdicts.read().items() if text},
        },
        "accelerate": _accelerate_configuration(),
    }


def _accelerate_configuration() -> dict[str, Any] | str | None:
    from accelerate.commands.config.config_args import default_config_file, load_config_from_file

    if not os.path.isfile(default_config_file):
        return None
    try:
        return {name: str(value) for name, value in load_config_from_file(default_config_file).to_dict().items()}
    # A broken file must not hide the rest of the report.
    except Exception as error:
        return f"cannot be read: {first_line(error)}"


def _obstacle(name: str, device: torch.device) -> str | None:
    if os.environ.get(ENVIRONMENT_VARIABLE) == "torch":
        return f"{ENVIRONMENT_VARIABLE}=torch"
    tokens = torch.empty(1, 1, 1, 64, dtype=TYPES[name], device=device)
    obstacle = _kernels_obstacle(tokens)
    if obstacle is not None or os.environ.get(ENVIRONMENT_VARIABLE) == "triton":
        return obstacle
    with _tf32(name == "tf32"):
        return auto_obstacle(tokens)


def _kernels_obstacle(tokens: torch.Tensor) -> str | None:
    if TRITON_INSTALLED and tokens.device.type == "cpu" and not INTERPRETED:
        return "they run on GPUs, and " + ("device is cpu" if torch.cuda.is_available() else "there is none here")
    return triton_obstacle(tokens)


def check_kernels(device: torch.device) -> Iterator[dict[str, Any]]:
    """Run every family of kernels, forward and backward, at several dtypes and widths, and compare with float64.

    Args:
        device: A GPU, or with TRITON_INTERPRET=1 the CPU, where one tiny width is run.

    Yields:
        For each run `family`, `direction`, `dtype`, `width`, `status` (`"passed"` or `"failed"`), `errors` (relative
        errors of the output, of a new state and of the gradients by name), `reason` of a failure, and `seconds`,
        compilation included.

    Raises:
        ValueError: If the kernels do not run on this device.
    """
    obstacle = _kernels_obstacle(torch.empty(1, 1, 1, 64, device=device))
    if obstacle is not None:
        hint = "" if device.type == "cuda" else " With TRITON_INTERPRET=1, Triton interprets them on a CPU."
        raise ValueError(f"The kernels cannot be checked here: {obstacle}.{hint}")
    for family, case in FAMILIES.items():
        for name, width in _runs(device):
            for backward in (False, True) if case.has_gradients else (False,):
                outcome = _run(family, device, name, width, backward)
                if outcome["errors"] or outcome["reason"]:
                    direction = "backward" if backward else "forward"
                    yield {"family": family, "direction": direction, "dtype": name, "width": width, **outcome}


def _runs(device: torch.device) -> Iterator[tuple[str, int]]:
    for index, (name, dtype) in enumerate(TYPES.items()):
        if device.type == "cpu":
            widths: Sequence[int] = _INTERPRETED_WIDTHS if dtype in INTERPRETED_DTYPES and name != "tf32" else ()
        else:
            widths = _OTHER_WIDTHS if index else _WIDTHS
        for width in widths:
            yield name, width


def _run(family: str, device: torch.device, name: str, width: int, backward: bool) -> dict[str, Any]:
    start, errors = time.perf_counter(), {}
    try:
        with _tf32(name == "tf32"):
            errors = kernel_errors(family, device, TYPES[name], width, backward=backward)
        reason = judge(errors, TYPES[name])
    # Compilers and drivers raise errors of many types, and all of them belong in the table.
    except Exception as error:
        reason = first_line(error)
    status = "failed" if reason else "passed"
    return {"status": status, "errors": errors, "reason": reason, "seconds": time.perf_counter() - start}


@contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    """Set whether torch multiplies float32 matrices through TF32 on GPUs."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def forget_failures(device: torch.device) -> None:
    """Remove verdicts of failed kernels, so that they are checked again on their next use."""
    verdicts = VerdictFile(device)
    if any(verdicts.read().values()):
        verdicts.remove()


def markdown_table(rows: Sequence[dict[str, Any]]) -> str:
    """Format the rows of [`check_kernels`] as a Markdown table."""
    lines = ["| kernels | direction | type | width | status | largest relative errors |", "|---|---|---|---|---|---|"]
    for row in rows:
        cells = [row["family"], row["direction"], row["dtype"], str(row["width"]), row["status"], describe_errors(row)]
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return "\n".join(lines)


def describe_errors(row: dict[str, Any]) -> str:
    """Format the reason of a failure and the errors by name of a row of [`check_kernels`]."""
    errors = ", ".join(f"{name.removeprefix('gradient of ')} {error:.1e}" for name, error in row["errors"].items())
    return "; ".join(filter(None, (row["reason"], errors)))
