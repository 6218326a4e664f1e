# SPDX-License-Identifier: Apache-2.0
"""A report that is written after every row, so that a run that is cut off leaves what it has found."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..utils.files import write_json
from ..utils.machine import machine_facts
from .cases import DEVICE, DTYPE, ON_GPU


NO_GPU = "No GPU was found, and nothing ran on one: kernels were interpreted on the CPU, and nothing was timed."
_PROPERTIES = ("major", "minor", "multi_processor_count", "L2_cache_size", "total_memory")


class Report:
    """Rows with the machine that they were found on.

    Args:
        name: Name of the command.
        path: JSON file to write after every row; None for none.
        seconds: Time after which nothing new is begun.
        show: Called with a line for each row.
    """

    def __init__(
        self, name: str, path: Path | None, seconds: float, show: Callable[[str], None] = partial(print, flush=True)
    ) -> None:
        self.path, self.stop, self.show = path, time.monotonic() + seconds, show
        facts = machine_facts(DEVICE)
        if ON_GPU:
            properties = torch.cuda.get_device_properties(DEVICE)
            facts |= {name: getattr(properties, name, None) for name in _PROPERTIES}
        self.content: dict[str, Any] = {
            "benchmark": f"kernels {name}",
            "machine": facts,
            "options": {"dtype": str(DTYPE).removeprefix("torch."), "interpreted": not ON_GPU},
            **({} if ON_GPU else {"note": NO_GPU}),
            "results": [],
            "left_out": [],
        }

    @property
    def results(self) -> list[dict[str, Any]]:
        """Rows so far."""
        return self.content["results"]

    def is_late(self, what: str) -> bool:
        """True once the time budget is spent; records the skipped part."""
        if time.monotonic() < self.stop:
            return False
        self.show(f"{what}: no time left")
        self.content["left_out"].append(what)
        self.write()
        return True

    def took(self, part: str, start: float) -> None:
        """Notes and shows how long a part took since `start`, by `time.monotonic`."""
        seconds = time.monotonic() - start
        self.content.setdefault("seconds", {})[part] = round(seconds, 1)
        self.show(f"    {part} took {seconds:.1f} s")

    def add(self, row: dict[str, Any], line: str) -> None:
        """Adds a row, writes the file and shows a line."""
        self.results.append(row)
        self.show(line)
        self.write()

    def write(self) -> None:
        """Writes the file."""
        if self.path is not None:
            write_json(self.path, self.content)
