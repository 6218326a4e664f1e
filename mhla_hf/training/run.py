# SPDX-License-Identifier: Apache-2.0
"""A run as its stages see it: where it resumes, its metrics (one line of `metrics.jsonl` per optimizer step,
consistent across kills and resumed runs), and the messages with which it stops or diverges."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import checkpoints, parameters
from .checkpoints import Position
from .config import TrainingConfig
from .evaluation import ModelTracker, Validator
from .optimization import make_optimizer
from .processes import StopSignals, TrainingStopped
from .stages.prediction import Stage


_SHOWN = 8


class Metrics:
    """The rows of the metrics so far, in memory.

    Args:
        rows: Those of earlier steps.
    """

    def __init__(self, rows: Sequence[dict[str, Any]] = ()) -> None:
        self.rows = list(rows)

    def append(self, row: dict[str, Any]) -> None:
        """Add a row, with at least `stage`, `step` and `loss`."""
        self.rows.append(row)


Callback = Callable[[str, int, float], None]
"""Called with (stage, step, loss)."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """The parts of a run that its stages share.

    Attributes:
        config: The options.
        accelerator: The processes; `stages.matching.OneProcess` for layers that train by themselves.
        model: The model that trains.
        dataset: The samples; stages make batches of them.
        state: Entries of the run in a checkpoint, see `Trainer._state`.
        output: Directory of the run; None writes nothing.
        callback: Called after every step.
        metrics: The metrics so far, in the process that keeps them.
        signals: Say when to stop.
        validator: Makes videos or images, in the process that does.
        tracker: Looks at the model while it trains.
    """

    config: TrainingConfig
    accelerator: Any
    model: nn.Module
    dataset: Sized
    state: Callable[[], dict[str, Any]]
    output: Path | None
    callback: Callback | None
    metrics: Metrics | None
    signals: StopSignals
    validator: Validator | None = None
    tracker: ModelTracker | None = None

    @property
    def checkpoints(self) -> Path | None:
        """Directory of the checkpoints; None writes none."""
        return None if self.output is None else self.output / "checkpoints"

    def prepare_model(self, names: Iterable[str]) -> None:
        """Make parameters trainable and enable gradient checkpointing if asked to."""
        parameters.set_trainable(self.model, names)
        self.model.train()
        if self.config.gradient_checkpointing:
            model: Any = self.model
            enable = getattr(model, "enable_gradient_checkpointing", None) or model.gradient_checkpointing_enable
            enable()

    def make_optimizer(self, stage: Stage, names: Sequence[str]) -> torch.optim.Optimizer:
        """The optimizer of a stage."""
        return make_optimizer(self.model, names, self.config, stage.learning_rate, stage.mhla_learning_rate)

    def moments_to_keep(self, moments: dict[str, torch.Tensor], finished: bool) -> dict[str, torch.Tensor]:
        """The optimizer's state that a checkpoint holds; more steps may be added to a finished run."""
        return moments

    def stopped(self, stage: Stage, step: int) -> TrainingStopped:
        """Return the exception that ends a stopped run, with its message in the main process."""
        message = ""
        if self.accelerator.is_main_process:
            message = f"stopped after step {step} of {stage.steps} ({stage.name}); "
            if self.checkpoints is None:
                message += "nothing was saved, for there is no output"
            else:
                saved = Position.of(stage.name, step).name
                newest = checkpoints.list_checkpoints(self.checkpoints)[-1].name
                # A run that went back has not reached its later checkpoints again.
                resume = "latest" if saved == newest else saved
                message += f"the same command with --resume {resume} continues from there (saved in {self.output})"
        return TrainingStopped(message, self.signals.received or signal.SIGINT)

    def diverged(
        self, problem: str, position: Position, batches: Sequence[tuple[float, tuple[int, ...]]]
    ) -> FloatingPointError:
        """Return the exception that ends a run whose loss or gradient is not finite. Every process must call it.

        Args:
            problem: The quantity and its value, such as "loss is nan".
            position: The step that it came up in; it counts as not done.
            batches: Loss and indices of samples of this process's micro-batches.
        """
        from accelerate.utils import gather_object

        numbers = samples_behind_bad_loss(gather_object(list(batches)))
        # A data set may say what a sample is.
        name = getattr(self.dataset, "sample_name", str)
        samples = ", ".join(name(index) for index in numbers[:_SHOWN])
        if len(numbers) > _SHOWN:
            samples += f" and {len(numbers) - _SHOWN} more"
        if self.checkpoints is None:
            way_out = "nothing was saved, for there is no output"
        else:
            good = checkpoints.last_good_checkpoint(self.checkpoints, position)
            way_out = "there is no good checkpoint to go back to"
            if good is not None:
                way_out = f"--resume {good.name} continues from the last good checkpoint"
        return FloatingPointError(
            f"the {problem} in {position.stage} step {position.step}, batch of sample {samples} of the data set; "
            f"{way_out}; lower the learning rate if the samples are sound"
        )


def samples_behind_bad_loss(batches: Sequence[tuple[float, tuple[int, ...]]]) -> list[int]:
    """Return the samples of micro-batches whose loss is not finite; of all if only the gradient is not."""
    bad = [indices for loss, indices in batches if not math.isfinite(loss)] or [indices for _, indices in batches]
    return list(dict.fromkeys(index for indices in bad for index in indices))
