# SPDX-License-Identifier: Apache-2.0
"""Models of transformers on a GPU beside the same model on the CPU: outputs, gradients, generation by any cache."""

from __future__ import annotations

import copy

import pytest
import torch

from mhla_hf.training.layers import on_device

from .mhla_models import FAMILIES, first_output, inputs, mhla_model, served_names
from .test_generation import generate, prompt


pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", served_names())
def test_equal_to_the_cpu(name):
    padding = None if FAMILIES[name].kind == "vision" else "left"
    model, given = mhla_model(name), inputs(name, padding=padding)
    other = copy.deepcopy(model).cuda()
    gradients = []
    for each, arguments in ((model, given), (other, on_device(given, other))):
        output = first_output(each, **arguments)
        output.square().mean().backward()
        gradients.append({name: x.grad.cpu() for name, x in each.named_parameters() if x.grad is not None})
        gradients[-1][""] = output.detach().cpu()
    expected, actual = gradients
    scale = max(x.norm() for key, x in expected.items() if key)
    assert (actual.pop("") - expected[""]).norm() < 1e-4 * expected.pop("").norm()
    assert actual.keys() == expected.keys()
    assert max((actual[key] - expected[key]).norm() for key in expected) < 1e-3 * scale


@pytest.mark.parametrize("name", [name for name in served_names() if FAMILIES[name].generates])
def test_generation(name):
    model = mhla_model(name)
    expected = generate(model, prompt(True))
    other = copy.deepcopy(model).cuda()
    output = generate(other, on_device(prompt(True), other))
    assert torch.equal(output.sequences.cpu(), expected.sequences)
    torch.testing.assert_close(torch.stack(output.logits).cpu(), torch.stack(expected.logits), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("implementation", ["static", "offloaded", "offloaded_static"])
@pytest.mark.parametrize("options", [{}, {"window": "adjacent"}], ids=str)
def test_caches(implementation, options):
    """Static ones are compiled by `generate` into CUDA graphs, which a second text and beams use again."""
    model = mhla_model("llama", **options)
    other = copy.deepcopy(model).cuda()
    for padded, chosen in ((True, {}), (False, {}), (True, {}), (True, {"num_beams": 3})):
        expected = generate(model, prompt(padded), **chosen).sequences
        given = {**chosen, "cache_implementation": implementation}
        assert torch.equal(generate(other, on_device(prompt(padded), other), **given).sequences.cpu(), expected)
    torch._dynamo.reset()


def test_bfloat16_follows_float32():
    model = mhla_model("llama").cuda()
    given = on_device(inputs("llama", length=60, padding="left"), model)
    with torch.no_grad():
        expected = first_output(model, **given)
        output = first_output(copy.deepcopy(model).bfloat16(), **given)
    mask = given["attention_mask"].bool()
    assert (output.float() - expected)[mask].norm() < 0.03 * expected[mask].norm()
