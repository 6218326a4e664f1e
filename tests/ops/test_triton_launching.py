# SPDX-License-Identifier: Apache-2.0
"""Launch plans: what is launched again without Triton's own look at the arguments, and what never may be."""

from __future__ import annotations

from typing import Any

import pytest
import torch


pytest.importorskip("triton")

from mhla_hf.ops.triton import launching
from mhla_hf.ops.triton.launching import as_rows, launch, prepare

from .triton_checks import DEVICES


class Kernel:
    """Stands in for a compiled kernel: records how it is launched."""

    arg_names = ("rows", "other", "first_line", "lines", "factor", "WIDTH")

    def __init__(self) -> None:
        self.by_triton: list[tuple[Any, ...]] = []
        self.directly: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: Any) -> Any:
        def run(*arguments: Any, **keywords: Any) -> Compiled:
            self.by_triton.append((grid, *arguments, keywords))
            return Compiled(self)

        return run


class Compiled:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments: self.kernel.directly.append((grid, *arguments))


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(launching, "_plans", {})
    return Kernel()


def tokens(width: int = 16, offset: int = 0, dtype: torch.dtype = torch.bfloat16, heads: int = 2) -> torch.Tensor:
    """`[1, 3, heads, 8]` cut out of rows of `width` a head, at an offset from an address that is a multiple of 64."""
    memory = torch.zeros(offset + 3 * heads * width + 64, dtype=dtype)
    start = -memory.data_ptr() % 64 // memory.element_size() + offset
    return memory[start : start + 3 * heads * width].view(1, 3, heads, width)[..., :8]


def run(kernel: Kernel, rows: torch.Tensor, other: Any = None, factor: float = 1.0, width: int = 8) -> None:
    stage = prepare(kernel, as_rows(rows), other, factor=factor, WIDTH=width, num_warps=4)
    stage(6, 0, 2)
    stage(3, 2, 1)


def test_launches_with_the_same_metadata_go_past_triton(kernel):
    first, second = tokens(), tokens()
    run(kernel, first)
    assert len(kernel.by_triton) == len(kernel.directly) == 1
    run(kernel, second)
    assert len(kernel.by_triton) == 1
    # All arguments in the order of the parameters, without Triton's options; tensors are those of this launch.
    grid, rows, *others = kernel.directly[-1]
    assert (grid, others) == ((3, 1, 1), [None, 2, 1, 1.0, 8])
    assert rows.data is second


@pytest.mark.parametrize(
    "change",
    [
        {"rows": tokens(width=24)},
        {"rows": tokens(width=9)},
        {"rows": tokens(offset=1)},
        {"rows": tokens(dtype=torch.float32)},
        {"rows": tokens(heads=1)},
        {"other": torch.zeros(4)},
        {"factor": 2.0},
        {"width": 7},
    ],
    ids=["strides", "unaligned strides", "address", "type", "heads", "tensor for None", "number", "constant"],
)
def test_other_metadata_has_a_plan_of_its_own(change, kernel):
    run(kernel, tokens())
    run(kernel, **{"rows": tokens(), **change})
    assert len(kernel.by_triton) == 2


def test_alignment_of_dense_tensors_counts(kernel):
    memory = torch.zeros(8)
    run(kernel, tokens(), memory)
    run(kernel, tokens(), memory[1:])
    assert len(kernel.by_triton) == 2


def test_plans_do_not_pile_up(kernel, monkeypatch):
    monkeypatch.setattr(launching, "MAX_PLANS", 3)
    for size in range(10):
        launch(kernel, 1, tokens(), None, first_line=0, lines=size, factor=1.0, WIDTH=8)
    assert len(launching._plans) <= 3


def test_rows_are_aligned_by_strides_and_address():
    """Multiples of 16 bytes, though not of 16 elements."""
    assert as_rows(tokens(width=24)).aligned and as_rows(tokens(width=24, offset=8)).aligned
    assert as_rows(tokens(width=20, dtype=torch.float32)).aligned
    for other in (tokens(width=20), tokens(offset=4), tokens(width=18, dtype=torch.float32)):
        assert as_rows(other).aligned is None
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
