# SPDX-License-Identifier: Apache-2.0
"""Flow matching, which Wan and SANA share: noise levels, noisy latents, and the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .objective import Objective


if TYPE_CHECKING:
    import torch

    from ..config import TrainingConfig
    from ..data.batches import Batch
    from ..loading import PipelineSource

FLOW_OPTIONS = frozenset({"flow_shift", "logit_mean", "logit_std"})
# Shift of pipelines at their smallest size, and of models that come without a pipeline.
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
        """Takes a shift that the options do not give from the pipeline's scheduler."""
        shift: float | None = DEFAULT_SHIFT
        if source is not None:
            scheduler = source.scheduler
            # Schedulers made for flows alone do not say so.
            prediction_type = scheduler.get("prediction_type", "flow_prediction")
            if prediction_type != "flow_prediction":
                raise ValueError(
                    f"model: the scheduler of {source.directory}, {scheduler.get('_class_name')}, has "
                    f"prediction_type={prediction_type!r}; for flow matching it must be 'flow_prediction'"
                )
            shift = float(scheduler.get("flow_shift") or scheduler.get("shift") or 1.0)
        if config.flow_shift is not None:
            shift = config.flow_shift
        given: dict[str, Any] = {"logit_mean": config.logit_mean, "logit_std": config.logit_std, "flow_shift": shift}
        return cls(**{name: value for name, value in given.items() if value is not None})

    def noise_levels(self, uniform: torch.Tensor) -> torch.Tensor:
        """Returns sigmas in [0, 1], fp32."""
        from ..stages.flow_matching import sigmas_from_uniform

        return sigmas_from_uniform(
            uniform,
            logit_mean=self.logit_mean,
            logit_std=self.logit_std,
            flow_shift=self.flow_shift,
            sigma_range=self.sigma_range,
        )

    def add_noise(self, latents: torch.Tensor, noise: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
        """Returns x_t = (1 - sigma) x_0 + sigma eps."""
        from ..stages.flow_matching import add_noise

        return add_noise(latents, noise, levels)

    def losses_of(self, prediction: torch.Tensor, noisy: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Returns the mean squared error to the direction from data to noise."""
        from ..stages.flow_matching import flow_matching_losses

        return flow_matching_losses(prediction, batch.latents, batch.noise)

    @staticmethod
    def timesteps(sigmas: torch.Tensor) -> torch.Tensor:
        """Returns timesteps as the flow schedulers of diffusers count them."""
        from ..stages.flow_matching import timesteps_from_sigmas

        return timesteps_from_sigmas(sigmas)
