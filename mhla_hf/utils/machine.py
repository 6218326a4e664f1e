# SPDX-License-Identifier: Apache-2.0
"""The device and number types that a program runs with, and a record of the machine."""

from __future__ import annotations

import os
import platform
from datetime import date
from pathlib import Path
from typing import Any

import torch

from .compat import installed_versions
from .messages import check_choice


DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}
"""The names `--dtype` takes."""


def choose_device(name: str | None) -> torch.device:
    """Return the device of a name; `None` or `auto` for a GPU if there is one. A named GPU becomes the current one.

    Raises:
        ValueError: If there is no such device here.
    """
    has_gpu = torch.cuda.is_available()
    name = None if name == "auto" else name
    name = name or ("cuda" if has_gpu else "cpu")
    kind = name.partition(":")[0]
    if kind not in ("cpu", "cuda") or (kind == "cuda" and not has_gpu):
        raise ValueError(f"device={name!r} must be cpu{' or cuda' if has_gpu else ': there is no GPU here'}.")
    device = torch.device(name)
    if device.index is not None and device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def machine_facts(device: torch.device) -> dict[str, Any]:
    """Return date, device, CPU cores and threads, and versions (`None` if not installed), ready for JSON.

    Args:
        device: The device that the models ran on.
    """
    return {
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name(),
        "cpu_cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        **installed_versions("torch", "transformers", "diffusers", "accelerate", "triton", "mhla-hf"),
    }


def processor_name() -> str:
    """Return the name of the CPU, as far as the system reports it."""
    information = Path("/proc/cpuinfo")
    if information.is_file():
        for line in information.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def parse_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """Read a floating-point type from its name.

    Raises:
        ValueError: If it is not float32, bfloat16 or float16.
    """
    if dtype is None or isinstance(dtype, torch.dtype) and dtype in DTYPES.values():
        return dtype
    check_choice("dtype", dtype, DTYPES)
    return DTYPES[str(dtype)]
