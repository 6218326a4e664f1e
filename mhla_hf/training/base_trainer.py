# SPDX-License-Identifier: Apache-2.0
"""A training run: its stages, any number of processes, resumed exactly. What it trains is a subclass's affair."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from accelerate import Accelerator, DistributedType
from torch import nn

from ..utils.files import remove_leftovers, write_json
from . import parameters
from .checkpoints import Position
from .config import TrainingConfig
from .export import package_versions
from .loop import Callback, Run, StageLoop, Validator
from .matching.teacher import SharedTeacher
from .metrics import MetricsFile
from .processes import check_distribution, make_accelerator, open_trackers
from .resuming import find_start
from .sharding import unsharded
from .stages.diffusion import Stage
from .stages.teachers import Teacher, memory_of, share_weights
from .stopping import StopSignals, TrainingStopped


@dataclass
class TrainingResult:
    """What a run returns.

    Attributes:
        model: The trained transformer, with the average of its weights under `ema_decay`; LoRA is merged.
        losses: Loss of every step of this run, by stage. A resumed run has those of the earlier one too.
        seconds_per_step: Mean duration of the steps run here, by stage.
        teacher_memory: Bytes of the weights of the distillation's teacher: `stored` for it alone, and `shared` with
            the model. Empty without distillation in this run.
        resumed_from: The checkpoint it went on from.
        pipeline: The directory of the pipeline or model written.
    """

    model: nn.Module
    losses: dict[str, list[float]] = field(default_factory=dict)
    seconds_per_step: dict[str, float] = field(default_factory=dict)
    teacher_memory: dict[str, int] = field(default_factory=dict)
    resumed_from: Path | None = None
    pipeline: Path | None = None


class Trainer(ABC):
    """What runs of all kinds of models share.

    Args:
        config: The options.
        teacher: The model before its conversion, or a `SharedTeacher`; None loads it.
        callback: Called with (stage, step, loss) after every step, in every process; steps count from 1.
        accelerator: An `Accelerator` to use; None makes one.

    Attributes:
        exported: Name of the result in the output directory.
        model: The model that trains.
        own_model: Whether it was loaded from `source`.
        source: The directory of `config.model`.
        dataset: The samples.
    """

    exported: str
    model: nn.Module
    own_model: bool
    source: Path | None
    dataset: Sized

    def __init__(
        self,
        config: TrainingConfig,
        teacher: Teacher | None = None,
        callback: Callback | None = None,
        accelerator: Accelerator | None = None,
    ) -> None:
        self.config = config
        self.output = Path(config.output) if config.output is not None else None
        self.owns_accelerator = accelerator is None
        self.accelerator = accelerator or make_accelerator(config)
        check_distribution(self.accelerator, config)
        self.metrics: MetricsFile | None = None
        self.callback = callback
        self.teacher = teacher
        self.teacher_of_distillation: SharedTeacher | None = None
        self.teacher_memory: dict[str, int] = {}
        self.inputs: dict[str, str] = {}

    @abstractmethod
    def _stages(self) -> list[Stage]:
        """The stages, in their order."""

    @abstractmethod
    def _run_inputs(self) -> dict[str, str]:
        """Fingerprints of what the run is made from."""

    @abstractmethod
    def _state(self) -> dict[str, Any]:
        """What a checkpoint keeps of the run."""

    @abstractmethod
    def _is_ordinary_source(self) -> bool:
        """Whether `source` holds the original weights."""

    @abstractmethod
    def _load_teacher(self) -> nn.Module:
        """The model before its conversion, from `source` or what it was made from."""

    @abstractmethod
    def _save_adapter(self, destination: Path, model: nn.Module) -> None:
        """Writes the LoRA matrices of a model, and its MHLA parameters."""

    @abstractmethod
    def _export(self, destination: Path, model: nn.Module, record: dict[str, Any]) -> None:
        """Writes the result of the run.

        Args:
            destination: Directory to make.
            model: The trained model, whole and without LoRA.
            record: What to say about the training in `training.json`.
        """

    def _make_validator(self) -> Validator | None:
        """What makes samples on the way."""
        return None

    def run(self) -> TrainingResult:
        """Trains, and returns what came of it.

        Raises:
            ValueError: If a checkpoint does not fit, or the output already holds a run that is not resumed.
            FloatingPointError: If a loss or gradient is no longer finite; the message names the step, the samples of
                its batch and the last good checkpoint.
            TrainingStopped: If Ctrl-C or SIGTERM has stopped the run, in this process or another one; with `output`, a
                checkpoint is saved before.
        """
        result = TrainingResult(self.model)
        stages = self._stages()
        position: Position | None = None
        locks: list[IO[str]] = []
        if self.output is not None:
            if self.accelerator.is_main_process:
                self.inputs = self._run_inputs()
            result.resumed_from, position, locks = find_start(
                self.config, self.accelerator, self._state(), self.dataset
            )
        try:
            with StopSignals() as signals:
                run = self._prepare(position, signals)
                for number, stage in enumerate(stages):
                    steps_before = sum(earlier.steps for earlier in stages[:number])
                    loop = StageLoop(run, stage, steps_before, averages=stage is stages[-1])
                    losses, seconds = loop.run(position, result.resumed_from)
                    result.losses[stage.name], result.seconds_per_step[stage.name] = losses, seconds
                result.teacher_memory = self.teacher_memory
            if signals.received is not None:
                raise KeyboardInterrupt
            self._finish(result)
        except TrainingStopped:
            # All processes stop together; after any other exception they may not all be here.
            self.accelerator.end_training()
            raise
        except KeyboardInterrupt as stop:
            if self.output is not None and not stop.args:
                stop.args = ("stopped; the same command with --resume latest goes on from the last checkpoint",)
            raise
        finally:
            if self.metrics is not None:
                self.metrics.close()
            for lock in locks:
                lock.close()
        return result

    def _keep_original_weights(self) -> None:
        """Starts the teacher of a model whose weights are still the original ones.

        That is before any stage changes them, and before those of a checkpoint are loaded.
        """
        is_fresh = (
            self.own_model
            and self.teacher is None
            and self.config.teacher is None
            and not self._is_sharded()
            and self._is_ordinary_source()
        )
        if is_fresh:
            self.teacher_of_distillation = SharedTeacher(self.model)
        elif isinstance(self.teacher, SharedTeacher):
            self.teacher_of_distillation = self.teacher
        if self.teacher_of_distillation is not None:
            self.teacher_of_distillation.keep(parameters.trainable_names(self.model, self.config.train))

    def _get_distillation_teacher(self) -> Teacher:
        teacher: Teacher | None = self.teacher_of_distillation or self.teacher
        self.teacher_of_distillation = self.teacher = None
        if teacher is None:
            if self.source is None:
                raise ValueError(
                    "distill_steps needs teacher: the model before its conversion, or a SharedTeacher of the model "
                    "made before its weights changed"
                )
            teacher = self._load_teacher()
            if not self._is_sharded():
                teacher = share_weights(self.model, teacher)
            if isinstance(teacher, nn.Module):
                low = {"bf16": torch.bfloat16, "fp16": torch.float16}
                teacher = teacher.to(low.get(self.accelerator.mixed_precision, torch.float32))
        if isinstance(teacher, nn.Module):
            teacher = teacher.requires_grad_(False).eval()
        self.teacher_memory = memory_of(teacher)
        return teacher.to(self.accelerator.device)

    def _is_sharded(self) -> bool:
        """Whether no process has the whole model."""
        return self.accelerator.distributed_type == DistributedType.FSDP

    def _prepare(self, position: Position | None, signals: StopSignals) -> Run:
        if self.output is not None and self.accelerator.is_main_process:
            self.output.mkdir(parents=True, exist_ok=True)
            for folder in (self.output, self.output / "checkpoints"):
                remove_leftovers(folder)
            write_json(self.output / "training_config.json", self.config.to_dict())
            self.metrics = MetricsFile(self.output / "metrics.jsonl", position)
        open_trackers(self.accelerator, self.config)
        validator = self._make_validator()
        self.accelerator.wait_for_everyone()
        return Run(
            config=self.config,
            accelerator=self.accelerator,
            model=self.model,
            dataset=self.dataset,
            state=self._state,
            output=self.output,
            callback=self.callback,
            metrics=self.metrics,
            signals=signals,
            validator=validator,
        )

    def _finish(self, result: TrainingResult) -> None:
        config, main = self.config, self.accelerator.is_main_process
        model = unsharded(self.model)
        if main and config.train == "lora" and self.output is not None:
            self._save_adapter(self.output / "lora", model)
        if config.train == "lora":
            parameters.merge_lora(model)
        if model is self.model:
            model.to(self.accelerator.device)
        model.requires_grad_(True).eval()
        result.model = model
        if self.output is not None and self.source is not None:
            result.pipeline = self.output / self.exported
            if main:
                record = self._state()
                is_directory = Path(str(config.model)).is_dir()
                record["source"] = {"location": str(self.source.resolve()) if is_directory else str(config.model)}
                record["final_losses"] = {name: values[-1] for name, values in result.losses.items() if values}
                if result.teacher_memory:
                    record["teacher_memory_bytes"] = result.teacher_memory
                record["versions"] = package_versions()
                self._export(result.pipeline, model, record)
        self.accelerator.wait_for_everyone()
        if self.owns_accelerator:
            self.accelerator.end_training()
