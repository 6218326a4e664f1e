# SPDX-License-Identifier: Apache-2.0
"""Gradients and gradient checkpointing of SANA."""

from tests.models.sana_case import SanaCase
from tests.models.training_checks import TrainingChecks


class TestSanaTraining(SanaCase, TrainingChecks):
    block_class = "MHLASanaTransformerBlock"
