# SPDX-License-Identifier: Apache-2.0
"""The stages of a recovery, and the measure of quality between them.

Each stage in [`STAGES`][mhla_hf.recovery.recipes.STAGES] has a function of its name. It goes on from its last
checkpoint if there is one, changes the model in place, and returns its details for the report, as plain JSON values.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from tqdm.auto import tqdm

from ..matching.blockwise import match_blocks
from ..matching.layer_training import summarize
from ..matching.layerwise import match_layers
from ..training.config import TrainingConfig
from ..training.data.batches import BatchSource, Latents, RecordedCalls
from ..training.data.texts import PackedText
from ..training.evaluation import evaluate_batches
from ..training.layers import (
    Batch,
    Changes,
    base_model,
    evaluating,
    mhla_layers,
    on_device,
    original_heads,
    run,
    swapped_parameters,
)
from ..training.libraries import DiffusionTrainer, TransformersTrainer
from ..training.processes import Processes, check_distribution
from ..training.teacher import SharedTeacher
from ..utils.files import read_json, write_json
from .calibration import calibrate_model
from .lookup import recall, recall_texts
from .own_weights import WARMUP_STEPS
from .recipes import (
    FORMER,
    LEAST_RECORDS,
    STAGES,
    BlockwiseOptions,
    CalibrateOptions,
    DistillOptions,
    FinetuneOptions,
    MatchOptions,
    PartOptions,
    Recipe,
)
from .selection import importance, steps_by_importance


# What a layer gets at least of the steps of a stage, relative to the average; a block that would get less is left out.
_LEAST_SHARE = 0.25
# Batches that tell how much each layer matters.
_TRIAL_BATCHES, _TRIAL_BATCH_SIZE = 4, 4
# As in matching: the runs are short.
_SECOND_BETA = 0.99
# How often steps of matching go through their batches at most, on average over the layers.
_MOST_PASSES = 8
_BATCH_SIZE = 16
_BAR = "{desc}: {percentage:3.0f}% of the run |{bar}| [{elapsed}<{remaining}{postfix}]"
# Tokens of a batch beyond which the logits of a large vocabulary fill the memory.
_MOST_TOKENS = 4096


Part = TypeVar("Part", bound=PartOptions)


class RunProgress:
    """One bar over all stages of a run, with the stage, the layer, the loss and the time left.

    A step of a layer counts as the samples of its batch, a step of the whole model as that times its layers. What an
    earlier run has done moves the bar, but does not make it look faster.

    Args:
        recipe: The recipe.
        layers: Number of layers with MHLA.
        shown: Whether there is a bar.
    """

    def __init__(self, recipe: Recipe, layers: int, shown: bool) -> None:
        options = {name: recipe.to_dict()[name] for name in recipe.stages}
        self.sizes = {name: 1 if name == "calibrate" else each["batch_size"] for name, each in options.items()}
        steps = {name: each.get("steps", each.get("fit_steps")) for name, each in options.items()}
        self.costs = {name: size * layers * steps[name] for name, size in self.sizes.items()}
        self.layers = layers
        self.bar = tqdm(total=sum(self.costs.values()), smoothing=0, disable=not shown, bar_format=_BAR)

    def follow(self, stage: str, steps: Mapping[str, int] | None = None) -> Callable[..., None]:
        """Begin a stage.

        Args:
            stage: Its name.
            steps: Steps of each layer, in the order in which they are trained; `None` if the whole model is.

        Returns:
            What to call after every step with the layer or its block, its steps so far, and the loss.
        """
        names, layers, seen = [*self.costs], dict(steps or {}), dict[str, int]()
        self.bar.set_description_str(f"{stage} ({names.index(stage) + 1} of {len(names)})")
        # To the end of the stages before it, whoever ran them.
        start = sum(self.costs[name] for name in names[: names.index(stage)])
        size = self.sizes[stage] * (1 if layers or stage == "calibrate" else self.layers)
        self._move(start)

        def advance(part: str, step: int, loss: float | None = None) -> None:
            layer = next((name for name in layers if f"{name}.".startswith(f"{part}.")), part)
            # Layers before it were finished by an earlier run, if they were not seen in this one.
            for name in takewhile(layer.__ne__, layers):
                seen.setdefault(name, layers[name])
            seen[layer] = step
            shown = {"layer": part if layers else None, "step": step, "loss": loss and f"{loss:.4f}"}
            self.bar.set_postfix({name: value for name, value in shown.items() if value}, refresh=False)
            self._move(start + size * sum(seen.values()), size)

        return advance

    def _move(self, position: float, taken: float = 0) -> None:
        ahead = position - self.bar.n
        if not self.bar.disable:
            self.bar.initial += ahead - min(ahead, taken)
        self.bar.update(ahead)


@dataclass(frozen=True)
class StageSettings:
    """What stages need besides the model, the teacher, the data and the recipe.

    Attributes:
        folder: Folder of the stage, for checkpoints and activations.
        save_every: Steps between checkpoints.
        seed: Seed of everything random.
        device: Device of the model.
        progress: Show progress.
        accelerator: The processes that share the run; `None` for one alone.
        run: The progress of the run that the stage is part of.
    """

    folder: Path
    save_every: int
    seed: int
    device: torch.device
    progress: bool
    accelerator: Accelerator | None = None
    run: RunProgress = None  # type: ignore[assignment]

    @property
    def processes(self) -> Processes:
        """The processes that share the run."""
        return Processes(alone=self.accelerator is None)

    @property
    def is_sharded(self) -> bool:
        """Whether they shard a model that trains as a whole."""
        return bool(getattr(self.accelerator, "is_fsdp2", False))

    def check(self, recipe: Recipe) -> None:
        """Check that the processes can share the stages of a recipe.

        Raises:
            ValueError: If they cannot divide its batches, or shard a model that cannot be.
        """
        if self.accelerator is not None:
            check_distribution(self.accelerator, TrainingConfig())
        for name, options in recipe.stages.items():
            size = self.processes.size
            if STAGES[name].part == "model" and options.batch_size % size:
                raise ValueError(
                    f"{name}.batch_size must be a multiple of the {size} processes, got {options.batch_size}"
                )


def calibrate(
    model: nn.Module, teacher: SharedTeacher, data: BatchSource, options: CalibrateOptions, settings: StageSettings
) -> dict[str, Any]:
    """Fit each layer in closed form, and what MHLA adds by a short training."""
    batches = data.batches("calibrate", options.batches, options.batch_size)
    advance = settings.run.follow("calibrate")
    report = calibrate_model(
        model,
        batches,
        fit_steps=options.fit_steps,
        progress=lambda done, total: advance("", done * settings.run.costs["calibrate"] // total),
        processes=settings.processes,
    )
    return report.to_dict()


def match(
    model: nn.Module, teacher: SharedTeacher, data: BatchSource, options: MatchOptions, settings: StageSettings
) -> dict[str, Any]:
    """Train each layer towards the output of the one that it replaced."""
    options = fitted_to(data, options)
    # A share of very few steps rounds to none.
    divided = _steps(model, teacher, data, options.steps, _LEAST_SHARE, settings)
    steps = {name: max(1, count) for name, count in divided.items()}
    make, shared = _recorded("match", data, options, settings, steps)
    # Calibration has changed projections; the teacher is the original.
    report = match_layers(model, make, teacher=teacher, cache=options.cache, save_every=settings.save_every, **shared)
    return report.to_dict()


def blockwise(
    model: nn.Module, teacher: SharedTeacher, data: BatchSource, options: BlockwiseOptions, settings: StageSettings
) -> dict[str, Any]:
    """Train the blocks one after the other on what those before give them, towards the original's hidden states."""
    options = fitted_to(data, options)
    divided = _steps(model, teacher, data, options.steps, 0.0, settings)
    steps = {name: count if count >= _LEAST_SHARE * options.steps else 0 for name, count in divided.items()}
    make, shared = _recorded("blockwise", data, options, settings, steps)
    return {"blocks": match_blocks(model, make, teacher=teacher, **shared)}


def fitted_to(data: BatchSource, options: Part) -> Part:
    """Options of matching that fit the samples: each is recorded once, and seen a limited number of times.

    What is held out is then of other samples than what is trained on. Samples of diffusion models are other ones with
    each noise.
    """
    if isinstance(data, Latents):
        return options
    size = 1 if isinstance(data, RecordedCalls) else max(1, min(options.batch_size, len(data) // LEAST_RECORDS))
    batches = min(options.batches, len(data) // size)
    return replace(options, batch_size=size, batches=batches, steps=min(options.steps, _MOST_PASSES * batches))


def _recorded(
    stage: str,
    data: BatchSource,
    options: PartOptions,
    settings: StageSettings,
    steps: Mapping[str, int],
) -> tuple[Callable[[int], Batch], dict[str, Any]]:
    """What makes the batches of a stage that trains part after part, and its arguments."""
    arguments = {name: getattr(options, name) for name in ("optimizer", "learning_rate", "mhla_learning_rate")}
    arguments |= {
        "held_out": options.held_out,
        "num_batches": options.batches,
        "steps": [*steps.values()],
        "seed": settings.seed,
    }
    arguments |= {"output": settings.folder, "progress": settings.run.follow(stage, steps)}
    # Order and noise of its batches follow from the name of a stage: they stay what they were.
    seeded = FORMER if stage == "blockwise" else stage
    return lambda index: data.batch(seeded, index, options.batch_size), arguments


def _steps(
    model: nn.Module, teacher: SharedTeacher, data: BatchSource, steps: int, least: float, settings: StageSettings
) -> dict[str, int]:
    """Divide the steps of a stage among the layers, by their names; a run that is resumed keeps what was tried."""
    file, processes, count = settings.folder / "steps.json", settings.processes, len(mhla_layers(model))

    def keep(errors: list[float], divided: list[int] | None = None) -> None:
        settings.run.bar.set_description_str(f"tried {len(errors)} of {count + 1}")
        if processes.rank == 0:
            settings.folder.mkdir(parents=True, exist_ok=True)
            write_json(file, {"errors": errors, "steps": divided})

    stored = processes.decide(lambda: read_json(file, "the steps of each layer") if file.is_file() else {})
    if (divided := stored.get("steps")) is None:
        # The rows of language models have many tokens, and take long.
        trial = data.batches("layers", 1 if isinstance(data, PackedText) else _TRIAL_BATCHES, _TRIAL_BATCH_SIZE)
        values = importance(model, teacher, trial, processes, known=stored.get("errors", ()), progress=keep)
        divided = steps_by_importance(steps, values, least)
        with processes.together():
            keep([], divided)
    return {layer.name: count for layer, count in zip(mhla_layers(model), divided, strict=True)}


def distill(
    model: nn.Module, teacher: SharedTeacher, data: BatchSource, options: DistillOptions, settings: StageSettings
) -> dict[str, Any]:
    """Train the whole model towards the original's prediction."""
    chosen = {
        "distill_steps": options.steps,
        "distill_ratio": options.ratio,
        "max_steps": 0,
        "lr_schedule": "cosine",
    }
    if not isinstance(data, Latents) and options.temperature is not None:
        chosen["distill_temperature"] = options.temperature
    return _train(model, teacher, data, options, settings, chosen)


def finetune(
    model: nn.Module, teacher: SharedTeacher, data: BatchSource, options: FinetuneOptions, settings: StageSettings
) -> dict[str, Any]:
    """Train the whole model on the data by its own objective."""
    return _train(model, None, data, options, settings, {"max_steps": options.steps, "lr_schedule": "constant"})


def _train(
    model: nn.Module,
    teacher: SharedTeacher | None,
    data: BatchSource,
    options: DistillOptions | FinetuneOptions,
    settings: StageSettings,
    chosen: dict[str, Any],
) -> dict[str, Any]:
    """Run a stage with the trainers of `mhla_hf.training`."""
    config = TrainingConfig(
        output=str(settings.folder),
        resume="latest",
        # Together the processes see the samples that one alone does.
        batch_size=options.batch_size // settings.processes.size,
        learning_rate=options.learning_rate,
        mhla_learning_rate=options.mhla_learning_rate,
        warmup_steps=min(WARMUP_STEPS, options.steps),
        adam_beta2=_SECOND_BETA,
        weight_decay=0.0,
        condition_dropout=data.condition_dropout if isinstance(data, Latents) else 0.1,
        checkpointing_steps=settings.save_every,
        checkpoints_total_limit=2,
        device="cpu" if settings.device.type == "cpu" else "auto",
        seed=settings.seed,
        progress=False,
        **chosen,
    )
    callback = settings.run.follow("finetune" if teacher is None else "distill")
    shared: dict[str, Any] = {"callback": callback, "accelerator": settings.accelerator}
    # Sharding takes a model apart: a copy trains, and the model waits in the memory of the CPU.
    trained = copy.deepcopy(model.to("cpu")) if settings.is_sharded else model
    if settings.is_sharded and teacher is not None:
        teacher = SharedTeacher(trained, dict(teacher.to("cpu").named_parameters()))
    trainer: DiffusionTrainer | TransformersTrainer
    if isinstance(data, Latents):
        trainer = DiffusionTrainer(
            config, trained, data.samples, teacher=teacher, null_condition=data.null_condition, **shared
        )
        # The objective follows the pipeline's scheduler; the trainer knows the model alone.
        trainer.objective = data.objective
    else:
        trainer = TransformersTrainer(config, data, trained, teacher=teacher, **shared)
    result = trainer.run()
    if settings.is_sharded:
        model.load_state_dict(result.model.state_dict())
        model.to(settings.device)
    (losses,) = result.losses.values()
    # The first process alone knows those of the run before.
    return settings.processes.decide(lambda: {"steps": len(losses), "last": losses[-1], **summarize(losses)})


class Quality:
    """The measure of one model: made while it still has all weights of its original.

    - Diffusion models: the loss of their objective, and by how many percent it is above the original's.
    - Language models: bits per byte of text, and by how many percent they are above the original's; and recall, the
      bits per token of a passage that is repeated, where model and text are long enough.
    - Encoders: cosine similarity of the mean-pooled last hidden states to the original's.
    - Diffusion models without data: cosine similarity of their predictions to the original's.
    - Vision models: the same of their logits, or last hidden states; of classifiers also how often both agree.

    Args:
        model: The converted model, with its original weights.
        source: The held-out data.
        processes: Processes that share its batches.

    Attributes:
        original: The original's figures.
    """

    def __init__(self, model: nn.Module, source: BatchSource, processes: Processes) -> None:
        self.source, self.processes = source, processes
        self.is_absolute = isinstance(source, (Latents, PackedText))
        self.classifies = type(model).__name__.endswith("ForImageClassification")
        if isinstance(source, Latents):
            self.latents = source.held_out_latents(_BATCH_SIZE, source.draws)
        else:
            length = len(source.table[0]) if isinstance(source, PackedText) else 1
            self.batches = source.held_out(max(1, min(_BATCH_SIZE, _MOST_TOKENS // length)))
        self.texts = recall_texts(model, self.batches) if isinstance(source, PackedText) else []
        with original_heads(mhla_layers(model)):
            self.original = self._absolute(model) if self.is_absolute else {}
            self.reference = [] if self.is_absolute else self._outputs(model)

    def measure(self, model: nn.Module) -> dict[str, float]:
        """Measure the model."""
        if self.is_absolute:
            figures = self._absolute(model)
            name = next(iter(figures))
            return {**figures, "above_softmax_percent": 100 * (figures[name] / self.original[name] - 1)}
        pairs = list(zip(self._outputs(model), self.reference, strict=True))
        cosines = torch.cat([F.cosine_similarity(mine, theirs, dim=-1) for mine, theirs in pairs])
        figures = {"cosine": cosines.mean().item()}
        if self.classifies:
            agreed = torch.cat([(mine.argmax(-1) == theirs.argmax(-1)).float() for mine, theirs in pairs])
            figures["agreement"] = agreed.mean().item()
        return figures

    def beside(self, model: nn.Module, key: str, part: str) -> dict[str, dict[str, float]]:
        """Measure what a model is without what MHLA adds; nothing for diffusion models without a window.

        Args:
            model: The model, whose weights are as before at the end.
            key: The key in what is returned, one of [`BESIDE`][mhla_hf.recovery.report.BESIDE].
            part: `"window"` leaves the window alone, `"mixing"` mixes all blocks with the same weight, which is linear
                attention.
        """
        modules = [layer.mhla for layer in mhla_layers(model)]
        is_diffusion, changes = isinstance(self.source, (Latents, RecordedCalls)), Changes()
        for mhla in () if is_diffusion and modules[0].window_bias is None else modules:
            if part == "mixing" and mhla.mixing.shape[-1] > 1:
                changes[mhla.mixing] = torch.full_like(mhla.mixing, mhla.mixing.mean().item())
                if mhla.mixing_decay is not None:
                    changes[mhla.mixing_decay] = torch.full_like(mhla.mixing_decay, math.inf)
            if part == "window" and mhla.window_bias is not None:
                changes[mhla.window_bias] = torch.full_like(mhla.window_bias, -math.inf)
        if not changes:
            return {}
        with swapped_parameters(changes):
            return {key: self.measure(model)}

    def _absolute(self, model: Any) -> dict[str, float]:
        if isinstance(self.source, Latents):
            objective = self.source.objective
            parts = self.processes.map(lambda batch: evaluate_batches(model, [batch], objective).losses, self.latents)
            losses = [loss for part in parts for loss in part]
            return {"loss": math.fsum(losses) / len(losses)}
        assert isinstance(self.source, PackedText)
        nats = sum(self.processes.map(partial(_negative_log_likelihood, model), self.batches))
        figures = {"bits_per_byte": nats / math.log(2) / self.source.held_out_bytes}
        seconds = [second for _, second in self.processes.map(lambda text: recall(model, [text]), self.texts)]
        return {**figures, "recall_bits": sum(seconds) / len(seconds)} if seconds else figures

    def _outputs(self, model: nn.Module) -> list[torch.Tensor]:
        with evaluating(model):
            return self.processes.map(partial(self._output, model), self.batches)

    @torch.no_grad()
    def _output(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        batch = on_device(batch, model)
        # The trunk: heads that are not of the checkpoint would be noise.
        output = run(model if self.classifies else base_model(model), batch)[0].float()
        if isinstance(self.source, RecordedCalls):
            output = output.flatten(1)
        elif not self.classifies:
            mask = batch.get("attention_mask", torch.ones(output.shape[:2], device=output.device))
            mask = mask.unsqueeze(-1).to(output)
            output = (output * mask).sum(1) / mask.sum(1)
        return output.cpu()


@torch.no_grad()
def _negative_log_likelihood(model: nn.Module, batch: Batch) -> float:
    """Sum over all tokens but the first of each row, in nats."""
    batch = on_device(batch, model)
    with evaluating(model):
        logits = run(model, batch)[0][:, :-1].float()
    return F.cross_entropy(logits.flatten(0, 1), batch["input_ids"][:, 1:].flatten(), reduction="sum").item()
