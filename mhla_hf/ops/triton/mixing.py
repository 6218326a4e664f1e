# SPDX-License-Identifier: Apache-2.0
"""Mixing of block summaries, forward and backward, with weights that are not rounded to the summaries' type.

    S̃_i = Σ_b m_ib S_b          dS_b = Σ_i m_ib dS̃_i          dm_ib = Σ dS̃_i · S_b

A summary is a row of `columns` numbers (K · V of them). float32 weights meet bfloat16 summaries as the sum of two
bfloat16 numbers, which costs one more product and keeps 16 bits of them; cuBLAS would need the weights rounded.

Shape letters: B batch, H heads, G heads of the summaries (H or a divisor), M blocks, K and V widths.
"""

# No postponed annotations here: torch.library and Triton read them from the functions themselves.

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..mixing import mix_summaries
from .device_functions import COUNTS, product, to_matrix
from .launching import dense_like, padded, product_precision, split_slots


# Pairs of batch entry and head whose share of a gradient is kept apart before they are summed.
SHARES = 64


@triton.jit
def _split_product(weights, summaries, PRECISION: tl.constexpr):
    """weights @ summaries for float32 weights."""
    result = product(weights, summaries, PRECISION)
    if PRECISION == "bf16":
        result += product(weights - weights.to(tl.bfloat16).to(tl.float32), summaries, PRECISION)
    return result


@triton.jit(do_not_specialize=COUNTS)
def mix_kernel(
    mixing, summaries, mixed,
    mixing_stride_batch, mixing_stride_head, mixing_stride_row, mixing_stride_column, columns, blocks,
    HEADS: tl.constexpr, REPEATS: tl.constexpr, SUM_REPEATS: tl.constexpr, LOWER: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_INNER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """mixed_i = Σ_b m_ib summary_b, `[B, HEADS, blocks, columns]` from `[B, G, blocks, columns]`.

    HEADS are those of `mixed`. Without SUM_REPEATS, G = HEADS / REPEATS and REPEATS heads in a row share one of
    `summaries`; with it, G = HEADS · REPEATS and REPEATS of them are mixed and summed (the gradient of the former).
    Strides say where a head's weights lie and whether they are transposed. LOWER: weights on and above the diagonal
    (1) or on and below it (2, for transposed ones) are zero, and not read.
    """
    row_tiles = (blocks + BLOCK_ROWS - 1) // BLOCK_ROWS
    column_tiles = (columns + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    row_tile, rest = tl.program_id(0) % row_tiles, tl.program_id(0) // row_tiles
    column_tile, line = rest % column_tiles, (rest // column_tiles).to(tl.int64)
    batch, head = line // HEADS, line % HEADS
    row = row_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = column_tile * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    accumulator = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    first = 0
    stop = blocks
    if LOWER == 1:
        stop = tl.minimum(blocks, (row_tile + 1) * BLOCK_ROWS)
    if LOWER == 2:
        first = (row_tile * BLOCK_ROWS) // BLOCK_INNER * BLOCK_INNER
    for repeat in range(REPEATS if SUM_REPEATS else 1):
        weight_head = head * REPEATS + repeat if SUM_REPEATS else head
        summary_head = weight_head if SUM_REPEATS else head // REPEATS
        groups = HEADS * REPEATS if SUM_REPEATS else HEADS // REPEATS
        weights_start = mixing + batch * mixing_stride_batch + weight_head * mixing_stride_head
        summary_start = summaries + (batch * groups + summary_head) * blocks * columns
        for offset in range(first, stop, BLOCK_INNER):
            inner = offset + tl.arange(0, BLOCK_INNER)
            used = (row < blocks)[:, None] & (inner < blocks)[None, :]
            if LOWER == 1:
                used = used & (inner[None, :] < row[:, None])
            if LOWER == 2:
                used = used & (inner[None, :] > row[:, None])
            pointers = weights_start + row[:, None] * mixing_stride_row + inner[None, :] * mixing_stride_column
            weights = tl.load(pointers, mask=used, other=0.0)
            pointers = summary_start + inner.to(tl.int64)[:, None] * columns + column[None, :]
            rows = tl.load(pointers, mask=(inner < blocks)[:, None] & (column < columns)[None, :], other=0.0)
            accumulator += _split_product(weights, rows, PRECISION)
    start = mixed + (batch * HEADS + head) * blocks * columns
    pointers = start + row.to(tl.int64)[:, None] * columns + column[None, :]
    inside = (row < blocks)[:, None] & (column < columns)[None, :]
    tl.store(pointers, to_matrix(accumulator, mixed.dtype.element_ty, PRECISION), mask=inside)


@triton.jit(do_not_specialize=COUNTS)
def mixing_gradient_kernel(
    gradients, summaries, result,
    columns, count, share, column_share, blocks,
    HEADS: tl.constexpr, REPEATS: tl.constexpr,
    column_shares,
    LOWER: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """result_ib = Σ gradient_i · summary_b over a share of the batch entries and heads and a share of the columns.

    `gradients` is `[B, HEADS, M, columns]`, `summaries` `[B, HEADS / REPEATS, M, columns]` and `result` float32
    `[shares, column_shares, M, M]`. Programs run over tiles of it, then over both kinds of shares: `share` of the
    `count` = B · HEADS pairs in a row, and `column_share` columns, a multiple of BLOCK_COLUMNS. LOWER leaves out what
    lies on and above the diagonal.
    """
    tiles = (blocks + BLOCK_ROWS - 1) // BLOCK_ROWS
    other_tile, rest = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    row_tile, part = rest % tiles, rest // tiles
    row = row_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    other = other_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    pairs, column_part = part // column_shares, part % column_shares
    first, stop = column_part * column_share, tl.minimum((column_part + 1) * column_share, columns)
    accumulator = tl.zeros((BLOCK_ROWS, BLOCK_ROWS), tl.float32)
    if not LOWER or other_tile <= row_tile:
        for index in range(pairs * share, tl.minimum((pairs + 1) * share, count)):
            batch, head = index // HEADS, index % HEADS
            gradient_start = gradients + tl.cast(index, tl.int64) * blocks * columns
            groups = HEADS // REPEATS
            summary_start = summaries + tl.cast(batch * groups + head // REPEATS, tl.int64) * blocks * columns
            for offset in range(first, stop, BLOCK_COLUMNS):
                column = offset + tl.arange(0, BLOCK_COLUMNS)
                inside = (column < columns)[None, :]
                pointers = row.to(tl.int64)[:, None] * columns + column[None, :]
                left = tl.load(gradient_start + pointers, mask=(row < blocks)[:, None] & inside, other=0.0)
                pointers = other.to(tl.int64)[:, None] * columns + column[None, :]
                right = tl.load(summary_start + pointers, mask=(other < blocks)[:, None] & inside, other=0.0)
                accumulator += product(left, tl.trans(right), PRECISION)
    used = (row < blocks)[:, None] & (other < blocks)[None, :]
    if LOWER:
        accumulator = tl.where(other[None, :] < row[:, None], accumulator, 0.0)
    start = result + part.to(tl.int64) * blocks * blocks
    tl.store(start + row[:, None] * blocks + other[None, :], accumulator, mask=used)


def mixing_strides(mixing: Tensor) -> tuple[int, ...]:
    """Strides of batch, head, row and column of `[M, M]`, `[H, M, M]` or `[B, 1 or H, M, M]`; 0 where shared."""
    leading = mixing[(None,) * (4 - mixing.dim())]
    shared = (0 if size == 1 else stride for size, stride in zip(leading.shape[:2], leading.stride()[:2]))
    return (*shared, *mixing.stride()[-2:])


def diagonal_arguments(mixing: Tensor) -> dict[str, Any]:
    """Kernel arguments for the diagonal of mixing weights."""
    batch, head, row, column = mixing_strides(mixing)
    return {
        "mixing": mixing,
        "mixing_stride_batch": batch,
        "mixing_stride_head": head,
        "mixing_stride_diagonal": row + column,
    }


def _precision(summaries: Tensor, exact: bool) -> str:
    return product_precision(torch.float16 if exact else torch.bfloat16, summaries.dtype)


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
    with torch.cuda.device_of(summaries):
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
            PRECISION=_precision(summaries, exact),
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
    with torch.cuda.device_of(summaries):
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
            PRECISION=_precision(summaries, exact),
        )
    if shared_by_all:
        return partial.sum((0, 1)).reshape(mixing.shape), grad_summaries
    return partial.sum(1).unflatten(0, (batch, heads)).sum_to_size(mixing.shape), grad_summaries


@mix_blocks_backward.register_fake
def _(gradient, mixing, summaries, heads, lower, exact):
    return dense_like(mixing), dense_like(summaries)


def _context(ctx, inputs, output):
    mixing, summaries, ctx.heads, ctx.lower, ctx.exact = inputs
    ctx.save_for_backward(mixing, summaries)


def _backward(ctx, gradient):
    mixing, summaries = ctx.saved_tensors
    grad_mixing, grad_summaries = mix_blocks_backward(gradient, mixing, summaries, ctx.heads, ctx.lower, ctx.exact)
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
