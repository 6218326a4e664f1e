# SPDX-License-Identifier: Apache-2.0
"""Training runs killed with SIGKILL, at renames and at random moments: nothing half-written, resumed bit for bit."""

import os
import subprocess
import sys

import pytest

from tests import ROOT


pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "count"),
    [
        # More than there are: all.
        ("renames", 1000),
        ("random", 40),
    ],
)
def test_killed_runs_end_like_others(how, count, tmp_path):
    command = [sys.executable, "-m", "tests.training.kill_training", str(tmp_path), how, str(count)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    killed = int(done.stdout.split()[0])
    # After the last rename, or late, a run may end before it is killed.
    assert killed >= (2 if how == "renames" else count // 2)
