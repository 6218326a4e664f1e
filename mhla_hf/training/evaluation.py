# SPDX-License-Identifier: Apache-2.0
"""How a model does while and after it trains: held-out loss, validation videos and images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device
from PIL import Image

from ..families.objectives import LatentBatch, Objective
from ..models.directory import ModelDirectory
from ..models.registry import trained_family
from ..utils.files import atomic_file
from .config import TrainingConfig
from .data.batches import LatentSamples, evaluation_batches
from .data.images import find_label, image_grid, pipeline_labels
from .data.latent_cache import GUIDANCE_LABEL, LatentDataset, load_encoders, num_classes
from .data.videos import write_video
from .layers import evaluating
from .stages.diffusion import objective_for


@dataclass(frozen=True)
class EvaluationResult:
    """Losses of one model.

    Attributes:
        losses: Loss of every draw, in a fixed order; compare two models draw by draw.
        levels: Noise level of every draw: sigmas of flow matching, timesteps of noise prediction.
    """

    losses: tuple[float, ...]
    levels: tuple[float, ...]

    @property
    def loss(self) -> float:
        """Mean loss."""
        return math.fsum(self.losses) / len(self.losses)

    def difference(self, other: EvaluationResult) -> tuple[float, float]:
        """Mean loss above another model's on the same draws, and the standard error of that mean.

        Raises:
            ValueError: If the two were not evaluated on the same draws.
        """
        if self.levels != other.levels:
            raise ValueError("the two results are of different draws: evaluate both models with the same arguments")
        differences = np.subtract(self.losses, other.losses)
        deviation = differences.std(ddof=1 if len(differences) > 1 else 0)
        return float(differences.mean()), float(deviation) / math.sqrt(len(differences))


@torch.no_grad()
def evaluate_batches(model: Any, batches: Sequence[LatentBatch], objective: Objective) -> EvaluationResult:
    """The loss of a model on given batches, in evaluation mode; the model's mode is put back afterwards.

    Args:
        model: A transformer, on any device.
        batches: See `evaluation_batches`.
        objective: The objective that the batches were made with.
    """
    losses: list[float] = []
    levels: list[float] = []
    with evaluating(model):
        for batch in batches:
            batch = send_to_device(batch, model.device)
            losses += objective.losses(model, batch, model.dtype).tolist()
            levels += batch.levels.tolist()
    return EvaluationResult(tuple(losses), tuple(levels))


def evaluate(
    model: torch.nn.Module, dataset: LatentSamples, *, objective: Objective | None = None, **draws: Any
) -> EvaluationResult:
    """Held-out loss of a model, comparable draw by draw between models.

    Without `objective` it is `objective_for(model)`, with the default noise levels of the model's family; give that
    function the pipeline's directory too, and they are its scheduler's. Further arguments are those of
    `evaluation_batches`: `seed`, `batch_size`, `draws_per_sample` and `max_samples`.

    Examples:
        >>> softmax = evaluate(softmax_model, held_out, draws_per_sample=2)  # doctest: +SKIP
        >>> mhla = evaluate(mhla_model, held_out, draws_per_sample=2)  # doctest: +SKIP
        >>> above, standard_error = mhla.difference(softmax)  # doctest: +SKIP
    """
    objective = objective or objective_for(model)
    return evaluate_batches(model, evaluation_batches(dataset, objective, **draws), objective)


class Validator:
    """Generates validation samples with the transformer being trained.

    Prompts are encoded once, when it is built; afterwards only the VAE and the scheduler are kept in memory.

    Args:
        source: The pipeline that training started from.
        config: The options; its `validation_*` ones are used.
        dataset: The cache that is trained on: its sizes and classes are those of the samples.
        device: Device to encode the prompts and run the VAE on.
    """

    def __init__(
        self, source: ModelDirectory, config: TrainingConfig, dataset: LatentDataset, device: torch.device
    ) -> None:
        self.config = config
        self.device = device
        family = trained_family(source.class_name)
        self.is_video, objective = family.kind == "video", family.load_objective()
        self.pipeline = load_encoders(source)
        encoders = [name for name in objective.encoders if name != "vae"]
        for name in encoders:
            if name.startswith("text_encoder"):
                getattr(self.pipeline, name).to(device)
        size = vars(dataset.sizes[0])
        if not self.is_video:
            size = {"height": size["height"], "width": size["width"]}
        self.inputs: list[dict[str, Any]]
        with torch.no_grad():
            if classes := num_classes(source):
                self.inputs = _class_inputs(source, config, dataset, classes)
            else:
                self.inputs = objective.validation_inputs(self.pipeline, config, dataset.settings, **size)
        self.pipeline.register_modules(**dict.fromkeys(encoders))

    def write(self, transformer: torch.nn.Module, folder: Path, step: int) -> list[Path]:
        """Write the samples of a step: a file for each video, or one with a grid of all images.

        Args:
            transformer: The transformer, unwrapped.
            folder: Folder to write to.
            step: Fine-tuning step, for the file names.

        Returns:
            The files.
        """
        samples = self.generate(transformer)
        folder.mkdir(parents=True, exist_ok=True)
        name = f"step-{step:08d}"
        if self.is_video:
            files = [folder / f"{name}-prompt-{number}.mp4" for number in range(len(samples))]
            return [write_video(path, video) for path, video in zip(files, samples)]
        path = folder / f"{name}.png"
        with atomic_file(path) as temporary:
            Image.fromarray(image_grid(samples)).save(temporary)
        return [path]

    @torch.no_grad()
    def generate(self, transformer: torch.nn.Module) -> np.ndarray:
        """One sample per prompt, uint8: `[P, F, H, W, 3]` of videos, `[P, H, W, 3]` of images."""
        self.pipeline.register_modules(transformer=transformer)
        self.pipeline.vae.to(self.device)
        samples = []
        with evaluating(transformer):
            for inputs in self.inputs:
                sample = self.pipeline(
                    **send_to_device(inputs, self.device),
                    num_inference_steps=self.config.validation_inference_steps,
                    guidance_scale=self.config.validation_guidance,
                    generator=torch.Generator().manual_seed(self.config.seed),
                    output_type="np",
                )[0][0]
                samples.append(np.rint(np.asarray(sample) * 255).clip(0, 255).astype(np.uint8))
        self.pipeline.vae.to("cpu")
        return np.stack(samples)


def _class_inputs(
    source: ModelDirectory, config: TrainingConfig, dataset: LatentDataset, number: int
) -> list[dict[str, Any]]:
    """Return arguments of the pipeline's call for the class of each validation sample.

    Raises:
        ValueError: If the pipeline cannot make one of the samples.
    """
    if config.validation_guidance > 1 and number != GUIDANCE_LABEL:
        raise ValueError(
            f"validation_guidance must be at most 1: the pipeline's guidance is for models of {GUIDANCE_LABEL} "
            f"classes, and this one has {number}"
        )
    # The classes of the data come first where an error lists them, and mean what they mean there.
    classes = dataset.manifest["classes"]
    known = {**classes, **pipeline_labels((source.index or {}).get("id2label")), **classes}
    return [{"class_labels": [find_label(each, known, number)]} for each in config.validation_prompts]
