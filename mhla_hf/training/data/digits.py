# SPDX-License-Identifier: Apache-2.0
"""Images and videos of handwritten digits, made from the real scans in scikit-learn's `load_digits`.

The data set needs no download: 1,797 scans of 8x8 pixels come with scikit-learn (the test part of the UCI "Optical
Recognition of Handwritten Digits" data). An image shows one of them. In a video one to four move over a black square
and bounce off its edges; its caption names each digit and the direction in which it sets off. A video is a function of
`(split, seed, index)` alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset

from ...utils.messages import check_choice, import_extra
from .folders import DataSample


DIGIT_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
"""The digits 0 to 9 as captions spell them."""

SPLITS = ("train", "held_out")
"""The two disjoint parts: every sixth scan is only ever seen in `held_out`."""

DIRECTIONS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}
"""Unit step `(rows, columns)` by caption word."""

_HELD_OUT_EVERY = 6
_SCAN_SIZE = 8
_PLACEMENT_CANDIDATES = 8


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
    check_choice("split", split, SPLITS)
    data = import_extra("sklearn.datasets", "the digits", "demo").load_digits()
    held_out = np.arange(len(data.images)) % _HELD_OUT_EVERY == _HELD_OUT_EVERY - 1
    chosen = held_out if split == "held_out" else ~held_out
    images = torch.from_numpy(data.images[chosen]).float() / 16.0
    return enlarge(images, digit_size).numpy(), data.target[chosen]


def enlarge(scans: torch.Tensor, size: int) -> torch.Tensor:
    """Enlarge scans `[N, 8, 8]` in 0..1 to `[N, size, size]` (bicubic)."""
    enlarged = F.interpolate(scans[:, None], size=(size, size), mode="bicubic", align_corners=False)
    return enlarged[:, 0].clamp(0.0, 1.0)


def digit_images(count: int, size: int, *, captions: bool, split: str = "train") -> list[DataSample]:
    """List images of one digit each, white on black.

    Args:
        count: Number of images; at most 1,498 in `train` and 299 in `held_out`.
        size: Height and width in pixels.
        captions: Condition on words ("the digit seven") instead of a class, 0 to 9.
        split: One of `SPLITS`.

    Raises:
        ValueError: If the split does not exist, or scikit-learn is missing.
    """
    # Enlarged one at a time, when read: all of them take gigabytes in the sizes of large models.
    scans, digits = load_scans(split, _SCAN_SIZE)

    def sample(index: int) -> DataSample:
        digit = int(digits[index])

        def load() -> torch.Tensor:
            image = enlarge(torch.from_numpy(scans[index : index + 1]), size) * 2 - 1
            return image.expand(3, size, size).contiguous()

        key = f"digits:{split}:{index}"
        if captions:
            return DataSample(key, f"the digit {DIGIT_WORDS[digit]}", load)
        return DataSample(key, digit, load, DIGIT_WORDS[digit])

    return [sample(index) for index in range(min(count, len(scans)))]


def caption_for(digits: Sequence[int], directions: Sequence[str]) -> str:
    """Write the caption of a video, such as `"a three moves left and a seven moves up"`.

    Args:
        digits: One to four digits, 0 to 9.
        directions: As many of the keys of `DIRECTIONS`.

    Returns:
        The caption, in lower case.
    """
    return " and ".join(
        f"a {DIGIT_WORDS[digit]} moves {direction}" for digit, direction in zip(digits, directions, strict=True)
    )


@dataclass(frozen=True, kw_only=True)
class MovingDigitsConfig:
    """Appearance of the videos.

    Args:
        num_frames: Frames per video.
        size: Height and width in pixels.
        digit_size: Side of one digit in pixels.
        speeds: Speeds to draw from, in whole pixels per frame.
        count_weights: Relative frequency of one, two, three and four digits.
    """

    num_frames: int = 17
    size: int = 64
    digit_size: int = 28
    speeds: tuple[int, ...] = (1, 2, 3)
    count_weights: tuple[float, ...] = (0.6, 0.3, 0.07, 0.03)


@dataclass(frozen=True)
class DigitVideo:
    """One example.

    Attributes:
        frames: `[num_frames, size, size]` uint8, white on black.
        caption: Its caption.
        digits: The digits in the order of the caption.
        directions: Their first directions.
    """

    frames: np.ndarray
    caption: str
    digits: tuple[int, ...] = field(default=())
    directions: tuple[str, ...] = field(default=())


def frames_to_tensor(frames: np.ndarray) -> torch.Tensor:
    """Convert grey uint8 frames `[..., F, H, W]` into `[..., 3, F, H, W]` float32 in -1..1."""
    video = torch.from_numpy(np.ascontiguousarray(frames)).float() / 127.5 - 1.0
    return video.unsqueeze(-4).expand(*video.shape[:-3], 3, *video.shape[-3:]).contiguous()


class MovingDigits(Dataset):
    """A deterministic data set of `DigitVideo`s.

    Args:
        split: One of `SPLITS`.
        length: Number of videos; index `i` shows the same video for every length.
        seed: Another seed gives other videos.
        config: Appearance; the default makes 17 frames of 64x64.

    Raises:
        ValueError: If the split does not exist.
    """

    def __init__(self, split: str, length: int, *, seed: int = 0, config: MovingDigitsConfig | None = None) -> None:
        self.config = config or MovingDigitsConfig()
        self.scans, self.labels = load_scans(split, self.config.digit_size)
        self.split = split
        self.seed = seed
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> DigitVideo:
        index = range(self.length)[index]
        random = np.random.default_rng([self.seed, SPLITS.index(self.split), index])
        weights = np.asarray(self.config.count_weights)
        count = int(random.choice(len(weights), p=weights / weights.sum())) + 1
        chosen = random.integers(len(self.scans), size=count)
        directions = tuple(list(DIRECTIONS)[number] for number in random.integers(len(DIRECTIONS), size=count))
        paths = self._paths(directions, random)
        digits = tuple(int(self.labels[number]) for number in chosen)
        frames = self._draw([self.scans[number] for number in chosen], paths)
        return DigitVideo(frames, caption_for(digits, directions), digits, directions)

    def _paths(self, directions: Sequence[str], random: np.random.Generator) -> np.ndarray:
        """Draws positions `[count, num_frames, 2]`; of a few candidates the one in which digits overlap least."""
        candidates = _PLACEMENT_CANDIDATES if len(directions) > 1 else 1
        placements = [np.stack([self._path(direction, random) for direction in directions]) for _ in range(candidates)]
        return min(placements, key=self._overlap)

    def _overlap(self, paths: np.ndarray) -> float:
        """Overlap of the digits on paths `[count, num_frames, 2]`, summed over pairs and frames."""
        distance = np.abs(paths[:, None] - paths[None]).max(axis=-1)
        closeness = np.clip(self.config.digit_size - distance, 0, None)
        return float(closeness.sum() - np.trace(closeness.sum(axis=-1)))

    def _path(self, direction: str, random: np.random.Generator) -> np.ndarray:
        room = self.config.size - self.config.digit_size
        start = random.integers(room + 1, size=2)
        speed = int(random.choice(self.config.speeds))
        step = np.asarray(DIRECTIONS[direction])
        axis = int(np.flatnonzero(step)[0])
        # The digit sets off from the half that it moves away from, so that the caption's direction is plain to see.
        half = random.integers(room // 2 + 1)
        start[axis] = half if step[axis] > 0 else room - half
        travelled = start[None] + np.arange(self.config.num_frames)[:, None] * step[None] * speed
        if room == 0:
            return np.zeros_like(travelled)
        folded = np.mod(travelled, 2 * room)
        return np.where(folded > room, 2 * room - folded, folded)

    def _draw(self, scans: Sequence[np.ndarray], paths: np.ndarray) -> np.ndarray:
        side = self.config.digit_size
        shape = (self.config.num_frames, self.config.size, self.config.size)
        frames: np.ndarray = np.zeros(shape, dtype=np.float32)
        for scan, path in zip(scans, paths, strict=True):
            for frame, (row, column) in zip(frames, path, strict=True):
                window = frame[row : row + side, column : column + side]
                np.maximum(window, scan, out=window)
        return np.rint(frames * 255.0).astype(np.uint8)


def stack_videos(dataset: MovingDigits, start: int, stop: int) -> tuple[torch.Tensor, list[str]]:
    """Collect videos `start` to `stop` (exclusive).

    Returns:
        `[stop - start, 3, F, H, W]` float32 in -1..1, and the captions.
    """
    examples = [dataset[index] for index in range(start, stop)]
    return frames_to_tensor(np.stack([example.frames for example in examples])), [e.caption for e in examples]


def digit_videos(count: int, size: int, num_frames: int) -> list[DataSample]:
    """List videos of moving digits, for training.

    Args:
        count: Number of videos.
        size: Height and width in pixels; the digits scale with it.
        num_frames: Frames of a video.
    """
    appearance = MovingDigitsConfig(num_frames=num_frames, size=size, digit_size=max(8, round(size * 28 / 64)))
    videos = MovingDigits("train", count, config=appearance)

    def sample(index: int) -> DataSample:
        return DataSample(f"digits:{index}", videos[index].caption, lambda: frames_to_tensor(videos[index].frames))

    return [sample(index) for index in range(count)]
