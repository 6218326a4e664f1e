# SPDX-License-Identifier: Apache-2.0
"""Norm and rotary embedding of projections in one kernel."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mhla_hf.layers.fused import PairwiseRotary

from .triton_checks import DEVICES, buffers_full_of_nan


pytest.importorskip("triton")


def in_torch(tokens, cosine, sine, weight):
    if weight is not None:
        tokens = F.rms_norm(tokens.flatten(2), weight.shape, weight, 1e-5).unflatten(2, tokens.shape[2:])
    return PairwiseRotary(cosine[None, :, None], sine[None, :, None])(tokens)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 5e-3)])
def test_values_and_gradients(dtype, tolerance, normed, device, monkeypatch):
    from mhla_hf.ops.triton import rotary, rotated_tokens

    monkeypatch.setattr(rotary, "FEW_PROGRAMS", 2)
    generator = torch.Generator().manual_seed(0)
    # Part of a wider projection.
    tokens = torch.randn(2, 9, 5, 12, generator=generator).to(dtype)[:, :, 1:4]
    weight = (1 + 0.2 * torch.randn(36, generator=generator)).to(dtype)
    angles = 6 * torch.rand(9, 6, generator=generator)
    cotangent = torch.randn(2, 3, 9, 12, generator=generator).to(dtype).transpose(1, 2)
    leaves = [tensor.to(device).requires_grad_() for tensor in (tokens, *([weight] if normed else []))]
    exact = [tensor.detach().cpu().double().requires_grad_() for tensor in leaves]
    tables = angles.cos(), angles.sin()
    with buffers_full_of_nan():
        norm = (leaves[1], 1e-5) if normed else None
        output = rotated_tokens(leaves[0], tuple(table.to(device) for table in tables), norm, dtype)
        gradients = torch.autograd.grad(output, leaves, cotangent.to(device))
    expected = in_torch(exact[0], *(table.double() for table in tables), exact[1] if normed else None)
    references = torch.autograd.grad(expected, exact, cotangent.double())
    for actual, reference in zip((output, *gradients), (expected, *references)):
        assert (actual.cpu().double() - reference).norm() <= tolerance * reference.norm()


@pytest.mark.parametrize("device", DEVICES)
def test_operator_is_what_torch_expects(device):
    from mhla_hf.ops.triton import rotary

    tokens = torch.randn(1, 5, 2, 4, device=device, requires_grad=True)
    weight = torch.rand(8, device=device, requires_grad=True)
    torch.library.opcheck(rotary.norm_and_rotate, (tokens, weight, torch.rand(5, 4, device=device), 1e-6))
