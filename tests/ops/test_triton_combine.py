# SPDX-License-Identifier: Apache-2.0
"""The sum of a layer's parts in one kernel."""

from __future__ import annotations

import pytest
import torch

from .triton_checks import DEVICES, buffers_full_of_nan


pytest.importorskip("triton")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("channels, positional", [(1, True), (20, True), (20, False)])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
def test_sum_and_gradients(dtype, tolerance, channels, positional, device, monkeypatch):
    from mhla_hf.ops.triton import combine, combine_parts

    monkeypatch.setattr(combine, "FEW_PROGRAMS", 1)
    generator = torch.Generator().manual_seed(0)
    shape = 2, 300, 3, 20
    tensors = [torch.randn(shape, generator=generator).to(dtype) for _ in range(3 if positional else 2)]
    gains = torch.randn(2, 3, channels, generator=generator)
    cotangent = torch.randn(shape, generator=generator).to(dtype)
    leaves = [tensor.to(device).requires_grad_() for tensor in (*tensors, gains)]
    exact = [tensor.double().requires_grad_() for tensor in (*tensors, gains)]
    with buffers_full_of_nan():
        output = combine_parts(*leaves[:2], leaves[2] if positional else None, leaves[-1], dtype)
        gradients = torch.autograd.grad(output, leaves, cotangent.to(device))
    expected = exact[-1][0] * exact[0] + exact[-1][1] * exact[1] + (exact[2] if positional else 0)
    references = torch.autograd.grad(expected, exact, cotangent.double())
    for actual, reference in zip((output, *gradients), (expected, *references)):
        assert (actual.cpu().double() - reference).norm() <= tolerance * reference.norm()


@pytest.mark.parametrize("device", DEVICES)
def test_operator_is_what_torch_expects(device):
    from mhla_hf.ops.triton import combine_parts

    parts = [torch.randn(1, 5, 2, 4, device=device, requires_grad=True) for _ in range(3)]
    gains = torch.randn(2, 2, 1, device=device, requires_grad=True)
    torch.library.opcheck(combine_parts, (*parts, gains, torch.float32))
