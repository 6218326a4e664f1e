# SPDX-License-Identifier: Apache-2.0
"""Pictures of handwritten digits, from the real scans in scikit-learn's `load_digits`.

The data set needs no download: 1,797 scans of 8x8 pixels come with scikit-learn (the test part of the UCI "Optical
Recognition of Handwritten Digits" data).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F

from .samples import DataSample


DIGIT_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
"""How captions spell the digits 0 to 9."""

SPLITS = ("train", "held_out")
"""The two disjoint parts: every sixth scan is only ever seen in `held_out`."""

_HELD_OUT_EVERY = 6
_SCAN_SIZE = 8


@lru_cache(maxsize=4)
def load_scans(split: str, digit_size: int = 28) -> tuple[np.ndarray, np.ndarray]:
    """Load one split of the scans, enlarged.

    Args:
        split: One of `SPLITS`.
        digit_size: Side in pixels that the 8x8 scans are enlarged to (bicubic).

    Returns:
        The scans, `[N, digit_size, digit_size]` float32 in 0..1, and their digits `[N]`.

    Raises:
        ValueError: If the split does not exist, or scikit-learn is missing.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}; got {split!r}.")
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ValueError("the digits need scikit-learn: pip install 'mhla-hf[demo]'") from error

    data = load_digits()
    held_out = np.arange(len(data.images)) % _HELD_OUT_EVERY == _HELD_OUT_EVERY - 1
    chosen = held_out if split == "held_out" else ~held_out
    images = torch.from_numpy(data.images[chosen]).float() / 16.0
    return enlarge(images, digit_size).numpy(), data.target[chosen]


def enlarge(scans: torch.Tensor, size: int) -> torch.Tensor:
    """Enlarges scans `[N, 8, 8]` in 0..1 to `[N, size, size]` (bicubic)."""
    enlarged = F.interpolate(scans[:, None], size=(size, size), mode="bicubic", align_corners=False)
    return enlarged[:, 0].clamp(0.0, 1.0)


def digit_pictures(count: int, size: int, *, captions: bool, split: str = "train") -> list[DataSample]:
    """Pictures of one digit each, white on black.

    Args:
        count: How many; there are 1,498 in `train` and 299 in `held_out`, and no more.
        size: Height and width in pixels.
        captions: Whether to say what they show in words ("the digit seven") rather than as a class, 0 to 9.
        split: One of `SPLITS`.

    Raises:
        ValueError: See `load_scans`.
    """
    # Enlarged one at a time, when read: all of them take gigabytes in the sizes of large models.
    scans, digits = load_scans(split, _SCAN_SIZE)

    def sample(index: int) -> DataSample:
        digit = int(digits[index])

        def load() -> torch.Tensor:
            picture = enlarge(torch.from_numpy(scans[index : index + 1]), size) * 2 - 1
            return picture.expand(3, size, size).contiguous()

        key = f"digits:{split}:{index}"
        if captions:
            return DataSample(key, f"the digit {DIGIT_WORDS[digit]}", load)
        return DataSample(key, digit, load, DIGIT_WORDS[digit])

    return [sample(index) for index in range(min(count, len(scans)))]
