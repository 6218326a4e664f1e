# SPDX-License-Identifier: Apache-2.0
"""What is remembered of launches, and rows of kernels: how they are aligned, and that they are read anywhere."""

from __future__ import annotations

import pytest
import torch


pytest.importorskip("triton")

from mhla_hf.ops.triton import launching
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


class Kernel:
    """Stands for a kernel, and for what it is compiled to: result = values ** power + first."""

    arg_names = ("result", "values", "first", "count", "power")

    def __init__(self):
        self.compiled = self.started = 0

    def __getitem__(self, grid):
        def run(result, values, first, count, power):
            self.started += 1
            result.data.copy_(values**power + first)
            return self

        def compile_and_run(*arguments, **keywords):
            # Plans start what was compiled without them.
            if keywords:
                assert keywords.pop("enable_fp_fusion")
                self.compiled += 1
            return run(*arguments, **keywords)

        return compile_and_run


def test_launches_are_remembered_for_what_a_compilation_depends_on(monkeypatch):
    """The kind of every tensor, and all but the lines of a group."""
    monkeypatch.setattr(launching, "_plans", {})
    kernel = Kernel()
    values = torch.rand(16), torch.rand(16), torch.rand(16).double(), torch.rand(17)[1:]
    for compiled, x in zip((2, 2, 4, 6), values, strict=True):
        for power in (2, 3):
            for first in (0, 5):
                result = torch.empty_like(x)
                launching.launch(kernel, 1, result, x, lines=(first, 1), power=power)
                torch.testing.assert_close(result, x**power + first)
        assert kernel.compiled == compiled


def test_launches_are_remembered_for_their_own_device(monkeypatch):
    """Where several GPUs share a process, a kernel that is compiled for one is not started on another."""
    monkeypatch.setattr(launching, "_plans", {})
    current, kernels = [0], [Kernel(), Kernel()]
    monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor: current[0])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])

    class EachDevice(Kernel):
        def __getitem__(self, grid):
            return kernels[current[0]][grid]

    kernel, x = EachDevice(), torch.rand(16)
    for current[0] in (0, 1, 0, 1, 1):
        launching.launch(kernel, 1, torch.empty(16), x, lines=(0, 1), power=2)
    assert [(part.compiled, part.started) for part in kernels] == [(1, 2), (1, 3)]


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
