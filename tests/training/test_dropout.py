# SPDX-License-Identifier: Apache-2.0
"""Distillation runs without dropout, and recomputes activations where it is asked to."""

import copy

import pytest
import torch

from mhla_hf.training.layers import without_dropout
from mhla_hf.training.teacher import SharedTeacher
from mhla_hf.utils.compat import checkpointing_method
from tests.integrations.transformers.mhla_models import mhla_model
from tests.integrations.transformers.tiny_models import inputs


@pytest.mark.parametrize("checkpointing", [False, True])
def test_outputs_are_those_of_evaluation(checkpointing):
    model = mhla_model("bert", sizes={"hidden_dropout_prob": 0.5}).train()
    if checkpointing:
        checkpointing_method(model)()
    batch = inputs("bert")
    with torch.no_grad():
        expected = copy.deepcopy(model).eval()(**batch)[0]
    modes = {name: module.training for name, module in model.named_modules()}
    teacher = SharedTeacher(model)
    with without_dropout(model):
        teacher(**batch)
        recomputing = [module for module in model.modules() if module.training]
        assert bool(recomputing) == checkpointing
        torch.testing.assert_close(model(**batch)[0], expected)
    assert {name: module.training for name, module in model.named_modules()} == modes
