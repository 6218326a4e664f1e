# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of block-parallel MHLA. Two of them carry forward and backward alike.

`outer_kernel` sums outer products of token rows within each block (block summaries, and the gradients of mixed
summaries); `apply_kernel` multiplies each token's row with a matrix of its block (all token gradients). The forward
pass has `attend_kernel`, which is `apply_kernel` with the division by the normaliser. Tokens are read where they lie:
a table gives the token of every slot of every block, so blocks need neither be contiguous nor of one size.

Programs are laid out as [`place_of_program`] says; the parts of a block are shares of its slots and column tiles. Sums
are in float32. Widths that are no power of two are padded with zeros inside the kernel only.
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
    store_rows,
    to_type,
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
    num_tokens,
    table_stride_batch,
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
    num_blocks,
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
    tl.store(pointers, to_type(accumulator * factor, products.dtype.element_ty, INTERPRETED), mask=inside)
    if TOTAL != 0:
        sums_start = total + split * total_stride_split + matrix * PLAIN
        if column_tile == 0:
            tl.store(sums_start + plain_column, sums, mask=plain_column < PLAIN)
    if BAD == 1:
        tl.store(bad + part * bad_stride_part + matrix, first_bad)


@triton.jit(do_not_specialize=COUNTS)
def attend_kernel(
    query,
    plain,
    summary,
    key_sum,
    table,
    output,
    denominator,
    num_tokens,
    table_stride_batch,
    query_stride_batch,
    query_stride_token,
    query_stride_head,
    plain_stride_batch,
    plain_stride_token,
    plain_stride_head,
    factor,
    eps,
    num_blocks,
    slots,
    splits,
    split_slots,
    HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE: tl.constexpr,
    PLAIN: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_PLAIN: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    NORMALIZER: tl.constexpr,
    DOT_TYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """output_t = factor · query_tᵀ summary_b(t), divided by plain_t · key_sum_b(t) + eps.

    HEADS is the number of heads of `summary`, REPEATS the query heads that share one. NORMALIZER: 0 does not divide,
    1 takes the query itself for `plain`, 2 takes `plain`, 3 takes a given `denominator` `[B, T, H]`; 1 and 2 write
    the denominator.
    """
    COLUMN_TILES: tl.constexpr = (VALUE + BLOCK_VALUE - 1) // BLOCK_VALUE
    batch, row_head, block, part = place_of_program(splits * COLUMN_TILES, num_blocks, HEADS * REPEATS)
    head, split, column_tile = row_head // REPEATS, part // COLUMN_TILES, part % COLUMN_TILES
    column = tl.arange(0, BLOCK_WIDTH)
    value_column = column_tile * BLOCK_VALUE + tl.arange(0, BLOCK_VALUE)
    plain_column = tl.arange(0, BLOCK_PLAIN)
    matrix = (batch * HEADS + head) * num_blocks + block
    weights = tl.load(
        summary + matrix * (WIDTH * VALUE) + column[:, None] * VALUE + value_column[None, :],
        mask=(column < WIDTH)[:, None] & (value_column < VALUE)[None, :],
        other=0.0,
    )
    if NORMALIZER == 1 or NORMALIZER == 2:
        sums = tl.load(key_sum + matrix * PLAIN + plain_column, mask=plain_column < PLAIN, other=0.0)
    query_start = query + batch * query_stride_batch + row_head * query_stride_head
    plain_start = plain + batch * plain_stride_batch + row_head * plain_stride_head
    output_start = output + (batch * num_tokens * (HEADS * REPEATS) + row_head) * VALUE
    first = split * split_slots
    stop = tl.minimum(first + split_slots, slots)
    for offset in range(first, stop, BLOCK_TOKENS):
        slot = offset + tl.arange(0, BLOCK_TOKENS)
        tokens, present = slot_tokens(table, batch, block, slot, stop, num_tokens, table_stride_batch, slots)
        rows = load_rows(query_start, tokens, present, query_stride_token, column, WIDTH)
        result = product(rows, weights, DOT_TYPE, PRECISION, INTERPRETED) * factor
        if NORMALIZER != 0:
            per_token = (batch * num_tokens + tokens) * (HEADS * REPEATS) + row_head
            if NORMALIZER == 3:
                divisor = tl.load(denominator + per_token, mask=present, other=1.0) + eps
            else:
                if NORMALIZER == 2:
                    plain_rows = load_rows(plain_start, tokens, present, plain_stride_token, plain_column, PLAIN)
                else:
                    plain_rows = rows
                divisor = tl.sum(plain_rows.to(tl.float32) * sums[None, :], axis=1) + eps
                if column_tile == 0:
                    tl.store(denominator + per_token, divisor, mask=present)
            result = result / tl.where(present, divisor, 1.0)[:, None]
        store_rows(output_start, tokens, present, HEADS * REPEATS * VALUE, value_column, result, VALUE, INTERPRETED)


@triton.jit(do_not_specialize=COUNTS)
def apply_kernel(
    rows,
    other,
    matrices,
    vectors,
    scale,
    table,
    result,
    second,
    weight,
    num_tokens,
    table_stride_batch,
    rows_stride_batch,
    rows_stride_token,
    rows_stride_head,
    other_stride_batch,
    other_stride_token,
    other_stride_head,
    matrix_stride_row,
    matrix_stride_column,
    factor,
    num_blocks,
    slots,
    splits,
    split_slots,
    HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_VECTOR: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    WEIGHT: tl.constexpr,
    VECTORS: tl.constexpr,
    DOT_TYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """result_t = factor · scale_t · rows_tᵀ matrix_b(t), plus weight_t · vector_b(t).

    The strides of a matrix say whether it is transposed. VECTORS: 0 adds nothing, 1 adds the weighted vector to the
    result, 2 writes it to `second`. WEIGHT: 0 takes 1 for weight_t. Otherwise weight_t is the gradient of a
    denominator, where rows are output gradients and `scale` is one over the denominator: 1 has the outputs in `other`
    and computes -scale_t rows_t · other_t; 2 has the queries there and computes the same from the products just made,
    -scale_t result_t · other_t, free of the rounding of the outputs, where one tile holds all columns. Either is
    written to `weight` `[B, T, H]`.
    """
    COLUMN_TILES: tl.constexpr = (COLUMNS + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    batch, row_head, block, part = place_of_program(splits * COLUMN_TILES, num_blocks, HEADS * REPEATS)
    head, split, column_tile = row_head // REPEATS, part // COLUMN_TILES, part % COLUMN_TILES
    row_column = tl.arange(0, BLOCK_WIDTH)
    column = column_tile * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    matrix = (batch * HEADS + head) * num_blocks + block
    weights = tl.load(
        matrices
        + matrix * (WIDTH * COLUMNS)
        + row_column[:, None] * matrix_stride_row
        + column[None, :] * matrix_stride_column,
        mask=(row_column < WIDTH)[:, None] & (column < COLUMNS)[None, :],
        other=0.0,
    )
    if VECTORS == 1:
        vector = tl.load(vectors + matrix * VECTOR + column, mask=column < VECTOR, other=0.0)
    if VECTORS == 2:
        vector_column = tl.arange(0, BLOCK_VECTOR)
        vector = tl.load(vectors + matrix * VECTOR + vector_column, mask=vector_column < VECTOR, other=0.0)
    rows_start = rows + batch * rows_stride_batch + row_head * rows_stride_head
    other_start = other + batch * other_stride_batch + row_head * other_stride_head
    token_start = batch * num_tokens * (HEADS * REPEATS) + row_head
    first = split * split_slots
    stop = tl.minimum(first + split_slots, slots)
    for offset in range(first, stop, BLOCK_TOKENS):
        slot = offset + tl.arange(0, BLOCK_TOKENS)
        tokens, present = slot_tokens(table, batch, block, slot, stop, num_tokens, table_stride_batch, slots)
        per_token = token_start + tokens * (HEADS * REPEATS)
        values = load_rows(rows_start, tokens, present, rows_stride_token, row_column, WIDTH)
        output = product(values, weights, DOT_TYPE, PRECISION, INTERPRETED) * factor
        if HAS_SCALE:
            # After the product: gradients of half precision then enter it as they are.
            row_scale = tl.load(scale + per_token, mask=present, other=0.0)
            output *= row_scale[:, None]
        if VECTORS != 0:
            if WEIGHT == 0:
                weighted = tl.zeros((BLOCK_TOKENS, 1), tl.float32) + vector[None, :]
            else:
                if WEIGHT == 1:
                    others = load_rows(other_start, tokens, present, other_stride_token, row_column, WIDTH)
                    row_weight = -row_scale * tl.sum(values.to(tl.float32) * others.to(tl.float32), axis=1)
                else:
                    others = load_rows(other_start, tokens, present, other_stride_token, column, COLUMNS)
                    row_weight = -row_scale * tl.sum(output * others.to(tl.float32), axis=1)
                if column_tile == 0:
                    tl.store(weight + per_token, row_weight, mask=present)
                weighted = row_weight[:, None] * vector[None, :]
            if VECTORS == 1:
                output += weighted
            elif column_tile == 0:
                second_start = second + token_start * VECTOR
                store_rows(
                    second_start,
                    tokens,
                    present,
                    HEADS * REPEATS * VECTOR,
                    vector_column,
                    weighted,
                    VECTOR,
                    INTERPRETED,
                )
        store_rows(
            result + token_start * COLUMNS,
            tokens,
            present,
            HEADS * REPEATS * COLUMNS,
            column,
            output,
            COLUMNS,
            INTERPRETED,
        )
