# SPDX-License-Identifier: Apache-2.0
"""`Objective` and `Family`: what one family of diffusion models brings to training, and sizes of its samples.

An objective calls the models of a family, adds noise and computes losses; a family encodes data and validation
prompts. The modules of this folder are imported without torch and diffusers: the command line reads its options from
them.

Shapes: B batch, C channels, then F frames (videos only), H height and W width of latents.
"""

from __future__ import annotations

import dataclasses
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, cast

from ...models.registry import ModelFamily, family_for
from ...utils.files import read_json
from ..config import DIGITS, LONGEST_SIDE, MOST_FRAMES, CacheConfig
from ..data.folders import Bucket, parse_buckets


if TYPE_CHECKING:
    import torch
    from torch import nn

    from ..config import TrainingConfig
    from ..data.batches import Batch
    from ..data.cache import LatentDataset
    from ..loading import PipelineSource

Tensors: TypeAlias = "Mapping[str, torch.Tensor]"
FLOW_OPTIONS = frozenset({"flow_shift", "logit_mean", "logit_std"})
# Shift of pipelines at their smallest size, and of models that come without a pipeline.
DEFAULT_SHIFT = 3.0
_DIGIT_VIDEO_DEFAULTS = {"height": 64, "width": 64, "num_frames": 17}
_DIGIT_IMAGE_SIZE = 64
# The factor of a VAE or a patch, or the side of an image in latents, is far below.
_MOST = 4096
# Options of models that are conditioned on text.
TEXT_OPTIONS = frozenset({"max_sequence_length", "prompts", "validation_negative_prompt"})
_MOST_STAGES = 12


@dataclass(frozen=True, kw_only=True)
class Objective(ABC):
    """Training objective of the models of one family; the fields of a subclass are the distribution of its noise.

    Attributes:
        upstream: Name of the diffusers class; its MHLA class is trained in the same way.
        condition_names: Tensors of a sample besides `latents`, and those of the sample for guidance.
        sharded_classes: Modules that sharding gathers separately, besides those that the model names.
    """

    upstream: ClassVar[str]
    condition_names: ClassVar[tuple[str, ...]]
    sharded_classes: ClassVar[tuple[str, ...]] = ()

    @classmethod
    @abstractmethod
    def from_run(cls, config: TrainingConfig, source: PipelineSource | None) -> Objective:
        """Make the objective of a run.

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

    @classmethod  # noqa: B027
    def check_config(cls, config: Mapping[str, Any]) -> None:
        """Check that a model of this configuration can be trained; by default all can.

        Raises:
            ValueError: If it is of a kind that needs another objective.
        """

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON values, to compare the objectives of two runs."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

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

    def predict(self, model: Any, noisy: torch.Tensor, levels: torch.Tensor, condition: Tensors) -> torch.Tensor:
        """Run the model on noisy latents; arguments as in `model_inputs`."""
        return model(**self.model_inputs(cast(Any, model.config), noisy, levels, condition))[0]

    @abstractmethod
    def losses_of(self, prediction: torch.Tensor, noisy: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Compute the loss of each sample `[B]`, fp32.

        Args:
            prediction: See `predict`.
            noisy: Input of the model.
            batch: The batch that it was made from.
        """

    def distillation_losses(
        self, prediction: torch.Tensor, target: torch.Tensor, noisy: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        """Compute the mean squared error of each sample's prediction to the teacher's, `[B]`, fp32.

        Args:
            prediction: See `predict`.
            target: The teacher's, same shape.
            noisy: Input of both.
            batch: The batch that it was made from.
        """
        return (prediction.float() - target.float()).square().flatten(1).mean(1)

    def fine_tuning(self, model: nn.Module) -> AbstractContextManager[None]:
        """Context to train the model in; restores the model afterwards."""
        return nullcontext()

    def losses(self, model: nn.Module, batch: Batch, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Compute the loss of each sample `[B]`, fp32.

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
        """Return the keyword arguments of the model's `forward` for a batch; arguments as in `losses`."""
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
        """Check that samples fit a model.

        Args:
            model: The transformer.
            sample: One of the samples.
            null_condition: The condition of a sample without caption or class, if there is one.

        Raises:
            ValueError: If a tensor is missing, or channels, sizes or the condition do not fit.
        """
        for what, tensors in (("a sample", sample), ("null_condition", null_condition)):
            names = ("latents", *cls.condition_names) if tensors is sample else cls.condition_names
            missing = [name for name in names if tensors is not None and name not in tensors]
            if missing:
                family = cls.family().name
                raise ValueError(f"{what} of {family} training must have {', '.join(names)}; it lacks {missing[0]}")
        config: Any = model.config
        latents = sample["latents"]
        channels, *size = latents.shape
        patch = config["patch_size"]
        patches = (patch,) * len(size) if isinstance(patch, int) else tuple(patch)
        conditions = [tensors for tensors in (sample, null_condition) if tensors is not None]
        if channels != config["in_channels"] or not latents.is_floating_point():
            takes = f"the model takes {config['in_channels']} of floats"
            problem: str | None = f"the samples have {channels} latent channels of type {latents.dtype}, {takes}"
        elif len(patches) != len(size) or any(length % width for length, width in zip(size, patches)):
            problem = f"the samples have latents of {size}, not multiples of the model's patches {patches}"
        else:
            problem = next(filter(None, (cls.condition_problem(config, each) for each in conditions)), None)
        if problem is not None:
            raise ValueError(problem)

    @classmethod
    @abstractmethod
    def condition_problem(cls, config: Mapping[str, Any], condition: Tensors) -> str | None:
        """Return why the condition of one sample does not fit a model of this configuration, or `None`."""


def text_width_problem(embeddings: torch.Tensor, width: int) -> str | None:
    """Return why text embeddings `[L, D]` of one sample do not fit a model that takes `width`, or `None`."""
    if embeddings.shape[-1] == width:
        return None
    return f"the samples have text embeddings of width {embeddings.shape[-1]}, the model takes {width}"


def _functions() -> Any:
    from ..stages import flow_matching

    return flow_matching


@dataclass(frozen=True, kw_only=True)
class FlowObjective(Objective):
    """Flow matching on logit-normal noise levels; see `flow_matching.sigmas_from_uniform` for the fields."""

    logit_mean: float = 0.0
    logit_std: float = 1.0
    flow_shift: float = 1.0
    sigma_range: tuple[float, float] = (0.0, 1.0)

    @classmethod
    def from_run(cls, config: TrainingConfig, source: PipelineSource | None) -> FlowObjective:
        """Take a shift that the options do not give from the pipeline's scheduler."""
        shift: float | None = DEFAULT_SHIFT
        if source is not None:
            scheduler = source.scheduler
            # Schedulers for flow matching alone have no such entry.
            prediction_type = scheduler.get("prediction_type", "flow_prediction")
            if prediction_type != "flow_prediction":
                raise ValueError(
                    f"model: the scheduler of {source.directory}, {scheduler.get('_class_name')}, has "
                    f"prediction_type={prediction_type!r}; for flow matching it must be 'flow_prediction'"
                )
            shift = float(scheduler.get("flow_shift") or scheduler.get("shift") or 1.0)
            if not 0 < shift < math.inf:
                raise ValueError(
                    f"model: the scheduler of {source.directory} has flow_shift={shift}; it must be above 0"
                )
        if config.flow_shift is not None:
            shift = config.flow_shift
        given: dict[str, Any] = {"logit_mean": config.logit_mean, "logit_std": config.logit_std, "flow_shift": shift}
        return cls(**{name: value for name, value in given.items() if value is not None})

    def noise_levels(self, uniform: torch.Tensor) -> torch.Tensor:
        """Return sigmas in [0, 1], fp32."""
        return _functions().sigmas_from_uniform(
            uniform,
            logit_mean=self.logit_mean,
            logit_std=self.logit_std,
            flow_shift=self.flow_shift,
            sigma_range=self.sigma_range,
        )

    def add_noise(self, latents: torch.Tensor, noise: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
        """Return x_t = (1 - sigma) x_0 + sigma eps."""
        return _functions().add_noise(latents, noise, levels)

    def losses_of(self, prediction: torch.Tensor, noisy: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the mean squared error to the direction from data to noise."""
        return _functions().flow_matching_losses(prediction, batch.latents, batch.noise)

    @staticmethod
    def timesteps(sigmas: torch.Tensor) -> torch.Tensor:
        """Return timesteps as the flow schedulers of diffusers count them."""
        return _functions().timesteps_from_sigmas(sigmas)


@dataclass(frozen=True)
class PipelineSizes:
    """Constraints of a pipeline on the sizes of its samples.

    Attributes:
        family: The model's family.
        spatial_factor: Pixels of height or width per latent.
        temporal_factor: Frames per latent; the first frame is one latent.
        patch_size: Height and width of a token, in latents.
        own_size: Height and width that an image model was made for, in pixels; 0 for video models.
        num_classes: Number of classes of the model; 0 if it is conditioned on text.
    """

    family: Family
    spatial_factor: int
    temporal_factor: int
    patch_size: tuple[int, int]
    own_size: int
    num_classes: int

    def complete(self, config: CacheConfig) -> CacheConfig:
        """Fill in the sizes that the options do not give.

        Videos are 480x832 with 81 frames, moving digits 64x64 with 17. Images have the size that the model was made
        for; digits at most 64x64, except for DiT, whose pipeline makes images of one size only. Of square data,
        one side is enough. With buckets the sizes are those of the first.

        Raises:
            ValueError: If a size does not fit the pipeline; the error names it.
        """
        if config.buckets is not None:
            config = self._complete_buckets(config)
        given = {name: value for name, value in config.to_dict().items() if value is not None}
        completed = config.replace(**{**self._defaults(config), **given})
        self.check(completed)
        return completed

    def check(self, config: CacheConfig) -> None:
        """Check that the VAE and the transformer's patches divide the wanted sizes.

        Raises:
            ValueError: If they do not; the error names the option.
        """
        for bucket in self.buckets(config):
            where = f" in bucket {bucket}" if config.buckets is not None else ""
            (rows, columns), factor = self.patch_size, self.spatial_factor
            for name, length, multiple, rest, most in (
                ("height", bucket.height, factor * rows, 0, LONGEST_SIDE),
                ("width", bucket.width, factor * columns, 0, LONGEST_SIDE),
                ("num_frames", bucket.num_frames, self.temporal_factor, 1, MOST_FRAMES),
            ):
                if (length - rest) % multiple or length > most:
                    allowed = "plus 1" if rest else "for this pipeline"
                    raise ValueError(f"{name} must be a multiple of {multiple} {allowed}, got {length}{where}")

    def buckets(self, config: CacheConfig) -> tuple[Bucket, ...]:
        """Return the sizes of the options of a cache; one where they name no buckets."""
        if config.buckets is not None:
            return parse_buckets(config.buckets)
        assert config.height is not None and config.width is not None
        return (Bucket(config.height, config.width, config.num_frames or 1),)

    def _complete_buckets(self, config: CacheConfig) -> CacheConfig:
        """Fill in the frames of all buckets, and the sizes of the first."""
        videos = self.family.video_size
        default = (config.num_frames or videos["num_frames"]) if videos else 1
        buckets = parse_buckets(str(config.buckets), default)
        if not videos and any(bucket.num_frames > 1 for bucket in buckets):
            raise ValueError(
                f"buckets of {self.family.name} models have height and width only, got {config.buckets!r}"
            )
        first = buckets[0]
        for name, value in (("height", first.height), ("width", first.width)):
            if getattr(config, name) not in (None, value):
                raise ValueError(f"{name} cannot be given beside buckets, which say every size")
        # Written out where it is one frame too: a text without frames means the default.
        text = ";".join(f"{each.height},{each.width}" + (f",{each.num_frames}" if videos else "") for each in buckets)
        frames = {"num_frames": first.num_frames} if videos else {}
        return config.replace(buckets=text, height=first.height, width=first.width, **frames)

    def _defaults(self, config: CacheConfig) -> dict[str, Any]:
        text = {"max_sequence_length": self.family.text_length} if self.family.text_length else {}
        one_side = config.height or config.width
        if self.family.video_size:
            if config.data != DIGITS:
                return {**self.family.video_size, **text}
            square = {"height": one_side, "width": one_side} if one_side else {}
            return {**_DIGIT_VIDEO_DEFAULTS, **square, **text}
        side = self.own_size
        if config.data == DIGITS and not self.num_classes:
            side = min(side, _DIGIT_IMAGE_SIZE)
        side = one_side or side
        return {"height": side, "width": side, **text}


def read_count(config: dict[str, Any], name: str, path: Path, *, default: int | None = None, most: int = _MOST) -> int:
    """Read a positive integer of a configuration.

    Args:
        config: The configuration.
        name: The entry.
        path: The file, for the error.
        default: Value of a missing entry; None requires it.
        most: Largest value.

    Raises:
        ValueError: If it is anything else.
    """
    value = config.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ValueError(
            f"the configuration {path}: {name!r} must be an integer from 1 to {most:,}, got {value!r:.40}."
        )
    return value


class Family(ABC):
    """The objective, command, data encoding, sizes and validation samples of one family of diffusion models.

    Attributes:
        objective: Class of the objective.
        help: Help text of the family's command.
        options: Options of the run and of the cache that only some families have.
        folders: Parts of the pipeline that encode samples.
        text_length: Default number of tokens that captions are padded to; 0 for models of classes.
        video_size: Default height, width and number of frames; empty for models of images.
        prompt_encoders: Parts of the pipeline that encode prompts, released afterwards.
        pipeline_options: Entries of the pipeline's configuration that its sampling depends on.
    """

    objective: ClassVar[type[Objective]]
    help: ClassVar[str]
    options: ClassVar[frozenset[str]] = frozenset()
    folders: ClassVar[tuple[str, ...]] = ("vae", "text_encoder", "tokenizer")
    text_length: ClassVar[int] = 0
    video_size: ClassVar[dict[str, int]] = {}
    prompt_encoders: ClassVar[tuple[str, ...]] = ("text_encoder", "tokenizer")
    pipeline_options: ClassVar[tuple[str, ...]] = ()

    @property
    def name(self) -> str:
        """Name of the family and of its command."""
        return self.objective.family().name

    def read_sizes(self, source: PipelineSource) -> PipelineSizes:
        """Read the sizes of samples that a pipeline takes; those of images by default.

        Raises:
            ValueError: If a configuration is damaged.
        """
        path, config = source.directory / "vae" / "config.json", source.model.config
        vae, model_path = read_json(path, "the VAE's configuration"), source.model.folder / "config.json"
        stages = vae.get("encoder_block_out_channels") or vae.get("block_out_channels")
        if not isinstance(stages, list) or not 1 <= len(stages) <= _MOST_STAGES:
            raise ValueError(
                f"the VAE's configuration {path}: 'block_out_channels' must be a list of 1 to {_MOST_STAGES} numbers."
            )
        factor = 2 ** (len(stages) - 1)
        patch = read_count(config, "patch_size", model_path)
        num_classes = 0
        if not self.text_length:
            num_classes = read_count(config, "num_embeds_ada_norm", model_path, most=10**9)
        own_size = read_count(config, "sample_size", model_path) * factor
        return PipelineSizes(self, factor, 1, (patch, patch), own_size, num_classes)

    @abstractmethod
    def encode_media(self, pipeline: Any, media: torch.Tensor) -> torch.Tensor:
        """Encode one video or image.

        Args:
            pipeline: The pipeline, without its transformer.
            media: See `DataSample.load`.

        Returns:
            Latents as the transformer takes them, fp32.
        """

    @abstractmethod
    def encode_condition(self, pipeline: Any, condition: str | int, config: CacheConfig) -> dict[str, torch.Tensor]:
        """Encode a caption or class.

        Args:
            pipeline: See `encode_media`.
            condition: See `DataSample`.
            config: The options of the cache.

        Returns:
            The tensors of the objective's `condition_names`, text without its padding.
        """

    @abstractmethod
    def encode_null_condition(self, pipeline: Any, config: CacheConfig, num_classes: int) -> dict[str, torch.Tensor]:
        """Encode the condition of a sample without caption or class, as the pipeline's guidance takes it."""

    @abstractmethod
    def validation_inputs(
        self, pipeline: Any, source: PipelineSource, config: TrainingConfig, dataset: LatentDataset
    ) -> list[dict[str, Any]]:
        """Encode the prompts of validation samples.

        Args:
            pipeline: See `encode_media`.
            source: The pipeline that training started from.
            config: The options of the run.
            dataset: The cache that is trained on; samples have its sizes and classes.

        Returns:
            Arguments of the pipeline's call for each prompt.

        Raises:
            ValueError: If the pipeline cannot make one of the samples.
        """


def encode_with(vae: Any, media: torch.Tensor) -> Any:
    """Call a VAE's `encode` on its device and in its type."""
    parameter = next(vae.parameters())
    return vae.encode(media.to(parameter.device, parameter.dtype))
