# SPDX-License-Identifier: Apache-2.0
"""Gradients and gradient checkpointing of DiT."""

from tests.models.dit_case import DiTCase
from tests.models.training_checks import TrainingChecks


class TestDiTTraining(DiTCase, TrainingChecks):
    block_class = "BasicTransformerBlock"
