# SPDX-License-Identifier: Apache-2.0
"""Handwritten digits, and the batch of each step: a pure function of the seed and the step.

Shapes: B images of a batch, S their side in pixels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch

from mhla_hf.families.objectives import add_noise, shift_sigmas
from mhla_hf.training.data.digits import load_scans
from mhla_hf.training.data.order import DataOrder, stable_seed

from .options import QualityOptions


NUM_CLASSES = 10
"""The digits; as a label it stands for no class."""

# Held-out images that the model sees at once.
EVALUATION_BATCH = 64


@dataclass(frozen=True)
class Digits:
    """Digits `[N, 1, S, S]` in [-1, 1], black to white, and their classes `[N]`."""

    images: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.images)


@dataclass(frozen=True)
class NoisyBatch:
    """Clean images, noise and their mixtures `[B, 1, S, S]`, noise levels in (0, 1) and labels `[B]`."""

    clean: torch.Tensor
    noise: torch.Tensor
    noisy: torch.Tensor
    sigmas: torch.Tensor
    labels: torch.Tensor

    def to(self, device: torch.device) -> NoisyBatch:
        """The batch on another device."""
        return NoisyBatch(*(getattr(self, field.name).to(device) for field in fields(self)))


def load_digits(split: str, size: int) -> Digits:
    """Loads a split of scikit-learn's digits; every sixth scan is held out.

    Args:
        split: `"train"` or `"held_out"`.
        size: S, that the scans of 8x8 pixels are enlarged to.
    """
    scans, labels = load_scans(split, size)
    return Digits(torch.from_numpy(scans)[:, None] * 2 - 1, torch.from_numpy(labels).long())


def training_batch(digits: Digits, options: QualityOptions, seed: int, step: int) -> NoisyBatch:
    """The batch of a step: a fresh order of the images every epoch, random noise levels, some classes left out."""
    order = DataOrder(dataset_size=len(digits), batch_size=options.batch_size, seed=seed, stage="quality")
    indices = torch.tensor([order.dataset_index(number) for number in order.sample_numbers(step)])
    generator = torch.Generator().manual_seed(stable_seed(seed, "quality", "draws", step))
    clean, labels = digits.images[indices], digits.labels[indices]
    noise = torch.randn(clean.shape, generator=generator)
    uniform = torch.rand(2, len(clean), generator=generator)
    labels = labels.masked_fill(uniform[1] < options.class_dropout, NUM_CLASSES)
    sigmas = shift_sigmas(uniform[0], options.flow_shift)
    return NoisyBatch(clean, noise, add_noise(clean, noise, sigmas), sigmas, labels)


def held_out_batches(digits: Digits, options: QualityOptions) -> Iterator[NoisyBatch]:
    """Noisy held-out images, the same for every model: noise levels as in training, evenly spread, in random order."""
    generator = torch.Generator().manual_seed(stable_seed("quality", "held-out"))
    count = len(digits) * options.held_out_draws
    sigmas = shift_sigmas((torch.randperm(count, generator=generator) + 0.5) / count, options.flow_shift)
    for chosen in torch.arange(count).split(EVALUATION_BATCH):
        clean, labels = digits.images[chosen % len(digits)], digits.labels[chosen % len(digits)]
        noise = torch.randn(clean.shape, generator=generator)
        yield NoisyBatch(clean, noise, add_noise(clean, noise, sigmas[chosen]), sigmas[chosen], labels)
