# SPDX-License-Identifier: Apache-2.0
"""One request of a visitor: checked against the limits, and answered by the MHLA model and by its original."""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from ..demo.config import DEFAULT_PROMPTS
from ..demo.data import TEXT_LENGTH
from ..recovery.probes import PROMPTS, sample_size
from ..utils.machine import synchronize
from .limits import MAX_GUIDANCE, MAX_SEED, MAX_TEMPERATURE, Limits, check_number, check_text, check_whole
from .models import Comparison
from .work import Control, Progress


# Pixels of the longer side; smaller pictures are enlarged by a whole number.
_SHOWN_PIXELS = 320


@dataclass(frozen=True)
class Field:
    """One input of a request.

    Attributes:
        name: Name of the argument.
        label: Name on the page.
        check: Returns the checked value, or raises `ValueError`.
        default: First value.
        least: Smallest number; `None` for a text.
        most: Largest number.
        step: Distance of the numbers.
    """

    name: str
    label: str
    check: Callable[[Any], Any]
    default: Any
    least: float | None = None
    most: float | None = None
    step: float | None = None


@dataclass(frozen=True)
class Answer:
    """What one model made of a request.

    Attributes:
        value: Frames `[F, H, W, 3]` uint8 of a video, an image `[H, W, 3]` uint8, or a text.
        seconds: Time of everything, from the request to the value.
        unit: What the work consists of: a step, or a token.
        unit_seconds: Time of one of them; of denoising steps the median, of tokens the mean.
    """

    value: Any
    seconds: float
    unit: str
    unit_seconds: float


class Generator(Protocol):
    """The two models of a comparison, as one that answers requests."""

    comparison: Comparison
    fields: tuple[Field, ...]

    def check_together(self, request: Mapping[str, Any]) -> None:
        """Raises `ValueError` if values that are allowed one by one are not together."""

    def generate(self, model: str, request: Mapping[str, Any], control: Control) -> Answer:
        """Answers a checked request with `"original"` or `"mhla"`."""


def read_request(generator: Generator, values: Sequence[Any]) -> dict[str, Any]:
    """Checks what a visitor sent.

    Args:
        generator: What it is for.
        values: A value for each of its fields.

    Raises:
        ValueError: If a value is missing, or is not allowed.
    """
    if len(values) != len(generator.fields):
        names = ", ".join(field.name for field in generator.fields)
        raise ValueError(f"{len(generator.fields)} values are expected: {names}.")
    request = {field.name: field.check(value) for field, value in zip(generator.fields, values, strict=True)}
    generator.check_together(request)
    return request


def make_generator(comparison: Comparison, limits: Limits) -> Generator:
    """The generator that suits the kind of a comparison's models.

    Raises:
        ValueError: If the pipeline needs more than a prompt or a class.
    """
    return (TextGenerator if comparison.kind == "text" else DiffusionGenerator)(comparison, limits)


def _whole(name: str, label: str, default: int, least: int, most: int, step: int = 1) -> Field:
    return Field(name, label, lambda value: check_whole(label, value, least, most, step=step), default, least, most, step)


def _number(name: str, label: str, default: float, most: float) -> Field:
    return Field(name, label, lambda value: check_number(label, value, most), default, 0.0, most, 0.1)


def _prompt(default: str, limits: Limits) -> Field:
    return Field("prompt", "Prompt", lambda value: check_text("Prompt", value, limits.prompt), default)


class DiffusionGenerator:
    """Images and videos of diffusers pipelines, from the same noise.

    Args:
        comparison: The pipelines.
        limits: Bounds of what visitors may ask for.

    Raises:
        ValueError: If the pipeline needs more than a prompt or a class.
    """

    def __init__(self, comparison: Comparison, limits: Limits) -> None:
        self.comparison, self.limits = comparison, limits
        pipeline = comparison.mhla
        self._parameters = inspect.signature(type(pipeline).__call__).parameters
        needed = {name for name in ("image", "video") if name in self._parameters}
        if needed or not {"prompt", "class_labels"} & set(self._parameters):
            raise ValueError(
                f"{comparison.name} is a {type(pipeline).__name__}, which takes {' and '.join(sorted(needed)) or 'none'} "
                "besides a prompt; the application takes prompts and classes alone."
            )
        self.fields = tuple(self._fields())
        self._text_length = comparison.text_length or (TEXT_LENGTH if comparison.is_demo else None)

    def generate(self, model: str, request: Mapping[str, Any], control: Control) -> Answer:
        """Answers a checked request; see [`Generator`]."""
        pipeline = getattr(self.comparison, model)
        title = "Original" if model == "original" else "MHLA"
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
        fields = [_whole("steps", "Steps", steps, 1, limits.steps), _whole("seed", "Seed", 0, 0, MAX_SEED)]
        if "guidance_scale" in known:
            fields.append(_number("guidance_scale", "Guidance", 4.0, MAX_GUIDANCE))
        if "height" in known:
            fields += self._sides(size.get("height"), size.get("width"))
        if frames_name is not None:
            every = getattr(pipeline, "vae_scale_factor_temporal", 1)
            # One frame, and then as many as the autoencoder makes of each of its own.
            most = (limits.frames_for(size.get("num_frames")) - 1) // every * every + 1
            default = min(size.get("num_frames") or most, most)
            fields.append(_whole(frames_name, "Frames", default, 1, most, every))
        if "prompt" in known:
            prompt = DEFAULT_PROMPTS[0] if self.comparison.is_demo else PROMPTS[2]
            return [_prompt(prompt, limits), *fields]
        classes = pipeline.transformer.config.num_embeds_ada_norm
        return [_whole("class_label", "Class", 0, 0, classes - 1), *fields]

    def _sides(self, height: int | None, width: int | None) -> list[Field]:
        """Height and width: multiples of a patch's pixels; each alone may be as long as the area allows."""
        pipeline = self.comparison.mhla
        patch = next(iter(self.comparison.mhla_models().values())).config.patch_size
        factor = getattr(pipeline, "vae_scale_factor_spatial", None) or getattr(pipeline, "vae_scale_factor", 8)
        unit = factor * (patch if isinstance(patch, int) else patch[-1])
        self._pixels = self.limits.pixels_for(height, width)
        longest = max(unit, self._pixels // unit // unit * unit)
        square = max(unit, int(self._pixels**0.5) // unit * unit)
        return [
            _whole(name, name.capitalize(), min(own or square, longest), unit, longest, unit)
            for name, own in (("height", height), ("width", width))
        ]

    def check_together(self, request: Mapping[str, Any]) -> None:
        """Checks the area; see [`Generator`]."""
        pixels = request.get("height", 0) * request.get("width", 0)
        if pixels and pixels > self._pixels:
            raise ValueError(
                f"Height × Width is {pixels:,} pixels; at most {self._pixels:,} are allowed here."
            )


class TextGenerator:
    """Texts of language models, with the same random numbers.

    Args:
        comparison: The models.
        limits: Bounds of what visitors may ask for.
    """

    def __init__(self, comparison: Comparison, limits: Limits) -> None:
        self.comparison, self.limits = comparison, limits
        self.fields = (
            _prompt("Once upon a time", limits),
            _whole("new_tokens", "New tokens", min(64, limits.new_tokens), 1, limits.new_tokens),
            _number("temperature", "Temperature", 0.0, MAX_TEMPERATURE),
            _whole("seed", "Seed", 0, 0, MAX_SEED),
        )

    def check_together(self, request: Mapping[str, Any]) -> None:
        """Nothing: the values do not depend on each other; see [`Generator`]."""

    def generate(self, model: str, request: Mapping[str, Any], control: Control) -> Answer:
        """Answers a checked request; see [`Generator`]."""
        from transformers import StoppingCriteriaList

        language_model, tokenizer = getattr(self.comparison, model), self.comparison.tokenizer
        device, total = self.comparison.device, request["new_tokens"]
        title = "Original" if model == "original" else "MHLA"
        control.limit(self.limits.seconds)
        if tokenizer.chat_template is not None:
            chat = [{"role": "user", "content": request["prompt"]}]
            inputs = tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        else:
            inputs = tokenizer(request["prompt"], return_tensors="pt", return_token_type_ids=False)
        inputs = inputs.to(device)
        length = inputs["input_ids"].shape[1]

        def count(tokens: torch.Tensor, _: Any, **__: Any) -> torch.Tensor:
            control.check()
            control.progress = Progress(f"{title}: generating", tokens.shape[1] - length, total)
            return torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)

        control.progress = Progress(f"{title}: generating", 0, total)
        options: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        if request["temperature"]:
            options = {"do_sample": True, "temperature": request["temperature"]}
        if language_model.generation_config.pad_token_id is None:
            options["pad_token_id"] = tokenizer.pad_token_id or tokenizer.eos_token_id
        with torch.random.fork_rng(), control.checked_by([language_model]), torch.no_grad():
            torch.manual_seed(request["seed"])
            synchronize(device)
            began = time.perf_counter()
            tokens = language_model.generate(
                **inputs, max_new_tokens=total, stopping_criteria=StoppingCriteriaList([count]), **options
            )
            synchronize(device)
            seconds = time.perf_counter() - began
        new = tokens[0, length:]
        text = tokenizer.decode(new, skip_special_tokens=True)
        return Answer(text, seconds, "token", seconds / max(1, len(new)))


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
    pixels = np.rint(np.asarray(values, dtype=np.float32) * 255).clip(0, 255).astype(np.uint8)
    scale = max(1, _SHOWN_PIXELS // max(pixels.shape[-3:-1]))
    return pixels.repeat(scale, axis=-3).repeat(scale, axis=-2)
