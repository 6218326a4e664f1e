# SPDX-License-Identifier: Apache-2.0
"""Times of all cases and of the kernels that each launches."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import torch

from mhla_hf.bench import failure_reason, peak_memory
from mhla_hf.gpu.cases import DEVICE, ON_GPU, KernelCase
from mhla_hf.gpu.examination import Report, copy_rates
from mhla_hf.utils.machine import synchronize


TARGETS = {
    "wan none": 0.16,
    "wan query": 0.20,
    "wan none train": 0.9,
    "wan query train": 0.9,
    "wan fused": 0.28,
    "wan-720p-h24 none": 0.7,
    "dit-512 query": 0.09,
    "dit-512 query train": 0.40,
    "causal-2k query": 0.15,
    "causal-32k query": 0.35,
}
"""Milliseconds to aim for, by case."""

# Twice the L2 cache of any GPU so far.
_COPIED_BYTES = 256 << 20
_MOST_COPIES = 64
# Bytes per second of copies on an H200, an upper bound; it decides only how many of them fill the queue.
_COPY_RATE = 4e12


@cache
def _buffers() -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.ones(_COPIED_BYTES, dtype=torch.uint8, device=DEVICE)
    return torch.empty_like(source), source


def empty_cache() -> None:
    """Overwrites the GPU's L2 cache."""
    target, source = _buffers()
    target.copy_(source)


def device_milliseconds(call: Callable[[], Any], rounds: int = 25) -> float:
    """Median time of a call's kernels on the GPU, from an empty cache and with its launches already waiting.

    `triton.testing.do_bench` starts its clock before the launches, which would count the host's time where it takes
    longer than the kernels. Without a GPU, the time of one call.
    """
    host = host_milliseconds(call, 1)
    if not ON_GPU:
        return host
    # Copies keep the GPU busy until all kernels of the call are in its queue.
    copy = 2e3 * _COPIED_BYTES / _COPY_RATE
    copies = min(_MOST_COPIES, 3 + int(2 * host / copy))
    pairs = []
    for _ in range(rounds):
        for _ in range(copies):
            empty_cache()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        call()
        last.record()
        pairs.append((first, last))
    synchronize(DEVICE)
    return statistics.median(first.elapsed_time(last) for first, last in pairs)


def host_milliseconds(call: Callable[[], Any], rounds: int = 30) -> float:
    """Median time until a call returns, the GPU being idle before."""
    times = []
    for _ in range(rounds + 1):
        synchronize(DEVICE)
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
        if not ON_GPU:
            break
    # The first one warms up.
    return statistics.median(times[1:] or times)


def time_cases(cases: Iterable[KernelCase], report: Report) -> None:
    """Times all cases, and the kernels of each, into a report; and copies, to judge them by."""
    report.content["bytes_per_second"] = copy_rates() if ON_GPU else {}
    for name, rate in report.content["bytes_per_second"].items():
        print(f"copies, {name}: {rate / 1e12:.2f} TB/s", flush=True)
    for case in cases:
        if report.is_late(case.name):
            continue
        row: dict[str, Any] = {
            "case": case.name,
            "target_milliseconds": TARGETS.get(case.name),
            "milliseconds": None,
        }
        try:
            start = time.perf_counter()
            case.run()
            synchronize(DEVICE)
            row["first_call_seconds"] = time.perf_counter() - start
            row["milliseconds"] = device_milliseconds(case.run)
            row["host_milliseconds"] = host_milliseconds(case.run)
            row["torch_host_milliseconds"] = host_milliseconds(partial(case.run, backend="torch"))
            row["kernels"] = _kernel_times(case.run)
            row["peak_memory_bytes"] = peak_memory(case.run, DEVICE) if ON_GPU else None
        except Exception as error:  # What fails is a result, and others go on.
            row["reason"] = failure_reason(error)
        report.add(row, _line(row))


def _line(row: dict[str, Any]) -> str:
    if row["milliseconds"] is None:
        return f"{row['case']}: {row['reason']}"
    if not ON_GPU:
        return f"{row['case']}: interpreted in {row['milliseconds']:.0f} ms"
    target = row["target_milliseconds"]
    aim = "" if target is None else f" (target {target:g}{'' if row['milliseconds'] <= target else ', MISSED'})"
    lines = [
        f"{row['case']}: {row['milliseconds']:.3f} ms{aim}, host {row['host_milliseconds']:.3f} ms, "
        f"first call {row['first_call_seconds']:.1f} s"
    ]
    for kernel in row["kernels"][:10]:
        lines.append(f"    {kernel['microseconds']:9.1f} µs  x{kernel['launches']:g}  {kernel['kernel']}")
    return "\n".join(lines)


def _kernel_times(call: Callable[[], Any], rounds: int = 10) -> list[dict[str, Any]]:
    """The kernels of a call by their time: `kernel`, `launches` and `microseconds` in one call, from empty caches."""
    if not ON_GPU:
        return []
    from torch.profiler import ProfilerActivity, profile

    call()
    synchronize(DEVICE)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(rounds):
            empty_cache()
            call()
        synchronize(DEVICE)
    found = [
        {
            "kernel": event.key[:120],
            "launches": event.count / rounds,
            "microseconds": event.device_time_total / rounds,
        }
        for event in profiler.key_averages()
        if event.device_type == torch.autograd.DeviceType.CUDA and "Memcpy" not in event.key
    ]
    return sorted(found, key=lambda row: -row["microseconds"])
