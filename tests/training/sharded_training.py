# SPDX-License-Identifier: Apache-2.0
"""Processes that train together under a configuration of `conversion/accelerate`, as by `accelerate launch`."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from pathlib import Path
from typing import Any

import torch
from accelerate.utils.other import get_free_port

from mhla_hf.training import TrainingConfig
from mhla_hf.training.processes import make_accelerator
from tests import ROOT

from .training_process import make_trainer


CONFIGURATIONS = ROOT / "conversion" / "accelerate"
# Where a gradient is zero but for rounding errors, Adam's steps are as large as anywhere: the learning rate bounds the
# difference between runs there.
OPTIONS: dict[str, Any] = {
    "train": "full", "distill_steps": 0, "learning_rate": 1e-3, "ema_decay": 0.9, "checkpoints_total_limit": None,
}  # fmt: skip


def launch_arguments(name: str, *arguments: str) -> Any:
    """What `accelerate launch --config_file` makes of a configuration."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    command = ["--config_file", str(CONFIGURATIONS / f"{name}.yaml"), *arguments, "script.py"]
    return _validate_launch_command(launch_command_parser().parse_args(command))[0]


def launch_environment(name: str) -> dict[str, str]:
    """The environment of its processes, without what is there anyway."""
    from accelerate.utils.launch import prepare_multi_gpu_env

    arguments = launch_arguments(name, "--mixed_precision", "no", "--main_process_port", "0")
    environment = prepare_multi_gpu_env(arguments)
    return {key: value for key, value in environment.items() if os.environ.get(key) != value}


def train_together(name: str, runs: list[tuple[Path, dict[str, Any]]], processes: int = 2) -> None:
    """Trains in so many processes, run after run; the first process saves the losses and weights of each.

    Args:
        name: Configuration.
        runs: Output and options of each run.
        processes: How many.
    """
    context = multiprocessing.get_context("forkserver")
    # Imported once and not in every process.
    context.set_forkserver_preload([__name__])
    address = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(get_free_port())}
    environment = {**launch_environment(name), **address}
    started = [
        context.Process(target=_train, args=(environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, runs))
        for rank in range(processes)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join(300)
    assert [process.exitcode for process in started] == [0] * processes


def _train(environment: dict[str, str], runs: list[tuple[Path, dict[str, Any]]]) -> None:
    torch.set_num_threads(1)
    os.environ.update(environment)
    try:
        accelerator = make_accelerator(TrainingConfig(device="cpu"))
        kind = accelerator.distributed_type.value
        for output, options in runs:
            result = make_trainer(output, None, accelerator, **OPTIONS, **options).run()
            if accelerator.is_main_process:
                record = {"losses": result.losses, "weights": result.model.state_dict(), "kind": kind}
                torch.save(record, output / "final.pt")
        accelerator.end_training()
    except BaseException:
        traceback.print_exc()
        raise
