# SPDX-License-Identifier: Apache-2.0
"""The trainers of models of diffusers and of transformers: their data, objectives, fingerprints and adapters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from accelerate import init_empty_weights
from safetensors.torch import save_file
from torch import nn

from ..families.objectives import TWO_ENCODERS, Tensors
from ..models.directory import ModelDirectory, find_pipeline
from ..models.registry import mhla_class_for, trained_family
from ..models.weight_files import check_weights
from ..utils.destinations import atomic_directory
from .config import TRANSFORMERS, UNCONVERTED, TrainingConfig, check_options
from .data.batches import BatchSource, LatentSamples, check_null_condition, make_batch
from .data.latent_cache import LatentDataset
from .data.order import DataOrder, first_of_buckets, folder_fingerprint, samples_fingerprint
from .evaluation import Validator
from .layers import Batch
from .parameters import adapter_of, check_conversion, check_takes_adapters, save_adapter
from .stages.diffusion import DiffusionStage, objective_for
from .stages.transformers import TransformersObjective, TransformersStage, model_batch
from .trainer import Trainer


def check_pipeline(directory: ModelDirectory) -> None:
    """Check that the model of a pipeline can be trained.

    Raises:
        ValueError: If it is of a kind that needs another objective, or the pipeline uses it in another way.
    """
    family = trained_family(directory.class_name, f"component: {directory.component} of {directory.location}")
    family.load_objective().check_model(directory.config)
    class_name = (directory.index or {}).get("_class_name")
    if class_name in family.refused_pipelines:
        raise ValueError(
            f"model: a {class_name} calls its transformer with more than a text, and cannot be recovered or trained "
            "here; save its parts as the pipeline from text"
        )


def open_pipeline(location: str, component: str = "transformer") -> ModelDirectory:
    """Open a pipeline to train; of a Hub repository, only the pipeline's own files are downloaded.

    Args:
        location: A directory or a Hub id.
        component: Name of the transformer to train.

    Raises:
        ValueError: If there is no pipeline, or its transformer cannot be trained here.
    """
    directory = ModelDirectory.read(find_pipeline(location), component, location=location)
    check_pipeline(directory)
    return directory


def check_run(directory: ModelDirectory, config: TrainingConfig) -> None:
    """Check the options of a run against the pipeline's files, before data are encoded for it.

    Raises:
        ValueError: If options, pipeline and teacher do not fit together.
    """
    trained_family(directory.class_name).load_objective().for_run(config, directory)
    for name in (directory.component, *TWO_ENCODERS):
        check_weights(directory.root / name)
    check_conversion(directory, config.mhla)
    model_class = directory.load_class() if config.mhla == UNCONVERTED else mhla_class_for(directory.class_name)
    if config.train == "lora":
        check_takes_adapters(model_class)
    if isinstance(config.mhla, dict):
        with init_empty_weights():
            model_class.from_config({**directory.config, "mhla": config.mhla})
    if config.distill_steps:
        directory.original(config.teacher, "teacher")


class DiffusionTrainer(Trainer):
    """Trainer of a diffusion transformer with MHLA: distillation, then fine-tuning.

    The objective of fine-tuning is that of the model's family, such as flow matching for Wan; see
    `mhla_hf.families`.

    With files, everything comes from `config.model` and `config.cache`. In a program, models and data can be passed
    in; without `config.output` nothing is written.

    Args:
        config: The options.
        model: The transformer to train, in place; None loads it from `config.model`.
        dataset: The samples, see `LatentSamples`; None opens the cache.
        teacher: The model that it was converted from, for `distill_steps`; None loads it. It can be a
            `SharedTeacher` of the model.
        null_condition: Condition of a sample without caption or class, for `condition_dropout`; None takes the data
            set's attribute of this name, if it has one.
        callback: Called with (stage, step, loss) after every step, in every process; steps count from 1.
        accelerator: An `Accelerator` to use; None makes one.
        source: The pipeline of `config.model`, if it was found already.
        tracker: Looks at the model while it trains, such as an
            [`AttentionTracker`][mhla_hf.analysis.AttentionTracker]. Its rows go into `metrics.jsonl` as `attention`
            (the one of step 0 as `attention_at_start`, in the row of the first step), its figures to the trackers, and
            a run that is resumed continues its history. Not for sharded runs. None for none.

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
        null_condition: Tensors | None = None,
        **options: Any,
    ) -> None:
        super().__init__(config, model, **options)
        if dataset is None:
            dataset = LatentDataset(config.cache or Path(str(config.output)) / "cache")
        self.dataset = dataset
        self.null_condition = getattr(dataset, "null_condition", None) if null_condition is None else null_condition
        check_null_condition(config.condition_dropout, self.null_condition)
        self._load_model()
        self.objective = objective_for(self.model, self.source, config)
        rate = getattr(dataset, "settings", {}).get("fps")
        if rate and hasattr(self.objective, "frame_rate"):
            self.objective = replace(cast(Any, self.objective), frame_rate=float(rate))
        for index in first_of_buckets(dataset):
            self.objective.check_data(self.model, dataset[index], self.null_condition)

    def probe_batch(self) -> Batch:
        """Arguments of the model's `forward` for the first batch of the data, at noise levels that never change."""
        batch = make_batch(self.dataset, self._data_order("probe"), 0, 0, self.objective)
        return self.objective.inputs_of(self.model, batch)

    def _batches(self) -> Callable[[DataOrder, int, int], Any]:
        return partial(
            make_batch,
            self.dataset,
            objective=self.objective,
            condition_dropout=self.config.condition_dropout,
            null_condition=self.null_condition,
        )

    def _data_fingerprints(self) -> dict[str, str]:
        dataset = self.dataset
        settings = dataset.settings if isinstance(dataset, LatentDataset) else {}
        inputs = {"data": samples_fingerprint(dataset)}
        for name in TWO_ENCODERS:
            # The latents come from the cache's, the validation samples and the exported pipeline from the source's.
            parts = [str(settings.get(name, ""))]
            if self.source is not None and (self.source.root / name).is_dir():
                parts.append(folder_fingerprint(self.source.root / name))
            if any(parts):
                inputs[name] = " ".join(parts)
        return inputs

    def _samples(self, order: DataOrder, step: int, micro_step: int) -> Sequence[int]:
        return [order.dataset_index(number) for number in order.sample_numbers(step, micro_step)]

    def _make_validator(self) -> Validator | None:
        source, dataset = self.source, self.dataset
        if not self.config.validation_prompts or not self.accelerator.is_main_process:
            return None
        has_one_transformer = source is not None and (source.index or {}).get("boundary_ratio") is None
        if source is None or not has_one_transformer or self.output is None or not isinstance(dataset, LatentDataset):
            raise ValueError(
                "validation_prompts need model, output and cache: a pipeline with one transformer, its data and where "
                "to write"
            )
        return Validator(source, self.config, dataset, self.accelerator.device)

    _save_adapter = staticmethod(save_adapter)


class TransformersTrainer(Trainer):
    """Trainer of a converted model of transformers: distillation, then fine-tuning on its own task.

    Distillation matches the logits of the model that it was converted from, or the last hidden states of models that
    are no language models and no classifiers. The task of language models is the next token; of other models
    `max_steps` must be 0.

    Args:
        config: The options.
        batches: Source of the batches.
        model: The converted model, trained in place; None loads it from `config.model`.
        teacher: See `DiffusionTrainer`.
        callback: Called with (stage, step, loss) after every step, in every process; steps count from 1.
        accelerator: An `Accelerator` to use; None makes one.
        tracker: Looks at the model while it trains, such as an
            [`AttentionTracker`][mhla_hf.analysis.AttentionTracker]. Its rows go into `metrics.jsonl` as `attention`
            (the one of step 0 as `attention_at_start`, in the row of the first step), its figures to the trackers, and
            a run that is resumed continues its history. Not for sharded runs. None for none.

    Raises:
        ValueError: If options, model and data do not fit together.
    """

    stage_class = TransformersStage
    source: ModelDirectory | None
    dataset: BatchSource

    def __init__(
        self, config: TrainingConfig, batches: BatchSource, model: nn.Module | None = None, **options: Any
    ) -> None:
        check_options(config, TRANSFORMERS)
        super().__init__(config, model, **options)
        if self.source is not None and config.distill_steps and self.teacher is None:
            _ = self.original
        self.dataset = batches
        self._load_model()
        self.objective = TransformersObjective.of(self.model, config.distill_temperature)

    @staticmethod
    def open_source(location: str, component: str) -> ModelDirectory:
        """Open a model of transformers."""
        return ModelDirectory.open(location)

    def _batches(self) -> Callable[[DataOrder, int, int], Any]:
        return partial(model_batch, self.dataset)

    def _data_fingerprints(self) -> dict[str, str]:
        return {"data": self.dataset.fingerprint}

    def _samples(self, order: DataOrder, step: int, micro_step: int) -> Sequence[int]:
        number = step * order.accumulation_steps + micro_step
        return self.dataset.batch_indices(order.stage, number, order.batch_size, order.rank, order.world_size)

    def _save_adapter(self, destination: Path, model: Any) -> None:
        tensors, config = adapter_of(model)
        config.base_model_name_or_path = getattr(self.source, "location", model.name_or_path)
        config.auto_mapping = {"base_model_class": type(model).__name__, "parent_library": type(model).__module__}
        config.inference_mode = True
        with atomic_directory(destination) as temporary:
            config.save_pretrained(temporary)
            adapter = {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}
            save_file(adapter, temporary / "adapter_model.safetensors", metadata={"format": "pt"})
