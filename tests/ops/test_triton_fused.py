# SPDX-License-Identifier: Apache-2.0
"""The fused operators as torch sees them: schemas, fakes, autograd, and how many operations they count."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mhla_hf import BlockLayout

from .triton_checks import DEVICES


pytest.importorskip("triton")

LAYOUT = BlockLayout((3, 5), blocks=(2, 2))
# Feature map, eps of the norm, scaling, eps of the features.
SHARED = "relu", 1e-6, 0.5, 1e-3


def make_arguments(device, dtype, everything):
    """Arguments of both operators, for two heads of width 8, with all that is optional or none of it."""
    from mhla_hf.ops.triton.fused_products import rotary_table

    generator = torch.Generator().manual_seed(0)

    def leaf(*shape, dtype=dtype):
        return torch.rand(shape, generator=generator).add(0.5).to(device, dtype).requires_grad_()

    query, key, value, gate = (leaf(2, 15, 2, 8) for _ in range(4))
    angles = torch.rand(15, 4, generator=generator).to(device)
    turns = rotary_table(angles.cos(), angles.sin(), dtype) if everything else None
    norm, output_norm = (leaf(16), leaf(8, dtype=torch.float32)) if everything else (None, None)
    table = LAYOUT.token_table(torch.device(device))
    summaries = leaf(2, 2, 4, 8, 8, dtype=torch.float32)
    sums = leaf(2, 2, 4, 8, dtype=torch.float32) if everything else None
    summary_arguments = key, value, norm, turns, table, *SHARED, 0.1, everything, False
    gates = gate if everything else None
    return summary_arguments, (
        query, summaries, sums, gates, norm, output_norm, turns, table, *SHARED, 2.0, 1e-6, 1e-6,
    )  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("everything", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators_are_what_torch_expects(dtype, everything, device):
    from mhla_hf.ops.triton import fused

    summary_arguments, attend_arguments = make_arguments(device, dtype, everything)
    torch.library.opcheck(fused.fused_summary, summary_arguments)
    torch.library.opcheck(fused.fused_attend, attend_arguments)


@pytest.mark.parametrize("device", DEVICES)
def test_operations_are_counted(device):
    """2 B T H K V for each product: one in each forward pass, two in each backward one, one of outputs made again."""
    from mhla_hf.ops.triton import fused

    summary_arguments, attend_arguments = make_arguments(device, torch.float32, True)
    product = 2 * 2 * 15 * 2 * 8 * 8
    with FlopCounterMode(display=False) as counter:
        summaries, sums, _ = fused.fused_summary(*summary_arguments)
    assert counter.get_total_flops() == product
    with FlopCounterMode(display=False) as counter:
        (summaries.sum() + sums.sum()).backward()
    assert counter.get_total_flops() == 2 * product
    with FlopCounterMode(display=False) as counter:
        output, _ = fused.fused_attend(*attend_arguments)
    assert counter.get_total_flops() == product
    with FlopCounterMode(display=False) as counter:
        output.sum().backward()
    assert counter.get_total_flops() == 3 * product


def test_rotary_tables_in_half_precision_are_finer_than_the_tokens():
    """Beside bfloat16: float16, whose error of a feature is an eighth of what its own rounding to bfloat16 adds."""
    from mhla_hf.ops.triton.fused_products import rotary_table

    generator = torch.Generator().manual_seed(0)
    angles = torch.rand(1, 500, 1, 32, generator=generator) * 100
    exact = torch.stack((angles.cos(), angles.sin()), dim=-1).reshape(500, 64)
    table = rotary_table(angles.cos(), angles.sin(), torch.bfloat16)
    assert table.dtype == torch.float16
    assert (table.float() - exact).abs().max() <= 2**-12
    assert (table.float() - exact).norm() <= (exact.bfloat16().float() - exact).norm() / 7
    for dtype in (torch.float16, torch.float32):
        assert torch.equal(rotary_table(angles.cos(), angles.sin(), dtype), exact)
