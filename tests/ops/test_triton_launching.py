# SPDX-License-Identifier: Apache-2.0
"""Rows of kernels: how they are aligned, and that they are read anywhere."""

from __future__ import annotations

import pytest
import torch


pytest.importorskip("triton")

from mhla_hf.ops.triton.launching import AlignedRows, as_rows

from .triton_checks import DEVICES


def tokens(width: int = 16, offset: int = 0, dtype: torch.dtype = torch.bfloat16, heads: int = 2) -> torch.Tensor:
    """`[1, 3, heads, 8]` cut out of rows of `width` a head, at an offset from an address that is a multiple of 64."""
    memory = torch.zeros(offset + 3 * heads * width + 64, dtype=dtype)
    start = -memory.data_ptr() % 64 // memory.element_size() + offset
    return memory[start : start + 3 * heads * width].view(1, 3, heads, width)[..., :8]


def test_rows_are_aligned_by_strides_and_address():
    """Multiples of 16 bytes, though not of 16 elements."""
    for aligned in (tokens(width=24), tokens(width=24, offset=8), tokens(width=20, dtype=torch.float32)):
        assert isinstance(as_rows(aligned), AlignedRows)
    for other in (tokens(width=20), tokens(offset=4), tokens(width=18, dtype=torch.float32)):
        assert not isinstance(as_rows(other), AlignedRows)
    assert as_rows(None) is None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("offset", [0, 1, 8])
@pytest.mark.parametrize("width", [16, 24, 25])
def test_rows_are_read_wherever_they_lie(width, offset, device):
    """Calls one after the other, which differ in strides and addresses only."""
    from mhla_hf import BlockLayout, mhla_attention

    layout, memory = BlockLayout((6,), blocks=(2,)), torch.rand(2 * 6 * 2 * width + 16, device=device)
    cut = memory[offset : offset + 2 * 6 * 2 * width].view(2, 6, 2, width)[..., :16]
    mixing = torch.rand(2, 2, device=device)
    output = mhla_attention(cut, cut, cut, mixing, layout, backend="triton")
    expected = mhla_attention(cut, cut, cut, mixing, layout, backend="torch")
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)
