# SPDX-License-Identifier: Apache-2.0
"""What families share in training: their objectives, and how a pipeline encodes data and prompts for them.

In flow matching (all but DiT) a clean latent x_0 and noise eps are joined by a straight line, x_t = (1 - sigma) x_0 +
sigma eps, and the model predicts its direction eps - x_0 (Lipman et al., "Flow Matching for Generative Modeling",
2023). Noise levels are logit-normal (Esser et al., "Scaling Rectified Flow Transformers", 2024), then shifted as the
sampler shifts them. See `noise_prediction` for DiT's functions.

Shapes: B batch, C channels, F frames (videos only), H height and W width of latents; of media H and W are in pixels.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import nn

from ..models.directory import ModelDirectory
from ..models.registry import TRAINED
from ..utils.files import Types, read_json


Tensors: TypeAlias = "Mapping[str, torch.Tensor]"
Inputs: TypeAlias = "dict[str, Any]"

NUM_TRAIN_TIMESTEPS = 1000
_MOST_TIMESTEPS = 100_000
_SCHEDULER_FIELDS: dict[str, Types] = {"_class_name": str, "num_train_timesteps": int}
# Shift of models that come without a pipeline.
_DEFAULT_SHIFT = 3.0
ONE_ENCODER = ("vae", "text_encoder", "tokenizer")
TWO_ENCODERS = (*ONE_ENCODER, "text_encoder_2", "tokenizer_2")
"""Parts that encode the samples of pipelines with one text encoder, and with two."""
PADDED = ("prompt_embeds", "prompt_attention_mask")
"""Tensors of text that are stored without padding."""
MASKED_NAMES = (*PADDED, *(f"negative_{name}" for name in PADDED))


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

    The class also knows how the family's pipeline encodes samples and prompts.

    Attributes:
        name: Name of the family.
        condition_names: Tensors of a sample besides `latents`, and those of the sample for guidance.
        sharded_classes: Modules that sharding gathers separately, besides those that the model names.
        packed: Side of the squares of latents that the model takes as one token each; 0 if it takes latents as such.
        encoders: Parts of the pipeline that encode samples.
        encoded_names: Arguments of the pipeline's call for what its `encode_prompt` returns, those of negative prompts
            last.
        call_options: Further arguments of the pipeline's call.
        out_channels: Number that configurations without it stand for; None for as many as go in.
    """

    name: ClassVar[str]
    condition_names: ClassVar[tuple[str, ...]]
    sharded_classes: ClassVar[tuple[str, ...]] = ()
    packed: ClassVar[int] = 0
    encoders: ClassVar[tuple[str, ...]] = ONE_ENCODER
    encoded_names: ClassVar[tuple[str, ...]] = ()
    call_options: ClassVar[dict[str, Any]] = {}
    out_channels: ClassVar[int | None] = None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON values, to compare the objectives of two runs."""
        compared = [item.name for item in dataclasses.fields(self) if item.compare]
        return json.loads(json.dumps({name: getattr(self, name) for name in compared}))

    def pack(self, latents: torch.Tensor) -> torch.Tensor:
        """Return latents `[B, C, ...]` as the model takes them, and predicts."""
        return F.pixel_unshuffle(latents, self.packed).flatten(2).mT if self.packed else latents

    def unpack(self, latents: torch.Tensor, grid: tuple[int, ...]) -> torch.Tensor:
        """Invert `pack` for one sample, whose tokens have a grid."""
        return F.pixel_shuffle(latents.mT.unflatten(1, grid), self.packed) if self.packed else latents

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
    def model_inputs(self, config: Any, noisy: torch.Tensor, levels: torch.Tensor, condition: Tensors) -> Inputs:
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

    def check_data(self, model: nn.Module, sample: Tensors, null_condition: Tensors | None = None) -> None:
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

    def training_context(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which the model is trained."""
        return nullcontext()

    @classmethod
    @abstractmethod
    def for_run(cls, config: Any, directory: ModelDirectory | None) -> Any:
        """Make the objective of a run.

        Args:
            config: The options, a `TrainingConfig`.
            directory: The pipeline that training starts from; None for a model without one.

        Raises:
            ValueError: If the pipeline's scheduler does not go with this objective.
        """

    def check_model(self, config: Any) -> None:
        """Check that a model of a configuration can be trained; by default all that take latents and no images.

        Raises:
            ValueError: If it is of a kind that needs another objective.
        """
        channels = config.get("in_channels", self.out_channels)
        # As in diffusers, `null` stands for as many as go in.
        takes_more = channels != (config.get("out_channels", self.out_channels) or channels)
        if takes_more or config.get("image_condition_type"):
            raise ValueError(
                f"model: this is an image-to-{TRAINED[self.name].kind} model, which cannot be recovered or trained "
                "here yet"
            )

    def frames_per_second(self, directory: ModelDirectory) -> float:
        """Return the frame rate that a pipeline's model was made for, where it makes videos."""
        return 24.0

    def encode_media(self, pipeline: Any, media: torch.Tensor) -> torch.Tensor:
        """Encode one video or image: to the mode of the VAE's distribution, normalised as its configuration says.

        Args:
            pipeline: The pipeline, without its transformer.
            media: See `DataSample.load`.

        Returns:
            Latents as the transformer takes them, fp32.
        """
        return encode_media(pipeline.vae, media[None])[0]

    def encode_condition(self, pipeline: Any, condition: str | int, length: int | None) -> dict[str, torch.Tensor]:
        """Encode a caption or class; by default a caption, without guidance.

        Args:
            pipeline: See `encode_media`.
            condition: See `DataSample`.
            length: Tokens that captions are padded to.

        Returns:
            The tensors of `condition_names`, text that is masked without its padding.
        """
        options = {"do_classifier_free_guidance": False} if TRAINED[self.name].negative_prompts else {}
        encoded = pipeline.encode_prompt(
            str(condition), max_sequence_length=length, **options, **self.prompt_options(pipeline)
        )
        named = zip(self.encoded_names, encoded)
        return without_padding({name: each[0] for name, each in named if name in self.condition_names})

    def encode_null_condition(self, pipeline: Any, length: int | None, num_classes: int) -> dict[str, torch.Tensor]:
        """Encode the condition of a sample without caption or class; by default the empty prompt."""
        return self.encode_condition(pipeline, "", length)

    def validation_inputs(self, pipeline: Any, config: Any, settings: Mapping[str, Any], **size: Any) -> list[Any]:
        """Encode the prompts of validation samples.

        Args:
            pipeline: See `encode_media`.
            config: The options of the run.
            settings: The options of the cached data, such as the length of prompts.
            **size: Size of the samples, arguments of the pipeline's call.

        Returns:
            Arguments of the pipeline's call for each prompt.
        """
        takes_negative = TRAINED[self.name].negative_prompts
        encoded = pipeline.encode_prompt(
            list(config.validation_prompts),
            max_sequence_length=settings["max_sequence_length"],
            device=pipeline.text_encoder.device,
            **({"negative_prompt": config.validation_negative_prompt} if takes_negative else {}),
            **self.prompt_options(pipeline),
        )[: len(self.encoded_names)]
        by_prompt = zip(*(tensor.cpu().split(1) for tensor in encoded), strict=True)
        common = {**self.call_options, **size}
        return [{**dict(zip(self.encoded_names, each, strict=True)), **common} for each in by_prompt]

    def prompt_options(self, pipeline: Any) -> dict[str, Any]:
        """Return further arguments of the pipeline's `encode_prompt`."""
        return {}


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

    def model_inputs(self, config: Any, noisy: torch.Tensor, levels: torch.Tensor, condition: Tensors) -> Inputs:
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

    @classmethod
    def for_run(cls, config: Any, directory: ModelDirectory | None) -> Any:
        """Make the objective of a run; a shift that the options do not give is the scheduler's."""
        shift: float | None = _DEFAULT_SHIFT
        if directory is not None:
            scheduler = read_scheduler(directory)
            # Schedulers for flow matching alone have no such entry.
            prediction_type = scheduler.get("prediction_type", "flow_prediction")
            shift = float(scheduler.get("flow_shift") or scheduler.get("shift") or 1.0)
            if scheduler.get("use_dynamic_shifting"):
                # The scheduler's largest; how much it shifts a sample depends on its size.
                shift = math.exp(float(scheduler.get("max_shift", 1.15)))
            if prediction_type != "flow_prediction" or not 0 < shift < math.inf:
                raise ValueError(
                    f"model: the scheduler of {directory.root}, {scheduler.get('_class_name')}, has prediction_type="
                    f"{prediction_type!r} and a shift of {shift}; for flow matching prediction_type must be "
                    "'flow_prediction', and the shift above 0"
                )
        given = {name: getattr(config, name) for name in ("logit_mean", "logit_std")}
        given["flow_shift"] = config.flow_shift or shift
        return cls(**{name: value for name, value in given.items() if value is not None})


def encode_media(vae: Any, media: torch.Tensor) -> torch.Tensor:
    """Encode videos or images to normalised latents.

    They are the mode of the VAE's distribution, less a mean and over a deviation where the VAE has them for every
    channel, else shifted; then scaled.

    Args:
        vae: A VAE of diffusers.
        media: `[N, 3, F, H, W]` or `[N, 3, H, W]` in [-1, 1].

    Returns:
        Latents as the transformer takes them, fp32.
    """
    parameter = next(vae.parameters())
    with torch.no_grad():
        encoded = vae.encode(media.to(parameter.device, parameter.dtype))
    latents = (encoded.latent if hasattr(encoded, "latent") else encoded.latent_dist.mode()).float()
    # LTX-Video's are buffers.
    stored = {**vae.config, **dict(vae.named_buffers())}
    # VAEs of several pipelines have a shift, and a mean that ours do not read.
    if "latents_mean" in stored and "shift_factor" not in stored:
        shape = (-1, *[1] * (latents.ndim - 2))
        mean, deviation = (torch.as_tensor(stored[f"latents_{each}"]).to(latents) for each in ("mean", "std"))
        latents = (latents - mean.view(shape)) / deviation.view(shape)
    return (latents - (stored.get("shift_factor") or 0.0)) * stored.get("scaling_factor", 1.0)


def read_scheduler(directory: ModelDirectory) -> dict[str, Any]:
    """Read the scheduler's configuration of a pipeline; empty for a pipeline without scheduler.

    Raises:
        ValueError: If it is damaged.
    """
    path = directory.root / "scheduler" / "scheduler_config.json"
    # A link that leads nowhere is an error, and no missing file.
    if not os.path.lexists(path):
        return {}
    config = read_json(path, "the scheduler's configuration", optional=_SCHEDULER_FIELDS)
    if not 1 <= config.get("num_train_timesteps", 1) <= _MOST_TIMESTEPS:
        raise ValueError(
            f"the scheduler's configuration {path}: 'num_train_timesteps' must be from 1 to {_MOST_TIMESTEPS:,}."
        )
    return config


def without_padding(text: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Cut the padding off embeddings `[L, D]` and their mask `[L]`, if there is one."""
    if "prompt_attention_mask" not in text:
        return text
    used = text["prompt_attention_mask"].nonzero()
    # With everything masked, attention would look at the padding: it stays.
    length = int(used.max()) + 1 if len(used) else len(text["prompt_attention_mask"])
    return text | {name: text[name][:length] for name in PADDED}
