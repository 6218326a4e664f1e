# SPDX-License-Identifier: Apache-2.0
"""Gated linear attention in a DiT against its definition, and flash-linear-attention against it where it is there."""

from __future__ import annotations

import pytest
import torch
from diffusers import DiTTransformer2DModel

from benchmarks.quality_dit.gated import GatedScan, scan_with_kernels, use_gated_attention


pytestmark = pytest.mark.slow


def dense_scan(query, key, value, log_gates):
    """Weights of all pairs: q_t · k_s times the gates after s up to t, in every channel."""
    decay = log_gates.double().cumsum(1)
    between = decay[:, :, None] - decay[:, None]
    weights = torch.einsum("bthk,bshk,btshk->btsh", query.double(), key.double(), between.exp())
    seen = torch.ones(weights.shape[1:3], dtype=torch.bool).tril()
    weights = weights * query.shape[-1] ** -0.5 * seen[:, :, None]
    return torch.einsum("btsh,bshk->bthk", weights, value.double()).to(value.dtype)


def tokens(batch=2, count=16, heads=2, width=8):
    generator = torch.Generator().manual_seed(0)
    query, key, value, gates = torch.randn(4, batch, count, heads, width, generator=generator)
    return query, key, value, torch.nn.functional.logsigmoid(gates)


def tiny_dit(scan):
    torch.manual_seed(0)
    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "sample_size": 8, "patch_size": 2}
    return use_gated_attention(DiTTransformer2DModel(**sizes, in_channels=1, num_embeds_ada_norm=10), scan)


def test_every_token_sees_the_whole_image():
    torch.manual_seed(0)
    layer = GatedScan(16, 2, dense_scan)
    hidden = torch.randn(1, 9, 16)
    query, key, value, _ = tokens(batch=1, count=9)
    value.requires_grad_()
    layer(query, key, value, hidden)[0, 4].sum().backward()
    assert (value.grad[0].abs().amax((1, 2)) > 0).all()
    # The convolution starts as an identity.
    torch.testing.assert_close(layer.local(hidden), hidden)


def test_the_naive_form_of_the_library_agrees():
    naive = pytest.importorskip("fla.ops.gla.naive")

    def scan(query, key, value, log_gates):
        return naive.naive_recurrent_gla(query, key, value, gk=log_gates)[0]

    torch.testing.assert_close(scan(*tokens()), dense_scan(*tokens()))
    images, timestep, labels = torch.randn(2, 1, 8, 8), torch.full((2,), 500), torch.arange(2)
    found, expected = (tiny_dit(one).eval()(images, timestep, labels).sample for one in (scan, dense_scan))
    torch.testing.assert_close(found, expected)


@pytest.mark.gpu
def test_the_kernels_agree():
    pytest.importorskip("fla")
    operands = [part.cuda() for part in tokens(count=256, width=32)]
    expected = dense_scan(*(part.cpu() for part in operands))
    torch.testing.assert_close(scan_with_kernels(*operands).cpu(), expected, rtol=1e-2, atol=1e-2)
