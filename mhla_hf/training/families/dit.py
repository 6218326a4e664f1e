# SPDX-License-Identifier: Apache-2.0
"""DiT: images of a class by noise prediction."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from .base import Family, Objective, Tensors, encode_with


if TYPE_CHECKING:
    import torch
    from torch import nn

    from ..config import CacheConfig, TrainingConfig
    from ..data.batches import Batch
    from ..data.cache import LatentDataset
    from ..loading import PipelineSource
    from ..stages.noise_prediction import NoiseSchedule

# Scheduler of DiT's pipeline, for models that come without one.
DEFAULT_SCHEDULER = {
    "beta_start": 1e-4,
    "beta_end": 0.02,
    "beta_schedule": "linear",
    "num_train_timesteps": 1000,
    "prediction_type": "epsilon",
}
# Entries of a scheduler's configuration that the noise depends on.
_NOISE_ENTRIES = (*DEFAULT_SCHEDULER, "trained_betas", "rescale_betas_zero_snr", "use_flow_sigmas", "_class_name")
# The label without class that diffusers' DiTPipeline has built in.
_GUIDANCE_LABEL = 1000


def _functions() -> Any:
    from ..stages import noise_prediction

    return noise_prediction


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
    # The last layer of the model reuses the first block's embeddings, after that block was resharded.
    sharded_classes = ("BasicTransformerBlock", "CombinedTimestepLabelEmbeddings")

    scheduler: Mapping[str, Any] = field(default_factory=lambda: dict(DEFAULT_SCHEDULER))

    def __post_init__(self) -> None:
        # Fail before the first batch.
        _ = self.schedule

    @classmethod
    def from_run(cls, config: TrainingConfig, source: PipelineSource | None) -> DiTObjective:
        """Take the noise of the pipeline's scheduler."""
        stored = {} if source is None else source.scheduler
        if not stored:
            return cls()
        return cls(scheduler={name: stored[name] for name in _NOISE_ENTRIES if stored.get(name) is not None})

    @classmethod
    def check_data(cls, model: nn.Module, sample: Tensors, null_condition: Tensors | None = None) -> None:
        """Check that samples fit a model; diffusers' own class takes square images only."""
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
    def condition_problem(cls, config: Mapping[str, Any], condition: Tensors) -> str | None:
        label, classes = condition["class_label"], config["num_embeds_ada_norm"]
        if label.ndim or label.is_floating_point() or not 0 <= int(label) <= classes:
            return f"class_label must be a whole number from 0 to {classes} for this model, got {label}"
        return None

    @cached_property
    def schedule(self) -> NoiseSchedule:
        """The scheduler's betas and all that follows from them, on the CPU."""
        return _functions().NoiseSchedule.from_config(self.scheduler)

    def noise_levels(self, uniform: torch.Tensor) -> torch.Tensor:
        """Return timesteps, int64."""
        return _functions().timesteps_from_uniform(uniform, self.schedule)

    def add_noise(self, latents: torch.Tensor, noise: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
        """Return x_t = sqrt(abar_t) x_0 + sqrt(1 - abar_t) eps."""
        return _functions().add_noise(latents, noise, levels, self.schedule)

    def model_inputs(
        self, config: Mapping[str, Any], noisy: torch.Tensor, levels: torch.Tensor, condition: Tensors
    ) -> dict[str, Any]:
        """Return the arguments of `forward`, which predicts noise `[B, C, H, W]`, and variances in some models."""
        return {
            "hidden_states": noisy,
            "timestep": levels,
            "class_labels": condition["class_label"],
            "return_dict": False,
        }

    def losses_of(self, prediction: torch.Tensor, noisy: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the mean squared error of the noise, plus the weighted variational bound of predicted variances."""
        return _functions().noise_prediction_losses(
            prediction, batch.noise, noisy, batch.latents, batch.levels, self.schedule
        )

    def distillation_losses(
        self, prediction: torch.Tensor, target: torch.Tensor, noisy: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        """Return the mean squared error to the teacher's noise, plus the divergence from its learned variances."""
        return _functions().noise_distillation_losses(prediction, target, noisy, batch.levels, self.schedule)

    def fine_tuning(self, model: nn.Module) -> AbstractContextManager[None]:
        """Drop classes by the seed of the sample alone, not also in every block."""
        return _functions().no_label_dropout(model)


class DiT(Family):
    """Images `[3, H, W]` to `[C, H', W']`; classes to `class_label` `[]`, int64."""

    objective = DiTObjective
    help = (
        "Fine-tune a DiT pipeline by noise prediction.\n\nWith --match-steps, its layers are first matched to the "
        "softmax model."
    )
    folders = ("vae",)
    prompt_encoders = ()

    def encode_media(self, pipeline: Any, media: torch.Tensor) -> torch.Tensor:
        """Return the mode of the VAE's distribution, scaled as the pipeline scales it."""
        vae = pipeline.vae
        return encode_with(vae, media[None]).latent_dist.mode()[0].float() * vae.config.scaling_factor

    def encode_condition(self, pipeline: Any, condition: str | int, config: CacheConfig) -> dict[str, torch.Tensor]:
        import torch

        return {"class_label": torch.tensor(int(condition))}

    def encode_null_condition(self, pipeline: Any, config: CacheConfig, num_classes: int) -> dict[str, torch.Tensor]:
        """Return the label after the last class."""
        return self.encode_condition(pipeline, num_classes, config)

    def validation_inputs(
        self, pipeline: Any, source: PipelineSource, config: TrainingConfig, dataset: LatentDataset
    ) -> list[dict[str, Any]]:
        from ..data.images import find_label, pipeline_labels

        sizes = source.sizes
        height, width = dataset.settings["height"], dataset.settings["width"]
        if (height, width) != (sizes.own_size, sizes.own_size):
            raise ValueError(
                f"validation_prompts: the pipeline makes images of {sizes.own_size}x{sizes.own_size} only, and the "
                f"cache has {height}x{width}"
            )
        if config.validation_guidance > 1 and sizes.num_classes != _GUIDANCE_LABEL:
            raise ValueError(
                f"validation_guidance must be at most 1: the pipeline's guidance is for models of {_GUIDANCE_LABEL} "
                f"classes, and this one has {sizes.num_classes}"
            )
        trained = dataset.manifest["classes"]
        # The classes of the data come first where an error lists them, and mean what they mean there.
        known = {**trained, **pipeline_labels(source), **trained}
        return [{"class_labels": [find_label(each, known, sizes.num_classes)]} for each in config.validation_prompts]
