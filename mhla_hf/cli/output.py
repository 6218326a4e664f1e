# SPDX-License-Identifier: Apache-2.0
"""`--json FILE` of every command that has figures; `-` is standard output."""

import json
import sys
from contextlib import redirect_stdout
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer


_STANDARD_OUTPUT: ContextVar[TextIO | None] = ContextVar("standard_output", default=None)
_DASH = Path("-")


def _prepare(context: typer.Context, file: Path | None) -> Path | None:
    """Refuses a directory before any work; for `-`, keeps standard output free for the JSON until the command ends."""
    if file is None or context.resilient_parsing:
        return file
    if file == _DASH:
        # The context is closed after this, in the order in which these were begun.
        token = _STANDARD_OUTPUT.set(sys.stdout)
        context.call_on_close(lambda: _STANDARD_OUTPUT.reset(token))
        context.with_resource(redirect_stdout(sys.stderr))
    elif file.is_dir():
        raise ValueError(f"json={str(file)!r} is a directory; give a file.")
    return file


JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help="Write the figures as JSON to FILE; '-' is standard output, and the rest goes to standard error.",
        callback=_prepare,
    ),
]
"""The option `--json` of a command, for [`write_report`]."""


def write_report(file: Path | None, report: Any, *, final: bool = True) -> None:
    """Writes what a command reports to the file of `--json`, if there is one.

    Args:
        file: Value of the option.
        report: Plain JSON values.
        final: Whether nothing follows; what comes before is written to a file alone, which the next replaces.
    """
    from ..utils.files import write_json

    if file is None or (file == _DASH and not final):
        return
    if file == _DASH:
        stream = _STANDARD_OUTPUT.get() or sys.stdout
        stream.write(json.dumps(report, indent=2, sort_keys=True) + "\n")
        stream.flush()
    else:
        write_json(file, report)
