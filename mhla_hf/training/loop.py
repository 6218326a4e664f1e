# SPDX-License-Identifier: Apache-2.0
"""The training loop of one stage: batches, optimizer steps, reports, checkpoints."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Sized
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator, DistributedType
from torch import nn

from . import checkpoints, parameters
from .averaging import WeightAverage
from .checkpoints import Position
from .config import TrainingConfig
from .data.batches import TrainingBatch
from .data.data_order import DataOrder
from .data.prefetch import Prefetcher
from .divergence import divergence_error
from .metrics import MetricsFile
from .optimization import learning_rate_factor, make_optimizer, set_learning_rate
from .sharding import full_tensor
from .stages.diffusion import Stage
from .stopping import StopSignals, TrainingStopped


Callback = Callable[[str, int, float], None]


class Validator(Protocol):
    """Makes samples with the model that trains; see `validation.Validator`."""

    def write_and_log(
        self, transformer: nn.Module, folder: Path, step: int, accelerator: Accelerator, run_step: int
    ) -> None:
        """Writes the samples of a step."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What the stages of a run share.

    Attributes:
        config: The options.
        accelerator: The processes.
        model: The model that trains.
        dataset: The samples; stages make batches of them.
        state: What a checkpoint keeps of the run, see `resuming.run_state`.
        output: Directory of the run; None writes nothing.
        callback: Called with (stage, step, loss) after every step.
        metrics: The metrics file, in the process that writes it.
        signals: Say when to stop.
        validator: Makes videos or pictures, in the process that does.
    """

    config: TrainingConfig
    accelerator: Accelerator
    model: nn.Module
    dataset: Sized
    state: Callable[[], dict[str, Any]]
    output: Path | None
    callback: Callback | None
    metrics: MetricsFile | None
    signals: StopSignals
    validator: Validator | None


class StageLoop:
    """Runs one stage.

    Args:
        run: What it shares with the other stages.
        stage: The stage.
        steps_before: Steps of the stages before it, which trackers count too.
        averages: Whether this is the stage whose weights are averaged where `ema_decay` asks for it. The model ends
            with their average.
    """

    def __init__(self, run: Run, stage: Stage, steps_before: int = 0, averages: bool = False) -> None:
        self.shared, self.stage, self.steps_before = run, stage, steps_before
        self.averages = averages and run.config.ema_decay is not None
        self.average: WeightAverage | None = None
        self.config, self.accelerator, self.model = run.config, run.accelerator, run.model

    def run(self, position: Position | None, checkpoint: Path | None) -> tuple[list[float], float]:
        """Runs what is left of the stage.

        Args:
            position: Where the whole run goes on; None at its beginning.
            checkpoint: The checkpoint of that position.

        Returns:
            The losses of all its steps, earlier ones included, and the mean seconds of the steps run here.

        Raises:
            FloatingPointError: If a loss or gradient is no longer finite; see `divergence_error`.
            TrainingStopped: If a signal has stopped one of the processes; a checkpoint is saved before.
        """
        stage, config, accelerator = self.stage, self.config, self.accelerator
        metrics, names = self.shared.metrics, stage.trainable_names()
        losses = [row["loss"] for row in (metrics.rows if metrics else []) if row["stage"] == stage.name]
        if position is None or position.stage != stage.name:
            checkpoint = None
        if position is not None and position >= Position.of(stage.name, stage.steps):
            # The next stage, or the export, goes on from the weights at the end of this one.
            if checkpoint is not None:
                checkpoints.load_weights(checkpoint, self.model, names, self.averages)
            return losses, 0.0
        start = position.step if position is not None and position.stage == stage.name else 0
        parameters.set_trainable(self.model, names)
        self.model.train()
        if config.gradient_checkpointing:
            enable_gradient_checkpointing(self.model)
        if checkpoint is not None:
            checkpoints.load_weights(checkpoint, self.model, names)
        optimizer = make_optimizer(self.model, names, config, stage.learning_rate, stage.mhla_learning_rate)
        module, optimizer = accelerator.prepare(stage.module(), optimizer)
        if self.averages:
            self.average = WeightAverage(self.model, names, config)
        if checkpoint is not None:
            if self.average is not None:
                self.average.load(checkpoint)
            checkpoints.load_optimizer(checkpoint, self.model, optimizer.optimizer, names)
            self._load_scaler(checkpoints.read_state(checkpoint))
        durations = []
        with stage.context(), self._progress(start) as bar, self._batches(start) as batches:
            for step in range(start, stage.steps):
                began = time.perf_counter()
                loss, logs, stop = self._step(module, optimizer, step, batches)
                durations.append(time.perf_counter() - began)
                losses.append(loss)
                self._report(step + 1, loss, logs, durations[-1], bar)
                self._save_if_due(step + 1, optimizer.optimizer, names, stop)
                if stop:
                    raise self._stopped(step + 1)
                self._validate_if_due(step + 1)
        if self.average is not None:
            self.average.copy_to_model()
        stage.close()
        del module, optimizer
        if accelerator.distributed_type != DistributedType.DEEPSPEED:
            # DeepSpeed would let go of the weights, which are still to be gathered.
            accelerator.free_memory()
        return losses, math.fsum(durations) / len(durations)

    def _step(
        self, module: nn.Module, optimizer: Any, step: int, batches: Callable[[int, int], TrainingBatch]
    ) -> tuple[float, dict[str, float], bool]:
        """One optimizer step.

        Returns:
            The loss averaged over micro-steps and processes, further figures, and whether one of the processes has
            been told to stop.
        """
        stage, config, accelerator = self.stage, self.config, self.accelerator
        factor = learning_rate_factor(
            step, schedule=config.lr_schedule, warmup_steps=config.warmup_steps, total_steps=stage.steps
        )
        rate = set_learning_rate(optimizer.optimizer, factor)
        losses: list[torch.Tensor] = []
        samples: list[tuple[int, ...]] = []
        for micro_step in range(config.gradient_accumulation_steps):
            batch = batches(step, micro_step).to(accelerator.device)
            last = micro_step + 1 == config.gradient_accumulation_steps
            with nullcontext() if last else accelerator.no_sync(module):
                loss = stage.loss(module, batch, accelerator) / config.gradient_accumulation_steps
                accelerator.backward(loss)
            losses.append(loss.detach())
            samples.append(batch.indices)
        norm = accelerator.clip_grad_norm_(module.parameters(), config.max_grad_norm or math.inf)
        # DeepSpeed gives a plain number.
        gradient_norm = float(full_tensor(norm) if torch.is_tensor(norm) else norm)
        total = torch.stack(losses).sum()
        told_to_stop = torch.tensor(float(self.shared.signals.received is not None), device=total.device)
        # Both in one message: all processes stop after the same step.
        loss_value, told = accelerator.reduce(torch.stack([total, told_to_stop]), reduction="mean").tolist()
        # Scaled gradients of fp16 may overflow: their step is left out.
        diverged = accelerator.scaler is None and not math.isfinite(gradient_norm)
        if diverged or not math.isfinite(loss_value):
            what = f"gradient is {gradient_norm}" if math.isfinite(loss_value) else f"loss is {loss_value}"
            position = Position.of(stage.name, step + 1)
            batches_seen = list(zip(torch.stack(losses).tolist(), samples, strict=True))
            raise divergence_error(what, position, batches_seen, self.shared.dataset, self.shared.output, accelerator)
        optimizer.step()
        optimizer.zero_grad()
        if self.average is not None:
            self.average.step()
        return loss_value, {"lr": rate, "grad_norm": gradient_norm}, told > 0

    def _stopped(self, step: int) -> TrainingStopped:
        """What ends a run that was told to stop, with its message in the main process."""
        message, output = "", self.shared.output
        if self.accelerator.is_main_process:
            message = f"stopped after step {step} of {self.stage.steps} ({self.stage.name}); "
            if output is None:
                message += "nothing was saved, for there is no output"
            else:
                saved = Position.of(self.stage.name, step).name
                newest = checkpoints.list_checkpoints(output / "checkpoints")[-1].name
                # A run that went back has not reached its later checkpoints again.
                resume = "latest" if saved == newest else saved
                message += f"the same command with --resume {resume} goes on from there (saved in {output})"
        return TrainingStopped(message, self.shared.signals.received or signal.SIGINT)

    def _batches(self, start: int) -> Prefetcher:
        config, shared = self.config, self.shared
        order = DataOrder(
            dataset_size=len(shared.dataset),
            batch_size=config.batch_size,
            seed=config.seed,
            stage=self.stage.name,
            accumulation_steps=config.gradient_accumulation_steps,
            world_size=self.accelerator.num_processes,
            rank=self.accelerator.process_index,
            buckets=getattr(shared.dataset, "buckets", None),
        )

        def make(step: int, micro_step: int) -> TrainingBatch:
            return self.stage.make_batch(order, step, micro_step)

        # On a CPU there is nothing to overlap with: the cores are busy training.
        ahead = self.accelerator.device.type != "cpu"
        return Prefetcher(make, micro_steps=config.gradient_accumulation_steps, steps=self.stage.steps, ahead=ahead)

    def _progress(self, start: int) -> Any:
        from tqdm.auto import tqdm

        hidden = not (self.config.progress and self.accelerator.is_local_main_process)
        return tqdm(total=self.stage.steps, initial=start, desc=self.stage.name, unit="step", disable=hidden)

    def _report(self, step: int, loss: float, logs: dict[str, float], seconds: float, bar: Any) -> None:
        name, shared = self.stage.name, self.shared
        bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
        bar.update()
        if shared.metrics is not None:
            row = {"stage": name, "step": step, "loss": loss, **logs, "seconds": round(seconds, 6)}
            shared.metrics.append(row)
        if self.accelerator.trackers:
            values = {f"{name}/{key}": value for key, value in {"loss": loss, **logs}.items()}
            self.accelerator.log(values, step=self.steps_before + step)
        if shared.callback is not None:
            shared.callback(name, step, loss)

    def _save_if_due(self, step: int, optimizer: torch.optim.Optimizer, names: list[str], stop: bool) -> None:
        every, output = self.config.checkpointing_steps, self.shared.output
        due = every and (step % every == 0 or step == self.stage.steps)
        if output is None or not (due or stop):
            return
        weights, moments = checkpoints.collect_state(self.model, optimizer, names)
        averages = self.average.collect() if self.average is not None else None
        if self.accelerator.is_main_process:
            state = self.shared.state()
            state["learning_rates"] = [group["lr"] for group in optimizer.param_groups]
            scaler = self.accelerator.scaler
            state["scaler"] = scaler.state_dict() if scaler is not None else None
            checkpoints.save_checkpoint(
                output / "checkpoints",
                Position.of(self.stage.name, step),
                weights,
                moments,
                state,
                self.config.checkpoints_total_limit,
                averages,
            )
        self.accelerator.wait_for_everyone()

    def _load_scaler(self, state: dict[str, Any]) -> None:
        if self.accelerator.scaler is not None and state.get("scaler"):
            self.accelerator.scaler.load_state_dict(state["scaler"])

    def _validate_if_due(self, step: int) -> None:
        config, validator, output = self.config, self.shared.validator, self.shared.output
        if not self.stage.validates or not config.validation_prompts:
            return
        if step % config.validation_steps and step != self.stage.steps:
            return
        if validator is not None and output is not None:
            with self.average.applied() if self.average is not None else nullcontext():
                validator.write_and_log(
                    self.model, output / "validation", step, self.accelerator, self.steps_before + step
                )
        self.accelerator.wait_for_everyone()


def enable_gradient_checkpointing(model: nn.Module) -> None:
    """Has a model of diffusers or transformers recompute activations in the backward pass."""
    enable: Any = getattr(model, "enable_gradient_checkpointing", None) or model.gradient_checkpointing_enable
    enable()
