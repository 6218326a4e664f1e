# SPDX-License-Identifier: Apache-2.0
"""Sizes of videos and pictures that a pipeline can be trained on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...utils.json_files import read_json
from ..config import DIGITS, LONGEST_SIDE, MOST_FRAMES, VIDEO_FAMILIES, CacheConfig
from ..data.buckets import Bucket, parse_buckets


if TYPE_CHECKING:
    from ..loading import PipelineSource


# Wan's own height, width and frames, and those of the moving digits.
_VIDEO_DEFAULTS = {"height": 480, "width": 832, "num_frames": 81}
_DIGIT_VIDEO_DEFAULTS = {"height": 64, "width": 64, "num_frames": 17}
_DIGIT_PICTURE_SIZE = 64
# As the pipelines' own `__call__` pads them.
_TEXT_LENGTHS = {"wan": 512, "sana": 300}


# What a VAE or a patch makes smaller, or the side of a picture in latents, is far below.
_MOST = 4096
_MOST_STAGES = 12


@dataclass(frozen=True)
class PipelineSizes:
    """What a pipeline asks of the sizes of its data.

    Attributes:
        family: Name of the model's family.
        spatial_factor: Pixels of height or width per latent.
        temporal_factor: Frames per latent; the first frame is a latent of its own.
        patch_size: Height and width of a token, in latents.
        own_size: Height and width that an image model was made for, in pixels; 0 for video models.
        num_classes: How many classes the model knows; 0 if it is conditioned on text.
    """

    family: str
    spatial_factor: int
    temporal_factor: int
    patch_size: tuple[int, int]
    own_size: int
    num_classes: int

    @classmethod
    def of_pipeline(cls, source: PipelineSource) -> PipelineSizes:
        """Reads the configurations of a pipeline.

        Raises:
            ValueError: If its transformer cannot be trained here, or a configuration is damaged.
        """
        config, family = source.model.config, source.family
        vae_path, model_path = source.directory / "vae" / "config.json", source.model.folder / "config.json"
        vae = read_json(vae_path, "the VAE's configuration")
        if family in VIDEO_FAMILIES:
            patch = config.get("patch_size")
            if not isinstance(patch, list) or len(patch) != 3:
                raise ValueError(f"the model's configuration {model_path}: 'patch_size' must be three integers.")
            # Checkpoints older than these entries have the VAE of Wan 2.1.
            spatial = _count(vae, "scale_factor_spatial", vae_path, default=8)
            temporal = _count(vae, "scale_factor_temporal", vae_path, default=4)
            height, width = (_count({"patch_size": side}, "patch_size", model_path) for side in patch[1:])
            return cls(family, spatial, temporal, (height, width), 0, 0)
        stages = vae.get("encoder_block_out_channels") or vae.get("block_out_channels")
        if not isinstance(stages, list) or not 1 <= len(stages) <= _MOST_STAGES:
            raise ValueError(
                f"the VAE's configuration {vae_path}: 'block_out_channels' must be a list of 1 to {_MOST_STAGES} "
                "numbers."
            )
        factor = 2 ** (len(stages) - 1)
        patch = _count(config, "patch_size", model_path)
        num_classes = _count(config, "num_embeds_ada_norm", model_path, most=10**9) if family == "dit" else 0
        own_size = _count(config, "sample_size", model_path) * factor
        return cls(family, factor, 1, (patch, patch), own_size, num_classes)

    def complete(self, config: CacheConfig) -> CacheConfig:
        """The options with every size given.

        Videos are 480x832 with 81 frames, moving digits 64x64 with 17. Pictures have the size that the model was made
        for; digits at most 64x64, except for DiT, whose pipeline makes pictures of one size only. Of square data,
        one side is enough. With buckets the sizes are those of the first.

        Raises:
            ValueError: If a size does not fit the pipeline or an option belongs to other models; the error names it.
        """
        config.check_family(self.family)
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
        videos = self.family in VIDEO_FAMILIES
        default = config.num_frames or _VIDEO_DEFAULTS["num_frames"]
        buckets = parse_buckets(str(config.buckets), default if videos else 1)
        if not videos and any(bucket.num_frames > 1 for bucket in buckets):
            raise ValueError(f"buckets of {self.family} models have height and width only, got {config.buckets!r}")
        first = buckets[0]
        for name, value in (("height", first.height), ("width", first.width)):
            if getattr(config, name) not in (None, value):
                raise ValueError(f"{name} cannot be given beside buckets, which say every size")
        # Written out where it is one frame too: a text without frames means the default.
        text = ";".join(f"{each.height},{each.width}" + (f",{each.num_frames}" if videos else "") for each in buckets)
        frames = {"num_frames": first.num_frames} if videos else {}
        return config.replace(buckets=text, height=first.height, width=first.width, **frames)

    def _defaults(self, config: CacheConfig) -> dict[str, Any]:
        text = {"max_sequence_length": _TEXT_LENGTHS[self.family]} if self.family in _TEXT_LENGTHS else {}
        one_side = config.height or config.width
        if self.family in VIDEO_FAMILIES:
            if config.data != DIGITS:
                return {**_VIDEO_DEFAULTS, **text}
            square = {"height": one_side, "width": one_side} if one_side else {}
            return {**_DIGIT_VIDEO_DEFAULTS, **square, **text}
        side = self.own_size
        if config.data == DIGITS and not self.num_classes:
            side = min(side, _DIGIT_PICTURE_SIZE)
        side = one_side or side
        return {"height": side, "width": side, **text}


def _count(config: dict[str, Any], name: str, path: Path, *, default: int | None = None, most: int = _MOST) -> int:
    """A positive integer of a configuration."""
    value = config.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ValueError(
            f"the configuration {path}: {name!r} must be an integer from 1 to {most:,}, got {value!r:.40}."
        )
    return value
