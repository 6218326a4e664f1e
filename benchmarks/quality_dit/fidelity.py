# SPDX-License-Identifier: Apache-2.0
"""Distance of samples from real digits: a small classifier, and the Fréchet distance of its features."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from mhla_hf.training.data.order import DataOrder, stable_seed

from .data import NUM_CLASSES, Digits


FEATURES = 32
"""Width of the layer before the last, whose values are compared."""

EPOCHS = 20
BATCH_SIZE = 32
LEARNING_RATE = 3e-3
# Side in pixels that the classifier sees, whatever the images' own: the scans have 8.
INPUT_SIZE = 32


class DigitClassifier(nn.Module):
    """Three convolutions and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        widths = (1, 16, 32, 64)
        stages = [
            layer
            for before, after in zip(widths, widths[1:])
            for layer in (nn.Conv2d(before, after, 3, stride=2, padding=1), nn.ReLU())
        ]
        self.body = nn.Sequential(*stages, nn.Flatten(), nn.Linear(64 * (INPUT_SIZE // 8) ** 2, FEATURES))
        self.head = nn.Linear(FEATURES, NUM_CLASSES)

    def features(self, images: torch.Tensor) -> torch.Tensor:
        """`[N, FEATURES]` of images `[N, 1, S, S]` in [-1, 1]."""
        return self.body(F.interpolate(images, size=(INPUT_SIZE, INPUT_SIZE), mode="area"))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits `[N, NUM_CLASSES]`."""
        return self.head(self.features(images).relu())


def train_classifier(digits: Digits, seed: int = 0) -> DigitClassifier:
    """Trains the classifier on the CPU.

    Args:
        digits: Training split.
        seed: Chooses weights and order.
    """
    torch.manual_seed(stable_seed(seed, "quality", "classifier"))
    classifier = DigitClassifier()
    order = DataOrder(dataset_size=len(digits), batch_size=BATCH_SIZE, seed=seed, stage="classifier")
    steps = EPOCHS * len(digits) // BATCH_SIZE
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=LEARNING_RATE)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        chosen = [order.dataset_index(number) for number in order.sample_numbers(step)]
        loss = F.cross_entropy(classifier(digits.images[chosen]), digits.labels[chosen])
        loss.backward()
        optimizer.step()
        decay.step()
        optimizer.zero_grad()
    return classifier.eval().requires_grad_(False)


@torch.no_grad()
def accuracy(classifier: DigitClassifier, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Share of images `[N, 1, S, S]` whose class `[N]` the classifier sees."""
    return (classifier(images).argmax(1) == labels).float().mean().item()


def nearest_distance(images: torch.Tensor, scans: torch.Tensor) -> float:
    """Mean distance of images `[N, 1, S, S]` to the nearest of the scans `[K, 1, S, S]`, at the scans' own 8x8 pixels.

    Copies of scans have a distance of 0.
    """
    images, scans = (F.interpolate(x, size=(8, 8), mode="area").flatten(1) for x in (images, scans))
    return torch.cdist(images, scans).amin(1).mean().item()


class FeatureStatistics(NamedTuple):
    """Mean `[FEATURES]` and covariance `[FEATURES, FEATURES]`, float64."""

    mean: torch.Tensor
    covariance: torch.Tensor


@torch.no_grad()
def feature_statistics(classifier: DigitClassifier, images: torch.Tensor) -> FeatureStatistics:
    """Statistics of the features of images `[N, 1, S, S]`."""
    features = classifier.features(images).double()
    return FeatureStatistics(features.mean(0), features.T.cov())


def frechet_distance(statistics: FeatureStatistics, reference: FeatureStatistics) -> float:
    """Squared Fréchet distance of two normal distributions, in units of the reference's total variance.

    It is (|m1 - m2|² + tr(C1 + C2 - 2 (C1 C2)^½)) / tr(C2) (Heusel et al., "GANs Trained by a Two Time-Scale Update
    Rule Converge to a Local Nash Equilibrium", 2017, without the division). Samples that are all alike, at the mean
    of the reference, have a distance of 1.

    Args:
        statistics: Of the samples.
        reference: Of the images that they should be like.
    """
    values, vectors = torch.linalg.eigh(reference.covariance)
    root = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
    # C1 C2 has the eigenvalues of this symmetric matrix.
    product = torch.linalg.eigvalsh(root @ statistics.covariance @ root)
    variance = reference.covariance.trace()
    traces = statistics.covariance.trace() + variance - 2 * product.clamp(min=0).sqrt().sum()
    return (((statistics.mean - reference.mean).square().sum() + traces) / variance).item()
