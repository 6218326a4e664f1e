# SPDX-License-Identifier: Apache-2.0
"""Runs experiments, or writes their tables into the documentation.

python -m benchmarks.experiments run                        # all of them, at the size for a CPU
python -m benchmarks.experiments run rank blocks --jobs 2
python -m benchmarks.experiments run language --setting gpu
python -m benchmarks.experiments write                      # tables of docs/results, from benchmarks/results
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from mhla_hf.utils.files import atomic_file

from .documentation import PAGES, RESULTS, beside, tables, with_tables
from .experiment import SETTINGS
from .registry import experiment_names, find_experiment
from .runner import run_case, run_experiment, write_report


def main(arguments: list[str] | None = None) -> None:
    """Runs a command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run experiments")
    run.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(experiment_names())}; default: all")
    run.add_argument("--setting", choices=SETTINGS, default="cpu")
    run.add_argument("--output", type=Path, default=RESULTS, help="directory of JSON files and plots")
    run.add_argument("--work", type=Path, default=Path("runs/experiments"), help="directory of finished cases")
    run.add_argument("--jobs", type=int, help="cases at a time; default: one for each core, on a GPU one")
    run.add_argument("--device", help="default: a GPU if there is one")
    run.add_argument("--quiet", action="store_true", help="show no progress")
    write = commands.add_parser("write", help="write the tables of docs/results")
    write.add_argument("--results", type=Path, default=RESULTS, help="directory of the JSON files")
    write.add_argument("--pages", type=Path, default=PAGES, help="directory to write; default: docs/results itself")
    case = commands.add_parser("case")
    for name in ("text", "file", "device", "threads"):
        case.add_argument(name)
    options = parser.parse_args(arguments)
    if options.command == "case":
        run_case(options.text, Path(options.file), options.device, int(options.threads))
    elif options.command == "write":
        sections = tables(options.results)
        options.pages.mkdir(parents=True, exist_ok=True)
        for page in sorted(PAGES.glob("*.md")):
            text, written = with_tables(page.read_text(encoding="utf-8"), sections), options.pages / page.name
            with atomic_file(written) as temporary:
                temporary.write_text(beside(text, written, options.results), encoding="utf-8")
        print(f"wrote {options.pages}")
    else:
        try:
            for name in options.names:
                find_experiment(name)
        except ValueError as error:
            sys.exit(f"error: {error}")
        jobs = options.jobs or (1 if options.setting == "gpu" else os.cpu_count() or 1)
        for name in options.names or experiment_names():
            start = time.perf_counter()
            report = run_experiment(
                name,
                options.setting,
                options.work,
                jobs=jobs,
                device=options.device,
                show_progress=not options.quiet,
            )
            paths = " and ".join(str(path) for path in write_report(report, options.output))
            print(f"wrote {paths} after {(time.perf_counter() - start) / 60:.1f} minutes", flush=True)


if __name__ == "__main__":
    main()
