# SPDX-License-Identifier: Apache-2.0
"""Triton kernels that mix block summaries, with weights that are not rounded to the summaries' type.

A summary is a row of `columns` numbers (K · V of them). float32 weights meet bfloat16 summaries as the sum of two
bfloat16 numbers, which costs one more product and keeps 16 bits of them; cuBLAS would need the weights rounded.
"""

# No postponed annotations here: Triton reads `tl.constexpr` from the functions themselves.
import triton
import triton.language as tl

from .rows import COUNTS, product, to_matrix, to_type


@triton.jit
def _split_product(weights, summaries, DOT_TYPE: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr):
    """weights @ summaries for float32 weights."""
    result = product(weights, summaries, DOT_TYPE, PRECISION, INTERPRETED)
    if DOT_TYPE == tl.bfloat16:
        rest = weights - to_type(weights, DOT_TYPE, INTERPRETED).to(tl.float32)
        result += product(rest, summaries, DOT_TYPE, PRECISION, INTERPRETED)
    return result


@triton.jit(do_not_specialize=COUNTS)
def mix_kernel(
    mixing,
    summaries,
    mixed,
    mixing_stride_batch,
    mixing_stride_head,
    mixing_stride_row,
    mixing_stride_column,
    columns,
    blocks,
    HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    SUM_REPEATS: tl.constexpr,
    LOWER: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_INNER: tl.constexpr,
    DOT_TYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
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
            accumulator += _split_product(weights, rows, DOT_TYPE, PRECISION, INTERPRETED)
    start = mixed + (batch * HEADS + head) * blocks * columns
    pointers = start + row.to(tl.int64)[:, None] * columns + column[None, :]
    inside = (row < blocks)[:, None] & (column < columns)[None, :]
    tl.store(pointers, to_matrix(accumulator, mixed.dtype.element_ty, PRECISION, INTERPRETED), mask=inside)


@triton.jit(do_not_specialize=COUNTS)
def mixing_gradient_kernel(
    gradients,
    summaries,
    result,
    columns,
    count,
    share,
    column_share,
    blocks,
    HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    column_shares,
    LOWER: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    DOT_TYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
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
                accumulator += product(left, tl.trans(right), DOT_TYPE, PRECISION, INTERPRETED)
    used = (row < blocks)[:, None] & (other < blocks)[None, :]
    if LOWER:
        accumulator = tl.where(other[None, :] < row[:, None], accumulator, 0.0)
    start = result + part.to(tl.int64) * blocks * blocks
    tl.store(start + row[:, None] * blocks + other[None, :], accumulator, mask=used)
