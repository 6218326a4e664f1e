# SPDX-License-Identifier: Apache-2.0
"""`Objective`: calls, noise and loss of the models of a family, and the flow matching that Wan and SANA share.

Shapes: B batch, C channels, then F frames (videos only), H height and W width of latents.
"""

from __future__ import annotations

import dataclasses
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, cast

from ...models.registry import ModelFamily, family_for


if TYPE_CHECKING:
    import torch
    from torch import nn

    from ..config import TrainingConfig
    from ..data.batches import Batch
    from ..loading import PipelineSource

Tensors: TypeAlias = "Mapping[str, torch.Tensor]"
FLOW_OPTIONS = frozenset({"flow_shift", "logit_mean", "logit_std"})
# Shift of pipelines at their smallest size, and of models that come without a pipeline.
DEFAULT_SHIFT = 3.0


@dataclass(frozen=True, kw_only=True)
class Objective(ABC):
    """Training objective of the models of one family; the fields of a subclass are the distribution of its noise.

    Attributes:
        upstream: Name of the diffusers class; its MHLA class is trained in the same way.
        condition_names: Tensors of a sample besides `latents`, and those of the sample for guidance.
        sharded_classes: Modules that sharding gathers by themselves, besides those that the model names.
    """

    upstream: ClassVar[str]
    condition_names: ClassVar[tuple[str, ...]]
    sharded_classes: ClassVar[tuple[str, ...]] = ()

    @classmethod
    @abstractmethod
    def from_run(cls, config: TrainingConfig, source: PipelineSource | None) -> Objective:
        """The objective of a run.

        Args:
            config: The options.
            source: The pipeline that training starts from; None for a model without one.

        Raises:
            ValueError: If the pipeline's scheduler does not go with this objective.
        """

    @classmethod
    def family(cls) -> ModelFamily:
        """The registry's entry of the models."""
        return family_for(cls.upstream)

    @classmethod
    @abstractmethod
    def check_config(cls, config: Mapping[str, Any]) -> None:
        """Checks that a model of this configuration can be trained.

        Raises:
            ValueError: If it is of a kind that needs another objective.
        """

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain JSON values, which tell the objectives of two runs apart."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @abstractmethod
    def noise_levels(self, uniform: torch.Tensor) -> torch.Tensor:
        """Noise levels from uniform draws.

        Args:
            uniform: Draws in [0, 1) `[B]`, float64.

        Returns:
            `[B]`, sigmas or timesteps.
        """

    @abstractmethod
    def add_noise(self, latents: torch.Tensor, noise: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
        """Noisy latents, of the shape of `latents`.

        Args:
            latents: Clean latents `[B, C, ...]`.
            noise: Standard normal, same shape.
            levels: See `noise_levels`.
        """

    @abstractmethod
    def model_inputs(
        self, config: Mapping[str, Any], noisy: torch.Tensor, levels: torch.Tensor, condition: Tensors
    ) -> dict[str, Any]:
        """Keyword arguments of the model's `forward` for noisy latents.

        Args:
            config: The model's configuration.
            noisy: See `add_noise`, in the type that the model computes in.
            levels: See `noise_levels`.
            condition: The tensors of `condition_names`, each `[B, ...]`.
        """

    def predict(self, model: Any, noisy: torch.Tensor, levels: torch.Tensor, condition: Tensors) -> torch.Tensor:
        """The model's output for noisy latents; arguments as in `model_inputs`."""
        return model(**self.model_inputs(cast(Any, model.config), noisy, levels, condition))[0]

    @abstractmethod
    def losses_of(self, prediction: torch.Tensor, noisy: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Loss of each sample `[B]`, fp32.

        Args:
            prediction: See `predict`.
            noisy: Input of the model.
            batch: The batch that it was made from.
        """

    def distillation_losses(
        self, prediction: torch.Tensor, target: torch.Tensor, noisy: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        """Distance of each sample's prediction to the teacher's, `[B]`, fp32: their mean squared error.

        Args:
            prediction: See `predict`.
            target: The teacher's, same shape.
            noisy: Input of both.
            batch: The batch that it was made from.
        """
        return (prediction.float() - target.float()).square().flatten(1).mean(1)

    def fine_tuning(self, model: nn.Module) -> AbstractContextManager[None]:
        """A context to train the model in; afterwards the model is as it was."""
        return nullcontext()

    def losses(self, model: nn.Module, batch: Batch, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Loss of each sample `[B]`, fp32.

        Args:
            model: The transformer.
            batch: On the model's device.
            dtype: Type to hand the inputs to the model in; None leaves them in fp32.
        """
        noisy = self.add_noise(batch.latents, batch.noise, batch.levels)
        return self.losses_of(self.run(model, noisy, batch, dtype), noisy, batch)

    def run(
        self, model: nn.Module, noisy: torch.Tensor, batch: Batch, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """`predict` on a batch; arguments as there and in `losses`."""
        noisy, condition = self._cast(noisy, batch, dtype)
        return self.predict(model, noisy, batch.levels, condition)

    def inputs_of(self, model: nn.Module, batch: Batch, dtype: torch.dtype | None = None) -> dict[str, Any]:
        """Keyword arguments of the model's `forward` for a batch; arguments as in `losses`."""
        noisy = self.add_noise(batch.latents, batch.noise, batch.levels)
        noisy, condition = self._cast(noisy, batch, dtype)
        return self.model_inputs(cast(Any, model.config), noisy, batch.levels, condition)

    @staticmethod
    def _cast(
        noisy: torch.Tensor, batch: Batch, dtype: torch.dtype | None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        condition = {
            name: tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
            for name, tensor in batch.condition.items()
        }
        return noisy if dtype is None else noisy.to(dtype), condition

    @classmethod
    def attention_name(cls, layer: int) -> str:
        """Name of the self-attention module of a layer, MHLA or not."""
        return cls.family().layers.format(index=layer).removesuffix(".mhla")

    @classmethod
    def check_data(cls, model: nn.Module, sample: Tensors, null_condition: Tensors | None = None) -> None:
        """Checks that samples fit a model.

        Args:
            model: The transformer.
            sample: One of the samples.
            null_condition: The condition of a sample without caption or class, if there is one.

        Raises:
            ValueError: If a tensor is missing, or channels, sizes or the condition do not fit.
        """
        cls._check_names("a sample", sample, ("latents", *cls.condition_names))
        if null_condition is not None:
            cls._check_names("null_condition", null_condition, cls.condition_names)
        if not sample["latents"].is_floating_point():
            raise ValueError(f"the samples have latents of type {sample['latents'].dtype}, not floating-point ones")
        config: Any = model.config
        channels, *size = sample["latents"].shape
        if channels != config["in_channels"]:
            raise ValueError(f"the samples have {channels} latent channels, the model takes {config['in_channels']}")
        patch = config["patch_size"]
        patches = (patch,) * len(size) if isinstance(patch, int) else tuple(patch)
        if len(patches) != len(size):
            raise ValueError(
                f"latents of samples must have {len(patches) + 1} axes for this model, got {len(size) + 1}"
            )
        if any(length % width for length, width in zip(size, patches, strict=True)):
            raise ValueError(f"the samples have latents of {size}, not multiples of the model's patches {patches}")
        cls.check_condition(config, {name: sample[name] for name in cls.condition_names})
        if null_condition is not None:
            cls.check_condition(config, null_condition)

    @classmethod
    @abstractmethod
    def check_condition(cls, config: Mapping[str, Any], condition: Tensors) -> None:
        """Checks that the condition of one sample fits a model of this configuration.

        Raises:
            ValueError: If it does not.
        """

    @classmethod
    def _check_names(cls, what: str, tensors: Tensors, names: tuple[str, ...]) -> None:
        missing = [name for name in names if name not in tensors]
        if missing:
            raise ValueError(
                f"{what} of {cls.family().name} training must have {', '.join(names)}; it lacks {', '.join(missing)}"
            )


def check_text_width(embeddings: torch.Tensor, width: int) -> None:
    """Checks text embeddings `[L, D]` of one sample.

    Raises:
        ValueError: If the model takes another width.
    """
    if embeddings.shape[-1] != width:
        raise ValueError(f"the samples have text embeddings of width {embeddings.shape[-1]}, the model takes {width}")


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
