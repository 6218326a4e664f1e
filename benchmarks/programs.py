# SPDX-License-Identifier: Apache-2.0
"""What the programs of benchmarks share on the command line."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mhla_hf.utils.files import write_json


def names(text: str) -> tuple[str, ...]:
    """Parse names separated by commas."""
    return tuple(name.strip() for name in text.split(","))


def numbers(text: str) -> tuple[int, ...]:
    """Parse numbers separated by commas."""
    return tuple(int(name) for name in names(text))


def make_parser(description: str | None, *, has_report: bool = True) -> argparse.ArgumentParser:
    """Return a parser with `--device` and `--quiet`, and for programs with a report `--json` and `--plot`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="cpu or cuda; a GPU by default if there is one")
    parser.add_argument("-q", "--quiet", action="store_true", help="print no progress")
    if has_report:
        parser.add_argument("--json", type=Path, help="write the figures to this file; - is standard output")
        parser.add_argument("--plot", type=Path, help="draw a PNG file of the figures; needs matplotlib")
    return parser


def _announce(case: str) -> None:
    print(f"measuring {case}", file=sys.stderr)


def run_program(parser: argparse.ArgumentParser, work: Callable[..., dict[str, Any] | None]) -> None:
    """Run a program with the options that were given; its errors are one line.

    Args:
        parser: From [`make_parser`].
        work: Called with `progress`, which is None with `--quiet`, and the options that are not None; returns the
            report.
    """
    given = {name: value for name, value in vars(parser.parse_args()).items() if value is not None}
    quiet, file, plot = given.pop("quiet"), given.pop("json", None), given.pop("plot", None)
    if plot is not None and find_spec("matplotlib") is None:
        sys.exit("error: --plot needs matplotlib (pip install matplotlib)")
    try:
        report = work(**given, progress=None if quiet else _announce)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    if file == Path("-"):
        print(json.dumps(report, indent=2, sort_keys=True))
    elif file is not None:
        write_json(file, report)
    if plot is not None:
        from benchmarks.plots import plot_report

        plot_report(report, plot)
