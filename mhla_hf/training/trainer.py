# SPDX-License-Identifier: Apache-2.0
"""Training runs, from options to the trained pipeline or model: their stages in any number of processes, resumable."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sized
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate import Accelerator, DistributedType
from safetensors.torch import save_file
from torch import nn

from ..utils.destinations import atomic_directory, remove_leftovers
from ..utils.files import list_files, write_json
from ..utils.locations import local_origin
from ..utils.machine import installed_versions
from ..utils.model_cards import carried_metadata
from . import parameters
from .checkpoints import Position
from .config import TRANSFORMERS, UNCONVERTED, TrainingConfig, check_options
from .data.batches import DataOrder, LatentSamples, check_null_condition, first_of_buckets, make_batch, stable_seed
from .data.cache import LatentDataset
from .data.folders import folder_fingerprint, model_fingerprint, samples_fingerprint
from .families import objective_for
from .loading import PipelineSource, TrainingSource, TransformersSource
from .loop import StageLoop
from .matching.layers import Batch
from .matching.teacher import SharedTeacher, Teacher, memory_of, share_weights
from .parameters import MHLA_FILE, save_adapter
from .processes import StopSignals, TrainingStopped, check_distribution, make_accelerator, open_trackers
from .run import Callback, MetricsFile, ModelTracker, Run, find_start
from .sharding import unsharded
from .stages.matching import Transfer
from .stages.objectives import Tensors
from .stages.prediction import DiffusionStage, PredictionStage, Stage
from .stages.transformers import BatchesByStep, TransformersObjective, TransformersStage
from .validation import Validator, make_validator


__all__ = ["DiffusionTrainer", "TrainingResult", "TransformersTrainer"]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class TrainingResult:
    """The outcome of a run.

    Attributes:
        model: The trained transformer, with the average of its weights under `ema_decay`; LoRA is merged.
        losses: Loss of every step of this run, by stage. A resumed run has those of the earlier one too.
        seconds_per_step: Mean duration of the steps run here, by stage.
        teacher_memory: Bytes of the weights of the distillation's teacher: `stored` for it alone, and `shared` with
            the model. Empty without distillation in this run.
        resumed_from: The checkpoint that the run was resumed from.
        pipeline: The directory of the pipeline or model written.
    """

    model: nn.Module
    losses: dict[str, list[float]] = field(default_factory=dict)
    seconds_per_step: dict[str, float] = field(default_factory=dict)
    teacher_memory: dict[str, int] = field(default_factory=dict)
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

    source_class: ClassVar[type[TrainingSource]]
    stage_class: ClassVar[type[PredictionStage]]
    source: Any
    dataset: Any
    objective: Any

    def __init__(
        self,
        config: TrainingConfig,
        model: nn.Module | None,
        dataset: Any,
        teacher: Teacher | None,
        callback: Callback | None,
        accelerator: Accelerator | None,
        source: TrainingSource | None,
        tracker: ModelTracker | None = None,
    ) -> None:
        if model is None and config.model is None:
            raise ValueError(f"model must be given: a {self.source_class.kind} directory or a Hub id")
        self.config = config
        self.output = Path(config.output) if config.output is not None else None
        self.owns_accelerator = accelerator is None
        self.accelerator = accelerator or make_accelerator(config)
        check_distribution(self.accelerator, config)
        self.metrics: MetricsFile | None = None
        self.callback, self.tracker = callback, tracker
        self.teacher = teacher
        self.teacher_of_distillation: SharedTeacher | None = None
        self.teacher_memory: dict[str, int] = {}
        self.inputs: dict[str, str] = {}
        self.source = source
        if source is None and config.model is not None:
            with self.accelerator.main_process_first():
                self.source = self.source_class.find(config.model, config.component, config.teacher)
        if self.source is not None and self.output is not None:
            # The finished pipeline gets a copy of them.
            list_files(self.source.directory)
        self.dataset = self._open(dataset)
        self.own_model = model is None
        self.model = model if model is not None else self._load_model()
        self.objective = self._make_objective()
        if config.train == "lora" and not hasattr(self.model, "peft_config"):
            parameters.add_lora(self.model, config.lora_rank, config.lora_alpha, stable_seed(config.seed, "lora"))

    @abstractmethod
    def _open(self, dataset: Any) -> Any:
        """The samples; checks whatever does not need the model."""

    @abstractmethod
    def _make_objective(self) -> Any:
        """The objective of the model; checks that the samples suit it."""

    def _stages(self) -> list[Stage]:
        """The stages, in their order."""
        config, arguments = self.config, (self.model, self.objective, self._batches())
        stages = self._matching_stages()
        if config.distill_steps:
            self._keep_original_weights()
            stages.append(self.stage_class(config, *arguments, self._get_distillation_teacher))
        if config.max_steps:
            stages.append(self.stage_class(config, *arguments))
        return stages

    @abstractmethod
    def _batches(self) -> Any:
        """The source of batches that the stages take."""

    def _matching_stages(self) -> list[Stage]:
        return []

    @abstractmethod
    def _data_fingerprints(self) -> dict[str, str]:
        """Fingerprints of the samples and of their encoders."""

    @abstractmethod
    def _save_adapter(self, destination: Path, model: Any) -> None:
        """Write the LoRA matrices of a model, and its MHLA parameters."""

    def _make_validator(self) -> Validator | None:
        return None

    def _load_model(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(stable_seed(self.config.seed, "parameters"))
            return self.source.load_model(self.config.mhla)

    def run(self) -> TrainingResult:
        """Train.

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
        locks = ExitStack()
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
                stop.args = ("stopped; the same command with --resume latest continues from the last checkpoint",)
            raise
        finally:
            if self.metrics is not None:
                self.metrics.close()
            locks.close()
        return result

    def _run_inputs(self) -> dict[str, str]:
        """Fingerprints of everything that the run is made from, by name; unknown parts are left out."""
        config, inputs = self.config, self._data_fingerprints()
        if not self.own_model:
            # Parameters that train come from a checkpoint.
            trained = set(parameters.trainable_names(self.model, config.train))
            inputs["base weights"] = model_fingerprint(self.model, trained)
        else:
            inputs["base weights"] = folder_fingerprint(self.source.model.folder)
        if self.teacher is not None:
            inputs["teacher"] = model_fingerprint(self.teacher)
        elif (config.transfer_steps or config.distill_steps) and self.source is not None:
            # A run that is past these stages is resumed without its teacher.
            with suppress(OSError, ValueError):
                inputs["teacher"] = folder_fingerprint(self.source.teacher.folder)
        return inputs

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

    def _keep_original_weights(self) -> None:
        """Make the model its own teacher if its weights are still the original ones.

        That is before any stage changes them, and before those of a checkpoint are loaded.
        """
        is_fresh = (
            self.own_model
            and self.teacher is None
            and self.config.teacher is None
            and not self._is_sharded()
            and not self.source.model.is_mhla
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
            original = self._load_teacher("distill_steps")
            teacher = original if self._is_sharded() else share_weights(self.model, original)
            if isinstance(teacher, nn.Module):
                teacher = teacher.to(_DTYPES.get(self.accelerator.mixed_precision, torch.float32))
        if isinstance(teacher, nn.Module):
            teacher = teacher.requires_grad_(False).eval()
        self.teacher_memory = memory_of(teacher)
        return teacher.to(self.accelerator.device)

    def _load_teacher(self, option: str) -> nn.Module:
        if self.source is None:
            raise ValueError(f"{option} needs teacher: the model before its conversion")
        return self.source.teacher.load()

    def _is_sharded(self) -> bool:
        """True if no process has the whole model."""
        return self.accelerator.distributed_type == DistributedType.FSDP

    def _prepare(self, position: Position | None, signals: StopSignals) -> Run:
        if self.tracker is not None and self.accelerator.distributed_type == DistributedType.DEEPSPEED:
            raise ValueError("tracker (--track-attention) does not run under DeepSpeed; use FSDP 2")
        if self.output is not None and self.accelerator.is_main_process:
            self.output.mkdir(parents=True, exist_ok=True)
            for folder in (self.output, self.output / "checkpoints"):
                remove_leftovers(folder)
            write_json(self.output / "training_config.json", self.config.to_dict())
            self.metrics = MetricsFile(self.output / "metrics.jsonl", position)
            if self.tracker is not None:
                kinds = ("attention_at_start", "attention")
                self.tracker.restore(row[kind] for row in self.metrics.rows for kind in kinds if kind in row)
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
            tracker=self.tracker,
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
            result.pipeline = self.output / self.source.kind
            if main:
                record = self._state()
                is_directory = Path(str(config.model)).is_dir()
                location = str(self.source.directory.resolve()) if is_directory else str(config.model)
                record["source"] = {"location": location}
                if is_directory:
                    record["source"] |= local_origin(self.source.directory)
                record["source_card"] = carried_metadata(self.source.directory)
                record["final_losses"] = {name: values[-1] for name, values in result.losses.items() if values}
                if result.teacher_memory:
                    record["teacher_memory_bytes"] = result.teacher_memory
                record["versions"] = installed_versions("torch", "diffusers", "accelerate", "safetensors")
                self.source.export(result.pipeline, model, record)
        self.accelerator.wait_for_everyone()
        if self.owns_accelerator:
            self.accelerator.end_training()


class DiffusionTrainer(Trainer):
    """Trainer of a diffusion transformer with MHLA: layer matching, distillation, then fine-tuning.

    Its MHLA layers are matched one by one, then its whole prediction (distillation). The objective of fine-tuning is
    flow matching for Wan and SANA, and noise prediction for DiT; see `mhla_hf.training.families`.

    With files, everything comes from `config.model` and `config.cache`. In a program, models and data can be passed
    in; without `config.output` nothing is written.

    Args:
        config: The options.
        model: The transformer to train, in place; None loads it from `config.model`.
        dataset: The samples, see `LatentSamples`; None opens the cache.
        teacher: The model that it was converted from, for `transfer_steps` and `distill_steps`; None loads it. For
            `distill_steps` alone it can be a `SharedTeacher` of the model.
        null_condition: Condition of a sample without caption or class, for `condition_dropout`; None takes the data
            set's attribute of this name, if it has one.
        callback: Called with (stage, step, loss) after every step, in every process; steps count from 1.
        accelerator: An `Accelerator` to use; None makes one.
        source: The pipeline of `config.model`, if it was found already.
        tracker: Looks at the model while it trains, such as an
            [`AttentionTracker`][mhla_hf.analysis.AttentionTracker]. Its rows go into `metrics.jsonl` as `attention`
            (the one of step 0 as `attention_at_start`, in the row of the first step; there is none under FSDP 2), its
            figures to the trackers, and a run that is resumed continues its history. None for none.

    Raises:
        ValueError: If options, model and data do not fit together.
    """

    source_class = PipelineSource
    stage_class = DiffusionStage
    source: PipelineSource | None
    dataset: LatentSamples

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
        source: PipelineSource | None = None,
        tracker: ModelTracker | None = None,
    ) -> None:
        self.null_condition = null_condition
        super().__init__(config, model, dataset, teacher, callback, accelerator, source, tracker)

    def probe_batch(self) -> Batch:
        """Arguments of the model's `forward` for the first batch of the data, at noise levels that never change."""
        order = DataOrder(
            dataset_size=len(self.dataset),
            batch_size=self.config.batch_size,
            seed=self.config.seed,
            stage="probe",
            buckets=getattr(self.dataset, "buckets", None),
        )
        batch = make_batch(self.dataset, order, 0, 0, self.objective)
        noisy = self.objective.add_noise(batch.latents, batch.noise, batch.levels)
        return self.objective.model_inputs(self.model.config, noisy, batch.levels, batch.condition)

    def _open(self, dataset: LatentSamples | None) -> LatentSamples:
        config = self.config
        if dataset is None:
            if config.cache is None and config.output is None:
                raise ValueError("cache must be given: the directory made by the cache step")
            dataset = LatentDataset(config.cache or Path(str(config.output)) / "cache")
        _refuse_empty(dataset)
        if self.null_condition is None:
            self.null_condition = getattr(dataset, "null_condition", None)
        check_null_condition(config.condition_dropout, self.null_condition)
        return dataset

    def _make_objective(self) -> Any:
        objective = objective_for(self.model, self.source and self.source.model, self.config)
        for index in first_of_buckets(self.dataset):
            objective.check_data(self.model, self.dataset[index], self.null_condition)
        return objective

    def _batches(self) -> Any:
        return partial(
            make_batch,
            self.dataset,
            objective=self.objective,
            condition_dropout=self.config.condition_dropout,
            null_condition=self.null_condition,
        )

    def _matching_stages(self) -> list[Stage]:
        if not self.config.transfer_steps:
            return []
        return [
            Transfer(
                self.config,
                self.model,
                self.objective,
                self._batches(),
                self._get_transfer_teacher,
                self.accelerator,
                self.dataset,
                None if self.output is None else self.output / "transfer",
            )
        ]

    def _get_transfer_teacher(self) -> nn.Module:
        teacher = self.teacher
        if not isinstance(teacher, nn.Module):
            # In the type of the model, which then has most of its weights. Distillation loads it again, to share them.
            teacher = self._load_teacher("transfer_steps")
        if not self.config.distill_steps:
            # Fine-tuning does not need it, and the stage releases it.
            self.teacher = None
        return teacher.to(self.accelerator.device).requires_grad_(False).eval()

    def _data_fingerprints(self) -> dict[str, str]:
        dataset, cached = self.dataset, isinstance(self.dataset, LatentDataset)
        inputs = {"data": dataset.fingerprint() if cached else samples_fingerprint(dataset)}  # type: ignore[attr-defined]
        for name in ("vae", "text_encoder", "tokenizer"):
            # The latents come from the cache's, the validation samples and the exported pipeline from the source's.
            parts = [str(dataset.settings.get(name, ""))] if isinstance(dataset, LatentDataset) else []
            if self.source is not None and (self.source.directory / name).is_dir():
                parts.append(folder_fingerprint(self.source.directory / name))
            if any(parts):
                inputs[name] = " ".join(parts)
        return inputs

    def _make_validator(self) -> Validator | None:
        return make_validator(self.source, self.config, self.dataset, self.accelerator)

    def _save_adapter(self, destination: Path, model: nn.Module) -> None:
        save_adapter(destination, model, self.config.component)


class TransformersTrainer(Trainer):
    """Trainer of a converted model of transformers: distillation, then fine-tuning on its own task.

    Distillation matches the logits or the hidden states of the model that it was converted from; see
    `distill_target`. The task of language models is the next token. Other models have one where batches hold `labels`;
    without them `max_steps` must be 0.

    Args:
        config: The options.
        batches: Source of the batches, such as a `BatchSource` of `mhla_hf.training.data.batches`.
        model: The converted model, trained in place; None loads it from `config.model`.
        teacher: See `DiffusionTrainer`.
        callback: Called with (stage, step, loss) after every step, in every process; steps count from 1.
        accelerator: An `Accelerator` to use; None makes one.
        tracker: Looks at the model while it trains, such as an
            [`AttentionTracker`][mhla_hf.analysis.AttentionTracker]. Its rows go into `metrics.jsonl` as `attention`
            (the one of step 0 as `attention_at_start`, in the row of the first step; there is none under FSDP 2), its
            figures to the trackers, and a run that is resumed continues its history. None for none.

    Raises:
        ValueError: If options, model and data do not fit together.
    """

    source_class = TransformersSource
    stage_class = TransformersStage
    source: TransformersSource | None
    dataset: BatchesByStep

    def __init__(
        self,
        config: TrainingConfig,
        batches: BatchesByStep,
        model: nn.Module | None = None,
        *,
        teacher: Teacher | None = None,
        callback: Callback | None = None,
        accelerator: Accelerator | None = None,
        tracker: ModelTracker | None = None,
    ) -> None:
        if config.transfer_steps or config.validation_prompts:
            raise ValueError(
                "transfer_steps and validation_prompts are for diffusion models; match models of transformers with "
                "mhla_hf.recovery.match_layers"
            )
        check_options(config, TRANSFORMERS)
        super().__init__(config, model, batches, teacher, callback, accelerator, None, tracker)

    def _open(self, dataset: BatchesByStep) -> BatchesByStep:
        if self.source is not None and self.config.distill_steps and self.teacher is None:
            _ = self.source.teacher
        _refuse_empty(dataset)
        return dataset

    def _make_objective(self) -> TransformersObjective:
        return TransformersObjective.of(self.model, self.config.distill_target, self.config.distill_temperature)

    def _batches(self) -> BatchesByStep:
        return self.dataset

    def _data_fingerprints(self) -> dict[str, str]:
        return {"data": str(getattr(self.dataset, "fingerprint", len(self.dataset)))}

    def _save_adapter(self, destination: Path, model: Any) -> None:
        with atomic_directory(destination) as temporary:
            # With adapters transformers writes these alone.
            model.save_pretrained(temporary)
            save_file(parameters.mhla_state_dict(model), temporary / MHLA_FILE, metadata={"format": "pt"})


def _refuse_empty(dataset: Sized) -> None:
    if len(dataset) < 1:
        raise ValueError("the data set is empty")
