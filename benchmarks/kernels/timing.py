# SPDX-License-Identifier: Apache-2.0
"""Times of all cases and of the kernels that each launches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from mhla_hf.bench import failure_reason, peak_memory
from mhla_hf.gpu.cases import DEVICE, ON_GPU, KernelCase
from mhla_hf.gpu.report import Report
from mhla_hf.gpu.timing import copy_rates, device_milliseconds, empty_cache, host_milliseconds, synchronize


def time_cases(cases: Iterable[KernelCase], report: Report) -> None:
    """Times all cases, and the kernels of each, into a report; and copies, to judge them by."""
    report.content["bytes_per_second"] = copy_rates()
    for name, rate in report.content["bytes_per_second"].items():
        print(f"copies, {name}: {rate / 1e12:.2f} TB/s", flush=True)
    for case in cases:
        if report.is_late(case.name):
            continue
        row: dict[str, Any] = {
            "case": case.name,
            "target_milliseconds": case.target,
            "milliseconds": None,
        }
        try:
            start = time.perf_counter()
            case.run()
            synchronize()
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
    synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(rounds):
            empty_cache()
            call()
        synchronize()
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
