# SPDX-License-Identifier: Apache-2.0
"""Checks, times and sweeps of the kernels.

    python -m benchmarks.kernels compile [--sweep]           # all cases in parallel, into Triton's cache
    python -m benchmarks.kernels check --json check.json     # what the tests cannot show
    python -m benchmarks.kernels time --json time.json       # every case, and each of its kernels
    python -m benchmarks.kernels sweep --json sweep.json     # launch options
    python -m benchmarks.kernels host --json host.json       # processor time of a call, on a stub of libcuda

Without a GPU, kernels are interpreted at small sizes, which shows that the program works and nothing about time.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path

import torch


if not torch.cuda.is_available():
    # Triton reads this when it is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Plain torch must not stand in for kernels that fail.
os.environ.setdefault("MHLA_HF_KERNEL_CHECK", "0")


def main() -> None:
    """Runs one command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["compile", "check", "time", "sweep", "host"])
    parser.add_argument("--json", type=Path, help="file to write, after every row")
    parser.add_argument("--cases", help="names of cases, or their beginnings, separated by commas; all by default")
    parser.add_argument("--checks", help="names of checks, separated by commas; all by default")
    parser.add_argument("--seconds", type=float, default=500.0, help="begin nothing new after this time")
    parser.add_argument("--quick", action="store_true", help="small sizes, on a GPU too")
    parser.add_argument("--sweep", action="store_true", help="compile what a sweep launches")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes that compile")
    arguments = parser.parse_args()
    names = None if arguments.cases is None else [name.strip() for name in arguments.cases.split(",")]
    from mhla_hf.gpu.cases import kernel_cases
    from mhla_hf.gpu.examination import CHECKS, Report, compile_in_parallel, run_cases, run_checks
    from mhla_hf.ops.backends import ENVIRONMENT_VARIABLE
    from mhla_hf.utils.messages import check_choice

    from .host import run_on_stub
    from .sweep import run_candidates, sweep_cases
    from .timing import time_cases

    checks = list(CHECKS) if arguments.checks is None else [name.strip() for name in arguments.checks.split(",")]
    try:
        if os.environ.get(ENVIRONMENT_VARIABLE):
            raise ValueError(f"{ENVIRONMENT_VARIABLE} is set and would choose the backend of all cases; unset it.")
        for name in checks:
            check_choice("checks", name, CHECKS)
        cases = list(kernel_cases(names, quick=arguments.quick))
    except ValueError as error:
        sys.exit(f"error: {error}")
    if arguments.command == "host":
        try:
            sys.exit(run_on_stub(*([] if arguments.json is None else [str(arguments.json)])))
        except ValueError as error:
            sys.exit(f"error: {error}")
    if arguments.command == "compile":
        run = partial(run_candidates if arguments.sweep else run_cases, names, arguments.quick)
        failures = compile_in_parallel(run, arguments.seconds, arguments.jobs)
        sys.exit("\n".join(failures) or 0)
    else:
        report = Report(arguments.command, arguments.json, arguments.seconds)
        if arguments.command == "check":
            sys.exit(not run_checks(checks, report))
        {"time": time_cases, "sweep": sweep_cases}[arguments.command](cases, report)


if __name__ == "__main__":
    main()
