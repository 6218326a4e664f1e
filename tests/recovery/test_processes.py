# SPDX-License-Identifier: Apache-2.0
"""Recoveries in two processes: the figures of one, and ends in common when one of them is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
from accelerate.state import AcceleratorState
from accelerate.utils.other import get_free_port

import mhla_hf
from mhla_hf.models.directory import ModelDirectory
from mhla_hf.recovery.data import open_data
from tests import ROOT, tiny_joint
from tests.training.kill_training import start
from tests.training.sharded_training import launch_environment

from .test_recover import CALLS, EXTRA, SMALL, make_source, weights


pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
    pytest.mark.usefixtures("fresh_accelerate_state"),
]

FINETUNE = {"finetune.steps": 4, "finetune.batch_size": 2}
CHANGES = {
    "llama": {**EXTRA["llama"], **FINETUNE},
    "wan": EXTRA["wan"],
    "bert": EXTRA["bert"],
    "flux": {
        "distill": None, "data.samples": 4, "data.held_out": 2, "data.height": 128, "data.width": 192,
        "data.max_length": 16, "match.batches": 2,
    },
}  # fmt: skip


def make(kind, root):
    """A tiny softmax model, and data for it."""
    if kind != "flux":
        return make_source(kind, root)
    pipeline = CALLS["flux"]()
    tiny_joint.with_encoders(pipeline)
    pipeline.save_pretrained(root / "flux")
    return root / "flux", None


def recover(kind, source, output, data, more=None, **options):
    changes = {name: value for name, value in SMALL.items() if f"{name.partition('.')[0]}" not in CHANGES[kind]}
    options = {
        "changes": {**changes, **CHANGES[kind], **(more or {})},
        "save_every": 2,
        "progress": False,
        "device": "cpu",
        **options,
    }
    return mhla_hf.recover(source, output, data, **options)


def start_two(action, environment=None):
    """Starts something in two processes, as a launcher does; returns their numbers."""
    port = str(get_free_port())

    def run(rank):
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "CUDA_VISIBLE_DEVICES": ""}
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        os.environ.update({**(environment or {}), **address, **ranks})
        torch.set_num_threads(1)
        # That of this process knows of no others.
        AcceleratorState._reset_state(reset_partial_state=True)
        action()

    return [start(lambda rank=rank: run(rank)) for rank in range(2)]


def codes(processes):
    return [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]


def check_equal(one, two):
    """Figures and losses of two reports agree to 1e-4, and so do the weights."""
    reports = [json.loads((output / "report.json").read_text()) for output in (one, two)]
    assert reports[0]["figures"].keys() == reports[1]["figures"].keys()
    for state, figures in reports[0]["figures"].items():
        assert reports[1]["figures"][state] == pytest.approx(figures, rel=1e-4, abs=1e-4), state
    for name, stage in reports[0]["stages"].items():
        for part in ("layers", "blocks"):
            for key, losses in stage.get(part, {}).items() if isinstance(stage.get(part), dict) else ():
                assert reports[1]["stages"][name][part][key] == pytest.approx(losses, rel=1e-4), (name, key)
        if "last" in stage:
            assert reports[1]["stages"][name] == pytest.approx(stage, rel=1e-4), name
    found, expected = weights(two), weights(one)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-4, msg=name)


@pytest.mark.parametrize("kind", ["llama", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("wan", "flux"))])
def test_two_processes_report_what_one_does(kind, tmp_path):
    source, data = make(kind, tmp_path)
    # The default of language models selects layers.
    options = {"layers": "auto:1/2"} if kind == "llama" else {}
    processes = start_two(lambda: recover(kind, source, tmp_path / "two", data, **options))
    recover(kind, source, tmp_path / "one", data, **options)
    assert codes(processes) == [0, 0]
    check_equal(tmp_path / "one", tmp_path / "two")
    assert set(os.listdir(tmp_path / "two" / "work")) <= {".lock", "run.json"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "stage"), [("llama", "finetune"), *((kind, "distill") for kind in ("llama", "wan", "bert"))]
)
def test_stages_on_the_whole_model_are_sharded(kind, stage, tmp_path):
    source, data = make(kind, tmp_path)
    # Adam makes steps of this size of gradients that are zero but for rounding, as those of Wan's norms of queries.
    rates = dict.fromkeys((f"{stage}.learning_rate", f"{stage}.mhla_learning_rate"), 1e-5)
    options = {"stages": ["calibrate", stage], "more": rates}
    environment = launch_environment("fsdp2")
    processes = start_two(lambda: recover(kind, source, tmp_path / "two", data, **options), environment)
    recover(kind, source, tmp_path / "one", data, **options)
    assert codes(processes) == [0, 0]
    check_equal(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
def test_a_process_that_is_killed_ends_the_other_and_any_number_goes_on(tmp_path):
    source, texts = make("llama", tmp_path)

    def kill_in(stage):
        """Data whose reader in the second process is killed where it reads for a stage."""

        def open_killing(model):
            amounts = {"samples": 12, "held_out": 4, "seed": 0, "length": 32}
            data = open_data(model, ModelDirectory.open(source), texts, **amounts)
            batch = data.batch

            def read(name, *arguments):
                if name == stage and os.environ.get("RANK") == "1":
                    os.kill(os.getpid(), signal.SIGKILL)
                return batch(name, *arguments)

            data.batch = read
            return data

        return open_killing

    recover("llama", source, tmp_path / "whole", kill_in(None))
    # The stage blockwise reads by its former name.
    for stage in ("calibrate", "match", "blocks", "distill", "finetune"):
        output = tmp_path / stage
        processes = start_two(lambda stage=stage, output=output: recover("llama", source, output, kill_in(stage)))
        assert os.waitstatus_to_exitcode(os.waitpid(processes[1], 0)[1]) == -signal.SIGKILL, stage
        began = time.monotonic()
        assert codes(processes[:1]) == [1], stage
        assert time.monotonic() - began < 60, stage
        resumed = lambda output=output: recover("llama", source, output, kill_in(None), resume=True)  # noqa: E731
        if stage in ("match", "distill"):
            assert codes(start_two(resumed)) == [0, 0], stage
        else:
            resumed()
        check_equal(tmp_path / "whole", output)


LAUNCHERS = {
    "accelerate": ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port"],
    "torchrun": ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port"],
}


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def recovery(source, data, steps):
    """Words of a command that matches layers; the output follows."""
    options = ["--match-steps", steps, "--match-batches", "2", "--samples", "8", "--max-length", "32"]
    return [
        "-m", "mhla_hf", "recover", str(source), "--data", data, "--stages", "match", *options, "--device", "cpu",
        "--quiet",
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_launchers_start_the_command(launcher, tmp_path):
    source, data = make("llama", tmp_path)
    command = [sys.executable, *LAUNCHERS[launcher], str(get_free_port()), *recovery(source, data, "4")]

    def run(output, *more):
        return subprocess.run(
            [*command, str(output), *more], env=ENVIRONMENT, capture_output=True, text=True, timeout=300
        )

    done = run(tmp_path / "output")
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "output" / "README.md").is_file()
    refused = run(tmp_path / "output", "--seed", "1")
    assert refused.returncode != 0 and "holds a run with" in refused.stderr
    assert "/mhla_hf/" not in refused.stderr, "a traceback of the run's own code"


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_one_line_says_that_a_process_was_killed(launcher, tmp_path):
    source, data = make("llama", tmp_path)
    command = [sys.executable, *LAUNCHERS[launcher], str(get_free_port()), *recovery(source, data, "100000")]
    process = subprocess.Popen(
        [*command, str(tmp_path / "output")], env=ENVIRONMENT, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 300
    while not (tmp_path / "output" / "work" / "match" / "matching.json").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(1)
    for child in psutil.Process(process.pid).children(recursive=True):
        if child.environ().get("RANK") == "1":
            child.kill()
    errors = process.communicate(timeout=60)[1]
    assert process.returncode != 0 and "unexpected" not in errors and "/mhla_hf/" not in errors
    ours = [line for line in errors.splitlines() if line.startswith(("error: ", "stopped "))]
    assert len(ours) == 1 and "the same command" in ours[0], errors


def test_batches_that_two_processes_cannot_share_are_refused(tmp_path):
    source, data = make("llama", tmp_path)

    def action():
        with pytest.raises(ValueError, match="distill.batch_size must be a multiple of the 2 processes, got 3"):
            recover("llama", source, tmp_path / "two", data, stages=["distill"], changes={"distill.batch_size": 3})

    assert codes(start_two(action)) == [0, 0]
