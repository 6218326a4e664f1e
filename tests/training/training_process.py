# SPDX-License-Identifier: Apache-2.0
"""A small training run as a program: `python -m tests.training.training_process OUTPUT [OPTIONS AS JSON]`.

It resumes where there is something to resume. The model is the smallest DiT, made from a seed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import typer

from mhla_hf.cli.main import FriendlyCommand
from mhla_hf.training import DiffusionTrainer, TrainingConfig
from mhla_hf.training.processes import make_accelerator

from .cases import CASES


def make_trainer(output, callback=None, accelerator=None, **options):
    """A trainer of the same model on the same data at every call."""
    case = CASES["dit"]
    torch.manual_seed(0)
    teacher = case.make_teacher()
    base = {
        "output": str(output), "resume": "latest", "distill_steps": 2, "max_steps": 6, "checkpointing_steps": 2,
        "checkpoints_total_limit": 2, "batch_size": 2, "learning_rate": 1e-2, "condition_dropout": 0.0,
        "progress": False, "device": "cpu",
    }  # fmt: skip
    return DiffusionTrainer(
        TrainingConfig(**{**base, **options}),
        case.student(teacher),
        case.dataset(),
        teacher=teacher,
        callback=callback,
        accelerator=accelerator,
    )


def train(output: Path, options: str = "{}") -> None:
    """Trains; every step takes as many seconds as the environment says, and each finished one leaves a file."""
    given = json.loads(options)
    accelerator = make_accelerator(TrainingConfig(device="cpu", **given))
    rank, pause = accelerator.process_index, float(os.environ.get("STEP_SECONDS", "0"))

    def callback(stage, step, loss):
        (output / f"reached-{rank}-{stage}-{step}").touch()
        time.sleep(pause)

    output.mkdir(parents=True, exist_ok=True)
    result = make_trainer(output, callback, accelerator, **given).run()
    if accelerator.is_main_process:
        torch.save(result.model.state_dict(), output / "final.pt")
    accelerator.end_training()


if __name__ == "__main__":
    if os.environ.get("RANK") == os.environ.get("RANK_TO_FAIL", "none"):
        sys.exit("this process has an error of its own")
    program = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    program.command(cls=FriendlyCommand)(train)
    program()
