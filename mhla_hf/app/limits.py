# SPDX-License-Identifier: Apache-2.0
"""Bounds of what one visitor may ask for. Imports nothing heavy: the command line reads them."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from ..utils.messages import shorten_value


MAX_SEED = 2**32 - 1
MAX_GUIDANCE = 30.0
MAX_TEMPERATURE = 5.0

# A model made for smaller samples may be tried at these sizes all the same.
_LEAST_PIXELS = 256 * 256
_LEAST_FRAMES = 33


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of one generation, and of the queue.

    Attributes:
        steps: Denoising steps.
        pixels: Height times width; `None` for the size that the model's mixing weights were made for, at least
            256 × 256.
        frames: Frames of a video; `None` for the number that they were made for, at least 33.
        prompt: Characters of a prompt.
        new_tokens: Tokens that a language model generates.
        seconds: Time of one model's generation.
        queue: Visitors who wait, besides the one who is served.

    Raises:
        ValueError: If one is not positive.
    """

    steps: int = 50
    pixels: int | None = None
    frames: int | None = None
    prompt: int = 1000
    new_tokens: int = 256
    seconds: float = 300.0
    queue: int = 8

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            optional = entry.name in ("pixels", "frames")
            if not (value is None and optional) and not (_is_number(value) and 0 < value < math.inf):
                raise ValueError(f"limit {entry.name}={shorten_value(value)} must be a positive number.")

    def pixels_for(self, height: int | None, width: int | None) -> int:
        """The bound of height times width for a model made for a size."""
        return self.pixels or max((height or 0) * (width or 0), _LEAST_PIXELS)

    def frames_for(self, frames: int | None) -> int:
        """The bound of frames for a model made for a number of them."""
        return self.frames or max(frames or 0, _LEAST_FRAMES)


def check_whole(name: str, value: Any, least: int, most: int, *, step: int = 1) -> int:
    """A whole number from a visitor.

    Args:
        name: Its name on the page.
        value: What the page sent; numbers arrive as floats too.
        least: Smallest value.
        most: Largest value.
        step: Allowed are `least` and every `step`-th number after it.

    Raises:
        ValueError: If it is none of the allowed numbers.
    """
    if not _is_number(value) or not least <= value <= most or value % 1:
        raise ValueError(f"{name} must be a whole number from {least} to {most}, not {shorten_value(value, 40)}.")
    if (int(value) - least) % step:
        first = "" if least % step == 0 else f"{least} plus "
        raise ValueError(f"{name} must be {first}a multiple of {step}, not {int(value)}.")
    return int(value)


def check_number(name: str, value: Any, most: float) -> float:
    """A number from a visitor, from 0 to `most`.

    Raises:
        ValueError: If it is none.
    """
    if not _is_number(value) or not 0 <= value <= most:
        raise ValueError(f"{name} must be a number from 0 to {most:g}, not {shorten_value(value, 40)}.")
    return float(value)


def check_text(name: str, value: Any, most: int) -> str:
    """A text from a visitor.

    Raises:
        ValueError: If it is none, empty or too long.
    """
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{name} must be a text, and not empty.")
    if len(value) > most:
        raise ValueError(f"{name} has {len(value):,} characters; at most {most:,} are taken here.")
    return value


def _is_number(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)
