# SPDX-License-Identifier: Apache-2.0
"""Validation videos: the same prompts from the same noise, as training goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from .batches import LatentSamples
from .cache import LatentDataset
from .config import TrainingConfig
from .pipeline_files import read_index
from .videos import write_video


class Validator:
    """Makes videos with the transformer that is being trained.

    Prompts are encoded once, when it is built; afterwards only the VAE and the scheduler are kept in memory.

    Args:
        directory: The pipeline that training started from.
        config: The options; its `validation_*` ones are used.
        video_size: `(frames, height, width)` in pixels.
        max_sequence_length: Tokens that prompts are padded to.
        device: Where to encode the prompts and run the VAE.
    """

    def __init__(
        self,
        directory: Path,
        config: TrainingConfig,
        video_size: tuple[int, int, int],
        max_sequence_length: int,
        device: torch.device,
    ) -> None:
        self.config = config
        self.video_size = video_size
        self.device = device
        self.prompts = config.validation_prompts
        pipeline = load_encoders(directory)
        pipeline.text_encoder.to(device)
        with torch.no_grad():
            embeddings, negative = pipeline.encode_prompt(
                list(self.prompts),
                negative_prompt=config.validation_negative_prompt,
                max_sequence_length=max_sequence_length,
                device=device,
            )
        self.embeddings, self.negative = embeddings.cpu(), negative.cpu()
        self.pipeline_class = type(pipeline)
        self.vae, self.scheduler = pipeline.vae, pipeline.scheduler
        self.extra = {"expand_timesteps": bool(read_index(directory).get("expand_timesteps", False))}

    @torch.no_grad()
    def frames(self, transformer: torch.nn.Module) -> np.ndarray:
        """One video per prompt, uint8 `[P, F, H, W, 3]`."""
        pipeline = self.pipeline_class(
            tokenizer=None,
            text_encoder=None,
            vae=self.vae.to(self.device),
            scheduler=self.scheduler,
            transformer=transformer,
            **self.extra,
        )
        pipeline.set_progress_bar_config(disable=True)
        num_frames, height, width = self.video_size
        was_training = transformer.training
        transformer.eval()
        videos = []
        try:
            for number in range(len(self.prompts)):
                video = pipeline(
                    prompt_embeds=self.embeddings[number : number + 1].to(self.device),
                    negative_prompt_embeds=self.negative[number : number + 1].to(self.device),
                    height=height,
                    width=width,
                    num_frames=num_frames,
                    num_inference_steps=self.config.validation_inference_steps,
                    guidance_scale=self.config.validation_guidance,
                    generator=torch.Generator().manual_seed(self.config.seed),
                    output_type="np",
                ).frames[0]
                videos.append(np.rint(np.asarray(video) * 255).clip(0, 255).astype(np.uint8))
        finally:
            transformer.train(was_training)
            self.vae.to("cpu")
        return np.stack(videos)

    def write(self, transformer: torch.nn.Module, folder: Path, step: int) -> tuple[list[Path], np.ndarray]:
        """Writes one file per prompt.

        Args:
            transformer: The transformer, unwrapped.
            folder: Where to write.
            step: Fine-tuning step, for the file names.

        Returns:
            The files, and the frames `[P, F, H, W, 3]`.
        """
        frames = self.frames(transformer)
        folder.mkdir(parents=True, exist_ok=True)
        paths = [
            write_video(folder / f"step-{step:08d}-prompt-{number}.mp4", video) for number, video in enumerate(frames)
        ]
        return paths, frames

    def write_and_log(self, transformer: torch.nn.Module, folder: Path, step: int, accelerator: Accelerator) -> None:
        """Writes one file per prompt, and a few of its frames to the trackers.

        Args:
            transformer: See `write`.
            folder: See `write`.
            step: See `write`; trackers count the steps of both stages.
            accelerator: Gives the precision to run in, and the trackers.
        """
        with accelerator.autocast():
            _, videos = self.write(transformer, folder, step)
        for tracker in accelerator.trackers:
            images = {f"validation/{number}": frame_strip(video)[None] for number, video in enumerate(videos)}
            options = {"dataformats": "NHWC"} if tracker.name == "tensorboard" else {}
            tracker.log_images(images, step=self.config.transfer_steps + step, **options)


def make_validator(
    source: Path | None, config: TrainingConfig, dataset: LatentSamples, accelerator: Accelerator
) -> Validator | None:
    """The validator of a run; None where it makes no videos, and in processes that do not.

    Args:
        source: The pipeline that training starts from.
        config: The options.
        dataset: What is trained on; its videos give the size.
        accelerator: The processes.

    Raises:
        ValueError: If videos are wanted but cannot be made.
    """
    if not config.validation_prompts or not accelerator.is_main_process or not config.max_steps:
        return None
    if source is None or config.output is None or not isinstance(dataset, LatentDataset):
        raise ValueError("validation_prompts need model, output and cache: a pipeline, its data and where to write")
    if read_index(source).get("boundary_ratio") is not None:
        raise ValueError("validation_prompts cannot be used for one transformer of a pipeline with two")
    settings = dataset.manifest["settings"]
    size = (settings["num_frames"], settings["height"], settings["width"])
    return Validator(source, config, size, dataset.max_sequence_length, accelerator.device)


def load_encoders(directory: Path) -> Any:
    """The pipeline without its transformers: VAE, text encoder, tokenizer and scheduler, on the CPU."""
    import diffusers

    pipeline_class = getattr(diffusers, read_index(directory)["_class_name"])
    pipeline = pipeline_class.from_pretrained(directory, transformer=None, transformer_2=None)
    pipeline.set_progress_bar_config(disable=True)
    for module in (pipeline.vae, pipeline.text_encoder):
        module.requires_grad_(False).eval()
    return pipeline


def frame_strip(video: np.ndarray, count: int = 5) -> np.ndarray:
    """A few frames of a video `[F, H, W, 3]` side by side, `[H, count W, 3]`."""
    numbers = np.linspace(0, len(video) - 1, min(count, len(video))).round().astype(int)
    return np.concatenate([video[number] for number in numbers], axis=1)
