# SPDX-License-Identifier: Apache-2.0
"""What a measurement was made on."""

from __future__ import annotations

import os
import platform
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch


def machine_facts(device: torch.device) -> dict[str, Any]:
    """Date, device, number of CPU cores and threads, and versions, ready for JSON.

    Args:
        device: What the models ran on.
    """
    return {
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name(),
        "cpu_cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers")},
    }


def processor_name() -> str:
    """Name of the CPU, as far as the system tells it."""
    information = Path("/proc/cpuinfo")
    if information.is_file():
        for line in information.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def synchronize(device: torch.device) -> None:
    """Waits until the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
