# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of block-parallel MHLA that multiply each token's row with a matrix of its block.

`attend_kernel` computes outputs: products with mixed summaries, divided by the normaliser. `apply_kernel` computes all
gradients of tokens. Tables, padding and the layout of programs are as in `outer_kernels`.
"""

# No postponed annotations here: Triton reads `tl.constexpr` from the functions themselves.
import triton
import triton.language as tl

from .rows import COUNTS, load_rows, place_of_program, product, slot_tokens, store_rows


@triton.jit(do_not_specialize=COUNTS)
def attend_kernel(
    query,
    plain,
    summary,
    key_sum,
    table,
    output,
    denominator,
    query_stride_batch,
    query_stride_token,
    query_stride_head,
    plain_stride_batch,
    plain_stride_token,
    plain_stride_head,
    factor,
    eps,
    num_tokens,
    num_blocks,
    table_stride_batch,
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
    rows_stride_batch,
    rows_stride_token,
    rows_stride_head,
    other_stride_batch,
    other_stride_token,
    other_stride_head,
    matrix_stride_row,
    matrix_stride_column,
    factor,
    num_tokens,
    num_blocks,
    table_stride_batch,
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
