# SPDX-License-Identifier: Apache-2.0
"""What measurements of speed have in common: options, what a row says, and what came of a contestant."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from ..conversion.options import parse_dtype
from ..ops.backends import ENVIRONMENT_VARIABLE
from ..utils.machine import choose_device, machine_facts
from .memory import peak_memory
from .timing import Timing, failure_reason, time_in_turns


@dataclass(frozen=True, kw_only=True)
class SpeedOptions:
    """Options of every measurement.

    Args:
        dtype: Type of tokens or models; None for bfloat16 on a GPU and float32 on a CPU.
        device: Where to run; None for a GPU if there is one.
        seconds: About how long the timed rounds of one case take.
        least_rounds: Rounds at least, however long they take.
        quick: A few cases, and a tenth of the time.

    Raises:
        ValueError: If a name is unknown or a number is not positive.
    """

    dtype: str | None = None
    device: str | None = None
    seconds: float = 3.0
    least_rounds: int = 3
    quick: bool = False

    def __post_init__(self) -> None:
        for name in ("seconds", "least_rounds"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be finite and positive.")
        self.place()

    def place(self) -> tuple[torch.device, torch.dtype]:
        """The device and the type."""
        device = choose_device(self.device)
        dtype = parse_dtype(self.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
        assert dtype is not None
        return device, dtype

    def report(self, benchmark: str, results: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """The results with the machine and these options, ready for JSON."""
        device, dtype = self.place()
        options = {**asdict(self), "device": device.type, "dtype": str(dtype).removeprefix("torch.")}
        return {
            "benchmark": benchmark,
            "machine": machine_facts(device),
            "options": options,
            **more,
            "results": results,
        }


def check_environment() -> None:
    """Checks that contestants are what they are called.

    Raises:
        ValueError: If the environment decides which backend MHLA takes.
    """
    if os.environ.get(ENVIRONMENT_VARIABLE):
        raise ValueError(f"{ENVIRONMENT_VARIABLE} is set, which would make all of MHLA run by one backend; unset it.")


def fill_rows(
    rows: Mapping[str, dict[str, Any]],
    runs: Mapping[str, Callable[[int], Any]],
    device: torch.device,
    options: SpeedOptions,
    *,
    alone: bool = False,
) -> None:
    """Times all runs in turns and writes what came of it into their rows.

    Args:
        rows: Rows with a `reason`, None for those that have a run. They get times in milliseconds, `runs` and
            `peak_memory_bytes`, or the reason why there are none.
        runs: See [`time_in_turns`].
        device: What they run on.
        options: How long.
        alone: See [`time_in_turns`].
    """
    seconds = options.seconds / (10 if options.quick else 1)
    times: Mapping[str, Timing | str]
    try:
        times = time_in_turns(runs, device, seconds=seconds, least=options.least_rounds, alone=alone)
    except Exception as error:  # Of the device itself, as after a fault in a kernel: earlier figures are still good.
        times = dict.fromkeys(runs, failure_reason(error))
    for name, timing in times.items():
        row = rows[name]
        if not isinstance(timing, Timing):
            row["reason"] = timing
            continue
        row["milliseconds"] = 1e3 * timing.median
        row["milliseconds_20"], row["milliseconds_80"] = 1e3 * timing.low, 1e3 * timing.high
        row["host_milliseconds"], row["runs"] = 1e3 * timing.host, timing.runs
        try:
            row["peak_memory_bytes"] = peak_memory(partial(runs[name], 0), device)
        except Exception as error:  # A figure that cannot be had must not cost the others.
            row["peak_memory_bytes"], row["peak_memory_reason"] = None, failure_reason(error)
