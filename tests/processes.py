# SPDX-License-Identifier: Apache-2.0
"""Programs in interpreters of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

from tests import ROOT


def run_program(program: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a program in a fresh interpreter, which ends well."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", **environment}
    command = [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return result
