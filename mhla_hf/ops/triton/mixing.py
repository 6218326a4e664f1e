# SPDX-License-Identifier: Apache-2.0
"""The custom operator that mixes block summaries, S̃_i = Σ_b m_ib S_b, with float32 weights.

Shape letters: B batch, H heads, G heads of the summaries (H or a divisor), M blocks, K and V widths.
"""

# No postponed annotations here: torch.library reads schemas from them.

from typing import Any

import torch
import triton
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..numerics import mix_summaries
from .launching import on_device, padded, product_options, split_slots
from .mixing_kernels import mix_kernel, mixing_gradient_kernel


# Pairs of batch entry and head whose share of a gradient is kept apart before they are summed.
SHARES = 64


def mixing_strides(mixing: Tensor) -> tuple[int, int, int, int]:
    """Strides of batch, head, row and column of `[M, M]`, `[H, M, M]` or `[B, 1 or H, M, M]`; 0 where shared."""
    leading = [0, 0]
    for axis in range(mixing.dim() - 2):
        leading[2 - (mixing.dim() - 2) + axis] = 0 if mixing.shape[axis] == 1 else mixing.stride(axis)
    return leading[0], leading[1], mixing.stride(-2), mixing.stride(-1)


def _product_options(summaries: Tensor, exact: bool) -> dict[str, Any]:
    tokens = torch.float16 if exact else torch.bfloat16
    return product_options(tokens, summaries.dtype, summaries.device)


def _launch(
    mixing: Tensor,
    summaries: Tensor,
    heads: int,
    repeats: int,
    *,
    transpose: bool,
    sum_repeats: bool,
    lower: bool,
    exact: bool,
) -> Tensor:
    batch, _, blocks = summaries.shape[:3]
    columns = summaries.shape[3] * summaries.shape[4]
    mixed = summaries.new_empty(batch, heads, *summaries.shape[2:])
    batch_stride, head_stride, row, column = mixing_strides(mixing)
    rows_tile, columns_tile = min(64, padded(blocks)), min(128, padded(columns))
    grid = (batch * heads * triton.cdiv(blocks, rows_tile) * triton.cdiv(columns, columns_tile),)
    with on_device(summaries):
        mix_kernel[grid](
            mixing,
            summaries,
            mixed,
            batch_stride,
            head_stride,
            column if transpose else row,
            row if transpose else column,
            columns,
            blocks=blocks,
            HEADS=heads,
            REPEATS=repeats,
            SUM_REPEATS=sum_repeats,
            LOWER=0 if not lower else 2 if transpose else 1,
            BLOCK_ROWS=rows_tile,
            BLOCK_COLUMNS=columns_tile,
            BLOCK_INNER=min(32, padded(blocks)),
            num_warps=4,
            num_stages=3,
            **_product_options(summaries, exact),
        )
    return mixed


@torch.library.custom_op("mhla_hf::mix_blocks", mutates_args=())
def mix_blocks(mixing: Tensor, summaries: Tensor, heads: int, lower: bool, exact: bool) -> Tensor:
    """S̃_i = Σ_b m_ib S_b.

    Args:
        mixing: float32 `[M, M]`, `[1 or H, M, M]` or `[B, 1 or H, M, M]`.
        summaries: `[B, G, M, K, V]`, dense.
        heads: Heads of the result: H, or G where all heads share the weights.
        lower: Take what lies on and above the diagonal of `mixing` for zero.
        exact: Multiply float32 summaries exactly, see [`multiplies_exactly`]; otherwise through TF32.

    Returns:
        `[B, heads, M, K, V]` in the dtype of `summaries`.
    """
    repeats = heads // summaries.shape[1]
    return _launch(mixing, summaries, heads, repeats, transpose=False, sum_repeats=False, lower=lower, exact=exact)


@mix_blocks.register_fake
def _(mixing, summaries, heads, lower, exact):
    return summaries.new_empty(summaries.shape[0], heads, *summaries.shape[2:])


@torch.library.custom_op("mhla_hf::mix_blocks_backward", mutates_args=())
def mix_blocks_backward(
    gradient: Tensor, mixing: Tensor, summaries: Tensor, heads: int, lower: bool, exact: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of mixing and summaries: Σ_bh gradient_i · S_b, and Σ_i m_ib gradient_i."""
    gradient = gradient.contiguous()
    batch, groups, blocks = summaries.shape[:3]
    repeats = heads // groups
    grad_summaries = _launch(
        mixing, gradient, groups, repeats, transpose=True, sum_repeats=True, lower=lower, exact=exact
    )
    shared_by_all = mixing.dim() == 2 or mixing.shape[:-2].numel() == 1
    share = triton.cdiv(batch * heads, SHARES) if shared_by_all else 1
    shares = triton.cdiv(batch * heads, share)
    tile = min(64, padded(blocks))
    tiles = triton.cdiv(blocks, tile) ** 2
    columns = summaries.shape[3] * summaries.shape[4]
    column_tile = min(64, padded(columns))
    # Sums over all columns are long, and few programs would wait for memory most of the time.
    column_shares, column_share = split_slots(columns, column_tile, tiles * shares)
    partial = mixing.new_empty(shares, column_shares, blocks, blocks, dtype=torch.float32)
    with on_device(summaries):
        mixing_gradient_kernel[(tiles * shares * column_shares,)](
            gradient,
            summaries,
            partial,
            columns,
            batch * heads,
            share,
            column_share,
            blocks=blocks,
            HEADS=heads,
            REPEATS=repeats,
            column_shares=column_shares,
            LOWER=lower,
            BLOCK_ROWS=tile,
            BLOCK_COLUMNS=column_tile,
            num_warps=4,
            num_stages=3,
            **_product_options(summaries, exact),
        )
    if shared_by_all:
        return partial.sum((0, 1)).reshape(mixing.shape), grad_summaries
    return partial.sum(1).unflatten(0, (batch, heads)).sum_to_size(mixing.shape), grad_summaries


@mix_blocks_backward.register_fake
def _(gradient, mixing, summaries, heads, lower, exact):
    grad_mixing = torch.empty_like(mixing, memory_format=torch.contiguous_format)
    return grad_mixing, torch.empty_like(summaries, memory_format=torch.contiguous_format)


def _context(ctx, inputs, output):
    mixing, summaries, ctx.heads, ctx.lower, ctx.exact = inputs
    ctx.save_for_backward(mixing, summaries)


def _backward(ctx, gradient):
    mixing, summaries = ctx.saved_tensors
    grad_mixing, grad_summaries = torch.ops.mhla_hf.mix_blocks_backward(
        gradient, mixing, summaries, ctx.heads, ctx.lower, ctx.exact
    )
    return grad_mixing, grad_summaries, None, None, None


mix_blocks.register_autograd(_backward, setup_context=_context)


def _flops(shape, heads: int, lower: bool) -> int:
    """2 B H M² K V, half of it for a triangle."""
    return 2 * shape[0] * heads * shape[2] ** 2 * shape[3] * shape[4] // (2 if lower else 1)


@register_flop_formula(torch.ops.mhla_hf.mix_blocks)
def _mix_flops(mixing, summaries, heads, lower, exact, *args, **kwargs) -> int:
    return _flops(summaries, heads, lower)


@register_flop_formula(torch.ops.mhla_hf.mix_blocks_backward)
def _mix_backward_flops(gradient, mixing, summaries, heads, lower, exact, *args, **kwargs) -> int:
    return 2 * _flops(summaries, heads, lower)


def mix_summaries_and_sums(
    mixing: Tensor, summaries: Tensor, key_sums: Tensor | None, num_heads: int, *, exact: bool
) -> tuple[Tensor, Tensor | None]:
    """Mixed summaries, and mixed sums of keys with the same heads.

    Args:
        mixing: As in [`mix_blocks`], of any type.
        summaries: `[B, G, M, K, V]`, dense.
        key_sums: float32 `[B, G, M, P]`; None where there is nothing to divide by.
        num_heads: H.
        exact: See [`mix_blocks`].

    Returns:
        `[B, H, M, K, V]` and `[B, H, M, P]` (or None), with G for H where all heads share the weights.
    """
    weights = mixing.float()
    per_head = weights.dim() > 2 and weights.shape[-3] != 1
    heads = num_heads if per_head else summaries.shape[1]
    mixed = mix_blocks(weights, summaries, heads, False, exact)
    if key_sums is None:
        return mixed, None
    return mixed, mix_summaries(weights, key_sums.unsqueeze(-1), heads).squeeze(-1).contiguous()
