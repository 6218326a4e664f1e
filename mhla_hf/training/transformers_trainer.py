# SPDX-License-Identifier: Apache-2.0
"""Training of language models, encoders and vision models of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from torch import nn

from ..utils.source_files import list_files
from . import parameters, transformers_loading
from .base_trainer import Trainer
from .config import TRANSFORMERS_KINDS, TrainingConfig
from .data.data_order import stable_seed
from .data.fingerprints import folder_fingerprint, model_fingerprint
from .export import MHLA_FILE
from .families.transformers_models import TransformersObjective
from .loop import Callback
from .resuming import run_state
from .stages.diffusion import Stage
from .stages.teachers import Teacher
from .stages.transformers import BatchesByStep, TransformersDistillation, TransformersFineTuning


class TransformersTrainer(Trainer):
    """Distills a converted model of transformers, and fine-tunes it on its own task.

    Distillation matches the logits or the hidden states of the model that it was converted from; see
    `distill_target`. The task of language models is the next token. Other models have one where batches hold `labels`;
    without them `max_steps` must be 0.

    Args:
        config: The options.
        batches: Where batches come from, such as a `BatchSource` of `mhla_hf.training.data.batch_sources`.
        model: The converted model, trained in place; None loads it from `config.model`.
        teacher: See `DiffusionTrainer`.
        callback: Called with (stage, step, loss) after every step, in every process; steps count from 1.
        accelerator: An `Accelerator` to use; None makes one.

    Raises:
        ValueError: If options, model and data do not fit together.
    """

    exported = "model"

    def __init__(
        self,
        config: TrainingConfig,
        batches: BatchesByStep,
        model: nn.Module | None = None,
        *,
        teacher: Teacher | None = None,
        callback: Callback | None = None,
        accelerator: Accelerator | None = None,
    ) -> None:
        if model is None and config.model is None:
            raise ValueError("model must be given: a model directory or a Hub id")
        if config.transfer_steps:
            raise ValueError("transfer_steps must be 0 for models of transformers: use mhla_hf.recovery.match_layers")
        if config.validation_prompts:
            raise ValueError("validation_prompts are not for models of transformers")
        config.check_family(TRANSFORMERS_KINDS[0])
        super().__init__(config, teacher, callback, accelerator)
        self.source = None
        if config.model is not None:
            with self.accelerator.main_process_first():
                self.source = transformers_loading.find_model(config.model)
            if self.output is not None:
                list_files(self.source)
            if config.distill_steps and teacher is None:
                transformers_loading.find_teacher(self.source, config.teacher)
        if len(batches) < 1:
            raise ValueError("the data set is empty")
        self.dataset = batches
        self.batches = batches
        self.own_model = model is None
        self.model = model if model is not None else self._load_model()
        self.objective = TransformersObjective.of(self.model, config.distill_target, config.distill_temperature)
        if config.train == "lora" and not hasattr(self.model, "peft_config"):
            parameters.add_lora(self.model, config.lora_rank, config.lora_alpha, stable_seed(config.seed, "lora"))

    def _load_model(self) -> nn.Module:
        assert self.source is not None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(stable_seed(self.config.seed, "parameters"))
            return transformers_loading.load_model(self.source, self.config.mhla)

    def _stages(self) -> list[Stage]:
        config, arguments = self.config, (self.model, self.objective, self.batches)
        stages: list[Stage] = []
        if config.distill_steps:
            self._keep_original_weights()
            stages.append(TransformersDistillation(config, *arguments, self._get_distillation_teacher))
        if config.max_steps:
            stages.append(TransformersFineTuning(config, *arguments))
        return stages

    def _run_inputs(self) -> dict[str, str]:
        inputs = {"data": str(getattr(self.batches, "fingerprint", len(self.batches)))}
        if not self.own_model:
            trained = set(parameters.trainable_names(self.model, self.config.train))
            inputs["base weights"] = model_fingerprint(self.model, trained)
        elif self.source is not None:
            inputs["base weights"] = folder_fingerprint(self.source)
        if self.teacher is not None:
            inputs["teacher"] = model_fingerprint(self.teacher)
        elif self.config.distill_steps and self.source is not None:
            teacher = transformers_loading.find_teacher(self.source, self.config.teacher)
            inputs["teacher"] = folder_fingerprint(teacher)
        return inputs

    def _state(self) -> dict[str, Any]:
        return run_state(self.config, self.model, self.accelerator, len(self.batches), self.objective, self.inputs)

    def _is_ordinary_source(self) -> bool:
        return self.source is not None and transformers_loading.is_ordinary(self.source)

    def _load_teacher(self) -> nn.Module:
        assert self.source is not None
        teacher = transformers_loading.find_teacher(self.source, self.config.teacher)
        return transformers_loading.load_model(teacher, "none")

    def _save_adapter(self, destination: Path, model: nn.Module) -> None:
        from ..utils.files import atomic_directory

        saving: Any = model
        with atomic_directory(destination) as temporary:
            # With adapters transformers writes these alone.
            saving.save_pretrained(temporary)
            save_file(parameters.mhla_state_dict(model), temporary / MHLA_FILE, metadata={"format": "pt"})

    def _export(self, destination: Path, model: nn.Module, record: dict[str, Any]) -> None:
        assert self.source is not None
        transformers_loading.export_model(self.source, destination, model, record)
