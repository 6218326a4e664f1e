# SPDX-License-Identifier: Apache-2.0
"""Recoveries killed with SIGKILL, at random moments of every stage, end where others do."""

import os
import subprocess
import sys

import pytest

from tests import ROOT


pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "count"), [("bert", 8), ("llama", 3), ("vit", 3), ("dit", 3)])
def test_killed_recoveries_end_like_others(kind, count, tmp_path):
    command = [sys.executable, "-m", "tests.recovery.kill_recovery", str(tmp_path), kind, str(count)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[0]) >= count // 2
