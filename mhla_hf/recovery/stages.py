# SPDX-License-Identifier: Apache-2.0
"""Stages of a recovery: calls of calibration, matching and training with the options of the recipe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..training.config import TrainingConfig
from ..training.data.batch_sources import BatchSource, Latents
from ..training.matching.layers import AttentionLayer
from ..training.matching.teacher import SharedTeacher
from .calibration import calibrate_model
from .recipes import CalibrateOptions, DistillOptions, FinetuneOptions, MatchOptions, Recipe


_WARMUP_STEPS = 10
# As in matching: the runs are short.
_SECOND_BETA = 0.99


@dataclass(frozen=True, kw_only=True)
class StageRun:
    """Inputs of a stage.

    Attributes:
        recipe: The recipe.
        model: The model, with the weights that the stage before left.
        layers: Its MHLA layers, with their projections.
        teacher: The original, in the model itself.
        source: The data.
        directory: Folder of its checkpoints.
        device: Device of the model.
        seed: Of everything random.
        save_every: Steps between checkpoints.
        progress: Show progress.
    """

    recipe: Recipe
    model: nn.Module
    layers: Sequence[AttentionLayer]
    teacher: SharedTeacher
    source: BatchSource
    directory: Path
    device: torch.device
    seed: int
    save_every: int
    progress: bool


def changed_parameters(model: nn.Module, layers: Sequence[AttentionLayer], stage: str) -> set[str]:
    """Names of the parameters of a model that a stage may change; its layers come with their projections."""
    if stage in ("calibrate", "match"):
        return {name for layer in layers for name in layer.parameters()}
    return {name for name, _ in model.named_parameters()}


def run_stage(name: str, run: StageRun) -> dict[str, Any]:
    """Runs a stage, from its last checkpoint if there is one; changes the model in place.

    Returns:
        Its details for the report, as plain JSON values.
    """
    return _STAGES[name](run, getattr(run.recipe, name))


def _calibrate(run: StageRun, options: CalibrateOptions) -> dict[str, Any]:
    batches = run.source.batches("calibrate", options.batches, options.batch_size)
    return calibrate_model(run.model, batches).to_dict()


def _match(run: StageRun, options: MatchOptions) -> dict[str, Any]:
    from ..training.matching.matching import match_layers

    report = match_layers(
        run.model,
        lambda index: run.source.batch("match", index, options.batch_size),
        num_batches=options.batches,
        steps=options.steps,
        learning_rate=options.learning_rate,
        mhla_learning_rate=options.mhla_learning_rate,
        # Calibration has changed projections; the original is recorded.
        original_parameters=run.teacher.weights,
        cache=options.cache,
        output=run.directory,
        save_every=run.save_every,
        seed=run.seed,
        progress=_bar(run, len(run.layers) * options.steps, "match"),
    )
    return report.to_dict()


def _distill(run: StageRun, options: DistillOptions) -> dict[str, Any]:
    chosen = {
        "distill_steps": options.steps,
        "distill_ratio": options.ratio,
        "max_steps": 0,
        "lr_schedule": "cosine",
        **_rates(options),
    }
    if not isinstance(run.source, Latents):
        chosen["distill_target"] = options.target
        if options.temperature is not None:
            chosen["distill_temperature"] = options.temperature
    return _train(run, chosen)


def _finetune(run: StageRun, options: FinetuneOptions) -> dict[str, Any]:
    return _train(run, {"max_steps": options.steps, "lr_schedule": "constant", **_rates(options)})


def _rates(options: DistillOptions | FinetuneOptions) -> dict[str, Any]:
    return {
        "batch_size": options.batch_size,
        "learning_rate": options.learning_rate,
        "mhla_learning_rate": options.mhla_learning_rate,
        "warmup_steps": min(_WARMUP_STEPS, options.steps),
    }


def _train(run: StageRun, options: dict[str, Any]) -> dict[str, Any]:
    """A stage of the training engine."""
    from ..training.trainer import DiffusionTrainer, TransformersTrainer

    source = run.source
    config = TrainingConfig(
        output=str(run.directory),
        resume="latest",
        adam_beta2=_SECOND_BETA,
        weight_decay=0.0,
        condition_dropout=source.condition_dropout if isinstance(source, Latents) else 0.1,
        checkpointing_steps=run.save_every,
        checkpoints_total_limit=2,
        device="cpu" if run.device.type == "cpu" else "auto",
        seed=run.seed,
        progress=run.progress,
        **options,
    )
    teacher = run.teacher if config.distill_steps else None
    trainer: DiffusionTrainer | TransformersTrainer
    if isinstance(source, Latents):
        trainer = DiffusionTrainer(
            config, run.model, source.samples, teacher=teacher, null_condition=source.null_condition
        )
        # That of the pipeline's scheduler; the trainer knows the model alone.
        trainer.objective = source.objective
    else:
        trainer = TransformersTrainer(config, source, run.model, teacher=teacher)
    (losses,) = trainer.run().losses.values()
    return losses_record(losses)


def losses_record(losses: Sequence[float]) -> dict[str, Any]:
    """The first, the last, and the mean of the last tenth."""
    last = losses[-max(1, len(losses) // 10) :]
    return {"steps": len(losses), "first": losses[0], "last": losses[-1], "last_tenth": sum(last) / len(last)}


def _bar(run: StageRun, total: int, description: str) -> Callable[[str, int, float], None] | None:
    if not run.progress:
        return None
    from tqdm.auto import tqdm

    bar = tqdm(total=total, desc=description, unit="step")

    def advance(layer: str, step: int, loss: float) -> None:
        bar.set_postfix(layer=layer, loss=f"{loss:.4f}", refresh=False)
        bar.update()
        if bar.n >= total:
            bar.close()

    return advance


_STAGES: dict[str, Callable[[StageRun, Any], dict[str, Any]]] = {
    "calibrate": _calibrate,
    "match": _match,
    "distill": _distill,
    "finetune": _finetune,
}
