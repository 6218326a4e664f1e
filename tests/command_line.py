# SPDX-License-Identifier: Apache-2.0
"""Commands of the package in the process of a test."""

from __future__ import annotations

from typing import Any

from typer.testing import CliRunner

from mhla_hf.cli.main import app


def run_command(*words: object, code: int | None = 0, columns: int = 200) -> Any:
    """Runs `mhla-hf` with these words, which ends with this exit code, or any for None."""
    result = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": str(columns)})
    assert code is None or result.exit_code == code, result.output
    return result
