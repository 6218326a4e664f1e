# SPDX-License-Identifier: Apache-2.0
"""One run of a recovery: conversion, stages and publication of the result, each skipped where it is finished."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..config import automatic_share
from ..conversion import convert_pretrained
from ..models.source import Component, Source, read_source
from ..training.config import TrainingConfig
from ..training.data.batches import BatchSource, Latents
from ..training.matching.layers import AttentionLayer, find_projections, mhla_layers, on_device
from ..training.matching.teacher import SharedTeacher
from ..utils.destinations import atomic_directory
from ..utils.files import write_json
from ..utils.machine import machine_facts
from .calibration import calibrate_model
from .directories import write_models
from .quality import Quality
from .recipes import CalibrateOptions, DistillOptions, FinetuneOptions, MatchOptions, Recipe
from .report import REPORT, RecoveryReport, write_plot
from .selection import select_layers
from .work_folder import CONVERTED, DATA, RESULT, RUN, WorkFolder


logger = logging.getLogger(__name__)

MakeSource = Callable[[nn.Module], BatchSource]
# Batches that layers are tried on when they are selected.
_TRIAL_BATCHES, _TRIAL_BATCH_SIZE = 8, 4
_WARMUP_STEPS = 10
# As in matching: the runs are short.
_SECOND_BETA = 0.99


@dataclass
class RecoveryRun:
    """One call of [`recover`][mhla_hf.recovery.recover.recover]."""

    source: Source
    component: Component
    work: WorkFolder
    recipe: Recipe
    seed: int
    device: torch.device
    save_every: int
    progress: bool
    hub: Mapping[str, Any]
    on_stage: Callable[[str], None] | None = None
    dtype: torch.dtype | None = None

    def run(self, open_source: MakeSource | None, origin: Mapping[str, Any]) -> RecoveryReport:
        """Run whatever is not done yet.

        Args:
            open_source: Opens the data for the converted model; `None` where stages and layers need none.
            origin: What the report says of where the data come from.
        """
        stages = self.recipe.stages()
        if not self.work.has_result:
            self._convert(open_source)
            model, name = self._load(), self.component.name
            if stages:
                assert open_source is not None
                source = open_source(model)
                unfinished = not all(self.work.is_done(name) for name in stages)
                begun = self.work.is_done("start") and self.work.read("start").get("fingerprint")
                if unfinished and begun and begun != source.fingerprint:
                    if self.work.has_progress:
                        raise ValueError(
                            f"data: what {self.work.output} was begun with has changed since; give the same data, or "
                            "another output"
                        )
                    # Layers may have been selected on the other data.
                    self.work.clear(RUN, DATA)
                    return self.run(open_source, origin)
                self._stages(model, source, origin)
            report = self._report()
            record = {"recovery": {key: value for key, value in report.to_dict().items() if key != "recipe"}}
            if "calibrate" in report.stages:
                record["calibration"] = report.stages["calibrate"]
            with atomic_directory(self.work.path / RESULT) as temporary:
                write_models(read_source(self.work.path / CONVERTED), temporary, {name: model}, record)
        if not self.work.is_done(RESULT):
            self.work.publish()
            summary = self._report().to_dict()
            write_json(self.work.output / REPORT, summary)
            write_plot(self.work.output, summary)
            self.work.finish(RESULT, {})
        self.work.remove_large([CONVERTED, DATA, *stages])
        return self._report()

    def _convert(self, open_source: Callable[[nn.Module], BatchSource] | None) -> None:
        """Convert the source unless that is done, after selecting layers if the recipe asks for it."""
        if self.work.is_done(CONVERTED):
            return
        layers = self.recipe.layers
        record: dict[str, Any] = {}
        with _timed() as seconds:
            share = automatic_share(layers)
            if share is not None:
                assert open_source is not None
                indices = self._convert_with("all")
                count = max(1, round(share * self._count))
                chosen = indices
                if count < len(indices):
                    model = self._load()
                    batches = open_source(model).batches("layers", _TRIAL_BATCHES, _TRIAL_BATCH_SIZE)
                    selection = select_layers(model, batches, keep=len(indices) - count)
                    chosen = selection.mhla_layers
                    record = {"selection": {**selection.to_dict(), "calibration": None}}
                record["layers"] = chosen
                self._convert_with(chosen)
            else:
                self._convert_with(layers)
        self.work.finish(CONVERTED, {"seconds": seconds, **record})

    def _convert_with(self, layers: str | list[int]) -> list[int]:
        """Write the converted directory and return the indices of its MHLA layers."""
        report = convert_pretrained(
            self.source.location,
            self.work.path / CONVERTED,
            dict(self.recipe.mhla),
            component=None if self.source.pipeline is None else self.component.name,
            layers=layers,
            dtype=self.dtype,
            overwrite=True,
            progress=self.progress,
            **self.hub,
        )
        part = report.components[self.component.name]
        self._count = part.num_layers
        return part.mhla_layers

    def _load(self) -> nn.Module:
        part = read_source(self.work.path / CONVERTED).component(self.component.name)
        return part.load().to(self.device).eval()

    def _stages(self, model: nn.Module, source: BatchSource, origin: Mapping[str, Any]) -> None:
        """Run the remaining stages; the model ends with the weights of the last."""
        names, work = self.recipe.stages(), self.work
        pending = [name for name in names if not work.is_done(name)]
        done = [name for name in names if work.is_done(name)]
        if pending:
            quality = Quality(model, source)
            if not work.is_done("start"):
                start = {
                    "figures": {"softmax": quality.original, "converted": quality.measure(model)},
                    "data": {**source.describe(), **origin},
                    "fingerprint": source.fingerprint,
                    "machine": machine_facts(self.device),
                }
                work.finish("start", start)
            # Before anything changes: the original's values of what later stages train.
            teacher = SharedTeacher(model)
            layers = find_projections(model, mhla_layers(model), on_device(source.batch("start", 0, 1), model))
            everything = {name for name, _ in model.named_parameters()}
            of_layers = {name for layer in layers for name in layer.parameters()}
            # The names of the parameters that a stage may change.
            changes = {stage: of_layers if stage in ("calibrate", "match") else everything for stage in names}
            teacher.keep(sorted(set().union(*changes.values())))
        if done:
            work.load_weights(done[-1], model)
        for name in pending:
            if self.on_stage is not None:
                self.on_stage(name)
            with _timed() as seconds:
                run = StageRun(run=self, name=name, model=model, layers=layers, teacher=teacher, source=source)
                details = run_stage(name, run)
            measured = quality.measure(model)
            # What earlier stages changed is in it too: the last file alone makes the model.
            changed = set().union(*(changes[stage] for stage in names[: names.index(name) + 1]))
            weights = {key: value for key, value in model.named_parameters() if key in changed}
            work.finish(name, {"figures": measured, "seconds": seconds, "details": details}, weights)
            logger.info("%s: %s in %.0f s", name, measured, seconds["seconds"])
            # Its checkpoints and activations, and the weights before it: the result has replaced them.
            work.remove_large(names[: names.index(name)])
            work.remove_large([name], weights=False)
        model.requires_grad_(True).eval()

    def _report(self) -> RecoveryReport:
        """Build the report from the records of the finished stages."""
        report = RecoveryReport(self.work.output, self.recipe.family, recipe=self.recipe.to_dict(), seed=self.seed)
        conversion = self.work.read(CONVERTED)
        report.seconds[CONVERTED] = conversion.pop("seconds")
        if conversion:
            report.stages[CONVERTED] = conversion
        if not self.work.is_done("start"):
            return report
        start = self.work.read("start")
        report.data, report.machine = start["data"], start.get("machine", {})
        # Files are sorted by name.
        report.figures = {name: start["figures"][name] for name in ("softmax", CONVERTED)}
        for name in self.recipe.stages():
            record = self.work.read(name)
            report.figures[name], report.seconds[name] = record["figures"], record["seconds"]
            report.stages[name] = record["details"]
        return report


@contextmanager
def _timed() -> Iterator[dict[str, float]]:
    """Yield a dict that holds the seconds when the block ends."""
    seconds: dict[str, float] = {}
    began, cpu = time.perf_counter(), time.process_time()
    yield seconds
    seconds["seconds"] = round(time.perf_counter() - began, 2)
    seconds["cpu_seconds"] = round(time.process_time() - cpu, 2)


@dataclass(frozen=True, kw_only=True)
class StageRun:
    """Inputs of a stage.

    Attributes:
        run: The recovery.
        name: Name of the stage.
        model: The model, with the weights of the previous stage.
        layers: Its MHLA layers, with their projections.
        teacher: The original, stored in the model itself.
        source: The data.
    """

    run: RecoveryRun
    name: str
    model: nn.Module
    layers: Sequence[AttentionLayer]
    teacher: SharedTeacher
    source: BatchSource

    @property
    def directory(self) -> Path:
        """Folder of the stage's checkpoints."""
        return self.run.work.path / self.name


def run_stage(name: str, stage: StageRun) -> dict[str, Any]:
    """Run a stage, from its last checkpoint if there is one; change the model in place.

    Returns:
        Its details for the report, as plain JSON values.
    """
    return _STAGES[name](stage, getattr(stage.run.recipe, name))


def _calibrate(stage: StageRun, options: CalibrateOptions) -> dict[str, Any]:
    batches = stage.source.batches("calibrate", options.batches, options.batch_size)
    return calibrate_model(stage.model, batches).to_dict()


def _match(stage: StageRun, options: MatchOptions) -> dict[str, Any]:
    from ..training.matching.matching import match_layers, matching_bar

    report = match_layers(
        stage.model,
        lambda index: stage.source.batch("match", index, options.batch_size),
        num_batches=options.batches,
        steps=options.steps,
        learning_rate=options.learning_rate,
        mhla_learning_rate=options.mhla_learning_rate,
        # Calibration has changed projections; the original is recorded.
        original_parameters=stage.teacher.weights,
        cache=options.cache,
        output=stage.directory,
        save_every=stage.run.save_every,
        seed=stage.run.seed,
        progress=matching_bar(stage.run.progress, len(stage.layers) * options.steps),
    )
    return report.to_dict()


def _distill(stage: StageRun, options: DistillOptions) -> dict[str, Any]:
    chosen = {
        "distill_steps": options.steps,
        "distill_ratio": options.ratio,
        "max_steps": 0,
        "lr_schedule": "cosine",
        **_rates(options),
    }
    if not isinstance(stage.source, Latents):
        chosen["distill_target"] = options.target
        if options.temperature is not None:
            chosen["distill_temperature"] = options.temperature
    return _train(stage, chosen)


def _finetune(stage: StageRun, options: FinetuneOptions) -> dict[str, Any]:
    return _train(stage, {"max_steps": options.steps, "lr_schedule": "constant", **_rates(options)})


def _rates(options: DistillOptions | FinetuneOptions) -> dict[str, Any]:
    return {
        "batch_size": options.batch_size,
        "learning_rate": options.learning_rate,
        "mhla_learning_rate": options.mhla_learning_rate,
        "warmup_steps": min(_WARMUP_STEPS, options.steps),
    }


def _train(stage: StageRun, options: dict[str, Any]) -> dict[str, Any]:
    """Run a stage with the trainers of `mhla_hf.training`."""
    from ..training.libraries import DiffusionTrainer, TransformersTrainer

    source = stage.source
    config = TrainingConfig(
        output=str(stage.directory),
        resume="latest",
        adam_beta2=_SECOND_BETA,
        weight_decay=0.0,
        condition_dropout=source.condition_dropout if isinstance(source, Latents) else 0.1,
        checkpointing_steps=stage.run.save_every,
        checkpoints_total_limit=2,
        device="cpu" if stage.run.device.type == "cpu" else "auto",
        seed=stage.run.seed,
        progress=stage.run.progress,
        **options,
    )
    teacher = stage.teacher if config.distill_steps else None
    trainer: DiffusionTrainer | TransformersTrainer
    if isinstance(source, Latents):
        trainer = DiffusionTrainer(
            config, stage.model, source.samples, teacher=teacher, null_condition=source.null_condition
        )
        # That of the pipeline's scheduler; the trainer knows the model alone.
        trainer.objective = source.objective
    else:
        trainer = TransformersTrainer(config, source, stage.model, teacher=teacher)
    (losses,) = trainer.run().losses.values()
    last = losses[-max(1, len(losses) // 10) :]
    return {"steps": len(losses), "first": losses[0], "last": losses[-1], "last_tenth": sum(last) / len(last)}


_STAGES: dict[str, Callable[[StageRun, Any], dict[str, Any]]] = {
    "calibrate": _calibrate,
    "match": _match,
    "distill": _distill,
    "finetune": _finetune,
}
