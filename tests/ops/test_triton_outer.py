# SPDX-License-Identifier: Apache-2.0
"""Sums of outer products, and the search for numbers that are not finite: only where a sum is not."""

from __future__ import annotations

import pytest
import torch

from .triton_checks import DEVICES


pytest.importorskip("triton")

from mhla_hf.ops.triton.launching import row_count
from mhla_hf.ops.triton.outer import Sums, outer


NAN, INFINITE = float("nan"), float("inf")
# Widths of left and right, blocks and slots, and tokens, of which the last block has fewer. The last two share out the
# slots of a block, and have two tiles of columns.
SHAPES = {"small": (8, 4, 3, 4, 10), "shares": (16, 16, 2, 200, 390), "tiles": (256, 72, 2, 4, 7)}
# Which rows have a bad number: block, slot, column and number.
BAD = {
    "key": [("left", 0, 1, 3, NAN)],
    "value": [("right", 1, 2, 2, -INFINITE)],
    "plain": [("plain", 0, 3, 1, INFINITE)],
    "several": [("right", 0, 2, 0, NAN), ("left", 0, 1, 0, INFINITE), ("plain", 0, 3, 2, NAN)],
    "ragged": [("right", -1, 1, 1, NAN)],
    "last-column": [("right", 0, 1, -1, INFINITE)],
}


def draw(shape: tuple[int, ...], device: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Rows `[1, T, 2, D]` and the table of their slots."""
    width, value, blocks, slots, count = shape
    generator = torch.Generator().manual_seed(0)
    widths = {"left": width, "right": value, "plain": 5}
    rows = {name: torch.randn(1, count, 2, size, generator=generator) for name, size in widths.items()}
    table = torch.arange(blocks * slots, dtype=torch.int32).clamp(max=count).view(blocks, slots)
    return {name: x.to(device) for name, x in rows.items()}, table.to(device)


def find(rows: dict[str, torch.Tensor], table: torch.Tensor, dtype: torch.dtype) -> Sums:
    return outer(
        rows["left"], rows["right"], table, rows["left"].shape[2],
        dtype=dtype, total=True, plain=rows.get("plain"), finite=True,
    )  # fmt: skip


def products(sums: Sums, shape: tuple[int, ...]) -> torch.Tensor:
    """Products as `[lines, M, K, V]` in float32, from tiles of columns and shares of slots."""
    width, value, blocks, *_ = shape
    result = sums.products.float()
    if sums.scales is not None:
        tiles = len(sums.scales)
        result = result.unflatten(0, (tiles, -1)) * sums.scales[..., None, None]
        result = result.unflatten(2, (-1, row_count(blocks))).sum(2)
        result = result.movedim(0, -2).flatten(-2)
    return result[:, :blocks, :, :value]


def by_definition(rows: dict[str, torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
    *_, blocks, slots, count = shape
    padded = (torch.nn.functional.pad(rows[x], (0, 0, 0, 0, 0, blocks * slots - count)) for x in ("left", "right"))
    left, right = (x.double().movedim(2, 1).flatten(0, 1).unflatten(1, (blocks, slots)) for x in padded)
    return left.mT @ right


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float16, 1e-3)], ids=str)
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("size", SHAPES)
def test_first_bad_slot_is_found_and_others_are_summed(size, bad, dtype, tolerance, device):
    """In the second of two lines; also where all others of a row or column are zero."""
    shape = SHAPES[size]
    *_, blocks, slots, count = shape
    rows, table = draw(shape, device)
    expected = torch.full((2, blocks), slots, dtype=torch.int32, device=device)
    clean = by_definition(rows, shape)
    rows["left"][0, :, 1, 0] = rows["right"][0, :, 1, 1] = 0
    clean[1, :, 0], clean[1, :, :, 1] = 0, 0
    for name, block, slot, column, number in BAD[bad]:
        rows[name][0, table[block, slot].item(), 1, column] = number
        expected[1, block] = min(slot, expected[1, block].item())
    result = find(rows, table, dtype)
    assert torch.equal(result.first_bad, expected)
    actual, whole = products(result, shape), (expected == slots)[..., None, None]
    assert actual.isfinite().all() and result.sums.isfinite().all()
    error = torch.where(whole, actual - clean, 0).norm() / clean.norm()
    assert error < tolerance


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("slot", [0, 70, 189])
def test_the_first_of_all_shares_counts(slot, device):
    """Slots that another share, and a later tile of one, work through."""
    shape = SHAPES["shares"]
    rows, table = draw(shape, device)
    for place in {slot, 189}:
        rows["right"][0, 200 + place, 0, 5] = NAN
    assert find(rows, table, torch.float32).first_bad.flatten().tolist() == [200, slot, 200, 200]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_finite_numbers_whose_sum_overflows_are_not_bad(dtype, device):
    """The sum is infinite, and its block alone."""
    shape = SHAPES["small"]
    rows, table = draw(shape, device)
    clean = by_definition(rows, shape)
    rows["left"][0, 5, 0, 3], rows["right"][0, 5, 0, 2] = 1e30, 1e30
    result = find(rows, table, dtype)
    assert (result.first_bad == 4).all()
    actual = products(result, shape)
    infinite = torch.zeros_like(actual, dtype=torch.bool)
    infinite[0, 1, 3, 2] = True
    assert torch.equal(actual.isinf(), infinite) and not actual.isnan().any()
    others = torch.ones(2, 3, dtype=torch.bool)
    others[0, 1] = False
    assert (actual[others] - clean[others]).norm() < 1e-3 * clean[others].norm()
