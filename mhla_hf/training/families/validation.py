# SPDX-License-Identifier: Apache-2.0
"""Validation videos and pictures: the same prompts from the same noise, as training goes on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from accelerate import Accelerator
from PIL import Image

from ...utils.files import atomic_file
from ..config import TrainingConfig
from ..data.batches import LatentSamples
from ..data.cache import LatentDataset
from ..data.class_labels import find_label, pipeline_labels
from ..data.encoding import sana_instruction
from ..data.images import picture_grid
from ..data.videos import write_video
from ..loading import PipelineSource
from .sizes import PipelineSizes


class Validator(ABC):
    """Makes samples with the transformer that is being trained.

    Prompts are encoded once, when it is built; afterwards only the VAE and the scheduler are kept in memory.

    Args:
        source: The pipeline that training started from.
        config: The options; its `validation_*` ones are used.
        dataset: The cache that is trained on: its sizes and classes are those of the samples.
        device: Where to encode the prompts and run the VAE.

    Attributes:
        encoders: What the pipeline encodes prompts with; it is given None in their places later.
    """

    encoders: ClassVar[tuple[str, ...]] = ("text_encoder", "tokenizer")

    def __init__(
        self, source: PipelineSource, config: TrainingConfig, dataset: LatentDataset, device: torch.device
    ) -> None:
        self.config = config
        self.device = device
        self.prompts = config.validation_prompts
        self.settings = dataset.settings
        pipeline = source.load_encoders()
        if "text_encoder" in self.encoders:
            pipeline.text_encoder.to(device)
        with torch.no_grad():
            self.conditions = self._conditions(pipeline, source, dataset)
        self.pipeline_class = type(pipeline)
        self.vae, self.scheduler = pipeline.vae, pipeline.scheduler
        self.options = {
            name: value for name, value in pipeline.config.items() if name in _PLAIN_OPTIONS and value is not None
        }

    @abstractmethod
    def _conditions(self, pipeline: Any, source: PipelineSource, dataset: LatentDataset) -> list[dict[str, Any]]:
        """Arguments of the pipeline's call for each prompt, tensors on the CPU."""

    @abstractmethod
    def write(self, transformer: torch.nn.Module, folder: Path, step: int) -> tuple[list[Path], np.ndarray]:
        """Writes the samples of a step.

        Args:
            transformer: The transformer, unwrapped.
            folder: Where to write.
            step: Fine-tuning step, for the file names.

        Returns:
            The files, and the samples, see `generate`.
        """

    @abstractmethod
    def pictures(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        """Pictures for trackers, by name, uint8 `[H, W, 3]`."""

    @torch.no_grad()
    def generate(self, transformer: torch.nn.Module) -> np.ndarray:
        """One sample per prompt, uint8: `[P, F, H, W, 3]` of videos, `[P, H, W, 3]` of pictures."""
        pipeline = self.pipeline_class(
            **dict.fromkeys(self.encoders),
            vae=self.vae.to(self.device),
            scheduler=self.scheduler,
            transformer=transformer,
            **self.options,
        )
        pipeline.set_progress_bar_config(disable=True)
        was_training = transformer.training
        transformer.eval()
        samples = []
        try:
            for condition in self.conditions:
                sample = pipeline(
                    **{
                        name: value.to(self.device) if torch.is_tensor(value) else value
                        for name, value in condition.items()
                    },
                    num_inference_steps=self.config.validation_inference_steps,
                    guidance_scale=self.config.validation_guidance,
                    generator=torch.Generator().manual_seed(self.config.seed),
                    output_type="np",
                )[0][0]
                samples.append(np.rint(np.asarray(sample) * 255).clip(0, 255).astype(np.uint8))
        finally:
            transformer.train(was_training)
            self.vae.to("cpu")
        return np.stack(samples)

    def write_and_log(
        self, transformer: torch.nn.Module, folder: Path, step: int, accelerator: Accelerator, run_step: int
    ) -> None:
        """Writes the samples of a step, and pictures of them to the trackers.

        Args:
            transformer: See `write`.
            folder: See `write`.
            step: See `write`.
            accelerator: Gives the precision to run in, and the trackers.
            run_step: The step as trackers count it, with those of earlier stages.
        """
        with accelerator.autocast():
            _, samples = self.write(transformer, folder, step)
        for tracker in accelerator.trackers:
            pictures = {name: picture[None] for name, picture in self.pictures(samples).items()}
            options = {"dataformats": "NHWC"} if tracker.name == "tensorboard" else {}
            tracker.log_images(pictures, step=run_step, **options)


class WanValidator(Validator):
    """Videos, one file per prompt."""

    def _conditions(self, pipeline: Any, source: PipelineSource, dataset: LatentDataset) -> list[dict[str, Any]]:
        embeddings, negative = pipeline.encode_prompt(
            list(self.prompts),
            negative_prompt=self.config.validation_negative_prompt,
            max_sequence_length=self.settings["max_sequence_length"],
            device=self.device,
        )
        size = {name: self.settings[name] for name in ("height", "width", "num_frames")}
        return [
            {"prompt_embeds": own[None].cpu(), "negative_prompt_embeds": other[None].cpu(), **size}
            for own, other in zip(embeddings, negative, strict=True)
        ]

    def write(self, transformer: torch.nn.Module, folder: Path, step: int) -> tuple[list[Path], np.ndarray]:
        """See the base class; one file per prompt."""
        videos = self.generate(transformer)
        folder.mkdir(parents=True, exist_ok=True)
        paths = [
            write_video(folder / f"step-{step:08d}-prompt-{number}.mp4", video) for number, video in enumerate(videos)
        ]
        return paths, videos

    def pictures(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        """A few frames of each video."""
        return {f"validation/{number}": frame_strip(video) for number, video in enumerate(samples)}


class PictureValidator(Validator):
    """Pictures, all prompts in one file."""

    def write(self, transformer: torch.nn.Module, folder: Path, step: int) -> tuple[list[Path], np.ndarray]:
        """See the base class; one file with a grid of all pictures."""
        pictures = self.generate(transformer)
        path = folder / f"step-{step:08d}.png"
        with atomic_file(path) as temporary:
            Image.fromarray(picture_grid(pictures)).save(temporary)
        return [path], pictures

    def pictures(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        """The grid."""
        return {"validation": picture_grid(samples)}


class SanaValidator(PictureValidator):
    """Pictures of prompts, in the size of the cache."""

    def _conditions(self, pipeline: Any, source: PipelineSource, dataset: LatentDataset) -> list[dict[str, Any]]:
        names = (
            "prompt_embeds",
            "prompt_attention_mask",
            "negative_prompt_embeds",
            "negative_prompt_attention_mask",
        )
        encoded = pipeline.encode_prompt(
            list(self.prompts),
            negative_prompt=self.config.validation_negative_prompt,
            max_sequence_length=self.settings["max_sequence_length"],
            complex_human_instruction=sana_instruction(pipeline),
            device=self.device,
        )
        common = {
            # By default it is an empty text, which the pipeline refuses beside embeddings.
            "negative_prompt": None,
            "height": self.settings["height"],
            "width": self.settings["width"],
            "use_resolution_binning": False,
        }
        by_prompt = zip(*(tensor.cpu().split(1) for tensor in encoded), strict=True)
        return [{**dict(zip(names, tensors, strict=True)), **common} for tensors in by_prompt]


class DiTValidator(PictureValidator):
    """Pictures of classes, in the one size that the pipeline makes."""

    encoders = ()

    def _conditions(self, pipeline: Any, source: PipelineSource, dataset: LatentDataset) -> list[dict[str, Any]]:
        sizes = PipelineSizes.of_pipeline(source)
        height, width = self.settings["height"], self.settings["width"]
        if (height, width) != (sizes.own_size, sizes.own_size):
            raise ValueError(
                f"validation_prompts: the pipeline makes pictures of {sizes.own_size}x{sizes.own_size} only, and the "
                f"cache has {height}x{width}"
            )
        if self.config.validation_guidance > 1 and sizes.num_classes != _GUIDANCE_LABEL:
            raise ValueError(
                f"validation_guidance must be at most 1: the pipeline's guidance is for models of {_GUIDANCE_LABEL} "
                f"classes, and this one has {sizes.num_classes}"
            )
        trained = dataset.manifest["classes"]
        # The classes of the data come first where an error lists them, and mean what they mean there.
        known = {**trained, **pipeline_labels(source), **trained}
        return [{"class_labels": [find_label(prompt, known, sizes.num_classes)]} for prompt in self.prompts]


VALIDATORS: dict[str, type[Validator]] = {"wan": WanValidator, "sana": SanaValidator, "dit": DiTValidator}
"""By the name of the family."""

# Plain options of Wan's pipeline that change how it samples.
_PLAIN_OPTIONS = ("expand_timesteps",)
# The label without class that diffusers' DiTPipeline has built in.
_GUIDANCE_LABEL = 1000


def make_validator(
    source: PipelineSource | None, config: TrainingConfig, dataset: LatentSamples, accelerator: Accelerator
) -> Validator | None:
    """The validator of a run; None where it makes no samples, and in processes that do not.

    Args:
        source: The pipeline that training starts from.
        config: The options.
        dataset: What is trained on; it gives the size.
        accelerator: The processes.

    Raises:
        ValueError: If samples are wanted but cannot be made.
    """
    makes_samples = config.validation_prompts and (config.max_steps or config.distill_steps)
    if not makes_samples or not accelerator.is_main_process:
        return None
    if source is None or config.output is None or not isinstance(dataset, LatentDataset):
        raise ValueError("validation_prompts need model, output and cache: a pipeline, its data and where to write")
    if source.index.get("boundary_ratio") is not None:
        raise ValueError("validation_prompts cannot be used for one transformer of a pipeline with two")
    return VALIDATORS[source.family](source, config, dataset, accelerator.device)


def frame_strip(video: np.ndarray, count: int = 5) -> np.ndarray:
    """A few frames of a video `[F, H, W, 3]` side by side, `[H, count W, 3]`."""
    numbers = np.linspace(0, len(video) - 1, min(count, len(video))).round().astype(int)
    return np.concatenate([video[number] for number in numbers], axis=1)
