# SPDX-License-Identifier: Apache-2.0
"""Images and videos of diffusers pipelines, from the same noise."""

from __future__ import annotations

import inspect
import math
import statistics
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ..demo.config import DEFAULT_PROMPTS
from ..demo.data import TEXT_LENGTH
from ..models.registry import family_for
from ..recovery.probes import PROMPTS, sample_size
from ..utils.machine import synchronize
from .generation import TITLES, Answer, Field, Generator, number_field, prompt_field, seed_field, whole_field
from .limits import MAX_GUIDANCE, Limits
from .models import Comparison
from .work import Control, Progress


# What heights and widths must be multiples of for the pipelines, whatever the model; 8 for others.
_MULTIPLES = {"wan": 16, "sana": 32, "sana-video": 32}
# Pixels of the longer side; smaller pictures are enlarged by a whole number.
_SHOWN_PIXELS = 320


class DiffusionGenerator(Generator):
    """Images and videos of diffusers pipelines, from the same noise.

    Args:
        comparison: The pipelines.
        limits: Bounds of what visitors may ask for.

    Raises:
        ValueError: If the pipeline needs more than a prompt or a class.
    """

    def __init__(self, comparison: Comparison, limits: Limits) -> None:
        super().__init__(comparison, limits)
        pipeline = comparison.mhla
        self._parameters = inspect.signature(type(pipeline).__call__).parameters
        needed = {name for name in ("image", "video") if name in self._parameters}
        if needed or not {"prompt", "class_labels"} & set(self._parameters):
            raise ValueError(
                f"{comparison.name} is a {type(pipeline).__name__}, which makes nothing of a prompt or a class alone; "
                "the application has no other inputs."
            )
        self.fields = tuple(self._fields())
        self._text_length = comparison.text_length or (TEXT_LENGTH if comparison.is_demo else None)

    def generate(self, model: str, request: Mapping[str, Any], control: Control) -> Answer:
        pipeline = getattr(self.comparison, model)
        title = TITLES[model]
        options: dict[str, Any] = dict(request)
        steps = options.pop("steps")
        generator = torch.Generator().manual_seed(options.pop("seed"))
        if "class_label" in options:
            options["class_labels"] = [options.pop("class_label")]
        if "use_resolution_binning" in self._parameters:
            # Otherwise the pipeline chooses a size of its own, which may be far beyond the limits.
            options["use_resolution_binning"] = False
        if "max_sequence_length" in self._parameters and self._text_length is not None:
            options["max_sequence_length"] = self._text_length
        denoisers = [getattr(pipeline, name) for name in self.comparison.components]
        clock = _StepClock(steps, title, control, self.comparison.device)
        hooks = [denoiser.register_forward_pre_hook(clock.before, with_kwargs=True) for denoiser in denoisers]
        hooks += [denoiser.register_forward_hook(clock.after) for denoiser in denoisers]
        control.limit(self.limits.seconds)
        control.progress = Progress(f"{title}: reading the prompt")
        began = time.perf_counter()
        try:
            with control.checked_by(pipeline.components.values()), torch.no_grad():
                output = pipeline(**options, num_inference_steps=steps, generator=generator, output_type="np")
        finally:
            for hook in hooks:
                hook.remove()
        value = _pixels(output.frames[0] if self.comparison.kind == "video" else output.images[0])
        return Answer(value, time.perf_counter() - began, "step", clock.seconds_per_step())

    def _fields(self) -> list[Field]:
        pipeline, limits, known = self.comparison.mhla, self.limits, self._parameters
        size = sample_size(pipeline, self.comparison.mhla_models())
        frames_name = next((name for name in ("num_frames", "frames") if name in known), None)
        steps = min(20, limits.steps)
        fields = [whole_field("steps", "Steps", steps, 1, limits.steps), seed_field()]
        if "guidance_scale" in known:
            fields.append(number_field("guidance_scale", "Guidance", 4.0, MAX_GUIDANCE))
        if "height" in known:
            fields += self._sides(size.get("height"), size.get("width"))
        if frames_name is not None:
            every = getattr(pipeline, "vae_scale_factor_temporal", 1)
            # One frame, and then as many as the autoencoder makes of each of its own.
            most = (limits.frames_for(size.get("num_frames")) - 1) // every * every + 1
            default = min(size.get("num_frames") or most, most)
            fields.append(whole_field(frames_name, "Frames", default, 1, most, every))
        if "prompt" in known:
            prompt = DEFAULT_PROMPTS[0] if self.comparison.is_demo else PROMPTS[2]
            return [prompt_field(prompt, limits), *fields]
        classes = pipeline.transformer.config.num_embeds_ada_norm
        return [whole_field("class_label", "Class", 0, 0, classes - 1), *fields]

    def _sides(self, height: int | None, width: int | None) -> list[Field]:
        """Height and width: multiples of a patch's pixels, each at most four times the side of the largest square."""
        pipeline = self.comparison.mhla
        model: Any = next(iter(self.comparison.mhla_models().values()))
        patch = model.config.patch_size
        factor: int = getattr(pipeline, "vae_scale_factor_spatial", 0) or getattr(pipeline, "vae_scale_factor", 8)
        family = family_for(type(model).__name__).name
        unit = math.lcm(int(factor * (patch if isinstance(patch, int) else patch[-1])), _MULTIPLES.get(family, 8))
        self._pixels = self.limits.pixels_for(height, width)
        square = max(unit, int(self._pixels**0.5) // unit * unit)
        longest = max(unit, min(4 * square, self._pixels // unit // unit * unit))
        if not height or not width or height * width > self._pixels:
            height = width = square
        return [
            whole_field(name, name.capitalize(), min(own, longest), unit, longest, unit)
            for name, own in (("height", height), ("width", width))
        ]

    def check_together(self, request: Mapping[str, Any]) -> None:
        pixels = request.get("height", 0) * request.get("width", 0)
        if pixels and pixels > self._pixels:
            raise ValueError(f"Height × Width is {pixels:,} pixels; at most {self._pixels:,} are allowed here.")


class _StepClock:
    """Times the steps of a pipeline from outside: hooks of its denoisers, which guidance may call twice a step."""

    def __init__(self, steps: int, title: str, control: Control, device: torch.device) -> None:
        self._steps, self._title, self._control, self._device = steps, title, control, device
        self._timestep: float | None = None
        self._began: list[float] = []
        self._ended = 0.0

    def before(self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._control.check()
        timestep = kwargs.get("timestep", args[1] if len(args) > 1 else None)
        value = float(torch.as_tensor(timestep).flatten()[0]) if timestep is not None else None
        if not self._began or value != self._timestep:
            synchronize(self._device)
            self._timestep = value
            self._began.append(time.perf_counter())
            step = min(len(self._began), self._steps)
            self._control.progress = Progress(f"{self._title}: step {step} of {self._steps}", step - 1, self._steps)

    def after(self, *_: Any) -> None:
        synchronize(self._device)
        self._ended = time.perf_counter()
        if len(self._began) >= self._steps:
            self._control.progress = Progress(f"{self._title}: decoding", self._steps, self._steps)

    def seconds_per_step(self) -> float:
        """Median time of a step."""
        ends = [*self._began[1:], self._ended]
        return statistics.median(end - began for began, end in zip(self._began, ends, strict=True))


def _pixels(values: np.ndarray) -> np.ndarray:
    """uint8 from numbers between 0 and 1; small pictures enlarged, so that they are no specks."""
    from PIL import Image

    pixels = np.rint(np.asarray(values, dtype=np.float32) * 255).clip(0, 255).astype(np.uint8)
    height, width = pixels.shape[-3:-1]
    scale = _SHOWN_PIXELS // max(height, width)
    if scale < 2:
        return pixels
    frames = pixels.reshape(-1, height, width, 3)
    large = [
        Image.fromarray(frame).resize((width * scale, height * scale), Image.Resampling.BICUBIC) for frame in frames
    ]
    return np.stack([np.asarray(frame) for frame in large]).reshape(
        *pixels.shape[:-3], height * scale, width * scale, 3
    )
