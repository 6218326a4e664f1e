# SPDX-License-Identifier: Apache-2.0
"""Gradients and gradient checkpointing of SANA-Video."""

from tests.models.sana_video_case import SanaVideoCase
from tests.models.training_checks import TrainingChecks


class TestSanaVideoTraining(SanaVideoCase, TrainingChecks):
    block_class = "SanaVideoTransformerBlock"
