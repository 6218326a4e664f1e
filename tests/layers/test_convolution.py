# SPDX-License-Identifier: Apache-2.0
"""The depthwise convolution of values over three axes: its output and gradients are those of PyTorch's convolution."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from mhla_hf import MHLA, MHLAConfig
from mhla_hf.layers import convolution as module
from mhla_hf.layers.convolution import DepthwiseConv3d, DepthwiseConvolution


# The demo's; ragged; fewer frames than a kernel reaches; no second row or column.
GRIDS = {"demo": (5, 8, 8), "ragged": (3, 5, 7), "one frame": (1, 4, 5), "two frames": (2, 3, 3), "line": (6, 1, 1)}
BATCH, CHANNELS = 2, 6


@pytest.fixture(autouse=True)
def any_size(monkeypatch):
    """Small inputs take the quick gradients as well."""
    monkeypatch.setattr(module, "_MIN_ELEMENTS", 0)


def operands(grid, kernel=3, dtype=torch.float64, channels_last=True, seed=0):
    """An image, a weight, a bias, and a gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (BATCH, *grid, CHANNELS), (CHANNELS, 1, *(kernel,) * 3), (CHANNELS,), (BATCH, *grid, CHANNELS)
    image, weight, bias, gradient = (torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes)
    image, gradient = image.movedim(-1, 1), gradient.movedim(-1, 1)
    if not channels_last:
        image, gradient = image.contiguous(), gradient.contiguous()
    return image.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), gradient


def convolution(weight, bias):
    layer = DepthwiseConv3d(CHANNELS, CHANNELS, weight.shape[-1], padding=weight.shape[-1] // 2, groups=CHANNELS)
    layer.weight, layer.bias = torch.nn.Parameter(weight.detach()), torch.nn.Parameter(bias.detach())
    return layer


def reference(image, weight, bias, gradient):
    """Output and gradients of PyTorch's convolution, in float64."""
    image, weight, bias = (tensor.detach().double().requires_grad_() for tensor in (image, weight, bias))
    output = F.conv3d(image, weight, bias, padding=weight.shape[-1] // 2, groups=CHANNELS)
    return output, *torch.autograd.grad(output, (image, weight, bias), gradient.double())


def is_quick(output):
    return "DepthwiseConvolution" in type(output.grad_fn).__name__


@pytest.mark.parametrize("channels_last", [True, False], ids=["channels last", "contiguous"])
@pytest.mark.parametrize("kernel", [3, 5])
@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-12), (torch.float32, 2e-5)], ids=["fp64", "fp32"])
def test_output_and_gradients(dtype, error, grid, kernel, channels_last):
    image, weight, bias, gradient = operands(grid, kernel, dtype, channels_last)
    output = DepthwiseConvolution.apply(image, weight, bias)
    found = output, *torch.autograd.grad(output, (image, weight, bias), gradient)
    for value, expected in zip(found, reference(image, weight, bias, gradient), strict=True):
        assert value.shape == expected.shape and value.dtype == dtype
        assert (value.double() - expected).abs().max() <= error * expected.abs().max()


@pytest.mark.parametrize("kernel", [3, 5])
@pytest.mark.parametrize("grid", [(1, 2, 3), (3, 2, 1)])
def test_gradients_are_those_of_finite_differences(grid, kernel):
    inputs = [
        tensor[:1, :2] if tensor.dim() == 5 and tensor.shape[1] > 1 else tensor[:2]
        for tensor in operands(grid, kernel)
    ]
    inputs = [tensor.detach().clone().requires_grad_() for tensor in inputs[:3]]
    assert torch.autograd.gradcheck(DepthwiseConvolution.apply, inputs)
    assert torch.autograd.gradgradcheck(DepthwiseConvolution.apply, inputs)


@pytest.mark.parametrize("needed", ["image", "weight", "bias"])
def test_only_the_gradients_that_are_needed(needed):
    image, weight, bias, gradient = operands(GRIDS["ragged"])
    inputs = {"image": image, "weight": weight, "bias": bias}
    for name, tensor in inputs.items():
        tensor.requires_grad_(name == needed)
    found = torch.autograd.grad(DepthwiseConvolution.apply(*inputs.values()), inputs[needed], gradient)[0]
    expected = reference(image, weight, bias, gradient)[1 + list(inputs).index(needed)]
    torch.testing.assert_close(found, expected)


def test_layer_takes_it_for_training_on_a_cpu_only():
    image, weight, bias, gradient = operands(GRIDS["demo"], dtype=torch.float32)
    layer = convolution(weight, bias)
    output = layer(image)
    assert is_quick(output)
    found = output, *torch.autograd.grad(output, (image, layer.weight, layer.bias), gradient)
    for value, expected in zip(found, reference(image, weight, bias, gradient), strict=True):
        assert (value - expected).abs().max() <= 2e-5 * expected.abs().max()
    with torch.no_grad():
        assert torch.equal(layer(image), output)
    with torch.autocast("cpu", torch.bfloat16):
        half = layer(image)
    assert half.dtype == torch.bfloat16 and not is_quick(half)
    assert (half.float() - output).abs().max() <= 0.02 * output.abs().max()
    torch.autograd.grad(half, layer.weight, gradient.bfloat16())
    assert not is_quick(layer.double()(image.double()))
    assert not is_quick(convolution(operands((2, 2, 2), 5)[1], bias).float()(image))
    assert layer.to("meta")(image.double().to("meta")).is_meta


def test_small_images_take_the_gradients_of_torch(monkeypatch):
    image, weight, bias, _ = operands(GRIDS["demo"], dtype=torch.float32)
    layer = convolution(weight, bias)
    monkeypatch.setattr(module, "_MIN_ELEMENTS", image.numel())
    assert is_quick(layer(image)) and not is_quick(layer(image[:1]))


def test_transforms_and_tracing_see_a_convolution():
    image, weight, bias, _ = operands(GRIDS["ragged"], dtype=torch.float32)
    layer, image = convolution(weight, bias), image.detach()

    def loss(parameters):
        return torch.func.functional_call(layer, parameters, image).square().sum()

    parameters = {name: parameter.detach() for name, parameter in layer.named_parameters()}
    found = torch.func.grad(loss)(parameters)
    expected = torch.autograd.grad(layer(image).square().sum(), layer.weight)[0]
    torch.testing.assert_close(found["weight"], expected, rtol=1e-4, atol=1e-4)
    torch.func.jvp(loss, (parameters,), (parameters,))
    traced = torch.jit.trace(layer, image, check_trace=False)
    assert "PythonOp" not in str(traced.graph) and "_convolution" in str(traced.inlined_graph)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(image), layer(image))


@pytest.mark.parametrize("reentrant", [True, False])
def test_layer_of_mhla_with_checkpointing(reentrant):
    torch.manual_seed(0)
    grid, prefix = (4, 6, 5), 1
    config = MHLAConfig(blocks=(2, 2, 2), lepe_kernel=3)
    layer = MHLA(config, hidden_size=32, num_heads=2, head_dim=16, num_prefix_tokens=prefix)
    torch.nn.init.normal_(layer.lepe.weight)
    tokens = torch.randn(2, 4 * 6 * 5 + prefix, 2, 16, requires_grad=True)
    leaves = [tokens, *layer.parameters()]

    def attend(value):
        return layer(value, value, value, grid=grid)

    def gradients(output):
        output.square().mean().backward()
        found = [leaf.grad.clone() for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        return found

    plain = gradients(attend(tokens))
    again = gradients(checkpoint(attend, tokens, use_reentrant=reentrant))
    module._MIN_ELEMENTS = 2**60
    for found, repeated, expected in zip(plain, again, gradients(attend(tokens)), strict=True):
        assert torch.equal(found, repeated)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
