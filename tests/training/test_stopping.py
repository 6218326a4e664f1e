# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and SIGTERM in training, and processes of a run that never start."""

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta

import psutil
import pytest
import torch
import typer
from accelerate.utils.other import get_free_port
from torch import distributed
from typer.main import get_command

from mhla_hf.cli.main import app, friendly_errors
from mhla_hf.training import TrainingConfig, processes
from mhla_hf.training.checkpoints import list_checkpoints
from tests import ROOT

from .kill_training import start as start_process
from .training_process import make_trainer


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

pytestmark = pytest.mark.usefixtures("fresh_accelerate_state")


@pytest.fixture(autouse=True, scope="module")
def ctrl_c_as_in_a_terminal():
    """Handles Ctrl-C even if the tests run in the background of a script, where it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def signal_at(where, number):
    def callback(stage, step, loss):
        if (stage, step) == where:
            os.kill(os.getpid(), number)

    return callback


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return make_trainer(tmp_path_factory.mktemp("whole")).run()


class TestOneProcess:
    def test_the_next_step_ends_with_a_checkpoint(self, whole, tmp_path, capsys):
        number, where, saved = signal.SIGTERM, ("finetune", 2), "finetune-00000003"
        before = [signal.getsignal(entry) for entry in (signal.SIGINT, signal.SIGTERM)]
        with pytest.raises(typer.Exit) as stop, friendly_errors():
            make_trainer(tmp_path, signal_at(where, number)).run()
        assert stop.value.exit_code == 128 + number
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and f"the same command with --resume {saved} continues from there" in lines[0]
        assert lines[0].startswith(f"stopped after step {int(saved[-8:])} of ")
        assert list_checkpoints(tmp_path / "checkpoints")[-1].name == saved
        assert [signal.getsignal(entry) for entry in (signal.SIGINT, signal.SIGTERM)] == before
        resumed = make_trainer(tmp_path).run()
        assert resumed.losses == whole.losses
        for name, value in whole.model.state_dict().items():
            assert torch.equal(value, resumed.model.state_dict()[name]), name


def test_a_process_that_never_starts_ends_the_others(monkeypatch):
    """One of two processes waits for the other, and not for hours."""

    def wait():
        monkeypatch.setattr(processes, "STARTUP_TIMEOUT", timedelta(seconds=1))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(get_free_port())}
        os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "ACCELERATE_USE_CPU": "true", **address})
        with pytest.raises(TimeoutError, match="processes of the run did not find one another within"):
            processes.make_accelerator(TrainingConfig(device="cpu"))

    _, status = os.waitpid(start_process(wait), 0)
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.parametrize("how", ["killed", "silent", "gone before a group"])
def test_a_process_that_ends_is_no_bug_of_the_others(how, tmp_path):
    """The other one says what to do, whatever torch.distributed calls it."""
    train = get_command(app).commands["train"].commands["wan"]

    def join(rank):
        options = {"rank": rank, "world_size": 2, "timeout": timedelta(seconds=1)}
        if how == "gone before a group":
            store = distributed.TCPStore("127.0.0.1", port, 2, rank == 0, timeout=timedelta(seconds=1))
            if rank == 0:
                store.get("not there")
            return
        distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", **options)
        if rank == 1:
            time.sleep(2) if how == "silent" else os.kill(os.getpid(), signal.SIGKILL)
        distributed.all_gather_object([None] * 2, "loss")

    def first():
        with open(tmp_path / "errors", "w") as file:
            os.dup2(file.fileno(), sys.stderr.fileno())
            sys.stderr = file
            with pytest.raises(typer.Exit) as stop, friendly_errors(train):
                join(0)
            assert stop.value.exit_code == 1

    port = get_free_port()
    other, one = start_process(lambda: join(1)), start_process(first)
    assert os.waitstatus_to_exitcode(os.waitpid(one, 0)[1]) == 0
    os.waitpid(other, 0)
    (line,) = [line for line in (tmp_path / "errors").read_text().splitlines() if line.startswith("error")]
    assert line == (
        "error: another process of this run has ended or does not answer: see what it said last, then start the same "
        "command again with --resume latest"
    )


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["accelerate", "torchrun"])
def test_one_of_two_processes_is_killed(launcher, tmp_path):
    output = tmp_path / "run"
    command = [sys.executable, *LAUNCHERS[launcher], "tests.training.training_process", str(output)]
    environment = {**ENVIRONMENT, "STEP_SECONDS": "0.5"}
    process = subprocess.Popen(command, env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 300
    while not (output / "reached-1-finetune-2").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    for child in psutil.Process(process.pid).children(recursive=True):
        if child.environ().get("RANK") == "1":
            child.kill()
    errors = process.communicate(timeout=120)[1]
    assert process.returncode != 0 and "unexpected" not in errors
    ours = [line for line in errors.splitlines() if line.startswith(("error: another process", "stopped"))]
    assert len(ours) == 1, errors
    assert "/mhla_hf/" not in errors, "a traceback of the run's own code"
    environment["STEP_SECONDS"] = "0"
    assert subprocess.run(command, env=environment, cwd=ROOT, timeout=300).returncode == 0
    assert (output / "final.pt").exists()


LAUNCHERS = {
    "accelerate": ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--quiet", "-m"],
    "torchrun": ["-m", "torch.distributed.run", "--nproc_per_node", "2", "-m"],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "number", "whom"),
    [("accelerate", signal.SIGTERM, "launcher"), ("torchrun", signal.SIGINT, "all")],
)
def test_two_processes_stop_together(launcher, number, whom, tmp_path):
    """`all` is what a terminal does: every process of the foreground group gets the signal."""
    output = tmp_path / "run"
    command = [sys.executable, *LAUNCHERS[launcher], "tests.training.training_process", str(output)]

    def start(seconds):
        return subprocess.Popen(
            command,
            env={**ENVIRONMENT, "STEP_SECONDS": str(seconds)},
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    process = start(0.5)
    deadline = time.monotonic() + 300
    while not (output / "reached-1-finetune-1").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(process.pid, number) if whom == "launcher" else os.killpg(process.pid, number)
    # Ends when all that inherited it have closed it: the launcher may end first.
    errors = process.communicate(timeout=120)[1]
    assert process.returncode != 0
    ours = [line for line in errors.splitlines() if line.startswith("stopped")]
    assert len(ours) == 1 and "--resume finetune-0000000" in ours[0]
    # Whatever traceback there is, the launcher's, shows nothing of the run's own code.
    assert "/mhla_hf/" not in errors.replace(ours[0], "")
    newest = list_checkpoints(output / "checkpoints")[-1].name
    assert newest.startswith("finetune-0000000") and not (output / "final.pt").exists()
    process = start(0)
    assert process.wait(timeout=300) == 0, process.stderr.read()
    assert (output / "final.pt").exists()


def test_a_launcher_that_starts_one_process_of_several_is_refused(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    with pytest.raises(ValueError, match="starts one process, whatever --num_processes says: launch with --multi_gpu"):
        processes.make_accelerator(TrainingConfig(learning_rate=1e-3, device="cpu"))
