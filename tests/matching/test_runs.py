# SPDX-License-Identifier: Apache-2.0
"""Runs of matching that are killed, stopped, diverge, fill the disk or have several processes."""

from __future__ import annotations

import os
import signal
import sys

import pytest
import torch
from torch import distributed

import mhla_hf
from mhla_hf.recovery import match_layers
from mhla_hf.training.processes import TrainingStopped
from tests.integrations.transformers.tiny_models import inputs, softmax_model
from tests.training.kill_training import start as start_process


_MOVES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir")


def student():
    return mhla_hf.convert(softmax_model("bert"), {"block_size": 4, "feature_map": "hedgehog"})


BATCHES = [inputs("bert", batch=2, length=length, seed=length) for length in (12, 8, 16)]


def run(output, model=None, **options):
    """Losses and weights of a run that saves after every second step."""
    model = student() if model is None else model
    report = match_layers(model, BATCHES, **{"steps": 5, "save_every": 2, "output": output, **options})
    return report.losses, {name: value.clone() for name, value in model.state_dict().items()}


def same(one, other):
    return one[0] == other[0] and all(torch.equal(value, other[1][name]) for name, value in one[1].items())


def kill_at(event):
    """Has this process end with SIGKILL before its change of files of this number."""
    count = 0

    def audit(name, arguments):
        nonlocal count
        writes = name == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if name in _MOVES or writes:
            count += 1
            if count == event:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(audit)


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["memory", "disk", "none"])
def test_killed_at_any_moment_it_goes_on_to_the_same_loss(cache, tmp_path):
    whole = run(tmp_path / "whole", cache=cache)
    event, killed = 4, 0
    while True:
        output = tmp_path / f"killed-{event}"

        def action(output=output, event=event):
            kill_at(event)
            run(output, cache=cache)

        _, status = os.waitpid(start_process(action), 0)
        assert same(run(output, cache=cache), whole)
        if not os.WIFSIGNALED(status):
            break
        killed += 1
        # Moments all over the run, each in another place of what is written again and again.
        event += 4
    assert killed >= 4


def test_another_run_in_the_output_is_refused_with_both_values(tmp_path):
    run(tmp_path, steps=1)
    with pytest.raises(ValueError, match=r"holds a run with seed 0 \(now 1\), steps \[1, 1, 1\] \(now \[2, 2, 2\]\)"):
        run(tmp_path, steps=2, seed=1)


@pytest.mark.parametrize("cache", ["memory"])
def test_a_signal_stops_after_the_step_and_the_same_call_goes_on(cache, tmp_path):
    whole = run(tmp_path / "whole", cache=cache)
    seen = []

    def stop_at(name, step, loss):
        seen.append((name, step))
        if len(seen) == 8:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(
        TrainingStopped, match=r"stopped matching \S+ after step 3 of 5; .*continues from there"
    ) as stop:
        run(tmp_path / "stopped", cache=cache, progress=stop_at)
    assert stop.value.exit_code == 143
    later = []
    again = run(tmp_path / "stopped", cache=cache, progress=lambda name, step, loss: later.append((name, step)))
    assert same(again, whole) and not set(later) & set(seen)
    # A finished run is not run again, and takes no record.
    untouched = run(tmp_path / "stopped", cache=cache, progress=lambda *step: pytest.fail("a step"))
    assert same(untouched, whole)
    with pytest.raises(TrainingStopped, match="nothing was saved, for there is no output"):
        seen.clear()
        run(None, cache=cache, progress=stop_at)


def in_two_processes(tmp_path, action):
    """Runs something in two processes of a gloo group; returns their exit codes."""

    def start(rank):
        distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=rank, world_size=2)
        action(rank)
        distributed.destroy_process_group()

    processes = [start_process(lambda rank=rank: start(rank)) for rank in range(2)]
    return [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]


@pytest.mark.skipif(torch.cuda.is_available(), reason="autograd of a process that has a GPU cannot be forked")
@pytest.mark.parametrize("cache", ["memory", "disk", pytest.param("none", marks=pytest.mark.slow)])
def test_two_processes_equal_one(cache, tmp_path):
    whole = run(tmp_path / "whole", cache=cache)

    def action(rank):
        seen = set()
        result = run(tmp_path / "shared", cache=cache, progress=lambda name, step, loss: seen.add(name))
        # Layers 0 and 2, and layer 1.
        assert len(seen) == 2 - rank
        torch.save(result, tmp_path / f"{rank}.pt")

    assert in_two_processes(tmp_path, action) == [0, 0]
    for rank in range(2):
        assert same(torch.load(tmp_path / f"{rank}.pt"), whole)
    # Another number of processes goes on where two were.
    assert same(run(tmp_path / "shared", cache=cache), whole)
