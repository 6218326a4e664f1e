# SPDX-License-Identifier: Apache-2.0
"""What the cache step encodes: samples that are listed first and read one at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


class UnusableSampleError(ValueError):
    """A file that has to be left out; the message names it and says why."""


@dataclass(frozen=True)
class DataSample:
    """One video or picture.

    Attributes:
        key: What identifies it; the cache notices by it that a source has changed.
        condition: Its caption, or the number of its class.
        load: Reads it, fp32 in [-1, 1]: `[3, F, H, W]` for a video, `[3, H, W]` for a picture. Raises
            `UnusableSampleError` if it has to be left out.
        class_name: Name of the class, where there is one.
    """

    key: str
    condition: str | int
    load: Callable[[], torch.Tensor]
    class_name: str | None = None


def unusable_sample(problem: str, condition: str | int = "", class_name: str | None = None) -> DataSample:
    """A sample that is left out whenever it is read, so that the others keep their numbers.

    Args:
        problem: What is wrong, with the name of the file; also the key, which changes when the file is mended.
        condition: See `DataSample`.
        class_name: See `DataSample`.
    """

    def load() -> torch.Tensor:
        raise UnusableSampleError(problem)

    return DataSample(printable(problem), condition, load, class_name)


def printable(text: str) -> str:
    """A text as UTF-8 can hold it; names of files may consist of any bytes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
