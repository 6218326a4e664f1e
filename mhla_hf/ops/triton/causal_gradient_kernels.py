# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of causal MHLA, backward.

With n_t and d_t the numerator and denominator of token t, g'_t = g_t / d_t and δ_t = -g'_t · n_t / d_t, the part of
the gradients that the own chunk contributes is, with m = m_ii and sums over the chunk,

    dq_t = m Σ_{j≤t} (g'_t · v_j) k_j      dk_j = m Σ_{t≥j} (g'_t · v_j) q_t      dv_j = m Σ_{t≥j} (q_t · k_j) g'_t
    dp_t = m δ_t Σ_{j≤t} p_j               dp_j = m Σ_{t≥j} δ_t p_t

for the normaliser's pair p. One kernel computes dq, one dk and dv (with the roles of the tensors exchanged); dp is
added to them, or computed by `causal_pair_kernels` where p is a pair of its own. The prefix adds products with its
gradients, as in the block kernels. Rows of queries from the `limit` of a chunk on are left out, keys and values that
are not finite count as zero. Programs are as in the forward pass.
"""

# No postponed annotations here: Triton reads `tl.constexpr` from the functions themselves.
import triton
import triton.language as tl

from .causal_kernels import load_matrix, tile_of_program
from .rows import COUNTS, finite_or_zero, load_rows, product, raw_product, slot_tokens, store_rows


@triton.jit(do_not_specialize=COUNTS)
def query_gradient_kernel(
    gradient,
    output,
    query,
    key,
    value,
    prefix,
    prefix_sum,
    mixing,
    limit,
    table,
    scale,
    result,
    weight,
    share,
    gradient_stride_batch,
    gradient_stride_token,
    gradient_stride_head,
    query_stride_batch,
    query_stride_token,
    query_stride_head,
    key_stride_batch,
    key_stride_token,
    key_stride_head,
    value_stride_batch,
    value_stride_token,
    value_stride_head,
    mixing_stride_batch,
    mixing_stride_head,
    mixing_stride_diagonal,
    share_stride_part,
    factor,
    num_tokens,
    num_blocks,
    table_stride_batch,
    slots,
    HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    PREFIX_REPEATS: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    NORMALIZER: tl.constexpr,
    TOKEN_TYPE: tl.constexpr,
    DOT_TYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Gradients of queries, of their denominators (`weight`, δ), and of m_ii (`share`, to be summed over its parts).

    NORMALIZER as in the forward pass. δ comes from the products made here where one tile holds all columns, free of
    the rounding of the outputs (dense `[B, T, HEADS, VALUE]`), otherwise from those.
    """
    batch, head, block, row_tile, column_tile = tile_of_program(
        num_blocks, slots, HEADS, BLOCK_TOKENS, WIDTH, BLOCK_WIDTH
    )
    key_head, prefix_head = head // REPEATS, head // PREFIX_REPEATS
    column = column_tile * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    value_column = tl.arange(0, BLOCK_VALUE)
    stop = tl.load(limit + (batch * (HEADS // REPEATS) + key_head) * num_blocks + block)
    slot = row_tile * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    tokens, present = slot_tokens(table, batch, block, slot, slots, num_tokens, table_stride_batch, slots)
    used = present & (slot < stop)
    per_token = (batch * num_tokens + tokens) * HEADS + head
    gradient_start = gradient + batch * gradient_stride_batch + head * gradient_stride_head
    key_start = key + batch * key_stride_batch + key_head * key_stride_head
    value_start = value + batch * value_stride_batch + key_head * value_stride_head
    rows = load_rows(gradient_start, tokens, used, gradient_stride_token, value_column, VALUE)
    own = tl.zeros((BLOCK_TOKENS, BLOCK_WIDTH), tl.float32)
    for tile in range(row_tile + 1):
        other_slot = tile * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
        others, there = slot_tokens(table, batch, block, other_slot, slots, num_tokens, table_stride_batch, slots)
        seen = other_slot[None, :] <= slot[:, None]
        values = finite_or_zero(load_rows(value_start, others, there, value_stride_token, value_column, VALUE))
        keys = finite_or_zero(load_rows(key_start, others, there, key_stride_token, column, WIDTH))
        scores = tl.where(seen, raw_product(rows, tl.trans(values), TOKEN_TYPE, PRECISION, INTERPRETED), 0.0)
        own += product(scores, keys, DOT_TYPE, PRECISION, INTERPRETED)
    own_weight = tl.load(
        mixing + batch * mixing_stride_batch + head * mixing_stride_head + block * mixing_stride_diagonal
    )
    matrix = (batch * (HEADS // PREFIX_REPEATS) + prefix_head) * num_blocks + block
    columns = load_matrix(prefix + matrix * (WIDTH * VALUE), value_column, column, 1, VALUE, VALUE, WIDTH)
    total = own * own_weight + raw_product(rows, columns, DOT_TYPE, PRECISION, INTERPRETED) * factor
    query_start = query + batch * query_stride_batch + head * query_stride_head
    queries = load_rows(query_start, tokens, used, query_stride_token, column, WIDTH).to(tl.float32)
    if NORMALIZER == 0:
        shares = tl.sum(queries * own, axis=1)
    else:
        row_scale = tl.load(scale + per_token, mask=used, other=0.0)
        total *= row_scale[:, None]
        shares = tl.sum(queries * own, axis=1) * row_scale
        if BLOCK_WIDTH >= WIDTH:
            row_weight = -row_scale * tl.sum(total * queries, axis=1)
        else:
            output_start = output + (batch * num_tokens * HEADS + head) * VALUE
            outputs = load_rows(output_start, tokens, used, HEADS * VALUE, value_column, VALUE)
            row_weight = -row_scale * tl.sum(rows.to(tl.float32) * outputs.to(tl.float32), axis=1)
        if column_tile == 0:
            tl.store(weight + per_token, row_weight, mask=present)
        if NORMALIZER == 1:
            # Keys are read once more here, from the cache: sums kept along with the products above would not fit into
            # registers.
            key_sums = tl.zeros((BLOCK_TOKENS, BLOCK_WIDTH), tl.float32)
            for tile in range(row_tile + 1):
                other_slot = tile * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
                others, there = slot_tokens(
                    table, batch, block, other_slot, slots, num_tokens, table_stride_batch, slots
                )
                keys = finite_or_zero(load_rows(key_start, others, there, key_stride_token, column, WIDTH))
                seen = (other_slot[None, :] <= slot[:, None]).to(tl.float32)
                key_sums += raw_product(seen, keys, TOKEN_TYPE, PRECISION, INTERPRETED)
            sums = tl.load(prefix_sum + matrix * WIDTH + column, mask=column < WIDTH, other=0.0)
            total += row_weight[:, None] * (sums[None, :] + own_weight * key_sums)
            shares += row_weight * tl.sum(queries * key_sums, axis=1)
    start = result + (batch * num_tokens * HEADS + head) * WIDTH
    store_rows(start, tokens, present, HEADS * WIDTH, column, total, WIDTH, INTERPRETED)
    part = row_tile * ((WIDTH + BLOCK_WIDTH - 1) // BLOCK_WIDTH) + column_tile
    share_start = share + part * share_stride_part + (batch * HEADS + head) * num_blocks
    tl.store(share_start + block, tl.sum(shares, axis=0))


@triton.jit(do_not_specialize=COUNTS)
def key_gradient_kernel(
    rows,
    inner,
    other,
    matrices,
    vectors,
    mixing,
    limit,
    table,
    scale,
    weight,
    result,
    rows_stride_batch,
    rows_stride_token,
    rows_stride_head,
    inner_stride_batch,
    inner_stride_token,
    inner_stride_head,
    other_stride_batch,
    other_stride_token,
    other_stride_head,
    matrix_stride_row,
    matrix_stride_column,
    mixing_stride_batch,
    mixing_stride_head,
    mixing_stride_diagonal,
    factor,
    num_tokens,
    num_blocks,
    table_stride_batch,
    slots,
    HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    TOKEN_TYPE: tl.constexpr,
    DOT_TYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """result_j = factor · rows_jᵀ matrix_i + m_ii Σ_{t ≥ j in i} (scale_t rows_j · inner_t + weight_t) other_t.

    The gradient of values for rows = keys, inner = queries, other = output gradients; that of keys for rows = values,
    inner = output gradients, other = queries, with δ for `weight` and the block's vector added to the result, if
    HAS_WEIGHT. HEADS is the number of key heads; REPEATS heads of `inner` and `other` are summed for each.
    """
    batch, head, block, row_tile, column_tile = tile_of_program(
        num_blocks, slots, HEADS, BLOCK_TOKENS, COLUMNS, BLOCK_COLUMNS
    )
    row_column = tl.arange(0, BLOCK_WIDTH)
    column = column_tile * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    matrix = (batch * HEADS + head) * num_blocks + block
    stop = tl.minimum(tl.load(limit + matrix), slots)
    slot = row_tile * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    tokens, present = slot_tokens(table, batch, block, slot, slots, num_tokens, table_stride_batch, slots)
    rows_start = rows + batch * rows_stride_batch + head * rows_stride_head
    own = finite_or_zero(load_rows(rows_start, tokens, present, rows_stride_token, row_column, WIDTH))
    total = tl.zeros((BLOCK_TOKENS, BLOCK_COLUMNS), tl.float32)
    for repeat in range(REPEATS):
        row_head = head * REPEATS + repeat
        inner_start = inner + batch * inner_stride_batch + row_head * inner_stride_head
        other_start = other + batch * other_stride_batch + row_head * other_stride_head
        own_weight = tl.load(
            mixing + batch * mixing_stride_batch + row_head * mixing_stride_head + block * mixing_stride_diagonal
        )
        for tile in range(row_tile, (slots + BLOCK_TOKENS - 1) // BLOCK_TOKENS):
            later_slot = tile * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
            later, there = slot_tokens(table, batch, block, later_slot, stop, num_tokens, table_stride_batch, slots)
            per_token = (batch * num_tokens + later) * (HEADS * REPEATS) + row_head
            inner_rows = load_rows(inner_start, later, there, inner_stride_token, row_column, WIDTH)
            other_rows = load_rows(other_start, later, there, other_stride_token, column, COLUMNS)
            scores = raw_product(own, tl.trans(inner_rows), TOKEN_TYPE, PRECISION, INTERPRETED)
            if HAS_SCALE:
                scores *= tl.load(scale + per_token, mask=there, other=0.0)[None, :]
            if HAS_WEIGHT:
                scores += tl.load(weight + per_token, mask=there, other=0.0)[None, :]
            scores = tl.where(later_slot[None, :] >= slot[:, None], scores * own_weight, 0.0)
            total += product(scores, other_rows, DOT_TYPE, PRECISION, INTERPRETED)
    start = matrices + matrix * (WIDTH * COLUMNS)
    columns = load_matrix(start, row_column, column, matrix_stride_row, matrix_stride_column, WIDTH, COLUMNS)
    total += raw_product(own, columns, DOT_TYPE, PRECISION, INTERPRETED) * factor
    if HAS_WEIGHT:
        total += tl.load(vectors + matrix * COLUMNS + column, mask=column < COLUMNS, other=0.0)[None, :]
    start = result + (batch * num_tokens * HEADS + head) * COLUMNS
    store_rows(start, tokens, present, HEADS * COLUMNS, column, total, COLUMNS, INTERPRETED)
