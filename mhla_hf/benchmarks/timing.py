# SPDX-License-Identifier: Apache-2.0
"""Medians of things that take turns, so that whatever else the machine does falls on each of them."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..utils.machine import last_cache_bytes, synchronize


COPY_BYTES = {"cuda": 1 << 30, "cpu": 128 << 20}
"""Bytes of the tensor that is copied to measure the bandwidth of memory."""

# Copies that are timed.
_COPIES = 15
# Copies that a GPU makes at most before a timed call, while the call's kernels are being launched.
_MOST_COPIES = 64
_REASON_LENGTH = 200


@dataclass(frozen=True)
class Timing:
    """Seconds of one thing.

    Args:
        median: Of all runs.
        low: The 20th percentile.
        high: The 80th percentile.
        host: Median of the time until the call returned; a GPU then still works.
        runs: How many there were.
    """

    median: float
    low: float
    high: float
    host: float
    runs: int


def copy_bandwidth(device: torch.device, num_bytes: int | None = None) -> float:
    """Bytes per second that a copy on the device reads and writes, the median of several.

    Args:
        device: Where to copy.
        num_bytes: Bytes of the tensor; `COPY_BYTES` if left out. No more than an eighth of a GPU's free memory.
    """
    num_bytes = COPY_BYTES[device.type] if num_bytes is None else num_bytes
    if device.type == "cuda":
        num_bytes = min(num_bytes, torch.cuda.mem_get_info(device)[0] // 8)
    # Not zeros: memory that was never written may be one page many times.
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source).copy_(source)
    watch = _Stopwatch(device)
    for _ in range(_COPIES):
        watch.time("copy", lambda: target.copy_(source))
    seconds, _ = watch.seconds()["copy"]
    return 2 * num_bytes / statistics.median(seconds)


def time_in_turns(
    runs: Mapping[str, Callable[[int], Any]],
    device: torch.device,
    *,
    seconds: float,
    least: int = 5,
    most: int = 100,
    warm_up: int = 2,
    alone: bool = False,
) -> dict[str, Timing | str]:
    """Times several things, one run of each after the other, round by round.

    On a GPU a run is timed by events around it. Copies of a buffer larger than the cache go before: they leave nothing
    of the inputs in it, and keep the GPU busy until the run's kernels are launched, so that events measure the GPU's
    time and not that of Python. With `alone` the GPU waits for the run instead, whose launches then count.

    Args:
        runs: What to time; called with the number of the round, so that it can take other inputs than before.
        device: What it runs on.
        seconds: About how long all rounds together may take.
        least: Rounds at least.
        most: Rounds at most.
        warm_up: Runs of each that come before and are not timed; 2 or more.
        alone: Let a GPU finish its work before every run and do nothing else before it.

    Returns:
        For each its times, or why it failed.
    """
    failures: dict[str, str] = {}
    estimates: dict[str, float] = {}
    hosts: dict[str, float] = {}
    for name, run in runs.items():
        try:
            for turn in range(warm_up):
                synchronize(device)
                start = time.perf_counter()
                run(turn)
                hosts[name] = time.perf_counter() - start
                synchronize(device)
                estimates[name] = time.perf_counter() - start
        except Exception as error:  # What a contestant cannot do is a result, whatever it raises.
            failures[name] = failure_reason(error)
            estimates.pop(name, None)
            free_memory(device)
    rounds = int(max(least, min(most, seconds / max(sum(estimates.values()), 1e-9))))
    copies = last_cache_bytes(device) if estimates and device.type == "cuda" and not alone else 0
    watch = _Stopwatch(device, copies)
    for turn in range(rounds):
        for name in estimates:
            if name not in failures:
                try:
                    if alone:
                        synchronize(device)
                    watch.time(name, partial(runs[name], warm_up + turn), hosts[name])
                except Exception as error:
                    failures[name] = failure_reason(error)
                    free_memory(device)
        synchronize(device)
    times = watch.seconds()
    return {name: failures[name] if name in failures else _timing(*times[name]) for name in runs}


def failure_reason(error: Exception) -> str:
    """An error in one line, not too long."""
    text = " ".join(str(error).split())
    first = text.split(". ")[0]
    return f"{type(error).__name__}: {first}"[:_REASON_LENGTH] if first else type(error).__name__


def free_memory(device: torch.device) -> None:
    """Gives back what nobody uses any more."""
    gc.collect()
    if device.type == "cuda":
        # After a fault in a kernel every call of CUDA fails: whatever runs next will say so.
        with suppress(RuntimeError):
            torch.cuda.empty_cache()


class _Stopwatch:
    """Times calls, on a GPU without waiting for them.

    Args:
        device: What the calls run on.
        copies: Bytes of a cache to empty before each call on a GPU; 0 for not doing so.
    """

    def __init__(self, device: torch.device, copies: int = 0) -> None:
        self.device = device
        self._marks: dict[str, list[tuple[Any, Any, float]]] = {}
        self._buffer: torch.Tensor | None = None
        if copies:
            try:
                buffer = torch.ones(4 * copies, dtype=torch.uint8, device=device)
                self._target = torch.empty_like(buffer)
                self._copy_seconds = 2 * buffer.numel() / copy_bandwidth(device, buffer.numel())
                self._buffer = buffer
            except torch.OutOfMemoryError:
                # Inputs that fill the memory pass through the cache anyway, and keep the GPU busy.
                free_memory(device)

    def time(self, name: str, call: Callable[[], Any], host_seconds: float = 0.0) -> None:
        """Times a call that keeps the CPU busy for about `host_seconds`."""
        marks = self._marks.setdefault(name, [])
        if self.device.type != "cuda":
            start = time.perf_counter()
            call()
            stop = time.perf_counter()
            marks.append((start, stop, stop - start))
            return
        if self._buffer is not None:
            for _ in range(min(_MOST_COPIES, 1 + math.ceil(1.5 * host_seconds / self._copy_seconds))):
                self._target.copy_(self._buffer)
        events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start = time.perf_counter()
        events[0].record()
        call()
        events[1].record()
        marks.append((*events, time.perf_counter() - start))

    def seconds(self) -> dict[str, tuple[list[float], list[float]]]:
        """Seconds of every call, and seconds until it returned, by name."""
        synchronize(self.device)
        return {
            name: ([_elapsed(start, stop) for start, stop, _ in marks], [host for _, _, host in marks])
            for name, marks in self._marks.items()
        }


def _elapsed(start: Any, stop: Any) -> float:
    return stop - start if isinstance(start, float) else start.elapsed_time(stop) / 1e3


def _timing(seconds: list[float], host: list[float]) -> Timing:
    ordered = sorted(seconds)
    low, high = (ordered[round(share * (len(ordered) - 1))] for share in (0.2, 0.8))
    return Timing(statistics.median(ordered), low, high, statistics.median(host), len(ordered))
