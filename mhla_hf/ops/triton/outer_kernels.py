# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel that sums outer products of token rows within each block.

It computes block summaries, and the gradients of mixed summaries. Tokens are read where they lie: a table gives the
token of every slot of every block, so blocks need neither be contiguous nor of one size. Programs are laid out as
[`place_of_program`] says; the parts of a block are shares of its slots and column tiles. Sums are in float32. Widths
that are no power of two are padded with zeros inside the kernel only.
"""

# No postponed annotations here: Triton reads `tl.constexpr` from the functions themselves.
import triton
import triton.language as tl

from .rows import (
    COUNTS,
    finite_or_zero,
    first_bad_slot,
    load_rows,
    place_of_program,
    product,
    slot_tokens,
    to_matrix,
    to_tf32,
)


@triton.jit(do_not_specialize=COUNTS)
def outer_kernel(
    left,
    right,
    plain,
    scale,
    weight,
    table,
    products,
    total,
    bad,
    left_stride_batch,
    left_stride_token,
    left_stride_head,
    right_stride_batch,
    right_stride_token,
    right_stride_head,
    plain_stride_batch,
    plain_stride_token,
    plain_stride_head,
    products_stride_split,
    total_stride_split,
    bad_stride_part,
    factor,
    num_tokens,
    num_blocks,
    table_stride_batch,
    slots,
    splits,
    split_slots,
    HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    PLAIN: tl.constexpr,
    BLOCK_LEFT: tl.constexpr,
    BLOCK_RIGHT: tl.constexpr,
    BLOCK_PLAIN: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    TOTAL: tl.constexpr,
    BAD: tl.constexpr,
    BAD_REPEATS: tl.constexpr,
    DOT_TYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """products_b = factor Σ_t left_t ⊗ (scale_t right_t) and total_b = Σ_t weight_t plain_t over the slots of block b.

    HEADS is the number of heads of `products`; each sums REPEATS heads of the rows. `scale` and `weight` are
    `[B, T, HEADS · REPEATS]`. TOTAL: 0 computes no total, 1 sums `left`, 2 sums `plain`. BAD: 1 takes numbers that are
    not finite for zero and writes the first slot that has one, or `slots`, to `bad` `[parts, B, HEADS, num_blocks]`, a
    part for each share and column tile; 2 leaves out the slots from `bad` `[B, heads, num_blocks]` on, of which
    BAD_REPEATS heads of the rows share one.
    """
    COLUMN_TILES: tl.constexpr = (RIGHT + BLOCK_RIGHT - 1) // BLOCK_RIGHT
    batch, head, block, part = place_of_program(splits * COLUMN_TILES, num_blocks, HEADS)
    split, column_tile = part // COLUMN_TILES, part % COLUMN_TILES
    left_column = tl.arange(0, BLOCK_LEFT)
    right_column = column_tile * BLOCK_RIGHT + tl.arange(0, BLOCK_RIGHT)
    plain_column = tl.arange(0, BLOCK_PLAIN)
    accumulator = tl.zeros((BLOCK_LEFT, BLOCK_RIGHT), tl.float32)
    sums = tl.zeros((BLOCK_PLAIN,), tl.float32)
    first = split * split_slots
    stop = tl.minimum(first + split_slots, slots)
    first_bad = tl.full((), slots, tl.int32)
    for repeat in range(REPEATS):
        row_head = head * REPEATS + repeat
        if BAD == 2:
            bad_heads = HEADS * REPEATS // BAD_REPEATS
            bad_matrix = (batch * bad_heads + row_head // BAD_REPEATS) * num_blocks + block
            stop = tl.minimum(tl.minimum(first + split_slots, slots), tl.load(bad + bad_matrix))
        left_start = left + batch * left_stride_batch + row_head * left_stride_head
        right_start = right + batch * right_stride_batch + row_head * right_stride_head
        plain_start = plain + batch * plain_stride_batch + row_head * plain_stride_head
        for offset in range(first, stop, BLOCK_TOKENS):
            slot = offset + tl.arange(0, BLOCK_TOKENS)
            tokens, present = slot_tokens(table, batch, block, slot, stop, num_tokens, table_stride_batch, slots)
            per_token = (batch * num_tokens + tokens) * (HEADS * REPEATS) + row_head
            left_rows = load_rows(left_start, tokens, present, left_stride_token, left_column, LEFT)
            right_rows = load_rows(right_start, tokens, present, right_stride_token, right_column, RIGHT)
            if BAD == 1:
                first_bad = tl.minimum(first_bad, first_bad_slot(left_rows, slot, slots))
                first_bad = tl.minimum(first_bad, first_bad_slot(right_rows, slot, slots))
                left_rows, right_rows = finite_or_zero(left_rows), finite_or_zero(right_rows)
            if HAS_SCALE:
                row_scale = tl.load(scale + per_token, mask=present, other=0.0)
                right_rows = right_rows.to(tl.float32) * row_scale[:, None]
                if PRECISION == "tf32":
                    right_rows = to_tf32(right_rows)
            accumulator += product(tl.trans(left_rows), right_rows, DOT_TYPE, PRECISION, INTERPRETED)
            if TOTAL != 0:
                if TOTAL == 2:
                    plain_rows = load_rows(plain_start, tokens, present, plain_stride_token, plain_column, PLAIN)
                    if BAD == 1:
                        first_bad = tl.minimum(first_bad, first_bad_slot(plain_rows, slot, slots))
                        plain_rows = finite_or_zero(plain_rows)
                else:
                    plain_rows = left_rows
                plain_rows = plain_rows.to(tl.float32)
                if HAS_WEIGHT:
                    row_weight = tl.load(weight + per_token, mask=present, other=0.0)
                    plain_rows *= row_weight[:, None]
                sums += tl.sum(plain_rows, axis=0)
    matrix = (batch * HEADS + head) * num_blocks + block
    start = products + split.to(tl.int64) * products_stride_split + matrix * (LEFT * RIGHT)
    inside = (left_column < LEFT)[:, None] & (right_column < RIGHT)[None, :]
    pointers = start + left_column[:, None] * RIGHT + right_column[None, :]
    result = to_matrix(accumulator * factor, products.dtype.element_ty, PRECISION, INTERPRETED)
    tl.store(pointers, result, mask=inside)
    if TOTAL != 0:
        sums_start = total + split * total_stride_split + matrix * PLAIN
        if column_tile == 0:
            tl.store(sums_start + plain_column, sums, mask=plain_column < PLAIN)
    if BAD == 1:
        tl.store(bad + part * bad_stride_part + matrix, first_bad)
