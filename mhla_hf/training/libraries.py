# SPDX-License-Identifier: Apache-2.0
"""The trainers of models of diffusers and of transformers: their data, objectives, fingerprints and adapters."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from safetensors.torch import save_file
from torch import nn

from ..models.directory import ModelDirectory
from ..utils.destinations import atomic_directory
from .checkpoints import Callback, ModelTracker
from .config import TRANSFORMERS, TrainingConfig, check_options
from .data.batches import (
    LatentSamples,
    check_null_condition,
    first_of_buckets,
    folder_fingerprint,
    make_batch,
    samples_fingerprint,
)
from .data.cache import LatentDataset
from .evaluation import Validator, make_validator
from .families import objective_for, open_pipeline
from .matching.layers import Batch
from .matching.teacher import Teacher
from .parameters import MHLA_FILE, mhla_state_dict, save_adapter
from .stages.objectives import Tensors
from .stages.prediction import DiffusionStage
from .stages.transformers import BatchesByStep, TransformersObjective, TransformersStage
from .trainer import Trainer


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

    open_source = staticmethod(open_pipeline)
    stage_class = DiffusionStage
    source: ModelDirectory | None
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
        source: ModelDirectory | None = None,
        tracker: ModelTracker | None = None,
    ) -> None:
        super().__init__(config, model, teacher, callback, accelerator, tracker, source)
        if dataset is None:
            if config.cache is None and config.output is None:
                raise ValueError("cache must be given: the directory made by the cache step")
            dataset = LatentDataset(config.cache or Path(str(config.output)) / "cache")
        self._take_data(dataset)
        self.null_condition = getattr(dataset, "null_condition", None) if null_condition is None else null_condition
        check_null_condition(config.condition_dropout, self.null_condition)
        self._load_model()
        self.objective = objective_for(self.model, self.source, config)
        for index in first_of_buckets(dataset):
            self.objective.check_data(self.model, dataset[index], self.null_condition)

    def probe_batch(self) -> Batch:
        """Arguments of the model's `forward` for the first batch of the data, at noise levels that never change."""
        batch = make_batch(self.dataset, self._data_order("probe"), 0, 0, self.objective)
        return self.objective.inputs_of(self.model, batch)

    def _batches(self) -> Any:
        return partial(
            make_batch,
            self.dataset,
            objective=self.objective,
            condition_dropout=self.config.condition_dropout,
            null_condition=self.null_condition,
        )

    def _data_fingerprints(self) -> dict[str, str]:
        dataset, cached = self.dataset, isinstance(self.dataset, LatentDataset)
        inputs = {"data": dataset.fingerprint() if cached else samples_fingerprint(dataset)}  # type: ignore[attr-defined]
        for name in ("vae", "text_encoder", "tokenizer"):
            # The latents come from the cache's, the validation samples and the exported pipeline from the source's.
            parts = [str(dataset.settings.get(name, ""))] if isinstance(dataset, LatentDataset) else []
            if self.source is not None and (self.source.root / name).is_dir():
                parts.append(folder_fingerprint(self.source.root / name))
            if any(parts):
                inputs[name] = " ".join(parts)
        return inputs

    def _make_validator(self) -> Validator | None:
        if not self.config.validation_prompts:
            return None
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

    stage_class = TransformersStage
    source: ModelDirectory | None
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
        super().__init__(config, model, teacher, callback, accelerator, tracker)
        if self.source is not None and config.distill_steps and teacher is None:
            _ = self.original
        self._take_data(batches)
        self._load_model()
        self.objective = TransformersObjective.of(self.model, config.distill_target, config.distill_temperature)

    @staticmethod
    def open_source(location: str, component: str) -> ModelDirectory:
        """Open a model of transformers."""
        directory = ModelDirectory.open(location)
        if not directory.is_transformers:
            raise ValueError(f"model: {location} is not a model of transformers")
        return directory

    def _batches(self) -> BatchesByStep:
        return self.dataset

    def _data_fingerprints(self) -> dict[str, str]:
        return {"data": str(getattr(self.dataset, "fingerprint", len(self.dataset)))}

    def _save_adapter(self, destination: Path, model: Any) -> None:
        with atomic_directory(destination) as temporary:
            # With adapters transformers writes these alone.
            model.save_pretrained(temporary)
            save_file(mhla_state_dict(model), temporary / MHLA_FILE, metadata={"format": "pt"})
