# SPDX-License-Identifier: Apache-2.0
"""A run as its stages see it: where it resumes, its metrics (one line of `metrics.jsonl` per optimizer step,
consistent across kills and resumed runs), and the messages with which it stops or diverges."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Callable, Iterable, Sequence, Sized
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import nn

from ..utils.destinations import lock_output
from ..utils.files import Types, atomic_file, check_fields, clear_write_errors, parse_json
from . import checkpoints, parameters
from .checkpoints import Position
from .config import TrainingConfig
from .data.cache import LatentDataset
from .optimization import make_optimizer
from .processes import Processes, StopSignals, TrainingStopped
from .stages.prediction import Stage
from .validation import Validator


# A checkpoint made under one of these options cannot go on under another.
IDENTITY = ("component", "train", "lora_rank", "lora_alpha", "mhla")
_METRICS: dict[str, Types] = {"stage": str, "step": int, "loss": float}
_SHOWN = 8


def check_state(checkpoint: Path, current: dict[str, Any]) -> None:
    """Check that a checkpoint belongs to this run.

    Args:
        checkpoint: The checkpoint.
        current: The state of the run as checkpoints record it.

    Raises:
        ValueError: If an option differs without which its weights do not fit, or the data or weights that the run is
            made from are others.
    """
    state = checkpoints.read_state(checkpoint)
    saved, now = state.get("config", {}), current["config"]
    changes = [f"{name}={saved.get(name)!r}" for name in IDENTITY if saved.get(name) != now[name]]
    made_from = state.get("inputs", {})
    inputs = current["inputs"].items()
    changes += [f"other {name} than this run has" for name, value in inputs if made_from.get(name, value) != value]
    if changes:
        raise ValueError(
            f"resume: {checkpoint} was made with {', '.join(changes)}; go on with the same or choose another output"
        )


def find_start(
    config: TrainingConfig, accelerator: Accelerator, current: dict[str, Any], dataset: Any = None
) -> tuple[Path | None, Position | None, ExitStack]:
    """Lock the output, and the cache for reading, and find where to resume.

    The main process decides, so that all agree even while files appear; an error it meets is raised in all.

    Args:
        config: The options; `output` must be given.
        accelerator: The processes.
        current: The state of the run as checkpoints record it.
        dataset: The samples.

    Returns:
        The checkpoint and its position, None to start from step 0; and the locks, which the run closes when it ends.

    Raises:
        ValueError: If the output or the cache is in use, or the checkpoint does not exist or fit.
    """
    from accelerate.utils import broadcast_object_list

    output = Path(str(config.output))
    found: list[Any] = [None]
    with ExitStack() as locks:
        with Processes().together():
            if accelerator.is_main_process:
                takes: list[Callable[[], Any]] = [partial(lock_output, output)]
                if isinstance(dataset, LatentDataset):
                    takes.append(dataset.lock)
                for take in takes:
                    locks.enter_context(take() or nullcontext())
                found = [checkpoints.find_checkpoint(config.resume, output / "checkpoints")]
                for finished in (output / "pipeline", output / "model"):
                    if config.resume is None and finished.exists():
                        raise ValueError(f"output already holds the finished {finished}; choose another output")
                if found[0] is not None:
                    check_state(found[0], current)
        broadcast_object_list(found)
        position = None if found[0] is None else checkpoints.checkpoint_position(found[0])
        return found[0], position, locks.pop_all()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a metrics file; a half-written last line, which a kill can leave, is dropped.

    Raises:
        ValueError: If another line is damaged; the message names it.
    """
    if not path.is_file():
        return []
    rows = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        where = f"line {number} of {path} (remove the file to start another)"
        rows.append(check_fields(parse_json(line.decode(errors="replace"), where), where, required=_METRICS))
    return rows


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


class MetricsFile(Metrics):
    """A metrics file that rows are appended to.

    Args:
        path: The file.
        position: Position that the run resumes from; rows of later steps are cut off. None starts an empty file.
    """

    def __init__(self, path: Path, position: Position | None = None) -> None:
        kept = []
        if position is not None:
            kept = [row for row in read_metrics(path) if Position.of(row["stage"], row["step"]) <= position]
        with atomic_file(path) as temporary:
            temporary.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        super().__init__(kept)
        self.path = path
        self._file = path.open("a", encoding="utf-8")

    def append(self, row: dict[str, Any]) -> None:
        """Write one row and flush it to the operating system, so that a killed process loses none.

        Raises:
            OSError: If there is no room for it.
        """
        super().append(row)
        with clear_write_errors(self.path):
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file. Only a row that `append` failed to write can be lost now."""
        with suppress(OSError):
            self._file.close()


Callback = Callable[[str, int, float], None]
"""Called with (stage, step, loss)."""


class ModelTracker(Protocol):
    """Observes the model during training, such as [`AttentionTracker`][mhla_hf.analysis.AttentionTracker].

    It may change neither the model nor the state of random number generators.
    """

    def is_due(self, step: int) -> bool:
        """Whether to record after this many steps of all stages."""

    def record(self, model: nn.Module, step: int) -> dict[str, Any]:
        """Records, and returns a row of its history, ready for JSON."""

    def figures(self, row: dict[str, Any]) -> dict[str, float]:
        """Figures of a row for trackers such as TensorBoard."""

    def restore(self, history: Iterable[dict[str, Any]]) -> None:
        """Continue a history."""


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
