# SPDX-License-Identifier: Apache-2.0
"""`Family`: everything that one family of diffusion models brings to training.

The modules of this folder are imported without torch and diffusers, for the command line reads its options from them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from ...utils.json_files import read_json
from .objective import Objective
from .sizes import PipelineSizes, read_count


if TYPE_CHECKING:
    import torch

    from ..config import CacheConfig, TrainingConfig
    from ..data.cache import LatentDataset
    from ..loading import PipelineSource

# Options of models that are conditioned on text.
TEXT_OPTIONS = frozenset({"max_sequence_length", "prompts", "validation_negative_prompt"})
_MOST_STAGES = 12


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
