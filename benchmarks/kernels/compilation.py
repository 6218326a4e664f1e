# SPDX-License-Identifier: Apache-2.0
"""Compiles what the other commands launch, several processes at a time, so that they find it in Triton's cache."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress

from .cases import ON_GPU, KernelCase
from .sweep import candidates, overridden_launches
from .timing import synchronize


def compile_in_parallel(arguments: Sequence[str], jobs: int, seconds: float) -> None:
    """Starts this program for its share of the work as often as there are jobs, and waits.

    Args:
        arguments: Arguments of `python -m benchmarks.kernels run` that choose the work.
        jobs: Number of processes.
        seconds: Time after which those that still run are ended.
    """
    start, running = time.monotonic(), []
    for part in range(jobs if ON_GPU else 1):
        command = [sys.executable, "-m", "benchmarks.kernels", "run", *arguments, "--part", f"{part}/{jobs}"]
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    for process in running:
        try:
            output, _ = process.communicate(timeout=max(1.0, seconds - (time.monotonic() - start)))
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
        if process.returncode:
            print("\n".join(output.strip().splitlines()[-3:]), flush=True)
    print(f"compiled in {time.monotonic() - start:.0f} s", flush=True)


def run_part(cases: Iterable[KernelCase], part: int, parts: int, sweep: bool) -> None:
    """Runs one share of the cases once, or of the candidates of their sweeps."""
    for index, case in enumerate(cases):
        if not sweep:
            if index % parts == part:
                case.run()
            continue
        with overridden_launches() as overrides:
            case.run()
            for choice in candidates(overrides.seen)[part::parts]:
                overrides.use(choice)
                # The sweep itself says why one fails.
                with suppress(Exception):
                    case.run()
    synchronize()
