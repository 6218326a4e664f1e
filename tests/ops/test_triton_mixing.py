# SPDX-License-Identifier: Apache-2.0
"""Mixing of block summaries between the kernels, against its formula in float64."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F


pytest.importorskip("triton")

from mhla_hf.ops.triton.launching import multiplied_for, row_count
from mhla_hf.ops.triton.mixing import Mixing, count_mixed_heads


BATCH, GROUPS, HEADS, BLOCKS = 2, 3, 6, 5
SHAPES = [(), (1,), (HEADS,), (1, 1), (BATCH, 1), (1, HEADS), (BATCH, HEADS)]


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def with_empty_blocks(summaries: torch.Tensor) -> torch.Tensor:
    """float32 summaries of the number of blocks that kernels leave room for."""
    blocks = summaries.shape[1]
    return F.pad(summaries.detach().float(), (0, 0) * (summaries.dim() - 2) + (0, row_count(blocks) - blocks))


def by_formula(weights: torch.Tensor, summaries: torch.Tensor) -> torch.Tensor:
    """`[B · S, M, ...]` from summaries `[B · G, M, ...]`."""
    weights = weights.reshape((1,) * (4 - weights.dim()) + weights.shape)
    mixed_heads = count_mixed_heads(weights.shape, HEADS, GROUPS)
    parts = summaries.unflatten(0, (BATCH, GROUPS)).repeat_interleave(mixed_heads // GROUPS, 1)
    weights = weights.expand(BATCH, mixed_heads, BLOCKS, BLOCKS)
    return torch.einsum("bhij,bhj...->bhi...", weights, parts).flatten(0, 1)


@pytest.mark.parametrize("groups", [[(0, 6)], [(0, 4), (4, 2)], [(0, 5), (5, 1)]], ids=len)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(shape, groups):
    """For all shapes of the weights, in one group of lines and in several, of one line too."""
    exact = draw(*shape, BLOCKS, BLOCKS).requires_grad_()
    summaries = draw(BATCH * GROUPS, BLOCKS, 4, 3, seed=1).requires_grad_()
    sums = draw(BATCH * GROUPS, BLOCKS, 4, seed=2).requires_grad_()
    expected = by_formula(exact, summaries), by_formula(exact, sums)
    cotangents = [draw(*part.shape, seed=3 + index) for index, part in enumerate(expected)]
    references = torch.autograd.grad(expected, (exact, summaries, sums), cotangents)
    mixing = Mixing(exact.detach().float(), BATCH, GROUPS, torch.float32)
    results = []
    # Layers may run under autocast, which would round the products.
    with torch.autocast("cpu", torch.bfloat16):
        for first, count in groups:
            chosen, mixed = (
                slice(first, first + count),
                slice(first * mixing.repeats, (first + count) * mixing.repeats),
            )
            parts = [with_empty_blocks(part)[chosen] for part in (summaries, sums)]
            gradients = [with_empty_blocks(part)[mixed] for part in cotangents]
            mixing.add_gradient(gradients[0], parts[0], gradients[1], parts[1])
            lines = first, count
            results.append((*mixing(*parts, lines), *mixing.transposed(*gradients, lines)))
    actual = [torch.cat(parts)[:, :BLOCKS] for parts in zip(*results, strict=True)]
    for result, reference in zip(
        (*actual, mixing.gradient()), (*expected, *references[1:], references[0]), strict=True
    ):
        torch.testing.assert_close(result, reference.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(), (HEADS,)], ids=str)
def test_bfloat16_summaries_are_rounded_once(shape):
    """Weights of 8 bits would add two thirds to the error of rounding the result; their two halves add nothing."""
    weights = torch.rand(*shape, 64, 64, generator=torch.Generator().manual_seed(0))
    summaries = draw(BATCH * GROUPS, 64, 16, 16, seed=1).bfloat16()
    mixed, _ = Mixing(weights, BATCH, GROUPS, torch.bfloat16)(summaries, None, (0, BATCH * GROUPS))
    repeats = len(mixed) // len(summaries)
    parts = summaries.double().repeat_interleave(repeats, 0)
    matrices = weights.double().reshape(-1, 64, 64).repeat(len(parts) // weights.shape[:-2].numel(), 1, 1)
    expected = torch.bmm(matrices, parts.flatten(2)).view(mixed.shape)
    assert mixed.dtype == torch.bfloat16
    errors = [(result.double() - expected).norm() for result in (mixed, expected.bfloat16())]
    assert errors[0] <= 1.02 * errors[1]


def test_tf32_ends_where_it_began(monkeypatch):
    """float32 products beside bfloat16 tokens; torch has one setting for all threads, which is put back."""
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    with multiplied_for(torch.float32, gpu):
        assert torch.get_float32_matmul_precision() == "highest"
    with multiplied_for(torch.bfloat16, gpu), multiplied_for(torch.bfloat16, gpu):
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == "highest"
    with pytest.raises(ValueError), multiplied_for(torch.bfloat16, gpu):
        raise ValueError
    assert torch.get_float32_matmul_precision() == "highest"
