# SPDX-License-Identifier: Apache-2.0
"""Training of diffusion models, from options to the trained pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from ..models.registry import is_mhla_class
from ..utils.locations import find_pipeline
from ..utils.source_files import list_files
from . import loading, parameters
from .base_trainer import Trainer, TrainingResult
from .config import TrainingConfig
from .data.batches import LatentBatches, LatentSamples, check_null_condition
from .data.cache import LatentDataset
from .data.data_order import first_of_buckets, stable_seed
from .export import export_pipeline, save_adapter
from .families import Tensors, objective_for
from .families.validation import make_validator
from .loop import Callback, Validator
from .matching.teacher import SharedTeacher
from .resuming import run_inputs, run_state
from .stages.diffusion import Distillation, FineTuning, Stage
from .stages.matching import Transfer
from .stages.teachers import Teacher


__all__ = ["DiffusionTrainer", "TrainingResult"]


class DiffusionTrainer(Trainer):
    """Trains a transformer with MHLA: matches it to the model it was converted from, then fine-tunes it.

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
        null_condition: What a sample without caption or class holds, for `condition_dropout`; None takes the data
            set's attribute of this name, if it has one.
        callback: Called with (stage, step, loss) after every step, in every process; steps count from 1.
        accelerator: An `Accelerator` to use; None makes one.

    Raises:
        ValueError: If options, model and data do not fit together.
    """

    exported = "pipeline"
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
    ) -> None:
        if model is None and config.model is None:
            raise ValueError("model must be given: a pipeline directory or a Hub id")
        if dataset is None and config.cache is None and config.output is None:
            raise ValueError("cache must be given: the directory made by the cache step")
        super().__init__(config, teacher, callback, accelerator)
        self.source = None
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
        if config.train == "lora" and not hasattr(self.model, "peft_config"):
            parameters.add_lora(self.model, config.lora_rank, config.lora_alpha, stable_seed(config.seed, "lora"))

    def _load_student(self) -> nn.Module:
        assert self.source is not None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(stable_seed(self.config.seed, "parameters"))
            return loading.load_student(self.source, self.config.component, self.config.mhla)

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

    def _run_inputs(self) -> dict[str, str]:
        return run_inputs(self.config, self.dataset, self.source, None if self.own_model else self.model, self.teacher)

    def _state(self) -> dict[str, Any]:
        return run_state(self.config, self.model, self.accelerator, len(self.dataset), self.objective, self.inputs)

    def _is_ordinary_source(self) -> bool:
        if self.source is None:
            return False
        return not is_mhla_class(loading.component_config(self.source, self.config.component)["_class_name"])

    def _load_teacher(self) -> nn.Module:
        assert self.source is not None
        return loading.load_teacher(self.source, self.config.component, self.config.teacher)

    def _make_validator(self) -> Validator | None:
        return make_validator(self.source, self.config, self.dataset, self.accelerator)

    def _save_adapter(self, destination: Path, model: nn.Module) -> None:
        save_adapter(destination, model, self.config.component)

    def _export(self, destination: Path, model: nn.Module, record: dict[str, Any]) -> None:
        assert self.source is not None
        export_pipeline(self.source, destination, self.config.component, model, record)
