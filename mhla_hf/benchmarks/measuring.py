# SPDX-License-Identifier: Apache-2.0
"""Time and memory of functions that are compared with each other, and the options of every measurement."""

from __future__ import annotations

import gc
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch.utils.benchmark import Timer

from ..conversion.options import parse_dtype
from ..ops.backends import ENVIRONMENT_VARIABLE
from ..utils.machine import choose_device, machine_facts


COPY_BYTES = {"cuda": 1 << 30, "cpu": 128 << 20}
"""Size of the tensor that is copied to measure the memory bandwidth, by device type."""

_REASON_LENGTH = 200
# Keeps torch's profiler from logging to standard error; above its highest level.
_PROFILER_LOG = ("KINETO_LOG_LEVEL", "99")


@dataclass(frozen=True, kw_only=True)
class SpeedOptions:
    """Options of every measurement.

    Args:
        dtype: Type of tokens or models; None for bfloat16 on a GPU and float32 on a CPU.
        device: Device to run on; None for a GPU if there is one.
        seconds: Approximate time for all runs of one case.
        rounds: Rounds in which contestants take turns.
        quick: Measure a few cases, in a tenth of the time.

    Raises:
        ValueError: If a name is unknown or a number is not positive.
    """

    dtype: str | None = None
    device: str | None = None
    seconds: float = 3.0
    rounds: int = 3
    quick: bool = False

    def __post_init__(self) -> None:
        for name in ("seconds", "rounds"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be finite and positive.")
        self.place()

    def place(self) -> tuple[torch.device, torch.dtype]:
        """Device and type of the tokens or models."""
        device = choose_device(self.device)
        dtype = parse_dtype(self.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
        assert dtype is not None
        return device, dtype

    def report(self, benchmark: str, results: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """Report of the results with the machine and these options, ready for JSON."""
        device, dtype = self.place()
        options = {**asdict(self), "device": device.type, "dtype": str(dtype).removeprefix("torch.")}
        machine = machine_facts(device)
        return {"benchmark": benchmark, "machine": machine, "options": options, **more, "results": results}


def check_environment() -> None:
    """Checks that no environment variable overrides the backend of a contestant.

    Raises:
        ValueError: If one does.
    """
    if os.environ.get(ENVIRONMENT_VARIABLE):
        raise ValueError(f"{ENVIRONMENT_VARIABLE} is set, which would make all of MHLA run by one backend; unset it.")


def fill_rows(
    rows: Mapping[str, dict[str, Any]],
    runs: Mapping[str, Callable[[], Any]],
    device: torch.device,
    options: SpeedOptions,
) -> None:
    """Times all runs in rounds and writes times and memory, or the reason of a failure, into their rows.

    Args:
        rows: Rows with a `reason`, None for those that have a run. They get what `time_in_rounds` returns and
            `peak_memory_bytes`.
        runs: Functions to time by name, as for `time_in_rounds`.
        device: Device that they run on.
        options: Time and rounds.
    """
    seconds = options.seconds / (10 if options.quick else 1)
    for name, figures in time_in_rounds(runs, device, seconds=seconds, rounds=options.rounds).items():
        row = rows[name]
        if isinstance(figures, str):
            row["reason"] = figures
            continue
        row.update(figures)
        try:
            row["peak_memory_bytes"] = peak_memory(runs[name], device)
        except Exception as error:  # The times are good all the same.
            row["peak_memory_bytes"], row["peak_memory_reason"] = None, failure_reason(error)


def time_in_rounds(
    runs: Mapping[str, Callable[[], Any]], device: torch.device, *, seconds: float, rounds: int = 3
) -> dict[str, dict[str, Any] | str]:
    """Times several functions in turns, round by round, so that other load on the machine falls on all of them.

    `triton.testing.do_bench` measures on a GPU, where events time each run and its cache is overwritten before, and
    `torch.utils.benchmark` on a CPU, where runs of microseconds are timed in blocks.

    Args:
        runs: Functions to time; a first call of each is not timed.
        device: Device that they run on.
        seconds: Approximate time for all of them together.
        rounds: Rounds of equal length.

    Returns:
        For each function `milliseconds` (median), `milliseconds_20` and `milliseconds_80` (percentiles),
        `host_milliseconds` (median time until a call returns; a GPU then still works) and `runs`, or the reason why
        it failed.
    """
    samples: dict[str, list[float]] = {name: [] for name in runs}
    hosts: dict[str, list[float]] = {name: [] for name in runs}
    counts = dict.fromkeys(runs, 0)
    reasons: dict[str, str] = {}
    share = seconds / (rounds * max(1, len(runs)))
    for _ in range(rounds):
        for name, run in runs.items():
            if name in reasons:
                continue
            try:
                run()
                times, runs_per_time = _sample(run, device, share)
                started = time.perf_counter()
                run()
                hosts[name].append(1e3 * (time.perf_counter() - started))
            except Exception as error:  # A contestant that cannot run is a result, whatever it raises.
                reasons[name] = failure_reason(error)
                free_memory(device)
                continue
            samples[name] += times
            counts[name] += len(times) * runs_per_time
    return {
        name: reasons[name] if name in reasons else {**_summary(samples[name], hosts[name]), "runs": counts[name]}
        for name in runs
    }


def _sample(run: Callable[[], Any], device: torch.device, seconds: float) -> tuple[list[float], int]:
    """Milliseconds of one run, measured several times, and how many runs each of these is the mean of."""
    if device.type == "cuda" and find_spec("triton") is not None:
        from triton.testing import do_bench

        return do_bench(run, warmup=1e3 * seconds / 4, rep=1e3 * seconds, return_mode="all"), 1
    timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
    measured = timer.blocked_autorange(min_run_time=seconds)
    return [1e3 * value for value in measured.times], measured.number_per_run


def _summary(times: list[float], hosts: list[float]) -> dict[str, float]:
    low, median, high = (
        torch.tensor(times, dtype=torch.float64).quantile(torch.tensor([0.2, 0.5, 0.8]).double()).tolist()
    )
    return {
        "milliseconds": median,
        "milliseconds_20": low,
        "milliseconds_80": high,
        "host_milliseconds": statistics.median(hosts),
    }


def copy_bandwidth(device: torch.device, num_bytes: int | None = None) -> float:
    """Bytes per second that a copy on the device reads and writes.

    Args:
        device: Device to copy on.
        num_bytes: Size of the tensor, `COPY_BYTES` by default; at most an eighth of a GPU's free memory.
    """
    num_bytes = COPY_BYTES[device.type] if num_bytes is None else num_bytes
    if device.type == "cuda":
        num_bytes = min(num_bytes, torch.cuda.mem_get_info(device)[0] // 8)
    # Not zeros: memory that was never written may be one page many times.
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    figures = time_in_rounds({"copy": lambda: target.copy_(source)}, device, seconds=num_bytes / 2e9, rounds=1)["copy"]
    if isinstance(figures, str):
        raise RuntimeError(figures)
    return 2 * num_bytes / (1e-3 * figures["milliseconds"])


def peak_memory(run: Callable[[], Any], device: torch.device) -> int:
    """Peak memory of a call in bytes, beyond what was allocated before and the tensors that it returns.

    The allocator reports it on a GPU, torch's profiler on a CPU; memory that libraries allocate past both is not seen.

    Args:
        run: Returns a tensor or several.
        device: Device that it runs on.
    """
    if device.type == "cuda":
        free_memory(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        kept = run()
        peak = torch.cuda.max_memory_allocated(device) - before
    else:
        peak, kept = _profiled_peak(run)
    return max(0, peak - held_bytes(kept))


def held_bytes(tensors: torch.Tensor | Iterable[torch.Tensor | None] | None) -> int:
    """Bytes of all tensors' storages, each counted once."""
    tensors = (tensors,) if tensors is None or isinstance(tensors, torch.Tensor) else tensors
    storages = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _profiled_peak(run: Callable[[], Any]) -> tuple[int, Any]:
    os.environ.setdefault(*_PROFILER_LOG)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = run()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    changes = [(event["ts"], event["args"]["Bytes"]) for event in events if event.get("name") == "[memory]"]
    held = accumulate((change for _, change in sorted(changes, key=lambda pair: pair[0])), initial=0)
    return max(held), kept


def failure_reason(error: Exception) -> str:
    """An error in one short line."""
    text = " ".join(str(error).split())
    first = text.split(". ")[0]
    return f"{type(error).__name__}: {first}"[:_REASON_LENGTH] if first else type(error).__name__


def free_memory(device: torch.device) -> None:
    """Returns unused memory to the device."""
    gc.collect()
    if device.type == "cuda":
        # After a fault in a kernel every call of CUDA fails; the next run reports it.
        with suppress(RuntimeError):
            torch.cuda.empty_cache()
