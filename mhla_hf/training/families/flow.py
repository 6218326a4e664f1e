# SPDX-License-Identifier: Apache-2.0
"""Flow matching, which Wan and SANA share: noise levels, noisy latents, and the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..stages import flow_matching
from .base import Objective


if TYPE_CHECKING:
    from ..config import TrainingConfig
    from ..data.batches import Batch
    from ..loading import PipelineSource

# Of pipelines at their smallest size, and of models that come without a pipeline.
DEFAULT_SHIFT = 3.0


@dataclass(frozen=True, kw_only=True)
class FlowObjective(Objective):
    """Flow matching on logit-normal noise levels; see `flow_matching.sigmas_from_uniform` for the fields."""

    logit_mean: float = 0.0
    logit_std: float = 1.0
    flow_shift: float = 1.0
    sigma_range: tuple[float, float] = (0.0, 1.0)

    @classmethod
    def from_run(cls, config: TrainingConfig, source: PipelineSource | None) -> FlowObjective:
        """See the base class; a shift that the options do not give is that of the pipeline's scheduler."""
        if source is not None:
            check_scheduler(source)
        shift = config.flow_shift
        if shift is None:
            shift = DEFAULT_SHIFT if source is None else default_flow_shift(source)
        given: dict[str, Any] = {"logit_mean": config.logit_mean, "logit_std": config.logit_std, "flow_shift": shift}
        return cls(**{name: value for name, value in given.items() if value is not None})

    def noise_levels(self, uniform: torch.Tensor) -> torch.Tensor:
        """Sigmas in [0, 1], fp32."""
        return flow_matching.sigmas_from_uniform(
            uniform,
            logit_mean=self.logit_mean,
            logit_std=self.logit_std,
            flow_shift=self.flow_shift,
            sigma_range=self.sigma_range,
        )

    def add_noise(self, latents: torch.Tensor, noise: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
        """x_t = (1 - sigma) x_0 + sigma eps."""
        return flow_matching.add_noise(latents, noise, levels)

    def losses_of(self, prediction: torch.Tensor, noisy: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Mean squared error to the direction from data to noise."""
        return flow_matching.flow_matching_losses(prediction, batch.latents, batch.noise)


def default_flow_shift(source: PipelineSource) -> float:
    """The shift that the pipeline's sampler uses; 1 if its scheduler names none."""
    config = source.scheduler
    return float(config.get("flow_shift") or config.get("shift") or 1.0)


def check_scheduler(source: PipelineSource) -> None:
    """Checks that the pipeline's sampler follows the flow that its transformer is trained on.

    Raises:
        ValueError: If the scheduler is for models that predict something else.
    """
    config = source.scheduler
    # Schedulers made for flows alone do not say so.
    prediction_type = config.get("prediction_type", "flow_prediction")
    if prediction_type != "flow_prediction":
        raise ValueError(
            f"model: the scheduler of {source.directory}, {config.get('_class_name')}, has "
            f"prediction_type={prediction_type!r}; for flow matching it must be 'flow_prediction'"
        )
