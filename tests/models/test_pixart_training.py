# SPDX-License-Identifier: Apache-2.0
"""Gradients and gradient checkpointing of PixArt."""

from tests.models.pixart_case import PixArtCase
from tests.models.training_checks import TrainingChecks


class TestPixArtTraining(PixArtCase, TrainingChecks):
    block_class = "BasicTransformerBlock"
