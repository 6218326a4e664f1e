# SPDX-License-Identifier: Apache-2.0
"""The training loop of one stage: batches, optimizer steps, reports, checkpoints."""

from __future__ import annotations

import math
import signal
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import DistributedType
from safetensors.torch import load_file
from torch.utils.data import DataLoader, Dataset, get_worker_info

from . import checkpoints
from .checkpoints import Position
from .data.batches import DataOrder, TrainingBatch
from .optimization import learning_rate_factor, set_learning_rate
from .processes import full_tensor
from .run import Run
from .stages.prediction import Stage


class StageLoop:
    """The loop of one stage, as a whole (`run`) or step by step (`start`, `take_step`, `finish`).

    Args:
        run: The parts shared with the other stages.
        stage: The stage.
        steps_before: Steps of the stages before it, which trackers count too.
        averages: True for the stage whose weights are averaged where `ema_decay` asks for it. The model ends
            with their average.

    Attributes:
        step: Steps taken, earlier runs included.
        losses: Loss of every step, in the process that keeps the metrics; elsewhere of the steps taken here.
        seconds: Duration of the steps taken here, without their reports and checkpoints.
    """

    def __init__(self, run: Run, stage: Stage, steps_before: int = 0, averages: bool = False) -> None:
        self.shared, self.stage, self.steps_before = run, stage, steps_before
        self.config, self.accelerator, self.model = run.config, run.accelerator, run.model
        self.averages = averages and run.config.ema_decay is not None
        rows = run.metrics.rows if run.metrics else []
        self.losses = [row["loss"] for row in rows if row["stage"] == stage.name]
        self.step = 0
        self.seconds = 0.0
        self._saved: int | None = None
        self._attention_at_start: dict[str, Any] | None = None

    @property
    def finished(self) -> bool:
        """True once all steps are taken."""
        return self.step >= self.stage.steps

    def run(self, position: Position | None, checkpoint: Path | None) -> tuple[list[float], float]:
        """Run the remaining steps of the stage.

        Args:
            position: Position that the whole run resumes from; None at its beginning.
            checkpoint: The checkpoint of that position.

        Returns:
            The losses of all its steps, earlier ones included, and the mean seconds of the steps run here.

        Raises:
            FloatingPointError: If a loss or gradient is no longer finite; see `Run.diverged`.
            TrainingStopped: If a signal has stopped one of the processes; a checkpoint is saved before.
        """
        self.start(position, checkpoint)
        if self.finished:
            return self.losses, 0.0
        first = self.step
        with self.stage.context(), self._progress() as bar:
            try:
                while not self.finished:
                    stop_requested = self.take_step()
                    bar.set_postfix(loss=f"{self.losses[-1]:.4f}", refresh=False)
                    bar.update()
                    if stop_requested:
                        self.save()
                        raise self.shared.stopped(self.stage, self.step)
                    self._validate_if_due()
            finally:
                # Ends the processes that make batches ahead, which would live as long as the error's traceback.
                self.batches.close()
        steps = self.step - first
        self.finish()
        return self.losses, self.seconds / steps

    def start(self, position: Position | None, checkpoint: Path | None) -> None:
        """Restore model and optimizer to the position that the run resumes from; arguments as in `run`."""
        stage, names = self.stage, self.stage.trainable_names()
        if position is None or position.stage != stage.name:
            checkpoint = None
        if position is not None and position >= Position.of(stage.name, stage.steps):
            self.step = self._saved = stage.steps
            # The next stage, or the export, continues from the weights at the end of this one.
            if checkpoint is not None:
                checkpoints.load_weights(checkpoint, self.model, names, self.averages)
            return
        if position is not None and position.stage == stage.name:
            self.step = self._saved = position.step
        self.names = names
        self.shared.prepare_model(names)
        if checkpoint is not None:
            checkpoints.load_weights(checkpoint, self.model, names)
        optimizer = self.shared.make_optimizer(stage, names)
        self.module, self.optimizer = self.accelerator.prepare(stage.module(), optimizer)
        if checkpoint is not None:
            parameters, plain = dict(self.model.named_parameters()), self._plain_optimizer()
            for key, value in load_file(checkpoint / checkpoints.MOMENTS).items():
                name, _, kind = key.rpartition("::")
                # The step count stays on the CPU, where AdamW makes it unless it is fused.
                on_cpu = kind == "step" and not plain.defaults.get("fused")
                plain.state[parameters[name]][kind] = value if on_cpu else value.to(parameters[name].device)
        # Models in shards have to take a step before parts of them can be called.
        if position is None and self.steps_before == 0 and not self._in_shards:
            self._attention_at_start = self._track()
            if self._attention_at_start is not None:
                self._log({}, self._attention_at_start)
        # Last, since it starts processes, which end when it is closed.
        self.batches = (batch for batch in self._loader())

    def take_step(self) -> bool:
        """Take an optimizer step, report it, and save a checkpoint if one is due.

        Returns:
            True if one of the processes has received a signal to stop.
        """
        began = time.perf_counter()
        loss, logs, stop_requested = self._optimizer_step()
        seconds = time.perf_counter() - began
        self.seconds += seconds
        self.step += 1
        self.losses.append(loss)
        self._report(loss, logs, seconds)
        every = self.config.checkpointing_steps
        if every and (self.step % every == 0 or self.finished):
            self.save()
        return stop_requested

    def save(self) -> None:
        """Save a checkpoint, unless this step has one or there is no output. Every process must call it."""
        directory = self.shared.checkpoints
        if directory is None or self._saved == self.step:
            return
        optimizer = self._plain_optimizer()
        parameters = dict(self.model.named_parameters())
        weights = {name: full_tensor(parameters[name]) for name in self.names}
        moments = {
            f"{name}::{kind}": full_tensor(value)
            for name in self.names
            for kind, value in optimizer.state.get(parameters[name], {}).items()
        }
        checkpoints.save_checkpoint(
            directory,
            Position.of(self.stage.name, self.step),
            {
                checkpoints.WEIGHTS: weights,
                checkpoints.MOMENTS: self.shared.moments_to_keep(moments, self.finished),
            },
            self.shared.state(),
            self.config.checkpoints_total_limit,
        )
        self._saved = self.step
        self.accelerator.wait_for_everyone()

    def finish(self) -> None:
        """Replace the weights by their average, and release the stage's resources."""
        self.stage.close()
        del self.module, self.optimizer, self.batches
        if self.accelerator.distributed_type != DistributedType.DEEPSPEED:
            # DeepSpeed would let go of the weights, which are still to be gathered.
            self.accelerator.free_memory()

    def _optimizer_step(self) -> tuple[float, dict[str, float], bool]:
        """One optimizer step.

        Returns:
            The loss averaged over micro-steps and processes, further figures, and whether one of the processes
            has received a signal to stop.
        """
        stage, config, accelerator = self.stage, self.config, self.accelerator
        factor = learning_rate_factor(
            self.step, schedule=config.lr_schedule, warmup_steps=config.warmup_steps, total_steps=stage.steps
        )
        rate = set_learning_rate(self._plain_optimizer(), factor)
        losses: list[torch.Tensor] = []
        samples: list[tuple[int, ...]] = []
        for micro_step in range(config.gradient_accumulation_steps):
            batch = next(self.batches)
            if isinstance(batch, Exception):
                raise batch
            batch = batch.to(accelerator.device)
            last = micro_step + 1 == config.gradient_accumulation_steps
            with nullcontext() if last else accelerator.no_sync(self.module):
                loss = stage.loss(self.module, batch, accelerator) / config.gradient_accumulation_steps
                accelerator.backward(loss)
            losses.append(loss.detach())
            samples.append(batch.indices)
        norm = accelerator.clip_grad_norm_(self.module.parameters(), config.max_grad_norm or math.inf)
        # DeepSpeed gives a plain number.
        gradient_norm = float(full_tensor(norm) if torch.is_tensor(norm) else norm)
        total = torch.stack(losses).sum()
        stop_requested = torch.tensor(float(self.shared.signals.received is not None), device=total.device)
        # Both in one message: all processes stop after the same step.
        loss_value, told = accelerator.reduce(torch.stack([total, stop_requested]), reduction="mean").tolist()
        # Scaled gradients of fp16 may overflow: their step is left out.
        diverged = accelerator.scaler is None and not math.isfinite(gradient_norm)
        if diverged or not math.isfinite(loss_value):
            problem = f"gradient is {gradient_norm}" if math.isfinite(loss_value) else f"loss is {loss_value}"
            batches_seen = list(zip(torch.stack(losses).tolist(), samples, strict=True))
            raise self.shared.diverged(problem, Position.of(stage.name, self.step + 1), batches_seen)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss_value, {"lr": rate, "grad_norm": gradient_norm}, told > 0

    def _plain_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer without accelerate's wrapper."""
        return getattr(self.optimizer, "optimizer", self.optimizer)

    def _loader(self) -> DataLoader:
        """The micro-batches that are left, in their order."""
        config, dataset = self.config, self.shared.dataset
        order = DataOrder(
            dataset_size=len(dataset),
            batch_size=config.batch_size,
            seed=config.seed,
            stage=self.stage.name,
            accumulation_steps=config.gradient_accumulation_steps,
            world_size=self.accelerator.num_processes,
            rank=self.accelerator.process_index,
            buckets=getattr(dataset, "buckets", None),
        )
        workers = config.dataloader_num_workers
        return load_micro_batches(MicroBatches(self.stage, order), self.step, self.stage.steps, workers)

    def _progress(self) -> Any:
        from tqdm.auto import tqdm

        hidden = not (self.config.progress and self.accelerator.is_local_main_process)
        return tqdm(total=self.stage.steps, initial=self.step, desc=self.stage.name, unit="step", disable=hidden)

    def _report(self, loss: float, logs: dict[str, float], seconds: float) -> None:
        name, shared = self.stage.name, self.shared
        tracked = self._track()
        if shared.metrics is not None:
            row = {"stage": name, "step": self.step, "loss": loss, **logs, "seconds": round(seconds, 6)}
            records = {"attention_at_start": self._attention_at_start, "attention": tracked}
            shared.metrics.append({**row, **{key: record for key, record in records.items() if record is not None}})
            self._attention_at_start = None
        self._log({"loss": loss, **logs}, tracked)
        if shared.callback is not None:
            shared.callback(name, self.step, loss)

    def _log(self, figures: dict[str, float], tracked: dict[str, Any] | None) -> None:
        """Log figures of this step, and those of a record of attention, to the trackers."""
        if not self.accelerator.trackers:
            return
        if tracked is not None and self.shared.tracker is not None:
            figures = {**figures, **self.shared.tracker.figures(tracked)}
        values = {f"{self.stage.name}/{key}": value for key, value in figures.items()}
        self.accelerator.log(values, step=self.steps_before + self.step)

    @property
    def _in_shards(self) -> bool:
        return self.accelerator.distributed_type == DistributedType.FSDP

    def _track(self) -> dict[str, Any] | None:
        """What the tracker records at this step, in the main process; models in shards need all of them."""
        tracker, step = self.shared.tracker, self.steps_before + self.step
        if tracker is None or not tracker.is_due(step):
            return None
        if not self._in_shards and not self.accelerator.is_main_process:
            return None
        return tracker.record(self.model, step)

    def _validate_if_due(self) -> None:
        config, validator, output = self.config, self.shared.validator, self.shared.output
        if not self.stage.validates or not config.validation_prompts:
            return
        if self.step % config.validation_steps and not self.finished:
            return
        if validator is not None and output is not None:
            validator.write_and_log(
                self.model, output / "validation", self.step, self.accelerator, self.steps_before + self.step
            )
        self.accelerator.wait_for_everyone()


class MicroBatches(Dataset):
    """The micro-batches of a stage by (step, micro-step).

    Args:
        stage: The stage, whose `make_batch` is a pure function.
        order: The data order.
    """

    def __init__(self, stage: Stage, order: DataOrder) -> None:
        self.stage, self.order = stage, order

    def __getitem__(self, place: tuple[int, int]) -> TrainingBatch | Exception:
        """The micro-batch; of a worker also its error, whose message the loader would fill with a traceback."""
        try:
            return self.stage.make_batch(self.order, *place)
        except (OSError, ValueError) as error:
            if get_worker_info() is None:
                raise
            return error


def load_micro_batches(batches: MicroBatches, first: int, steps: int, workers: int) -> DataLoader:
    """A loader of the micro-batches of the steps from `first` on, in their order.

    Args:
        batches: The micro-batches.
        first: The first step, from 0.
        steps: Steps of the stage.
        workers: Processes that make batches ahead; 0 makes each where and when it is asked for.
    """
    micro_steps = range(batches.order.accumulation_steps)
    return DataLoader(
        batches,
        batch_size=None,
        sampler=[(step, micro_step) for step in range(first, steps) for micro_step in micro_steps],
        num_workers=workers,
        collate_fn=_unchanged,
        worker_init_fn=_ignore_stop_signals,
        # The loader draws a number, which must not come from the generator of the model's dropout.
        generator=torch.Generator(),
    )


def _unchanged(batch: Any) -> Any:
    return batch


def _ignore_stop_signals(worker: int) -> None:
    """Ignore SIGINT and SIGTERM in data workers, so that the current step can finish."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
