# SPDX-License-Identifier: Apache-2.0
"""Gradients and gradient checkpointing of Wan transformers."""

from tests.models.training_checks import TrainingChecks
from tests.models.wan_case import WanCase, WanImageToVideoCase


class TestWanTraining(WanCase, TrainingChecks):
    block_class = "WanTransformerBlock"


class TestWanImageToVideoTraining(WanImageToVideoCase):
    def test_every_parameter_has_a_gradient(self):
        model = self.make_mhla().train()
        model(**self.inputs()).sample.square().mean().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
