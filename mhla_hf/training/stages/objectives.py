# SPDX-License-Identifier: Apache-2.0
"""Objectives of diffusion models, and stages that train on predictions: distillation and fine-tuning.

Objectives know tensors and a model. In flow matching (all but DiT) a clean latent x_0 and noise eps are joined by a
straight line, x_t = (1 - sigma) x_0 + sigma eps, and the model predicts its direction eps - x_0 (Lipman et al., "Flow
Matching for Generative Modeling", 2023). Noise levels are logit-normal (Esser et al., "Scaling Rectified Flow
Transformers", 2024), then shifted as the sampler shifts them. See `noise_prediction` for DiT's functions.

Shapes: B batch, C channels, then F frames (videos only), H height and W width of latents.
"""

from __future__ import annotations

import dataclasses
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, TypeAlias, cast

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn

from ...utils.compat import unsplit_classes
from ..config import TrainingConfig
from ..matching.teacher import SharedTeacher, Teacher
from ..parameters import trainable_names
from ..processes import is_fully_sharded
from . import noise_prediction
from .noise_prediction import NoiseSchedule


Tensors: TypeAlias = "Mapping[str, torch.Tensor]"

# Scheduler of DiT's pipeline, for models that come without one.
_DIT_SCHEDULER = {
    "beta_start": 1e-4,
    "beta_end": 0.02,
    "beta_schedule": "linear",
    "num_train_timesteps": 1000,
    "prediction_type": "epsilon",
}
NUM_TRAIN_TIMESTEPS = 1000


def shift_sigmas(sigmas: torch.Tensor, flow_shift: float) -> torch.Tensor:
    """Shift noise levels towards 1: s sigma / (1 + (s - 1) sigma), as diffusers' flow schedulers do.

    Args:
        sigmas: Noise levels in [0, 1], any shape.
        flow_shift: s; 1 changes nothing, Wan uses 3 at 480p and 5 at 720p.

    Returns:
        Shifted noise levels, same shape and dtype.
    """
    return flow_shift * sigmas / (1 + (flow_shift - 1) * sigmas)


def unshift_sigmas(sigmas: torch.Tensor, flow_shift: float) -> torch.Tensor:
    """Invert `shift_sigmas`."""
    return shift_sigmas(sigmas, 1.0 / flow_shift)


def sigmas_from_uniform(
    uniform: torch.Tensor,
    *,
    logit_mean: float = 0.0,
    logit_std: float = 1.0,
    flow_shift: float = 1.0,
    sigma_range: tuple[float, float] = (0.0, 1.0),
) -> torch.Tensor:
    """Map uniform draws to shifted logit-normal noise levels by the inverse distribution function.

    Working from uniform draws makes stratified draws, and draws conditioned on a range, exact.

    Args:
        uniform: Draws in [0, 1), any shape; float64 is best.
        logit_mean: Mean of logit(sigma) before the shift.
        logit_std: Standard deviation of logit(sigma) before the shift, above 0.
        flow_shift: See `shift_sigmas`.
        sigma_range: The draws are conditioned on the shifted noise level lying here; Wan 2.2's two transformers are
            trained on [boundary, 1] and [0, boundary].

    Returns:
        Noise levels, fp32, same shape as `uniform`.

    Raises:
        ValueError: If `sigma_range` is not an increasing pair within [0, 1].
    """
    low, high = sigma_range
    if not 0 <= low < high <= 1:
        raise ValueError(f"sigma_range must be an increasing pair within [0, 1], got {sigma_range}")
    # Rounding can push a bound of 1 past 1, where the logit is not defined.
    bounds = unshift_sigmas(torch.tensor([low, high], dtype=torch.float64), flow_shift).clamp(0, 1)
    quantiles = torch.special.ndtr((torch.logit(bounds) - logit_mean) / logit_std).tolist()
    # A draw of exactly 0 would map to minus infinity.
    position = uniform.double().clamp(1e-12, 1 - 1e-12) * (quantiles[1] - quantiles[0]) + quantiles[0]
    sigmas = torch.sigmoid(logit_mean + logit_std * torch.special.ndtri(position))
    return shift_sigmas(sigmas, flow_shift).clamp(low, high).float()


def sample_sigmas(batch_size: int, *, generator: torch.Generator | None = None, **distribution: Any) -> torch.Tensor:
    """Draw noise levels.

    Args:
        batch_size: B.
        generator: Source of randomness; by default PyTorch's own.
        **distribution: `logit_mean`, `logit_std`, `flow_shift` and `sigma_range` of `sigmas_from_uniform`.

    Returns:
        Noise levels `[B]`, fp32, on the CPU.
    """
    return sigmas_from_uniform(torch.rand(batch_size, generator=generator, dtype=torch.float64), **distribution)


def add_noise(latents: torch.Tensor, noise: torch.Tensor, sigmas: torch.Tensor) -> torch.Tensor:
    """x_t = (1 - sigma) x_0 + sigma eps.

    Args:
        latents: Clean latents x_0 `[B, C, ...]`.
        noise: eps, same shape.
        sigmas: Noise levels `[B]`.

    Returns:
        x_t, same shape and dtype as `latents`.

    Raises:
        ValueError: If the shapes do not fit.
    """
    if noise.shape != latents.shape or sigmas.shape != latents.shape[:1]:
        raise ValueError(
            f"noise must have the shape of latents, {tuple(latents.shape)}, and sigmas its first axis; got "
            f"{tuple(noise.shape)} and {tuple(sigmas.shape)}"
        )
    sigmas = sigmas.to(latents).reshape(-1, *[1] * (latents.ndim - 1))
    return (1 - sigmas) * latents + sigmas * noise


def flow_matching_target(latents: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Target of the model: eps - x_0, the direction from data to noise."""
    return noise - latents


def timesteps_from_sigmas(sigmas: torch.Tensor) -> torch.Tensor:
    """Timesteps as the flow schedulers of diffusers count them: 1000 sigma, same shape, fp32."""
    return sigmas.float() * NUM_TRAIN_TIMESTEPS


def flow_matching_losses(prediction: torch.Tensor, latents: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Mean squared error of each sample `[B]`, in fp32."""
    error = prediction.float() - flow_matching_target(latents, noise).float()
    return error.square().flatten(1).mean(1)


def flow_matching_loss(prediction: torch.Tensor, latents: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Mean squared error between the prediction and eps - x_0, a scalar in fp32.

    Args:
        prediction: Model output `[B, C, ...]`.
        latents: Clean latents x_0, same shape.
        noise: eps, same shape.
    """
    return F.mse_loss(prediction.float(), flow_matching_target(latents, noise).float())


class LatentBatch(NamedTuple):
    """A micro-batch of clean latents with the noise to add to them.

    Attributes:
        latents: Clean latents `[B, C, ...]`, fp32.
        noise: Standard normal, same shape, fp32.
        levels: Noise levels `[B]`, as the objective draws them.
        condition: Captions or classes, each `[B, ...]`: fp32, or int64 for integers.
    """

    latents: torch.Tensor
    noise: torch.Tensor
    levels: torch.Tensor
    condition: dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Objective(ABC):
    """Training objective of the models of one family; the fields of a subclass are the distribution of its noise.

    Attributes:
        condition_names: Tensors of a sample besides `latents`, and those of the sample for guidance.
        sharded_classes: Modules that sharding gathers separately, besides those that the model names.
        packed: Side of the squares of latents that the model takes as one token each; 0 if it takes latents as such.
    """

    condition_names: ClassVar[tuple[str, ...]]
    sharded_classes: ClassVar[tuple[str, ...]] = ()
    packed: ClassVar[int] = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON values, to compare the objectives of two runs."""
        compared = [item.name for item in dataclasses.fields(self) if item.compare]
        return json.loads(json.dumps({name: getattr(self, name) for name in compared}))

    @classmethod
    def pack(cls, latents: torch.Tensor) -> torch.Tensor:
        """Return latents `[B, C, ...]` as the model takes them, and predicts."""
        return F.pixel_unshuffle(latents, cls.packed).flatten(2).mT if cls.packed else latents

    @classmethod
    def unpack(cls, latents: torch.Tensor, grid: tuple[int, ...]) -> torch.Tensor:
        """Invert `pack` for one sample, whose tokens have a grid."""
        return F.pixel_shuffle(latents.mT.unflatten(1, grid), cls.packed) if cls.packed else latents

    @abstractmethod
    def noise_levels(self, uniform: torch.Tensor) -> torch.Tensor:
        """Map uniform draws to noise levels.

        Args:
            uniform: Draws in [0, 1) `[B]`, float64.

        Returns:
            `[B]`, sigmas or timesteps.
        """

    @abstractmethod
    def add_noise(self, latents: torch.Tensor, noise: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
        """Add noise to latents.

        Args:
            latents: Clean latents `[B, C, ...]`.
            noise: Standard normal, same shape.
            levels: See `noise_levels`.
        """

    @abstractmethod
    def model_inputs(
        self, config: Mapping[str, Any], noisy: torch.Tensor, levels: torch.Tensor, condition: Tensors
    ) -> dict[str, Any]:
        """Return the keyword arguments of the model's `forward` for noisy latents.

        Args:
            config: The model's configuration.
            noisy: See `add_noise`, in the type that the model computes in.
            levels: See `noise_levels`.
            condition: The tensors of `condition_names`, each `[B, ...]`.
        """

    @abstractmethod
    def losses_of(self, prediction: torch.Tensor, noisy: torch.Tensor, batch: LatentBatch) -> torch.Tensor:
        """Compute the loss of each sample `[B]`, fp32.

        Args:
            prediction: See `predict`.
            noisy: Input of the model.
            batch: The batch that it was made from.
        """

    def distillation_losses(
        self, prediction: torch.Tensor, target: torch.Tensor, noisy: torch.Tensor, batch: LatentBatch
    ) -> torch.Tensor:
        """Compute the mean squared error of each sample's prediction to the teacher's, `[B]`, fp32.

        Args:
            prediction: See `predict`.
            target: The teacher's, same shape.
            noisy: Input of both.
            batch: The batch that it was made from.
        """
        return (prediction.float() - target.float()).square().flatten(1).mean(1)

    def predict(self, model: Any, noisy: torch.Tensor, levels: torch.Tensor, condition: Tensors) -> torch.Tensor:
        """Run the model on noisy latents; arguments as in `model_inputs`."""
        return model(**self.model_inputs(model.config, noisy, levels, condition))[0]

    def losses(self, model: nn.Module, batch: LatentBatch, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Compute the loss of each sample `[B]`, fp32.

        Args:
            model: The transformer.
            batch: On the model's device.
            dtype: Type to hand the inputs to the model in; None leaves them in fp32.
        """
        noisy = self.add_noise(batch.latents, batch.noise, batch.levels)
        return self.losses_of(model(**self.inputs_of(model, batch, dtype))[0], noisy, batch)

    def inputs_of(self, model: nn.Module, batch: LatentBatch, dtype: torch.dtype | None = None) -> dict[str, Any]:
        """Return the keyword arguments of the model's `forward` for a batch; arguments as in `losses`."""
        noisy = self.add_noise(batch.latents, batch.noise, batch.levels)
        condition = {
            name: tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
            for name, tensor in batch.condition.items()
        }
        return self.model_inputs(cast(Any, model.config), noisy.to(dtype or noisy.dtype), batch.levels, condition)

    @classmethod
    def check_data(cls, model: nn.Module, sample: Tensors, null_condition: Tensors | None = None) -> None:
        """Check what no error of the model would show: whole numbers as latents would round the noise.

        Args:
            model: The transformer.
            sample: One of the samples.
            null_condition: The condition of a sample without caption or class, if there is one.

        Raises:
            ValueError: If a tensor has values that do not fit.
        """
        if not sample["latents"].is_floating_point():
            raise ValueError(f"the latents of the samples must be floating-point, got {sample['latents'].dtype}")


@dataclass(frozen=True, kw_only=True)
class FlowObjective(Objective):
    """Flow matching on logit-normal noise levels; see `sigmas_from_uniform` for the fields."""

    condition_names: ClassVar[tuple[str, ...]] = ("prompt_embeds",)

    logit_mean: float = 0.0
    logit_std: float = 1.0
    flow_shift: float = 1.0
    sigma_range: tuple[float, float] = (0.0, 1.0)

    def noise_levels(self, uniform: torch.Tensor) -> torch.Tensor:
        """Return sigmas in [0, 1], fp32."""
        names = [item.name for item in dataclasses.fields(FlowObjective)]
        return sigmas_from_uniform(uniform, **{name: getattr(self, name) for name in names})

    def add_noise(self, latents: torch.Tensor, noise: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
        """Return x_t = (1 - sigma) x_0 + sigma eps."""
        return add_noise(latents, noise, levels)

    def model_inputs(
        self, config: Mapping[str, Any], noisy: torch.Tensor, levels: torch.Tensor, condition: Tensors
    ) -> dict[str, Any]:
        """Return the arguments of `forward`, which predicts the direction, packed as the model takes it."""
        return {
            "hidden_states": self.pack(noisy),
            "timestep": timesteps_from_sigmas(levels),
            "encoder_hidden_states": condition["prompt_embeds"],
            "return_dict": False,
        }

    def losses_of(self, prediction: torch.Tensor, noisy: torch.Tensor, batch: LatentBatch) -> torch.Tensor:
        """Return the mean squared error to the direction from data to noise."""
        return flow_matching_losses(prediction, self.pack(batch.latents), self.pack(batch.noise))


@dataclass(frozen=True, kw_only=True)
class WanObjective(FlowObjective):
    """Flow matching of videos; samples have `latents` `[C, F, H, W]` and `prompt_embeds` `[L, D]`."""


@dataclass(frozen=True, kw_only=True)
class WanVACEObjective(WanObjective):
    """Flow matching of videos that nothing but text controls; samples as those of Wan.

    Attributes:
        control: Makes the control of no video, `[1, C, F, H, W]`, for the shape of latents `[F, H, W]` and a device;
            None for a model without pipeline, which cannot be called.
    """

    control: Callable[[tuple[int, ...], torch.device], torch.Tensor] | None = field(default=None, compare=False)

    def model_inputs(
        self, config: Mapping[str, Any], noisy: torch.Tensor, levels: torch.Tensor, condition: Tensors
    ) -> dict[str, Any]:
        """Return the arguments of `forward`, which predicts the direction `[B, C, F, H, W]`."""
        if self.control is None:
            raise ValueError(
                "model: Wan-VACE needs the VAE of its pipeline to be trained; give the pipeline's directory"
            )
        control = self.control(tuple(noisy.shape[2:]), noisy.device).to(noisy)
        return {
            **super().model_inputs(config, noisy, levels, condition),
            "control_hidden_states": control.expand(len(noisy), *control.shape[1:]),
            "control_hidden_states_scale": noisy.new_ones(len(config["vace_layers"])),
        }


@dataclass(frozen=True, kw_only=True)
class SanaObjective(FlowObjective):
    """Flow matching of images.

    Samples have `latents` `[C, H, W]`, `prompt_embeds` `[L, D]` and `prompt_attention_mask` `[L]`.
    """

    condition_names = ("prompt_embeds", "prompt_attention_mask")

    def model_inputs(
        self, config: Mapping[str, Any], noisy: torch.Tensor, levels: torch.Tensor, condition: Tensors
    ) -> dict[str, Any]:
        """Return the arguments of `forward`, which predicts the direction `[B, C, H, W]`."""
        return {
            **super().model_inputs(config, noisy, levels, condition),
            "encoder_attention_mask": condition["prompt_attention_mask"],
            # As the pipeline hands it over.
            "timestep": timesteps_from_sigmas(levels) * config["timestep_scale"],
        }


@dataclass(frozen=True, kw_only=True)
class LTXObjective(FlowObjective):
    """Flow matching of videos.

    Samples have `latents` `[C, F, H, W]`, `prompt_embeds` `[L, D]` and `prompt_attention_mask` `[L]`.

    Attributes:
        temporal_factor: Frames per latent.
        spatial_factor: Pixels of height or width per latent.
        frame_rate: Frames per second of the videos; by default the pipeline's.
    """

    condition_names = ("prompt_embeds", "prompt_attention_mask")
    packed = 1

    temporal_factor: int = 8
    spatial_factor: int = 32
    # Follows from the data, whose fingerprint tells runs apart.
    frame_rate: float = field(default=25.0, compare=False)

    def model_inputs(
        self, config: Mapping[str, Any], noisy: torch.Tensor, levels: torch.Tensor, condition: Tensors
    ) -> dict[str, Any]:
        """Return the arguments of `forward`, which predicts the packed direction `[B, F H W, C]`."""
        return {
            **super().model_inputs(config, noisy, levels, condition),
            "encoder_attention_mask": condition["prompt_attention_mask"].bool(),
            **dict(zip(("num_frames", "height", "width"), noisy.shape[2:], strict=True)),
            "rope_interpolation_scale": (
                self.temporal_factor / self.frame_rate,
                self.spatial_factor,
                self.spatial_factor,
            ),
        }


@dataclass(frozen=True, kw_only=True)
class HunyuanVideoObjective(FlowObjective):
    """Flow matching of videos.

    Samples have `latents` `[C, F, H, W]`, `prompt_embeds` `[L, D]`, `prompt_attention_mask` `[L]` and
    `pooled_prompt_embeds` `[P]`. Models are told a guidance scale of 1, as those of Flux.
    """

    condition_names = ("prompt_embeds", "prompt_attention_mask", "pooled_prompt_embeds")

    def model_inputs(
        self, config: Mapping[str, Any], noisy: torch.Tensor, levels: torch.Tensor, condition: Tensors
    ) -> dict[str, Any]:
        """Return the arguments of `forward`, which predicts the direction `[B, C, F, H, W]`."""
        return {
            **super().model_inputs(config, noisy, levels, condition),
            "encoder_attention_mask": condition["prompt_attention_mask"].to(noisy.dtype),
            "pooled_projections": condition["pooled_prompt_embeds"],
            # As guidance scales are counted; models without them ignore it.
            "guidance": timesteps_from_sigmas(torch.ones_like(levels)),
        }


@dataclass(frozen=True, kw_only=True)
class FluxObjective(FlowObjective):
    """Flow matching of images.

    Samples have `latents` `[C, H, W]`, `prompt_embeds` `[L, D]` and `pooled_prompt_embeds` `[P]`. Models that are told
    a guidance scale are told 1: data have none.
    """

    condition_names = ("prompt_embeds", "pooled_prompt_embeds")
    packed = 2

    def model_inputs(
        self, config: Mapping[str, Any], noisy: torch.Tensor, levels: torch.Tensor, condition: Tensors
    ) -> dict[str, Any]:
        """Return the arguments of `forward`, which predicts the packed direction `[B, H W / 4, 4 C]`."""
        text = condition["prompt_embeds"]
        sides = (1, *(side // self.packed for side in noisy.shape[2:]))
        return {
            **super().model_inputs(config, noisy, levels, condition),
            "timestep": levels,
            "guidance": torch.ones_like(levels) if config["guidance_embeds"] else None,
            "pooled_projections": condition["pooled_prompt_embeds"],
            "txt_ids": text.new_zeros(text.shape[1], 3),
            "img_ids": torch.cartesian_prod(*(torch.arange(side).to(noisy) for side in sides)),
        }


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

    condition_names = ("class_label",)
    # The last layer of the model reuses the first block's embeddings, after that block was resharded.
    sharded_classes = ("BasicTransformerBlock", "CombinedTimestepLabelEmbeddings")

    scheduler: Mapping[str, Any] = field(default_factory=lambda: dict(_DIT_SCHEDULER))

    def __post_init__(self) -> None:
        # Fail before the first batch.
        _ = self.schedule

    @cached_property
    def schedule(self) -> NoiseSchedule:
        """The scheduler's betas and all that follows from them, on the CPU."""
        return NoiseSchedule.from_config(self.scheduler)

    @classmethod
    def check_data(cls, model: nn.Module, sample: Tensors, null_condition: Tensors | None = None) -> None:
        """Check that labels are those of the model; a wrong null label would train a class."""
        super().check_data(model, sample, null_condition)
        config: Any = model.config
        label, classes = int(sample["class_label"]), config["num_embeds_ada_norm"]
        null_label = classes if null_condition is None else int(null_condition["class_label"])
        if not 0 <= label <= classes or null_label != classes:
            raise ValueError(
                f"class_label must be from 0 to {classes} for this model, and {classes} in null_condition; got "
                f"{label} and {null_label}"
            )

    def noise_levels(self, uniform: torch.Tensor) -> torch.Tensor:
        """Return timesteps, int64."""
        return noise_prediction.timesteps_from_uniform(uniform, self.schedule)

    def add_noise(self, latents: torch.Tensor, noise: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
        """Return x_t = sqrt(abar_t) x_0 + sqrt(1 - abar_t) eps."""
        return noise_prediction.add_noise(latents, noise, levels, self.schedule)

    def model_inputs(
        self, config: Mapping[str, Any], noisy: torch.Tensor, levels: torch.Tensor, condition: Tensors
    ) -> dict[str, Any]:
        """Return the arguments of `forward`, which predicts noise `[B, C, H, W]`, and variances in some models."""
        labels = condition["class_label"]
        return {"hidden_states": noisy, "timestep": levels, "class_labels": labels, "return_dict": False}

    def losses_of(self, prediction: torch.Tensor, noisy: torch.Tensor, batch: LatentBatch) -> torch.Tensor:
        """Return the mean squared error of the noise, plus the weighted variational bound of predicted variances."""
        return noise_prediction.noise_prediction_losses(
            prediction, batch.noise, noisy, batch.latents, batch.levels, self.schedule
        )

    def distillation_losses(
        self, prediction: torch.Tensor, target: torch.Tensor, noisy: torch.Tensor, batch: LatentBatch
    ) -> torch.Tensor:
        """Return the mean squared error to the teacher's noise, plus the divergence from its learned variances."""
        return noise_prediction.noise_distillation_losses(prediction, target, noisy, batch.levels, self.schedule)


class Stage(ABC):
    """Fine-tuning on the model's own task or, with a teacher, distillation towards its predictions.

    Args:
        config: The options.
        model: The model.
        objective: The objective of the model.
        make_batch: Makes a micro-batch on the CPU from the data order of this process, the step and the micro-step.
        get_teacher: Returns the teacher when the stage runs; None for fine-tuning.

    Attributes:
        name: One of `checkpoints.STAGES`.
        steps: Number of optimizer steps.
        learning_rate: Peak learning rate.
        mhla_learning_rate: Peak learning rate of the MHLA parameters.
        validates: True if the stage generates validation samples.
        teacher_share: Weight of the distance to the teacher in the loss; the rest is the weight of the task's loss.
    """

    def __init__(
        self,
        config: TrainingConfig,
        model: Any,
        objective: Any,
        make_batch: Callable[[Any, int, int], Any],
        get_teacher: Callable[[], Teacher] | None = None,
    ) -> None:
        self.config, self.model, self.objective, self.make_batch = config, model, objective, make_batch
        self.get_teacher = get_teacher
        self.name, self.steps, self.teacher_share = "finetune", config.max_steps, 0.0
        own_rate = None
        if get_teacher is not None:
            self.name, self.steps, self.teacher_share = "distill", config.distill_steps, config.distill_ratio
            own_rate = config.distill_learning_rate
        self.learning_rate = own_rate or config.learning_rate
        # The more particular option wins, over one of these parameters.
        self.mhla_learning_rate = own_rate or config.mhla_learning_rate or config.learning_rate
        # Fine-tuning generates them later, for the same steps.
        self.validates = get_teacher is None or not config.max_steps

    def trainable_names(self) -> list[str]:
        """Names of the parameters that train."""
        return trainable_names(self.model, self.config.train)

    @cached_property
    def teacher(self) -> Teacher | None:
        """The teacher; the trainer releases it after the stage."""
        return None if self.get_teacher is None else self.get_teacher()

    @contextmanager
    def sharded_teacher(self, module: nn.Module) -> Iterator[bool]:
        """A context in which a sharded module computes what the teacher in it does; tells whether it does."""
        if isinstance(self.teacher, SharedTeacher) and is_fully_sharded(module):
            with self.teacher.in_shards(module):
                yield True
        else:
            yield False

    @abstractmethod
    def module(self) -> nn.Module:
        """The module that accelerate wraps, which shares its parameters with the model."""

    @abstractmethod
    def loss(self, module: nn.Module, batch: Any, accelerator: Any) -> torch.Tensor:
        """Compute the loss of a micro-batch, a scalar.

        Args:
            module: The wrapped module.
            batch: A micro-batch, on the device.
            accelerator: The processes.
        """

    @abstractmethod
    def context(self) -> AbstractContextManager[None]:
        """Context of the stage's steps."""


class Computed(nn.Module):
    """A model within the function that a stage computes with it.

    Accelerate changes the forward method of what it wraps; wrapping this leaves the model as it was. Everything that
    needs the model's parameters runs within `forward`, as sharding and distributed training require.

    Args:
        model: The model.
        compute: Called with the model and the arguments.
        sharded_classes: Names of classes that sharding gathers separately, besides those that the model names.
    """

    def __init__(self, model: nn.Module, compute: Callable[..., Any], sharded_classes: Iterable[str] = ()) -> None:
        super().__init__()
        self.model, self.compute = model, compute
        # Sharding refuses names that no module has.
        there = {type(module).__name__ for module in model.modules()}
        self._no_split_modules = sorted({*unsplit_classes(model), *sharded_classes} & there)

    def forward(self, *args: Any) -> Any:
        """Compute."""
        return self.compute(self.model, *args)


class DiffusionStage(Stage):
    """The family's objective, or the distance to the teacher's prediction of the same noisy latents."""

    def module(self) -> nn.Module:
        return Computed(self.model, self._predict, self.objective.sharded_classes)

    def _predict(
        self, model: nn.Module, noisy: torch.Tensor, levels: torch.Tensor, condition: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """See `Objective.predict`; fractional `levels` come as int32.

        The loss is not in here: sharding under mixed precision casts arguments, and the targets are better in fp32.
        """
        levels = levels.view(torch.float32) if levels.dtype == torch.int32 else levels
        return self.objective.predict(model, noisy, levels, condition)

    def loss(self, module: nn.Module, batch: LatentBatch, accelerator: Accelerator) -> torch.Tensor:
        """Compute the distance to the teacher's prediction, the objective's loss, or a mixture of both."""
        objective, share = self.objective, self.teacher_share
        noisy = objective.add_noise(batch.latents, batch.noise, batch.levels)
        # Sharding under mixed precision rounds floating-point arguments: the model would be conditioned on other noise
        # levels than those of its input.
        levels = batch.levels.view(torch.int32) if batch.levels.dtype == torch.float32 else batch.levels
        if share:
            with torch.no_grad(), accelerator.autocast(), self.sharded_teacher(module) as is_sharded:
                if is_sharded:
                    target = module(noisy, levels, batch.condition)
                else:
                    target = objective.predict(self.teacher, noisy, batch.levels, batch.condition)
        prediction = module(noisy, levels, batch.condition)
        if not share:
            return objective.losses_of(prediction, noisy, batch).mean()
        loss = objective.distillation_losses(prediction, target, noisy, batch).mean()
        if share < 1:
            loss = share * loss + (1 - share) * objective.losses_of(prediction, noisy, batch).mean()
        return loss

    def context(self) -> AbstractContextManager[None]:
        """Drop classes of DiT by the seed of the sample alone, not also in every block."""
        is_dit = isinstance(self.objective, DiTObjective)
        return noise_prediction.no_label_dropout(self.model) if is_dit else nullcontext()
