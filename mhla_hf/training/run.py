# SPDX-License-Identifier: Apache-2.0
"""A run as its stages see it: where it resumes, and the messages with which it stops or diverges."""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import nn

from ..utils.destinations import lock_output
from . import checkpoints, parameters
from .checkpoints import Position
from .config import TrainingConfig
from .data.cache import LatentDataset
from .metrics import Metrics
from .optimization import make_optimizer
from .processes import StopSignals, TrainingStopped
from .stages.prediction import Stage
from .validation import Validator


logger = logging.getLogger(__name__)

# A checkpoint made under one of these options cannot go on under another.
IDENTITY = ("component", "train", "lora_rank", "lora_alpha", "mhla")
# Another value lets the run go on, but it will not end where an uninterrupted one would.
TRAJECTORY = (
    "adam_beta1", "adam_beta2", "adam_epsilon", "condition_dropout", "distill_learning_rate", "distill_ratio",
    "distill_steps", "distill_target", "distill_temperature", "ema_decay", "ema_inv_gamma", "ema_power",
    "gradient_accumulation_steps", "learning_rate", "lr_schedule", "max_grad_norm", "max_steps",
    "mhla_learning_rate", "mixed_precision", "seed", "transfer_cache", "transfer_learning_rate", "transfer_steps",
    "warmup_steps", "weight_decay",
)  # fmt: skip
_SHOWN = 8


def check_state(checkpoint: Path, current: dict[str, Any]) -> None:
    """Checks that a checkpoint belongs to this run, and warns of options that changed since.

    Args:
        checkpoint: The checkpoint.
        current: The state of the run as checkpoints record it.

    Raises:
        ValueError: If an option differs without which its weights do not fit, or the data or weights that the run is
            made from are others.
    """
    state = checkpoints.read_state(checkpoint)
    saved, now = state.get("config", {}), current["config"]
    broken = [name for name in IDENTITY if saved.get(name) != now[name]]
    if broken:
        changes = ", ".join(f"{name}={saved.get(name)!r}" for name in broken)
        raise ValueError(f"resume: {checkpoint} was made with {changes}; go on with the same or choose another output")
    made_from = state.get("inputs", {})
    others = [name for name, value in current["inputs"].items() if made_from.get(name, value) != value]
    if others:
        raise ValueError(
            f"resume: {checkpoint} was made with other {', '.join(others)} than this run has; go on with the same or "
            "choose another output"
        )
    changed = [name for name in TRAJECTORY if saved.get(name) != now[name]]
    changed += [name for name in ("dataset_size",) if state.get(name) != current[name]]
    # Two processes see what one with the doubled batch sees.
    if _batch_of_all(state) != _batch_of_all(current):
        changed += ["batch_size times the number of processes"]
    saved_objective, objective = state.get("objective", {}), current["objective"]
    changed += [name for name in objective if saved_objective.get(name) != objective[name]]
    if changed:
        logger.warning(
            "%s was made with other values of %s: the run will not end where an uninterrupted one would",
            checkpoint.name,
            ", ".join(changed),
        )


def _batch_of_all(state: dict[str, Any]) -> Any:
    """Samples in one micro-step of all processes; None if a checkpoint does not say."""
    batch_size, world_size = state.get("config", {}).get("batch_size"), state.get("world_size")
    return batch_size * world_size if isinstance(batch_size, int) and isinstance(world_size, int) else None


def find_start(
    config: TrainingConfig, accelerator: Accelerator, current: dict[str, Any], dataset: Any = None
) -> tuple[Path | None, Position | None, list[Any]]:
    """Locks the output, and the cache for reading, and finds where to go on.

    The main process decides, so that all agree even while files appear; an error it meets is raised in all.

    Args:
        config: The options; `output` must be given.
        accelerator: The processes.
        current: The state of the run as checkpoints record it.
        dataset: The samples.

    Returns:
        The checkpoint and its position, None to start anew; and the locks, to be closed when the run ends.

    Raises:
        ValueError: If the output or the cache is in use, or the checkpoint does not exist or fit.
    """
    from accelerate.utils import broadcast_object_list

    output = Path(str(config.output))
    locks: list[Any] = []
    found: list[Any] = [None, None]
    if accelerator.is_main_process:
        try:
            locks.append(lock_output(output))
            if isinstance(dataset, LatentDataset):
                locks.append(dataset.lock())
            path = checkpoints.find_checkpoint(config.resume, output / "checkpoints")
            for finished in (output / "pipeline", output / "model"):
                if config.resume is None and finished.exists():
                    raise ValueError(f"output already holds the finished {finished}; choose another output")
            if path is not None:
                check_state(path, current)
                found[0] = str(path)
        except (OSError, ValueError) as error:
            found[1] = str(error)
    broadcast_object_list(found)
    held = [lock for lock in locks if lock is not None]
    if found[1] is not None:
        for lock in held:
            lock.close()
        raise ValueError(found[1])
    if found[0] is None:
        return None, None, held
    checkpoint = Path(found[0])
    return checkpoint, checkpoints.checkpoint_position(checkpoint), held


Callback = Callable[[str, int, float], None]
"""Called with (stage, step, loss)."""


class ModelTracker(Protocol):
    """Looks at the model while it trains, such as [`AttentionTracker`][mhla_hf.analysis.AttentionTracker].

    It may change neither the model nor the state of random number generators.
    """

    def is_due(self, step: int) -> bool:
        """Whether to record after this many steps of all stages."""

    def record(self, model: nn.Module, step: int) -> dict[str, Any]:
        """Records, and returns a row of its history, ready for JSON."""

    def figures(self, row: dict[str, Any]) -> dict[str, float]:
        """Figures of a row for trackers such as TensorBoard."""

    def restore(self, history: Iterable[dict[str, Any]]) -> None:
        """Continues a history."""


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
        """Lets parameters train, and the model recompute its activations where it is asked to."""
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
        """The end of a run that was told to stop, with its message in the main process."""
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
        """The end of a run whose loss or gradient is not finite. Every process must call it.

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
    """Samples of the micro-batches whose loss is not finite; of all where only the gradient is not."""
    bad = [indices for loss, indices in batches if not math.isfinite(loss)] or [indices for _, indices in batches]
    return list(dict.fromkeys(index for indices in bad for index in indices))
