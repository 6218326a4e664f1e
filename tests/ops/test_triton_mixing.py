# SPDX-License-Identifier: Apache-2.0
"""Mixing of block summaries between the kernels, against its formula in float64."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F


pytest.importorskip("triton")

from mhla_hf.ops.triton.launching import multiplied_for, row_count
from mhla_hf.ops.triton.mixing import count_mixed_heads, mix, mixing_gradient, sum_gradients
from mhla_hf.ops.triton.outer import Sums

from .triton_checks import DEVICES


BATCH, GROUPS, HEADS, BLOCKS = 2, 3, 6, 5
SHAPES = [(), (1,), (HEADS,), (1, 1), (BATCH, 1), (1, HEADS), (BATCH, HEADS)]


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def as_sums(products: torch.Tensor, sums: torch.Tensor, device: str, dtype: torch.dtype = torch.float32) -> Sums:
    """Exact summaries `[L, M, K, V]` and sums of keys as kernels leave them: with empty blocks, and over scales."""
    empty = row_count(products.shape[1]) - products.shape[1]
    products, sums = (F.pad(part.detach(), (0, 0) * (part.dim() - 2) + (0, empty)) for part in (products, sums))
    scales = None
    if dtype == torch.float16:
        scales = 2 ** products.abs().amax((2, 3)).clamp(min=1e-30).log2().floor()
        products, scales = products / scales[..., None, None], scales[None].float().to(device)
    return Sums(products.to(device, dtype), scales, sums.float().to(device), None)


def lines_of(part: Sums, chosen: slice) -> Sums:
    """Those of some lines."""
    scales = None if part.scales is None else part.scales[:, chosen]
    return Sums(part.products[chosen], scales, part.sums[chosen], None)


def by_formula(weights: torch.Tensor, summaries: torch.Tensor) -> torch.Tensor:
    """`[B · S, M, ...]` from summaries `[B · G, M, ...]`."""
    weights = weights.reshape((1,) * (4 - weights.dim()) + weights.shape)
    mixed_heads = count_mixed_heads(weights.shape, HEADS, GROUPS)
    parts = summaries.unflatten(0, (BATCH, GROUPS)).repeat_interleave(mixed_heads // GROUPS, 1)
    weights = weights.expand(BATCH, mixed_heads, BLOCKS, BLOCKS)
    return torch.einsum("bhij,bhj...->bhi...", weights, parts).flatten(0, 1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float16, 2e-3)], ids=str)
@pytest.mark.parametrize("groups", [[(0, 6)], [(0, 4), (4, 2)], [(0, 5), (5, 1)]], ids=len)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(shape, groups, dtype, tolerance, device):
    """For all shapes of the weights, in one group of lines and in several, of one line too; summaries of any size."""
    exact = draw(*shape, BLOCKS, BLOCKS).requires_grad_()
    size = torch.tensor([1e-6, 1, 1e5, 1e-3, 30], dtype=torch.float64)[:, None, None]
    size = size if dtype == torch.float16 else torch.ones_like(size)
    summaries = (draw(BATCH * GROUPS, BLOCKS, 4, 3, seed=1) * size).requires_grad_()
    sums = draw(BATCH * GROUPS, BLOCKS, 4, seed=2).requires_grad_()
    expected = by_formula(exact, summaries), by_formula(exact, sums)
    cotangents = [draw(*part.shape, seed=3 + index) for index, part in enumerate(expected)]
    references = torch.autograd.grad(expected, (exact, summaries, sums), cotangents)
    mixing = exact.detach().float().to(device)
    repeats = count_mixed_heads(mixing.shape, HEADS, GROUPS) // GROUPS
    inputs, outputs = as_sums(summaries, sums, device, dtype), as_sums(*cotangents, device, dtype)
    results, gradients = [], []
    # Layers may run under autocast, which would round the products.
    with torch.autocast(device, torch.bfloat16):
        for lines in groups:
            first, count = lines
            part = lines_of(inputs, slice(first, first + count))
            gradient = lines_of(outputs, slice(first * repeats, (first + count) * repeats))
            gradients.append(mixing_gradient(gradient, part, mixing, lines, torch.float32))
            both = mix(part, mixing, GROUPS, lines), mix(gradient, mixing, GROUPS, lines, transpose=True)
            for mixed, scales, mixed_sums in both:
                scale = 1.0 if scales is None else scales[..., None, None]
                results.append((mixed.float() * scale, mixed_sums))
    actual = [torch.cat(parts)[:, :BLOCKS] for parts in (*zip(*results[::2]), *zip(*results[1::2]))]
    actual.append(sum_gradients(gradients, mixing, BATCH))
    for result, reference in zip(actual, (*expected, *references[1:], references[0]), strict=True):
        assert result.shape == reference.shape
        assert (result.cpu().double() - reference).norm() <= tolerance * reference.norm()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(), (HEADS,)], ids=str)
def test_weights_of_22_bits_add_nothing_to_the_rounding_of_results(shape, device):
    weights = torch.rand(*shape, 64, 64, generator=torch.Generator().manual_seed(0))
    summaries = draw(BATCH * GROUPS, 64, 16, 16, seed=1)
    rounded = as_sums(summaries, summaries[..., 0], device, torch.float16)
    mixed, scales, _ = mix(rounded, weights.to(device), GROUPS, (0, BATCH * GROUPS), twice=True)
    repeats = len(mixed) // len(summaries)
    parts = rounded.products.cpu().double() * rounded.scales[0].cpu().double()[..., None, None]
    parts = parts.repeat_interleave(repeats, 0)
    matrices = weights.double().reshape(-1, 64, 64).repeat(len(parts) // weights.shape[:-2].numel(), 1, 1)
    expected = torch.bmm(matrices, parts.flatten(2)).view(mixed.shape) / scales.cpu()[..., None, None]
    errors = [(result.double() - expected).norm() for result in (mixed.cpu(), expected.half())]
    assert errors[0] <= 1.02 * errors[1]


@pytest.mark.parametrize("device", DEVICES)
def test_a_number_that_is_not_finite_spoils_its_own_column(device):
    """And does not take the scale of the others."""
    summaries = draw(1, 8, 4, 3, seed=1)
    part = as_sums(summaries, summaries[..., 0], device, torch.float16)
    weights = torch.rand(8, 8, generator=torch.Generator().manual_seed(0)).to(device)
    clean, scales, _ = mix(part, weights, 1, (0, 1))
    for bad in (float("nan"), float("inf")):
        part.products[0, 2, 1, 1] = bad
        spoilt, same, _ = mix(part, weights, 1, (0, 1))
        assert torch.equal(same, scales) and not spoilt[:, :, 1, 1].isfinite().any()
        spoilt[:, :, 1, 1] = clean[:, :, 1, 1]
        assert torch.equal(spoilt, clean)


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
