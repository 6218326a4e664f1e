# SPDX-License-Identifier: Apache-2.0
"""`Family`: everything that one family of diffusion models brings to training, sizes of samples included.

The modules of this folder are imported without torch and diffusers, for the command line reads its options from them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ...utils.json_files import read_json
from ..config import DIGITS, LONGEST_SIDE, MOST_FRAMES, CacheConfig
from ..data.folders import Bucket, parse_buckets
from .objective import Objective


if TYPE_CHECKING:
    import torch

    from ..config import TrainingConfig
    from ..data.cache import LatentDataset
    from ..loading import PipelineSource

_DIGIT_VIDEO_DEFAULTS = {"height": 64, "width": 64, "num_frames": 17}
_DIGIT_IMAGE_SIZE = 64
# The factor of a VAE or a patch, or the side of an image in latents, is far below.
_MOST = 4096
# Options of models that are conditioned on text.
TEXT_OPTIONS = frozenset({"max_sequence_length", "prompts", "validation_negative_prompt"})
_MOST_STAGES = 12


@dataclass(frozen=True)
class PipelineSizes:
    """Constraints of a pipeline on the sizes of its samples.

    Attributes:
        family: The model's family.
        spatial_factor: Pixels of height or width per latent.
        temporal_factor: Frames per latent; the first frame is a latent of its own.
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
        """The options with every size given.

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
        """Checks that the VAE and the transformer's patches divide the wanted sizes.

        Raises:
            ValueError: If they do not; the error names the option.
        """
        for bucket in self.buckets(config):
            where = f" in bucket {bucket}" if config.buckets is not None else ""
            sides = (("height", bucket.height), ("width", bucket.width))
            for (name, length), patch in zip(sides, self.patch_size, strict=True):
                multiple = self.spatial_factor * patch
                if length % multiple or not 8 <= length <= LONGEST_SIDE:
                    raise ValueError(f"{name} must be a multiple of {multiple} for this pipeline, got {length}{where}")
            if (bucket.num_frames - 1) % self.temporal_factor or bucket.num_frames > MOST_FRAMES:
                raise ValueError(
                    f"num_frames must be a multiple of {self.temporal_factor} plus 1, got {bucket.num_frames}{where}"
                )

    def buckets(self, config: CacheConfig) -> tuple[Bucket, ...]:
        """The sizes of the options of a cache; one where they name no buckets."""
        if config.buckets is not None:
            return parse_buckets(config.buckets)
        assert config.height is not None and config.width is not None
        return (Bucket(config.height, config.width, config.num_frames or 1),)

    def _complete_buckets(self, config: CacheConfig) -> CacheConfig:
        """The options with the frames of all buckets, and the sizes of the first."""
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
    """Reads a positive integer of a configuration.

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
        prompt_encoders: Parts of the pipeline that encode prompts, and are left out once that is done.
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
        """Reads the sizes of samples that a pipeline takes: those of images, unless a family overrides it.

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
        """Encodes one video or image.

        Args:
            pipeline: The pipeline, without its transformer.
            media: See `DataSample.load`.

        Returns:
            Latents as the transformer takes them, fp32.
        """

    @abstractmethod
    def encode_condition(self, pipeline: Any, condition: str | int, config: CacheConfig) -> dict[str, torch.Tensor]:
        """Encodes a caption or class.

        Args:
            pipeline: See `encode_media`.
            condition: See `DataSample`.
            config: The options of the cache.

        Returns:
            The tensors of the objective's `condition_names`, text without its padding.
        """

    @abstractmethod
    def encode_null_condition(self, pipeline: Any, config: CacheConfig, num_classes: int) -> dict[str, torch.Tensor]:
        """Encodes the condition of a sample without caption or class, as the pipeline's guidance takes it."""

    @abstractmethod
    def validation_inputs(
        self, pipeline: Any, source: PipelineSource, config: TrainingConfig, dataset: LatentDataset
    ) -> list[dict[str, Any]]:
        """Encodes the prompts of validation samples.

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
    """Calls a VAE's `encode` on its device and in its type."""
    parameter = next(vae.parameters())
    return vae.encode(media.to(parameter.device, parameter.dtype))
