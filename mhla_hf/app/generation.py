# SPDX-License-Identifier: Apache-2.0
"""Requests of visitors, checked field by field, and answers of the two models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .limits import MAX_SEED, Limits, check_number, check_text, check_whole
from .models import Comparison
from .work import Control


TITLES = {"original": "Original", "mhla": "MHLA"}
"""The models of a comparison as the page calls them."""


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


class Generator(ABC):
    """The two models of a comparison, as one that answers requests.

    Args:
        comparison: The models.
        limits: Bounds of what visitors may ask for.

    Attributes:
        fields: The inputs of a request.
    """

    fields: tuple[Field, ...]

    def __init__(self, comparison: Comparison, limits: Limits) -> None:
        self.comparison, self.limits = comparison, limits

    def check_together(self, request: Mapping[str, Any]) -> None:  # noqa: B027 (nothing to check is the usual case)
        """Checks values that are allowed one by one.

        Raises:
            ValueError: If they are not together.
        """

    @abstractmethod
    def generate(self, model: str, request: Mapping[str, Any], control: Control) -> Answer:
        """Answers a request.

        Args:
            model: `"original"` or `"mhla"`.
            request: From [`read_request`].
            control: Gets the progress, and stops the work.

        Raises:
            WorkStopped: If it was stopped.
            ValueError: If it takes longer than the limit.
        """


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


def whole_field(name: str, label: str, default: int, least: int, most: int, step: int = 1) -> Field:
    """A whole number from `least` to `most`, every `step`-th one."""

    def check(value: Any) -> int:
        return check_whole(label, value, least, most, step=step)

    return Field(name, label, check, default, least, most, step)


def number_field(name: str, label: str, default: float, most: float) -> Field:
    """A number from 0 to `most`."""
    return Field(name, label, lambda value: check_number(label, value, most), default, 0.0, most, 0.1)


def prompt_field(default: str, limits: Limits) -> Field:
    """A prompt within the limits."""
    return Field("prompt", "Prompt", lambda value: check_text("Prompt", value, limits.prompt), default)


def seed_field() -> Field:
    """The seed of everything random."""
    return whole_field("seed", "Seed", 0, 0, MAX_SEED)
