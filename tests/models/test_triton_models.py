# SPDX-License-Identifier: Apache-2.0
"""Whole models by the Triton kernels against the same models in plain torch: outputs, and every gradient."""

from __future__ import annotations

import pytest
import torch
from accelerate.utils import send_to_device

from tests.families.cases import DiTCase, LTX23Case, LTXCase, SanaCase, SanaVideoCase, WanCase
from tests.families.model_case import OPTION_SETS, gradient_error, relative_error
from tests.ops.triton_checks import DEVICES


pytest.importorskip("triton")

# Kernels compute the rotary embedding of Wan, and none that differs by head.
MODELS = (DiTCase(), WanCase(), SanaCase(), SanaVideoCase(), LTXCase(), LTX23Case())
CASES = [pytest.param(case, id=type(case).__name__) for case in MODELS]


@pytest.fixture(params=["default", "everything"])
def options(request):
    return OPTION_SETS[request.param]


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients(case, options, device, monkeypatch):
    model = case.make_mhla(**options).to(device)
    inputs = send_to_device(case.inputs(0), device)
    outputs, gradients = {}, {}
    for backend in ("torch", "triton"):
        # The variable wins over the model's own configuration.
        monkeypatch.setenv("MHLA_HF_BACKEND", backend)
        with torch.no_grad():
            outputs[backend] = case.predict(model, **inputs)
        model.zero_grad()
        case.predict(model, **inputs).square().mean().backward()
        gradients[backend] = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    assert relative_error(outputs["triton"], outputs["torch"]) < 1e-5
    assert gradient_error(gradients["triton"], gradients["torch"]) < 1e-4
