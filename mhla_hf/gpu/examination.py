# SPDX-License-Identifier: Apache-2.0
"""`mhla-hf doctor --gpu`: verify and time the Triton kernels."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from ..bench import SHAPES, BenchOptions, OperatorShape, measure_operator
from ..ops.backends import ENVIRONMENT_VARIABLE, SELF_TEST_VARIABLE
from ..ops.diagnosis import check_kernels
from .cases import DEVICE, DTYPE, ON_GPU, kernel_cases
from .checks import CHECKS, run_checks
from .report import Report
from .timing import copy_rates


SECONDS, COMPILATION_SECONDS, CASE_SECONDS = 280.0, 120.0, 0.5
"""Time after which nothing new is begun, for compilation, and for the contestants of one size and direction."""
SIZES = ("wan", "dit-512", "causal-2k", "causal-32k")
"""Names of `bench.SHAPES` that are timed."""
_KERNELS, _PEERS = "mhla-triton", {"mhla-torch": "torch", "softmax-flash": "flash", "softmax-cudnn": "cudnn"}


def examine_kernels(report: Report) -> bool:
    """Compile the kernels, check them, and time them beside plain torch and softmax attention.

    Without a GPU, kernels are interpreted at small sizes and nothing is timed. Rows have `check`, `name`, `status`
    (`"passed"`, `"failed"`, or `"slow"` for kernels that plain torch outruns), `detail`, and where something was timed
    `microseconds`, `gigabytes_per_second` and `speedup_over_` each peer that ran.

    Args:
        report: Takes the rows.

    Returns:
        Whether nothing failed.

    Raises:
        ValueError: If an environment variable chooses the backend, or the kernels do not run here.
    """
    if os.environ.get(ENVIRONMENT_VARIABLE):
        raise ValueError(f"{ENVIRONMENT_VARIABLE} is set and would choose the backend of all checks; unset it.")
    # Plain torch must not stand in for kernels that fail.
    before = os.environ.get(SELF_TEST_VARIABLE)
    os.environ[SELF_TEST_VARIABLE] = "0"
    try:
        if ON_GPU:
            start = time.monotonic()
            failures = compile_in_parallel(_run_part, COMPILATION_SECONDS)
            report.content["compilation_failures"] = failures
            report.took("compilation", start)
        start = time.monotonic()
        for row in check_kernels(DEVICE):
            errors = ", ".join(f"{name} {error:.1e}" for name, error in row["errors"].items())
            kind = f"{row['dtype']}, heads of {row['width']} × {row['repeats']}, {row['normalizer']}"
            name = f"{row['family']}, {row['direction']}, {kind}"
            _add(report, "small inputs", name, row["status"], "; ".join(filter(None, (row["reason"], errors))))
        report.took("small inputs", start)
        run_checks(list(CHECKS), report)
        if ON_GPU:
            start = time.monotonic()
            report.content["bytes_per_second"] = copy_rates()
            for size in SIZES:
                if not report.is_late(f"times of {size}"):
                    _time(report, size)
            report.took("times", start)
    finally:
        os.environ.pop(SELF_TEST_VARIABLE) if before is None else os.environ.update({SELF_TEST_VARIABLE: before})
    return all(row["status"] != "failed" for row in report.results)


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


def _run_part(part: int, parts: int) -> None:
    run_cases(["wan ", *SIZES[1:]], False, part, parts)
    list(check_kernels(DEVICE, part, parts))


def _add(report: Report, check: str, name: str, status: str, detail: str, **figures: Any) -> None:
    report.add({"check": check, "name": name, "status": status, "detail": detail, **figures}, f"{status}  {name}")


def _time(report: Report, size: str) -> None:
    """Times of one size, forward and with the backward pass, with the `query` normaliser."""
    options = BenchOptions(device=DEVICE.type, seconds=CASE_SECONDS)
    rows = measure_operator(options, [size], [_KERNELS, *_PEERS], normalizers=["query"])["results"]
    for direction in ("forward", "fwd+bwd"):
        found = {row["contestant"]: row for row in rows if row["direction"] == direction}
        reasons = [f"{name}: {row['reason']}" for name, row in found.items() if row["reason"]]
        own = found[_KERNELS]
        figures: dict[str, Any] = {}
        status = "failed"
        if own["reason"] is None:
            milliseconds = own["milliseconds"]
            figures["microseconds"] = 1e3 * milliseconds
            figures["gigabytes_per_second"] = _least_bytes(SHAPES[size], direction) / milliseconds / 1e6
            for name, peer in _PEERS.items():
                if found[name]["reason"] is None:
                    figures[f"speedup_over_{peer}"] = found[name]["milliseconds"] / milliseconds
            status = "slow" if figures.get("speedup_over_torch", 1.0) < 1 else "passed"
        _add(report, "times", f"{size}, {direction}", status, "; ".join(reasons), **figures)


def _least_bytes(shape: OperatorShape, direction: str) -> int:
    """Bytes to read and write at least: q, k, v and o; backward these, the gradient of o, and three gradients more."""
    tensors = 4 if direction == "forward" else 4 + 5 + 3
    return tensors * shape.batch * shape.tokens * shape.heads * shape.width * DTYPE.itemsize


def markdown_table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Format the rows of a report as the lines of a Markdown table."""
    peers = [f"speedup_over_{peer}" for peer in _PEERS.values()]
    yield f"| check | | status | µs | GB/s | {' | '.join(f'{peer} / MHLA' for peer in _PEERS.values())} | |"
    yield f"|---|---|---|--:|--:|{'--:|' * len(peers)}---|"
    for row in rows:
        formats = {"microseconds": ",.0f", "gigabytes_per_second": ",.0f", **dict.fromkeys(peers, ".2f")}
        figures = [format(row[name], form) if name in row else "" for name, form in formats.items()]
        cells = [row["check"], row["name"], row["status"], *figures, row["detail"]]
        yield f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
