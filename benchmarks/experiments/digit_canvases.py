# SPDX-License-Identifier: Apache-2.0
"""Images to classify: scikit-learn's digits, enlarged to a random size and put at a random place.

At a fixed place and size digits are too easy: comparing each pixel with its mean over a class is nearly enough,
whatever the attention. Here a model has to relate the parts of a digit to one another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from mhla_hf.training.data.digits import load_scans
from mhla_hf.training.data.order import stable_seed


EVALUATION_BATCH = 64


class DigitCanvases:
    """Digits of random size at random places of black images.

    Args:
        split: `"train"` or `"held_out"`; no scan is in both.
        image_size: Side of an image in pixels.
        digit_sizes: Sides in pixels that scans are enlarged to, one of them drawn for each image.
        channels: Number of channels C, all alike.
    """

    def __init__(self, split: str, image_size: int, digit_sizes: Sequence[int], *, channels: int = 1) -> None:
        self.split, self.image_size, self.digit_sizes, self.channels = split, image_size, tuple(digit_sizes), channels
        self.scans = {size: load_scans(split, size)[0] for size in self.digit_sizes}
        self.labels = load_scans(split, self.digit_sizes[0])[1]

    def training_batch(self, count: int, seed: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Images of one step, a function of seed and step alone, and their digits.

        Returns:
            `[count, C, image_size, image_size]` float32 in -1..1, and `[count]`.
        """
        random = np.random.default_rng([stable_seed(seed, "canvases", step)])
        return self._images(random.integers(len(self.labels), size=count), random)

    def probe(self, count: int) -> torch.Tensor:
        """Images `[count, C, image_size, image_size]` of the first scans, always the same."""
        return self._images(np.arange(count), np.random.default_rng([0]))[0]

    def evaluation_batches(self, copies: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Every scan at `copies` places, always the same, in batches."""
        random = np.random.default_rng([0])
        images, labels = self._images(np.tile(np.arange(len(self.labels)), copies), random)
        yield from zip(images.split(EVALUATION_BATCH), labels.split(EVALUATION_BATCH), strict=True)

    def _images(self, chosen: np.ndarray, random: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        images = np.full((len(chosen), 1, self.image_size, self.image_size), -1.0, dtype=np.float32)
        for image, index in zip(images[:, 0], chosen, strict=True):
            size = int(random.choice(self.digit_sizes))
            row, column = random.integers(self.image_size - size + 1, size=2)
            image[row : row + size, column : column + size] = self.scans[size][index] * 2 - 1
        return torch.from_numpy(images).expand(-1, self.channels, -1, -1), torch.from_numpy(self.labels[chosen]).long()
