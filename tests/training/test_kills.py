# SPDX-License-Identifier: Apache-2.0
"""Training runs killed with SIGKILL, at renames and at random moments: nothing half-written, resumed bit for bit."""

import json
import os
import shutil
import subprocess
import sys
import time

import psutil
import pytest
from accelerate.utils.other import get_free_port

from mhla_hf.training.checkpoints import list_checkpoints
from tests import ROOT

from .training_process import make_trainer


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

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
    done = subprocess.run(command, env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    killed = int(done.stdout.split()[0])
    # After the last rename, or late, a run may end before it is killed.
    assert killed >= (2 if how == "renames" else count // 2)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_accelerate_state")
def test_two_killed_processes_go_on_as_one(tmp_path):
    shared = {"learning_rate": 1e-3, "distill_steps": 0}
    whole, killed = make_trainer(tmp_path / "whole", **shared, batch_size=2).run(), tmp_path / "killed"
    launcher = ["torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(get_free_port())]
    program = ["tests.training.training_process", str(killed), "--options", json.dumps({**shared, "batch_size": 1})]
    process = subprocess.Popen(
        [sys.executable, "-m", *launcher, "-m", *program], env={**ENVIRONMENT, "STEP_SECONDS": "0.3"}, cwd=ROOT
    )
    deadline = time.monotonic() + 120
    while not (killed / "reached-1-finetune-3").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    launched = psutil.Process(process.pid)
    # The launcher first, which would end the others by a signal that they handle.
    for each in (launched, *launched.children(recursive=True)):
        each.kill()
    process.wait(timeout=60)
    newest = list_checkpoints(killed / "checkpoints")[-1].name
    assert newest in ("finetune-00000002", "finetune-00000004")
    # As many samples in a step as before.
    for changes in ({"batch_size": 2}, {"batch_size": 1, "gradient_accumulation_steps": 2}):
        output = shutil.copytree(killed, tmp_path / str(len(changes)))
        result = make_trainer(output, **shared, **changes).run()
        assert result.resumed_from.name == newest
        for stage, losses in whole.losses.items():
            assert result.losses[stage] == pytest.approx(losses, rel=1e-5), stage
        state = result.model.state_dict()
        # Softmax does not depend on a bias of all keys: its gradient is rounding errors, which Adam makes steps of.
        differences = {
            name: float((state[name] - value).abs().max())
            for name, value in whole.model.state_dict().items()
            if not name.endswith(".to_k.bias")
        }
        assert max(differences.values()) < 1e-5, differences
