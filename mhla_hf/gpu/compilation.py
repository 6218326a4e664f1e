# SPDX-License-Identifier: Apache-2.0
"""Compiles what checks and times launch, in several processes at a time, so that they find it in Triton's cache."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable

from .cases import ON_GPU, kernel_cases


def compile_in_parallel(run_part: Callable[[int, int], None], seconds: float, jobs: int | None = None) -> list[str]:
    """Run shares of some work in processes of their own, and wait for them.

    Args:
        run_part: Runs one share; called with its index and the number of shares. It must be picklable.
        seconds: Time after which processes that still run are ended.
        jobs: Number of processes; that of the CPU cores by default, and one without a GPU.

    Returns:
        What went wrong, one line for each process that failed.
    """
    count = (jobs or os.cpu_count() or 1) if ON_GPU else 1
    stop = time.monotonic() + seconds
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=run_part, args=(part, count)) for part in range(count)]
    for process in processes:
        process.start()
    failures = []
    for part, process in enumerate(processes):
        process.join(max(0.0, stop - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
            failures.append(f"process {part} was still compiling after {seconds:.0f} s")
        elif process.exitcode:
            failures.append(f"process {part} ended with code {process.exitcode}")
    return failures


def run_cases(names: list[str] | None, quick: bool, part: int, parts: int) -> None:
    """Run one share of some cases once, see [`kernel_cases`]."""
    for index, case in enumerate(kernel_cases(names, quick=quick)):
        if index % parts == part:
            case.run()
