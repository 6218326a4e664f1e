# SPDX-License-Identifier: Apache-2.0
"""Diagnosis of the Triton kernels on a device: why they run or not, and the error of each."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..utils.compat import installed_versions
from ..utils.machine import machine_facts
from .backends import ENVIRONMENT_VARIABLE, auto_obstacle, triton_obstacle
from .kernel_cases import FAMILIES, compare_kernels


TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "tf32": torch.float32}
"""Types of tokens by name; `"tf32"` is float32 whose products run through TF32."""
# Beside those of `machine_facts`.
_PACKAGES = ("peft", "safetensors", "huggingface_hub", "tokenizers", "numpy", "kernels", "gradio")


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Describe what a bug report needs, for JSON.

    Args:
        device: The device that models would run on.

    Returns:
        `machine` (versions of the main packages among it), `platform`, `packages` (versions of others by name, None if
        not installed), `environment` (the variables of this package and Triton's), and `kernels` (for each dtype the
        reason why they do not run, None where they run).
    """
    machine = machine_facts(device)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        machine["capability"] = f"{properties.major}.{properties.minor}"
        machine["memory_bytes"] = properties.total_memory
    ours = [name for name in sorted(os.environ) if name.startswith("MHLA_HF_") or name == "TRITON_INTERPRET"]
    return {
        "machine": machine,
        "platform": platform.platform(),
        "packages": installed_versions(*_PACKAGES),
        "environment": {name: os.environ[name] for name in ours if os.environ[name]},
        "kernels": {name: _obstacle(name, device) for name in TYPES},
    }


def _obstacle(name: str, device: torch.device) -> str | None:
    wanted = os.environ.get(ENVIRONMENT_VARIABLE)
    if wanted == "torch":
        return f"{ENVIRONMENT_VARIABLE}=torch"
    tokens = torch.empty(1, 1, 1, 64, dtype=TYPES[name], device=device)
    obstacle = triton_obstacle(tokens)
    if obstacle is not None or wanted == "triton":
        return obstacle
    with _tf32(name == "tf32"):
        return auto_obstacle(tokens)


def check_kernels(device: torch.device, part: int = 0, parts: int = 1) -> Iterator[dict[str, Any]]:
    """Run every family of kernels, forward and backward, at several dtypes and widths, and compare with float64.

    Args:
        device: A GPU, or with TRITON_INTERPRET=1 the CPU, where one tiny width is run.
        part: Which share of the runs to do.
        parts: Number of shares.

    Yields:
        For each run `family`, `direction`, `dtype`, `width`, `repeats` (query heads that share a key head),
        `normalizer`, `status` (`"passed"` or `"failed"`), `errors` (relative errors of the output, of a new state and
        of the gradients by name), `reason` of a failure, and `seconds`, compilation included.

    Raises:
        ValueError: If the kernels do not run on this device.
    """
    obstacle = triton_obstacle(torch.empty(1, 1, 1, 64, device=device))
    if obstacle is not None:
        hint = "" if device.type == "cuda" else " With TRITON_INTERPRET=1, Triton interprets them on a CPU."
        raise ValueError(f"The kernels cannot be checked here: {obstacle}.{hint}")
    runs = [
        (family, *run, backward)
        for family, case in FAMILIES.items()
        for run in _runs(device)
        # Features have neither normaliser nor keys.
        if family != "hedgehog" or run[2:] == (1, "query")
        for backward in ((False, True) if case.has_gradients else (False,))
    ]
    for family, name, width, repeats, normalizer, backward in runs[part::parts]:
        start = time.perf_counter()
        with _tf32(name == "tf32"):
            kind = family, device, TYPES[name], width, width, repeats, normalizer
            errors, reason = compare_kernels(*kind, backward=backward)
        if errors or reason:
            yield {
                "family": family,
                "direction": "backward" if backward else "forward",
                "dtype": name,
                "width": width,
                "repeats": repeats,
                "normalizer": normalizer,
                "status": "failed" if reason else "passed",
                "errors": errors,
                "reason": reason,
                "seconds": time.perf_counter() - start,
            }


def _runs(device: torch.device) -> list[tuple[str, int, int, str]]:
    """Types, widths of heads, queries that share a key, normalisers; 72 is DiT-XL/2's width, no multiple of 16."""
    if device.type == "cpu":
        return [("float32", 8, 1, "query")]
    types = [("bfloat16", 72), ("bfloat16", 128), *((name, 64) for name in TYPES)]
    return [*((name, width, 1, "query") for name, width in types), (*types[-1], 3, "none")]


@contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    """Set whether torch multiplies float32 matrices through TF32 on GPUs."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
