# SPDX-License-Identifier: Apache-2.0
"""DiT: pictures of a class by noise prediction."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..stages import noise_prediction
from .base import Objective, Tensors


if TYPE_CHECKING:
    from ..config import TrainingConfig
    from ..data.batches import Batch
    from ..loading import PipelineSource

# DiT's own, for models that come without a pipeline.
DEFAULT_SCHEDULER = {
    "beta_start": 1e-4,
    "beta_end": 0.02,
    "beta_schedule": "linear",
    "num_train_timesteps": 1000,
    "prediction_type": "epsilon",
}
# What of a scheduler's configuration the noise depends on.
_NOISE_ENTRIES = (*DEFAULT_SCHEDULER, "trained_betas", "rescale_betas_zero_snr", "use_flow_sigmas", "_class_name")


@dataclass(frozen=True, kw_only=True)
class DiTObjective(Objective):
    """Noise prediction on uniform timesteps; where the model predicts variances, with their variational bound.

    Samples have `latents` `[C, H, W]` and `class_label` `[]`, int64. The label of a sample without class is the
    number of classes.

    Attributes:
        scheduler: Configuration of the pipeline's scheduler, whose steps are trained.

    Raises:
        ValueError: If the scheduler is for another objective; see `noise_prediction.NoiseSchedule`.
    """

    upstream = "DiTTransformer2DModel"
    condition_names = ("class_label",)
    # The model's end calls the first block's embeddings once more, when the block is sharded again.
    sharded_classes = ("BasicTransformerBlock", "CombinedTimestepLabelEmbeddings")

    scheduler: Mapping[str, Any] = field(default_factory=lambda: dict(DEFAULT_SCHEDULER))

    def __post_init__(self) -> None:
        # Not at the first batch, when there is work to lose.
        _ = self.schedule

    @classmethod
    def from_run(cls, config: TrainingConfig, source: PipelineSource | None) -> DiTObjective:
        """See the base class; the noise is that of the pipeline's scheduler."""
        stored = {} if source is None else source.scheduler
        if not stored:
            return cls()
        return cls(scheduler={name: stored[name] for name in _NOISE_ENTRIES if stored.get(name) is not None})

    @classmethod
    def check_config(cls, config: Mapping[str, Any]) -> None:
        """See the base class."""
        channels, outputs = config.get("in_channels", 4), config.get("out_channels")
        if outputs not in (None, channels, 2 * channels):
            raise ValueError(
                f"model: out_channels must be in_channels, {channels}, or twice that with learned variances, "
                f"got {outputs}"
            )

    @classmethod
    def check_data(cls, model: nn.Module, sample: Tensors, null_condition: Tensors | None = None) -> None:
        """See the base class; diffusers' own class takes square pictures only."""
        super().check_data(model, sample, null_condition)
        config: Any = model.config
        height, width = sample["latents"].shape[1:]
        if height != width and config.get("mhla") is None:
            raise ValueError(
                f"latents must be square for {type(model).__name__}, got {height} x {width}; the MHLA class takes both"
            )
        classes = config["num_embeds_ada_norm"]
        if null_condition is not None and int(null_condition["class_label"]) != classes:
            raise ValueError(
                f"null_condition has class_label {int(null_condition['class_label'])}; of a model with {classes} "
                f"classes it must be {classes}"
            )

    @classmethod
    def check_condition(cls, config: Mapping[str, Any], condition: Tensors) -> None:
        """See the base class."""
        label, classes = condition["class_label"], config["num_embeds_ada_norm"]
        if label.ndim or label.is_floating_point() or not 0 <= int(label) <= classes:
            raise ValueError(f"class_label must be a whole number from 0 to {classes} for this model, got {label}")

    @cached_property
    def schedule(self) -> noise_prediction.NoiseSchedule:
        """The scheduler's betas and what follows from them, on the CPU."""
        return noise_prediction.NoiseSchedule.from_config(self.scheduler)

    def noise_levels(self, uniform: torch.Tensor) -> torch.Tensor:
        """Timesteps, int64."""
        return noise_prediction.timesteps_from_uniform(uniform, self.schedule)

    def add_noise(self, latents: torch.Tensor, noise: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
        """x_t = sqrt(abar_t) x_0 + sqrt(1 - abar_t) eps."""
        return noise_prediction.add_noise(latents, noise, levels, self.schedule)

    def model_inputs(
        self, config: Mapping[str, Any], noisy: torch.Tensor, levels: torch.Tensor, condition: Tensors
    ) -> dict[str, Any]:
        """See the base class; it predicts noise `[B, C, H, W]`, some models variances after it."""
        return {
            "hidden_states": noisy,
            "timestep": levels,
            "class_labels": condition["class_label"],
            "return_dict": False,
        }

    def losses_of(self, prediction: torch.Tensor, noisy: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Mean squared error of the noise, plus the weighted variational bound of predicted variances."""
        return noise_prediction.noise_prediction_losses(
            prediction, batch.noise, noisy, batch.latents, batch.levels, self.schedule
        )

    def distillation_losses(
        self, prediction: torch.Tensor, target: torch.Tensor, noisy: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        """Mean squared error to the teacher's noise, plus the weighted divergence from its learned variances."""
        return noise_prediction.noise_distillation_losses(prediction, target, noisy, batch.levels, self.schedule)

    def fine_tuning(self, model: nn.Module) -> AbstractContextManager[None]:
        """Classes are dropped from the sample's own seed, and not once more in every block."""
        return noise_prediction.own_class_dropping_off(model)
