# SPDX-License-Identifier: Apache-2.0
"""Training runs, from options to the trained pipeline or model: their stages in any number of processes, resumable.

`Trainer.run` reads as a run goes: set up (fingerprints, teacher, locks, checkpoint to resume), the stages one after
another (start, steps, reports, checkpoints, validation samples), and the export.
"""

from __future__ import annotations

import math
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import broadcast_object_list, send_to_device
from torch import nn
from tqdm.auto import tqdm

from ..models.directory import ModelDirectory
from ..utils.compat import checkpointing_method
from ..utils.destinations import lock_output, remove_leftovers
from ..utils.files import list_files, write_json
from ..utils.locations import local_origin
from ..utils.messages import shorten_list
from ..utils.model_cards import carried_metadata
from . import checkpoints, parameters, processes
from .checkpoints import Callback, Position, Reports
from .config import UNCONVERTED, TrainingConfig
from .data.order import DataOrder, folder_fingerprint, model_fingerprint, stable_seed
from .evaluation import Validator
from .parameters import WeightAverage, learning_rate_factor, make_optimizer, set_learning_rate
from .stages.diffusion import Stage
from .teacher import SharedTeacher, Teacher, share_weights


_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class TrainingResult:
    """The outcome of a run.

    Attributes:
        model: The trained transformer, with the average of its weights under `ema_decay`; LoRA is merged.
        losses: Loss of every step of this run, by stage. A resumed run has those of the earlier one too.
        resumed_from: The checkpoint that the run was resumed from.
        pipeline: The directory of the pipeline or model written.
    """

    model: nn.Module
    losses: dict[str, list[float]] = field(default_factory=dict)
    resumed_from: Path | None = None
    pipeline: Path | None = None


class Trainer(ABC):
    """A run on models of either library; see `DiffusionTrainer` and `TransformersTrainer` for the arguments.

    Attributes:
        source: The directory of `config.model`.
        model: The model that trains.
        own_model: True if it was loaded from `source`.
        dataset: The samples.
        objective: The task of the model.
    """

    stage_class: ClassVar[type[Stage]]
    source: Any
    model: Any
    dataset: Any
    objective: Any

    def __init__(
        self,
        config: TrainingConfig,
        model: nn.Module | None = None,
        *,
        teacher: Teacher | None = None,
        callback: Callback | None = None,
        accelerator: Accelerator | None = None,
        source: ModelDirectory | None = None,
        tracker: Any = None,
    ) -> None:
        if model is None and config.model is None:
            raise ValueError("model must be given: a directory or a Hub id")
        self.config, self.model, self.own_model = config, model, model is None
        self.output = Path(config.output) if config.output is not None else None
        self.owns_accelerator = accelerator is None
        self.accelerator = accelerator or processes.make_accelerator(config)
        processes.check_distribution(self.accelerator, config)
        self.teacher, self.callback, self.tracker, self.source = teacher, callback, tracker, source
        if source is None and config.model is not None:
            with self.accelerator.main_process_first():
                self.source = self.open_source(config.model, config.component)
        if self.source is not None and self.output is not None:
            # The finished pipeline gets a copy of them.
            list_files(self.source.root)

    @staticmethod
    @abstractmethod
    def open_source(location: str, component: str) -> ModelDirectory:
        """Open the pipeline or model to train."""

    @cached_property
    def original(self) -> ModelDirectory:
        """The ordinary model behind that of the source."""
        return self.source.original(self.config.teacher, "teacher")

    @property
    def is_sharded(self) -> bool:
        """Whether each process holds a share of every parameter."""
        return self.accelerator.distributed_type == DistributedType.FSDP

    def _load_model(self) -> None:
        """Load the model of the source unless there is one, and add LoRA where it trains."""
        config = self.config
        if self.own_model:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(stable_seed(config.seed, "parameters"))
                self.model = parameters.load_model(self.source, config.mhla)
        if config.train == "lora" and not hasattr(self.model, "peft_config"):
            parameters.add_lora(self.model, config.lora_rank, config.lora_alpha, stable_seed(config.seed, "lora"))

    @abstractmethod
    def _batches(self) -> Callable[[DataOrder, int, int], Any]:
        """The function that makes the batches of the stages, see `Stage`."""

    @abstractmethod
    def _data_fingerprints(self) -> dict[str, str]:
        """Hashes that identify the samples and their encoders, by name."""

    @abstractmethod
    def _samples(self, order: DataOrder, step: int, micro_step: int) -> Sequence[int]:
        """Indices in the data set of the samples of a micro-batch."""

    @abstractmethod
    def _save_adapter(self, destination: Path, model: Any) -> None:
        """Write the LoRA matrices of a model, and its MHLA parameters."""

    def _make_validator(self) -> Validator | None:
        return None

    def run(self) -> TrainingResult:
        """Train.

        Raises:
            ValueError: If a checkpoint does not fit, or the output already holds a run that is not resumed.
            FloatingPointError: If a loss or gradient is no longer finite; the message names the step, its samples and
                the last good checkpoint.
            TrainingStopped: If Ctrl-C or SIGTERM has stopped the run, in this process or another one; with `output`, a
                checkpoint is saved before.
        """
        result = TrainingResult(self.model)
        try:
            with ExitStack() as self.resources:
                self.inputs = self._run_inputs()
                stages = self._make_stages()
                result.resumed_from = self._find_checkpoint()
                with processes.StopSignals() as self.signals:
                    self._set_up(result.resumed_from)
                    for number, stage in enumerate(stages):
                        self.reports.steps_before = sum(each.steps for each in stages[:number])
                        is_last = number == len(stages) - 1
                        result.losses[stage.name] = self._train(stage, is_last)
                self._finish(result)
        except processes.TrainingStopped:
            # All processes stop together; after any other exception they may not all be here.
            self.accelerator.end_training()
            raise
        return result

    # Set up.

    def _run_inputs(self) -> dict[str, str]:
        """Fingerprints of everything that the run is made from, by name; unknown parts are left out."""
        config = self.config
        if self.output is None or not self.accelerator.is_main_process:
            return {}
        inputs = self._data_fingerprints()
        if self.own_model:
            inputs["base weights"] = folder_fingerprint(self.source.folder)
        else:
            # Parameters that train come from a checkpoint.
            trained = set(parameters.trainable_names(self.model, config.train))
            inputs["base weights"] = model_fingerprint(self.model, trained)
        if self.teacher is not None:
            inputs["teacher"] = model_fingerprint(self.teacher)
        elif config.distill_steps and self.source is not None:
            # A run that is past this stage is resumed without its teacher.
            with suppress(OSError, ValueError):
                inputs["teacher"] = folder_fingerprint(self.original.folder)
        return inputs

    def _make_stages(self) -> list[Stage]:
        config, arguments = self.config, (self.model, self.objective, self._batches())
        stages: list[Stage] = []
        if config.distill_steps:
            self._keep_original_weights()
            stages.append(self.stage_class(config, *arguments, self._take_teacher))
        if config.max_steps:
            stages.append(self.stage_class(config, *arguments))
        return stages

    def _find_checkpoint(self) -> Path | None:
        """Lock the output and find the checkpoint to resume from.

        The main process decides, so that all agree even while files appear; an error it meets is raised in all.
        """
        found: list[Path | None] = [None]
        if self.output is None:
            return None
        with processes.Processes().together():
            if self.accelerator.is_main_process:
                self.resources.enter_context(lock_output(self.output))
                found = [checkpoints.find_checkpoint(self.config.resume, self.output / "checkpoints")]
                for finished in (self.output / "pipeline", self.output / "model"):
                    if self.config.resume is None and finished.exists():
                        raise ValueError(f"output already holds the finished {finished}; choose another output")
                if found[0] is not None:
                    checkpoints.check_run(found[0], self._state())
                elif (self.output / checkpoints.MATCHING).is_dir():
                    checkpoints.refuse_matching_run(self.output)
        broadcast_object_list(found)
        return found[0]

    def _set_up(self, checkpoint: Path | None) -> None:
        """Open the metrics and trackers, and encode the prompts of validation samples."""
        if self.tracker is not None and self.is_sharded:
            raise ValueError("tracker (--track-attention) needs the whole model in a process: use one process or DDP")
        self.checkpoint = checkpoint
        self.position = checkpoints.checkpoint_position(checkpoint) if checkpoint is not None else None
        if self.output is not None and self.accelerator.is_main_process:
            for folder in (self.output, self.output / "checkpoints"):
                remove_leftovers(folder)
            write_json(self.output / "training_config.json", self.config.to_dict())
        self.reports = Reports(self.config, self.accelerator, self.output, self.position, self.callback, self.tracker)
        self.validator = self._make_validator()
        self.accelerator.wait_for_everyone()

    def _state(self) -> dict[str, Any]:
        """The run as a checkpoint records it, as plain JSON."""
        options = self.config.to_dict()
        stored = getattr(self.model.config, "mhla", None)
        options["mhla"] = dict(stored) if stored is not None else UNCONVERTED
        # The autocast type in use; None on the command line means the launcher's.
        options["mixed_precision"] = self.accelerator.mixed_precision
        return {
            "config": options,
            "world_size": self.accelerator.num_processes,
            "dataset_size": len(self.dataset),
            "objective": self.objective.to_dict(),
            "inputs": self.inputs,
        }

    def _data_order(self, stage: str, **sharing: int) -> DataOrder:
        config, buckets = self.config, getattr(self.dataset, "buckets", None)
        options = {"dataset_size": len(self.dataset), "batch_size": config.batch_size, "seed": config.seed}
        return DataOrder(stage=stage, buckets=buckets, **options, **sharing)

    # The original that distillation learns from.

    def _keep_original_weights(self) -> None:
        """Make a model with its original weights its own teacher, before a stage or a checkpoint changes them."""
        is_original = self.own_model and self.config.teacher is None and not self.source.is_mhla
        if self.teacher is None and is_original:
            self.teacher = SharedTeacher(self.model)
        if isinstance(self.teacher, SharedTeacher):
            self.teacher.keep(parameters.trainable_names(self.model, self.config.train))

    def _take_teacher(self) -> Teacher:
        """The original, on the device unless it will be sharded with the model; the trainer lets go of it."""
        teacher, self.teacher = self.teacher, None
        if teacher is None:
            if self.source is None:
                raise ValueError("distill_steps needs teacher: the model before its conversion")
            teacher = share_weights(self.model, self.original.load())
        if isinstance(teacher, nn.Module):
            teacher = teacher.requires_grad_(False).eval()
        if isinstance(teacher, SharedTeacher):
            teacher.keep(parameters.trainable_names(self.model, self.config.train))
            return teacher if self.is_sharded else teacher.to(self.accelerator.device)
        return teacher.to(self.accelerator.device, _DTYPES.get(self.accelerator.mixed_precision, torch.float32))

    # The stages.

    def _bar(self, name: str, steps: int, done: int = 0) -> tqdm:
        """A progress bar, which the first process of a machine alone shows."""
        hidden = not (self.config.progress and self.accelerator.is_local_main_process)
        return tqdm(total=steps, initial=done, desc=name, unit="step", disable=hidden)

    def _train(self, stage: Stage, is_last: bool) -> list[float]:
        """Run the remaining steps of a stage.

        Args:
            stage: The stage.
            is_last: True for the stage whose weights are averaged where `ema_decay` asks for it. The model ends with
                their average.

        Returns:
            The losses of all its steps, earlier ones included.
        """
        config, self.stage, self.step = self.config, stage, 0
        losses = self.reports.losses(stage.name)
        ema_decay = config.ema_decay if is_last else None
        checkpoint = self.checkpoint if self.position is not None and self.position.stage == stage.name else None
        if self.position is not None and self.position >= Position.of(stage.name, stage.steps):
            # The next stage, or the export, continues from the weights at the end of this one.
            if checkpoint is not None:
                checkpoints.load_weights(
                    checkpoint, self.model, stage.trainable_names(), averages=ema_decay is not None
                )
            return losses
        self._start(checkpoint, ema_decay)
        bar = self._bar(stage.name, stage.steps, self.step)
        with stage.context(), bar, closing(self.batches):
            while self.step < stage.steps:
                began = time.perf_counter()
                loss, figures, stop_requested = self._take_step()
                seconds = time.perf_counter() - began
                self.step += 1
                losses.append(loss)
                self.reports.add(stage.name, self.step, loss, figures, seconds, self.model)
                _advance(bar, loss)
                every, is_over = config.checkpointing_steps, self.step == stage.steps
                if stop_requested or (every and (self.step % every == 0 or is_over)):
                    self._save()
                if stop_requested:
                    raise self._stopped()
                if self.step % config.validation_steps == 0 or is_over:
                    self._validate()
        if self.average is not None:
            self.average.copy_to_model()
        stage.teacher = None
        del self.module, self.optimizer, self.batches
        self.accelerator.free_memory()
        return losses

    def _start(self, checkpoint: Path | None, ema_decay: float | None) -> None:
        """Prepare model, optimizer and batches of the stage, and restore them from its checkpoint if there is one."""
        stage, config, accelerator = self.stage, self.config, self.accelerator
        self.names = stage.trainable_names()
        parameters.set_trainable(self.model, self.names)
        self.model.train()
        if config.gradient_checkpointing:
            checkpointing_method(self.model)()
        if checkpoint is not None and self.position is not None:
            self.step = self.position.step
            checkpoints.load_weights(checkpoint, self.model, self.names)
        optimizer = make_optimizer(self.model, self.names, config, stage.learning_rate, stage.mhla_learning_rate)
        # Compared and kept while the model is whole.
        teacher = stage.teacher if self.is_sharded else None
        self.module, self.optimizer = accelerator.prepare(stage.module(), optimizer)
        if isinstance(teacher, SharedTeacher):
            teacher.shard()
        # Without accelerate's wrapper.
        self.plain_optimizer: torch.optim.Optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        self.average = None if ema_decay is None else WeightAverage(self.model, self.names, ema_decay)
        if checkpoint is not None:
            state = checkpoints.read_state(checkpoint)
            if self.average is not None:
                checkpoints.load_average(checkpoint, state, self.average)
            checkpoints.load_moments(checkpoint, self.model, self.plain_optimizer)
            if accelerator.scaler is not None and state.get("scaler"):
                accelerator.scaler.load_state_dict(state["scaler"])
        if self.position is None and self.reports.steps_before == 0:
            self.reports.start(stage.name, self.model)
        sharing = {"world_size": accelerator.num_processes, "rank": accelerator.process_index}
        self.order = self._data_order(stage.name, accumulation_steps=config.gradient_accumulation_steps, **sharing)
        # Last, since it starts processes, which end when it is closed.
        workers = config.dataloader_num_workers
        self.batches = processes.read_batches(stage.make_batch, self.order, self.step, stage.steps, workers)

    def _take_step(self) -> tuple[float, dict[str, float], bool]:
        """Take an optimizer step.

        Returns:
            The mean loss of micro-steps and processes, further figures, and whether a process was told to stop.
        """
        stage, config, accelerator = self.stage, self.config, self.accelerator
        factor = learning_rate_factor(
            self.step, schedule=config.lr_schedule, warmup_steps=config.warmup_steps, total_steps=stage.steps
        )
        rate = set_learning_rate(self.plain_optimizer, factor)
        losses: list[torch.Tensor] = []
        for micro_step in range(config.gradient_accumulation_steps):
            batch = send_to_device(next(self.batches), accelerator.device, non_blocking=True)
            last = micro_step + 1 == config.gradient_accumulation_steps
            with nullcontext() if last else accelerator.no_sync(self.module):
                loss = stage.loss(self.module, batch, accelerator) / config.gradient_accumulation_steps
                accelerator.backward(loss)
            losses.append(loss.detach())
        norm = accelerator.clip_grad_norm_(self.module.parameters(), config.max_grad_norm or math.inf)
        gradient_norm = float(processes.full_tensor(norm))
        total = torch.stack(losses).sum()
        stop_requested = torch.tensor(float(self.signals.received is not None), device=total.device)
        # Both in one message: all processes stop after the same step.
        loss_value, told = accelerator.reduce(torch.stack([total, stop_requested]), reduction="mean").tolist()
        # Scaled gradients of fp16 may overflow: their step is left out.
        diverged = accelerator.scaler is None and not math.isfinite(gradient_norm)
        if diverged or not math.isfinite(loss_value):
            problem = f"gradient is {gradient_norm}" if math.isfinite(loss_value) else f"loss is {loss_value}"
            raise self._diverged(problem)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.average is not None:
            self.average.step()
        return loss_value, {"lr": rate, "grad_norm": gradient_norm}, told > 0

    def _save(self) -> None:
        """Save a checkpoint of this step, if there is an output. Every process must call it."""
        if self.output is None:
            return
        accelerator, average = self.accelerator, self.average
        tensors = dict(self.model.named_parameters())
        files = {checkpoints.WEIGHTS: {name: processes.full_tensor(tensors[name]) for name in self.names}}
        files[checkpoints.MOMENTS] = checkpoints.collect_moments(self.model, self.plain_optimizer)
        if average is not None:
            averages = average.tensors.items()
            files[checkpoints.AVERAGES] = {name: processes.full_tensor(tensor) for name, tensor in averages}
        steps = average.ema.optimization_step if average is not None else None
        scaler = accelerator.scaler.state_dict() if accelerator.scaler is not None else None
        position = Position.of(self.stage.name, self.step)
        self._write_checkpoint(position, files, **{checkpoints.AVERAGE_STEPS: steps, "scaler": scaler})

    def _write_checkpoint(self, position: Position, files: dict[str, dict[str, torch.Tensor]], **state: Any) -> None:
        if self.output is not None:
            folder, limit = self.output / "checkpoints", self.config.checkpoints_total_limit
            if self.accelerator.is_main_process:
                checkpoints.save_checkpoint(folder, position, files, {**self._state(), **state}, limit)
            self.accelerator.wait_for_everyone()

    def _validate(self) -> None:
        """Write the validation samples of this step, if the run makes any. Every process must call it."""
        if not self.stage.validates or not self.config.validation_prompts:
            return
        if self.validator is not None and self.output is not None:
            average = self.average.applied() if self.average is not None else nullcontext()
            with average, self.accelerator.autocast():
                self.validator.write(self.model, self.output / "validation", self.step)
        self.accelerator.wait_for_everyone()

    # Messages.

    def _stopped(self) -> processes.TrainingStopped:
        """Return the exception that ends a stopped run, with its message in the main process."""
        message = ""
        if self.accelerator.is_main_process:
            message = f"stopped after step {self.step} of {self.stage.steps} ({self.stage.name}); "
            if self.output is None:
                message += "nothing was saved, for there is no output"
            else:
                saved = Position.of(self.stage.name, self.step).name
                message += f"the same command with --resume {saved} continues from there (saved in {self.output})"
        return processes.TrainingStopped(message, self.signals.received or signal.SIGINT)

    def _diverged(self, problem: str) -> FloatingPointError:
        """Return the exception that ends a run whose loss or gradient is not finite.

        Args:
            problem: The quantity and its value, such as "loss is nan".
        """
        position, way_out = Position.of(self.stage.name, self.step + 1), "nothing was saved, for there is no output"
        if self.output is not None:
            good = checkpoints.last_good_checkpoint(self.output / "checkpoints", position)
            way_out = "there is no good checkpoint to go back to"
            if good is not None:
                way_out = f"--resume {good.name} continues from the last good checkpoint"
        samples = [
            index
            for rank in range(self.order.world_size)
            for micro_step in range(self.order.accumulation_steps)
            for index in self._samples(replace(self.order, rank=rank), self.step, micro_step)
        ]
        # A data set may say what a sample is.
        names = shorten_list(map(getattr(self.dataset, "sample_name", str), samples))
        return FloatingPointError(
            f"the {problem} in {position.stage} step {position.step}, batch of samples {names} of the data set; "
            f"{way_out}; lower the learning rate if the samples are sound"
        )

    # The export.

    def _finish(self, result: TrainingResult) -> None:
        """Merge LoRA, and write the trained pipeline or model."""
        config, main = self.config, self.accelerator.is_main_process
        model: Any = processes.unsharded(self.model)
        if main and config.train == "lora" and self.output is not None:
            self._save_adapter(self.output / "lora", model)
        if config.train == "lora":
            parameters.merge_lora(model)
        if model is self.model:
            model.to(self.accelerator.device)
        model.requires_grad_(True).eval()
        result.model = model
        if self.output is not None and self.source is not None:
            result.pipeline = self.output / ("model" if self.source.index is None else "pipeline")
            if main:
                parameters.export_model(self.source, result.pipeline, model, self._record(result))
        self.accelerator.wait_for_everyone()
        if self.owns_accelerator:
            self.accelerator.end_training()

    def _record(self, result: TrainingResult) -> dict[str, Any]:
        """Contents of `training.json`."""
        directory, origin = self.source.root, {"location": str(self.config.model)}
        if Path(origin["location"]).is_dir():
            origin = {"location": str(directory.resolve()), **local_origin(directory)}
        return {
            **self._state(),
            "source": origin,
            "source_card": carried_metadata(directory),
            "final_losses": {name: values[-1] for name, values in result.losses.items() if values},
        }


def _advance(bar: tqdm, loss: float, **others: str) -> None:
    bar.set_postfix(**others, loss=f"{loss:.4f}", refresh=False)
    bar.update()
