# SPDX-License-Identifier: Apache-2.0
"""A training run from options to the trained pipeline: its stages, any number of processes, resumed exactly."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from accelerate import Accelerator, DistributedType
from torch import nn

from ..files import remove_leftovers, write_json
from ..models.registry import is_mhla_class
from ..recovery.teacher import SharedTeacher
from ..source_files import list_files
from ..sources import find_pipeline
from . import loading, parameters
from .batches import LatentBatches, LatentSamples, check_null_condition
from .cache import LatentDataset
from .checkpoints import Position
from .config import TrainingConfig
from .data_order import first_of_buckets, stable_seed
from .export import export_pipeline, package_versions, save_adapter, unsharded
from .loop import Callback, Run, StageLoop
from .metrics import MetricsFile
from .objectives import Tensors, objective_for
from .resuming import find_start, run_inputs, run_state
from .runtime import check_distribution, make_accelerator, open_trackers
from .stages import Distillation, FineTuning, Stage
from .stopping import StopSignals, TrainingStopped
from .teachers import Teacher, memory_of, share_weights
from .transfer import Transfer
from .validation import make_validator


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
        pipeline: The pipeline directory written.
    """

    model: nn.Module
    losses: dict[str, list[float]] = field(default_factory=dict)
    seconds_per_step: dict[str, float] = field(default_factory=dict)
    teacher_memory: dict[str, int] = field(default_factory=dict)
    resumed_from: Path | None = None
    pipeline: Path | None = None


class DiffusionTrainer:
    """Trains a transformer with MHLA: matches it to the model it was converted from, then fine-tunes it.

    Its MHLA layers are matched one by one, then its whole prediction (distillation). The objective of fine-tuning is
    flow matching for Wan and SANA, and noise prediction for DiT; see `mhla_hf.training.objectives`.

    With files, everything comes from `config.model` and `config.cache`. In a program, models and data can be passed
    in; without `config.output` nothing is written.

    Args:
        config: The options.
        model: The transformer to train, in place; None loads it from `config.model`.
        dataset: The samples, see `LatentSamples`; None opens the cache.
        teacher: The model that it was converted from, for `transfer_steps` and `distill_steps`; None loads it. For
            `distill_steps` alone it can be a `SharedTeacher` of the model.
        null_condition: What a sample without caption or class holds, for `condition_dropout`; None takes the data
            set's attribute of this name, if it has one.
        callback: Called with (stage, step, loss) after every step, in every process; steps count from 1.
        accelerator: An `Accelerator` to use; None makes one.

    Raises:
        ValueError: If options, model and data do not fit together.
    """

    def __init__(
        self,
        config: TrainingConfig,
        model: nn.Module | None = None,
        dataset: LatentSamples | None = None,
        *,
        teacher: Teacher | None = None,
        null_condition: Tensors | None = None,
        callback: Callback | None = None,
        accelerator: Accelerator | None = None,
    ) -> None:
        if model is None and config.model is None:
            raise ValueError("model must be given: a pipeline directory or a Hub id")
        if dataset is None and config.cache is None and config.output is None:
            raise ValueError("cache must be given: the directory made by the cache step")
        self.config = config
        self.output = Path(config.output) if config.output is not None else None
        self.owns_accelerator = accelerator is None
        self.accelerator = accelerator or make_accelerator(config)
        check_distribution(self.accelerator, config)
        self.metrics: MetricsFile | None = None
        self.callback = callback
        self.source: Path | None = None
        if config.model is not None:
            with self.accelerator.main_process_first():
                self.source = find_pipeline(config.model, "model")
            if self.output is not None:
                # The finished pipeline gets a copy of them.
                list_files(self.source)
        if dataset is None:
            dataset = LatentDataset(config.cache or Path(str(config.output)) / "cache")
        self.dataset = dataset
        if len(dataset) < 1:
            raise ValueError("the data set is empty")
        self.null_condition: Tensors | None = (
            null_condition if null_condition is not None else getattr(dataset, "null_condition", None)
        )
        check_null_condition(config.condition_dropout, self.null_condition)
        self.own_model = model is None
        self.model = model if model is not None else self._load_student()
        self.objective = objective_for(self.model, self.source, config)
        for index in first_of_buckets(dataset):
            self.objective.check_data(self.model, dataset[index], self.null_condition)
        self.teacher = teacher
        self.teacher_of_distillation: SharedTeacher | None = None
        self.teacher_memory: dict[str, int] = {}
        self.inputs: dict[str, str] = {}
        if config.train == "lora" and not hasattr(self.model, "peft_config"):
            parameters.add_lora(self.model, config.lora_rank, config.lora_alpha, stable_seed(config.seed, "lora"))

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
                self.inputs = run_inputs(
                    self.config, self.dataset, self.source, None if self.own_model else self.model, self.teacher
                )
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

    def _load_student(self) -> nn.Module:
        assert self.source is not None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(stable_seed(self.config.seed, "parameters"))
            return loading.load_student(self.source, self.config.component, self.config.mhla)

    def _state(self) -> dict[str, Any]:
        return run_state(self.config, self.model, self.accelerator, len(self.dataset), self.objective, self.inputs)

    def _stages(self) -> list[Stage]:
        config = self.config
        batches = LatentBatches(
            dataset=self.dataset,
            objective=self.objective,
            condition_dropout=config.condition_dropout,
            null_condition=self.null_condition,
        )
        stages: list[Stage] = []
        if config.transfer_steps:
            folder = None if self.output is None else self.output / "transfer"
            stages.append(
                Transfer(
                    config,
                    self.model,
                    self.objective,
                    batches,
                    self._get_teacher,
                    self.accelerator,
                    self.dataset,
                    folder,
                )
            )
        if config.distill_steps:
            self._keep_original_weights()
            stages.append(Distillation(config, self.model, self.objective, batches, self._get_distillation_teacher))
        if config.max_steps:
            stages.append(FineTuning(config, self.model, self.objective, batches))
        return stages

    def _get_teacher(self) -> nn.Module:
        if self.teacher is None:
            if self.source is None:
                raise ValueError("transfer_steps needs a teacher: the model before its conversion")
            low = {"bf16": torch.bfloat16, "fp16": torch.float16}
            dtype = low.get(self.accelerator.mixed_precision, torch.float32)
            self.teacher = loading.load_teacher(self.source, self.config.component, self.config.teacher, dtype)
        if isinstance(self.teacher, SharedTeacher):
            raise ValueError("teacher must be a model of its own for transfer_steps, not a SharedTeacher")
        teacher = self.teacher
        if not self.config.distill_steps:
            # Handed over: fine-tuning does not need it, and the stage lets go of it.
            self.teacher = None
        return teacher.to(self.accelerator.device).requires_grad_(False).eval()

    def _keep_original_weights(self) -> None:
        """Starts the teacher of a model whose weights are still the original ones.

        That is before any stage changes them, and before those of a checkpoint are loaded.
        """
        is_fresh = (
            self.own_model
            and self.teacher is None
            and self.config.teacher is None
            and not self._is_sharded()
            and self.source is not None
            and not is_mhla_class(loading.component_config(self.source, self.config.component)["_class_name"])
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
            teacher = loading.load_teacher(self.source, self.config.component, self.config.teacher)
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
        validator = make_validator(self.source, self.config, self.dataset, self.accelerator)
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
            save_adapter(self.output / "lora", model, config.component)
        if config.train == "lora":
            parameters.merge_lora(model)
        if model is self.model:
            model.to(self.accelerator.device)
        model.requires_grad_(True).eval()
        result.model = model
        if self.output is not None and self.source is not None:
            result.pipeline = self.output / "pipeline"
            if main:
                record = self._state()
                is_directory = Path(str(config.model)).is_dir()
                record["source"] = {"location": str(self.source.resolve()) if is_directory else str(config.model)}
                record["final_losses"] = {name: values[-1] for name, values in result.losses.items() if values}
                if result.teacher_memory:
                    record["teacher_memory_bytes"] = result.teacher_memory
                record["versions"] = package_versions()
                export_pipeline(self.source, result.pipeline, config.component, model, record)
        self.accelerator.wait_for_everyone()
        if self.owns_accelerator:
            self.accelerator.end_training()
