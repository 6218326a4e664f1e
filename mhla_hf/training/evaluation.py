# SPDX-License-Identifier: Apache-2.0
"""Held-out loss, with noise and noise levels that all models share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .data.batches import LatentSamples, evaluation_batches
from .families import objective_for
from .matching.layers import evaluating
from .stages.objectives import LatentBatch, Objective


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
        differences = [mine - theirs for mine, theirs in zip(self.losses, other.losses, strict=True)]
        mean = math.fsum(differences) / len(differences)
        spread = math.fsum((value - mean) ** 2 for value in differences) / max(len(differences) - 1, 1)
        return mean, math.sqrt(spread / len(differences))


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
            batch = batch.to(model.device)
            losses += objective.losses(model, batch, model.dtype).tolist()
            levels += batch.levels.tolist()
    return EvaluationResult(tuple(losses), tuple(levels))


def evaluate(
    model: torch.nn.Module,
    dataset: LatentSamples,
    *,
    seed: int = 0,
    batch_size: int = 8,
    draws_per_sample: int = 1,
    max_samples: int | None = None,
    objective: Objective | None = None,
) -> EvaluationResult:
    """Held-out loss of a model, comparable draw by draw between models; see `evaluation_batches`.

    Without `objective` it is `objective_for(model)`, with the default noise levels of the model's family; give that
    function the pipeline's directory too, and they are its scheduler's.

    Examples:
        >>> softmax = evaluate(softmax_model, held_out, draws_per_sample=2)  # doctest: +SKIP
        >>> mhla = evaluate(mhla_model, held_out, draws_per_sample=2)  # doctest: +SKIP
        >>> above, standard_error = mhla.difference(softmax)  # doctest: +SKIP
    """
    objective = objective or objective_for(model)
    batches = evaluation_batches(
        dataset,
        objective,
        seed=seed,
        batch_size=batch_size,
        draws_per_sample=draws_per_sample,
        max_samples=max_samples,
    )
    return evaluate_batches(model, batches, objective)
