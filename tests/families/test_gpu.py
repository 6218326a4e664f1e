# SPDX-License-Identifier: Apache-2.0
"""Every model on a GPU beside the same model on the CPU."""

from __future__ import annotations

import copy

import pytest
import torch

from .cases import CASES, FluxCase, LTXCase, WanCase
from .model_case import relative_error


pytestmark = pytest.mark.gpu


def on(device, inputs, dtype=None):
    """The inputs of a model on a device; numbers that are not integers may get another dtype."""
    return {
        name: value.to(device, dtype if dtype is not None and value.is_floating_point() else value.dtype)
        if isinstance(value, torch.Tensor)
        else value
        for name, value in inputs.items()
    }


def output_and_gradients(case, model, inputs):
    output = case.predict(model, **inputs)
    output.float().square().mean().backward()
    return output.detach().cpu().double(), {name: x.cpu().double() for name, x in case.gradients_of(model).items()}


def largest_error(actual, expected):
    """The largest error of any gradient relative to the norm of all of them: some are zero but for rounding."""
    scale = max(x.norm() for x in expected.values())
    return max(((actual[name] - expected[name]).norm() / scale).item() for name in expected)


@pytest.mark.parametrize("options", [{}, {"window": "adjacent"}, {"feature_map": "hedgehog"}], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: type(case).__name__)
def test_equal_to_the_cpu(case, options):
    model = case.make_mhla(**options)
    inputs = case.inputs(2, batch=2)
    expected, gradients = output_and_gradients(case, model, inputs)
    model.zero_grad()
    actual, actual_gradients = output_and_gradients(case, copy.deepcopy(model).cuda(), on("cuda", inputs))
    assert relative_error(actual, expected) < 1e-4
    assert largest_error(actual_gradients, gradients) < 1e-3
    errors = []
    for device in ("cpu", "cuda"):
        half = copy.deepcopy(model).to(device, torch.bfloat16)
        for module in half.mhla_modules().values():
            module.float()
        with torch.no_grad():
            errors.append(relative_error(case.predict(half, **on(device, inputs, torch.bfloat16)).cpu(), expected))
    assert errors[1] < 1.5 * errors[0] + 0.01


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("case", [WanCase(), FluxCase(), LTXCase()], ids=lambda case: type(case).__name__)
def test_compiled_blocks(case, mode):
    """As diffusers compiles pipelines, at two sizes, in inference."""
    model = case.make_mhla().cuda()
    compiled = copy.deepcopy(model)
    compiled.compile_repeated_blocks(fullgraph=True, mode=mode)
    with torch.no_grad():
        for size in (0, 2, 0):
            inputs = on("cuda", case.inputs(size))
            for _ in range(3):
                if mode == "reduce-overhead":
                    torch.compiler.cudagraph_mark_step_begin()
                output = case.predict(compiled, **inputs).clone()
            assert relative_error(output.cpu(), case.predict(model, **inputs).cpu()) < 1e-4
    torch._dynamo.reset()
