# SPDX-License-Identifier: Apache-2.0
"""The fused operator as torch sees it: schema, fakes, autograd, and how many operations it counts."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mhla_hf import BlockLayout

from .triton_checks import DEVICES


pytest.importorskip("triton")
# Half a minute interpreted; the block and causal kernels are tested every time.
pytestmark = pytest.mark.slow

LAYOUT = BlockLayout((3, 5), blocks=(2, 2))


def make_arguments(device, dtype, everything, *, per_head=False):
    """Arguments of the operator, for two heads of width 8, with all that is optional or none of it."""
    from mhla_hf.ops.triton.fused_products import rotary_table

    generator = torch.Generator().manual_seed(0)

    def leaf(*shape, dtype=dtype):
        return torch.rand(shape, generator=generator).add(0.5).to(device, dtype).requires_grad_()

    query, key, value, gate = (leaf(2, 15, 2, 8) for _ in range(4))
    mixing = leaf(*((2,) if per_head else ()), 4, 4, dtype=torch.float32)
    angles = torch.rand(15, 4, generator=generator).to(device)
    turns = rotary_table(angles.cos(), angles.sin(), dtype) if everything else None
    norms = [leaf(16), leaf(16), leaf(8, dtype=torch.float32)] if everything else [None] * 3
    table = LAYOUT.token_table(torch.device(device))
    # Feature map, scaling, eps of the features, whether to divide, and other epsilons.
    rest = "relu", 0.5, 1e-3, everything, 1e-6, 1e-6, 1e-6, 1e-6
    return query, key, value, gate if everything else None, mixing, *norms, turns, table, *rest


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("everything", [True, False])
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operator_is_what_torch_expects(dtype, everything, device):
    from mhla_hf.ops.triton import fused

    torch.library.opcheck(fused.fused_attention.overload, make_arguments(device, dtype, everything))


@pytest.mark.parametrize("device", DEVICES)
def test_empty_slots_add_nothing_to_the_gradient_of_an_output_norm_without_eps(device):
    from mhla_hf.ops.triton import fused

    *arguments, _ = make_arguments(device, torch.float32, True)
    weight = arguments[7]
    found = []
    for eps in (0.0, 1e-12):
        output, *_ = fused.fused_attention(*arguments, eps)
        found.append(torch.autograd.grad(output.sum(), weight)[0])
    assert found[0].isfinite().all()
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_second_derivatives_are_an_error(device):
    from mhla_hf.ops.triton import fused

    arguments = make_arguments(device, torch.float32, False)
    output, *_ = fused.fused_attention(*arguments)
    (gradient,) = torch.autograd.grad(output.sum(), arguments[0], create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        gradient.square().sum().backward()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("per_head", [False, True])
def test_operations_are_counted(per_head, device):
    """2 B T H K V for summaries, the same for outputs, and 2 B H M² K V for mixing; twice that backwards."""
    from mhla_hf.ops.triton import fused

    arguments = make_arguments(device, torch.float32, True, per_head=per_head)
    forward = 2 * (2 * 2 * 15 * 2 * 8 * 8) + 2 * 2 * 2 * 4**2 * 8 * 8
    with FlopCounterMode(display=False) as counter:
        output, *_ = fused.fused_attention(*arguments)
    assert counter.get_total_flops() == forward
    with FlopCounterMode(display=False) as counter:
        output.sum().backward()
    assert counter.get_total_flops() == 2 * forward


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


def test_rotary_tables_are_remembered_until_they_change():
    from mhla_hf.ops.triton.fused_products import rotary_table

    cosine, sine = torch.rand(1, 5, 1, 4), torch.rand(1, 5, 1, 4)
    with torch.inference_mode():
        first = rotary_table(cosine, sine, torch.bfloat16)
        changing = torch.rand(5, 4)
        tables = [rotary_table(changing.mul_(0.5), sine.view(5, 4), torch.float32) for _ in range(2)]
    # Saved for a backward pass later.
    assert not first.is_inference() and rotary_table(cosine, sine, torch.bfloat16) is first
    torch.testing.assert_close(tables[0][:, ::2], 2 * tables[1][:, ::2])
    other = rotary_table(cosine, sine.clone() + 1, torch.bfloat16)
    assert not torch.equal(other, first)
    cosine.zero_()
    assert rotary_table(cosine, sine, torch.bfloat16)[:, ::2].abs().max() == 0
