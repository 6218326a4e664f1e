# SPDX-License-Identifier: Apache-2.0
"""Tracking of attention in the `Trainer` of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accelerate import DistributedType
from accelerate.state import AcceleratorState
from transformers import TrainerCallback
from transformers.integrations import is_deepspeed_zero3_enabled

from .tracking import AttentionTracker, mean_figures


HISTORY_FILE = "attention_history.json"
"""File in the output directory that holds the history."""


class TrackingCallback(TrainerCallback):
    """Records attention while the `Trainer` of transformers trains, every `tracker.every` steps and at its beginning.

    The history is written to `attention_history.json` in the output directory, and continued by a run that is resumed.
    Means over the layers go into the logs as `attention_rank`, `attention_effective_rank`, ...

    Args:
        tracker: The tracker, with the probe.
        trainer: The trainer, whose `log` takes the figures and hands them on, to TensorBoard for example. Without it
            they are in `state.log_history` alone.
        per_layer: Log the figures of each layer as well, as `attention_rank/LAYER`.

    Examples:
        >>> trainer = Trainer(model, arguments, train_dataset=dataset)  # doctest: +SKIP
        >>> trainer.add_callback(TrackingCallback(AttentionTracker(batch, every=50), trainer))  # doctest: +SKIP
    """

    def __init__(self, tracker: AttentionTracker, trainer: Any = None, *, per_layer: bool = False) -> None:
        self.tracker, self.trainer, self.per_layer = tracker, trainer, per_layer

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Continues the history of a run that is resumed, or records the model as it is.

        Raises:
            ValueError: Under DeepSpeed ZeRO-3, whose weights no process has.
        """
        if is_deepspeed_zero3_enabled():
            raise ValueError("TrackingCallback does not run under DeepSpeed ZeRO-3; use FSDP 2, or ZeRO-2.")
        path = Path(args.output_dir) / HISTORY_FILE
        if state.global_step and path.is_file():
            self.tracker.load(path, state.global_step)
        elif not state.global_step:
            self.tracker.history = []
        recorded = [row["step"] for row in self.tracker.history]
        if self.tracker.is_due(state.global_step) and state.global_step not in recorded:
            self._record(args, state, control, model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Records, where a record is due."""
        if self.tracker.is_due(state.global_step):
            self._record(args, state, control, model)

    def _record(self, args: Any, state: Any, control: Any, model: Any) -> None:
        # Models in shards need all processes; of others all have the same copy. `accelerate launch` can shard too,
        # which the arguments do not say.
        in_shards = AcceleratorState().distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
        if not state.is_world_process_zero and not in_shards:
            return
        row = self.tracker.record(model, state.global_step)
        if not state.is_world_process_zero:
            return
        figures = mean_figures(row, per_layer=self.per_layer)
        if self.trainer is not None:
            # A log of its own would cancel the trainer's that is due at this step.
            due = control.should_log
            self.trainer.log(figures)
            control.should_log = due
        else:
            state.log_history.append({**figures, "step": state.global_step})
        path = Path(args.output_dir)
        path.mkdir(parents=True, exist_ok=True)
        self.tracker.save(path / HISTORY_FILE)
