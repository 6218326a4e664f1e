# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of causal MHLA: the mixed prefix and the causal part of the own chunk in one pass, forward.

A chunk is worked on in tiles of rows; a row tile meets the tiles of its chunk up to its own. Tokens are read where
they lie, through a table of the token of every slot, and programs laid out as in the block kernels; the parts of a
chunk are row tiles and column tiles. Scores are products of tokens in the tokens' own type, which float32 sums hold
exactly; they meet the values in DOT_TYPE.
"""

# No postponed annotations here: Triton reads `tl.constexpr` from the functions themselves.
import triton
import triton.language as tl

from .rows import COUNTS, finite_or_zero, load_rows, place_of_program, product, raw_product, slot_tokens, store_rows


@triton.jit
def tile_of_program(
    num_blocks,
    slots,
    HEADS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Batch entry, head, chunk, row tile and column tile of this program."""
    COLUMN_TILES: tl.constexpr = (COLUMNS + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    parts = (slots + BLOCK_TOKENS - 1) // BLOCK_TOKENS * COLUMN_TILES
    batch, head, block, part = place_of_program(parts, num_blocks, HEADS)
    return batch, head, block, part // COLUMN_TILES, part % COLUMN_TILES


@triton.jit
def load_matrix(start, row, column, stride_row, stride_column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A tile of a matrix, zero outside."""
    pointers = start + row[:, None] * stride_row + column[None, :] * stride_column
    return tl.load(pointers, mask=(row < ROWS)[:, None] & (column < COLUMNS)[None, :], other=0.0)


@triton.jit(do_not_specialize=COUNTS)
def limit_kernel(
    first_bad,
    starts,
    limit,
    num_blocks,
    slots,
    starts_stride_batch,
    HEADS: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The slot of each chunk from which on outputs are NaN: the first bad one, or 0 after a chunk with a bad one.

    `first_bad` and `limit` are int32 `[B, HEADS, M]`, `slots` where no slot is bad. `starts` is the first chunk of
    each chunk's document, int32 `[B, M]`.
    """
    last_tile = tl.program_id(1)
    row = last_tile * BLOCK + tl.arange(0, BLOCK)
    batch = tl.program_id(0).to(tl.int64) // HEADS
    line = tl.program_id(0).to(tl.int64) * num_blocks
    inside = row < num_blocks
    own = tl.load(first_bad + line + row, mask=inside, other=0)
    if HAS_STARTS:
        start = tl.load(starts + batch * starts_stride_batch + row, mask=inside, other=0)
    else:
        start = tl.zeros((BLOCK,), tl.int32)
    spoilt = tl.zeros((BLOCK,), tl.int32)
    for tile in range(last_tile + 1):
        other = tile * BLOCK + tl.arange(0, BLOCK)
        bad = tl.load(first_bad + line + other, mask=other < num_blocks, other=slots) < slots
        earlier = (other[None, :] >= start[:, None]) & (other[None, :] < row[:, None])
        spoilt = tl.maximum(spoilt, tl.max((earlier & bad[None, :]).to(tl.int32), axis=1))
    tl.store(limit + line + row, tl.where(spoilt > 0, 0, own), mask=inside)


@triton.jit(do_not_specialize=COUNTS)
def causal_attend_kernel(
    query,
    key,
    value,
    plain_query,
    plain_key,
    prefix,
    prefix_sum,
    mixing,
    limit,
    table,
    output,
    denominator,
    query_stride_batch,
    query_stride_token,
    query_stride_head,
    key_stride_batch,
    key_stride_token,
    key_stride_head,
    value_stride_batch,
    value_stride_token,
    value_stride_head,
    plain_query_stride_batch,
    plain_query_stride_token,
    plain_query_stride_head,
    plain_key_stride_batch,
    plain_key_stride_token,
    plain_key_stride_head,
    mixing_stride_batch,
    mixing_stride_head,
    mixing_stride_diagonal,
    factor,
    eps,
    num_tokens,
    num_blocks,
    table_stride_batch,
    slots,
    HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    PREFIX_REPEATS: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE: tl.constexpr,
    PLAIN: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_PLAIN: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    NORMALIZER: tl.constexpr,
    TOKEN_TYPE: tl.constexpr,
    PLAIN_TYPE: tl.constexpr,
    DOT_TYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """output_t = factor · query_tᵀ prefix_i + m_ii Σ_{j ≤ t in i} (query_t · key_j) value_j for chunk i, divided by
    the same expression of `plain_query`, `plain_key` and `prefix_sum`, without factor and values but with eps.

    HEADS is the number of query heads; REPEATS of them share a key head, PREFIX_REPEATS a prefix. NORMALIZER: 0 does
    not divide, 1 takes query and key themselves for the plain ones, 2 takes those. Rows from the chunk's `limit` on
    become NaN.
    """
    batch, head, block, row_tile, column_tile = tile_of_program(
        num_blocks, slots, HEADS, BLOCK_TOKENS, VALUE, BLOCK_VALUE
    )
    key_head, prefix_head = head // REPEATS, head // PREFIX_REPEATS
    column, plain_column = tl.arange(0, BLOCK_WIDTH), tl.arange(0, BLOCK_PLAIN)
    value_column = column_tile * BLOCK_VALUE + tl.arange(0, BLOCK_VALUE)
    slot = row_tile * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    tokens, present = slot_tokens(table, batch, block, slot, slots, num_tokens, table_stride_batch, slots)
    query_start = query + batch * query_stride_batch + head * query_stride_head
    key_start = key + batch * key_stride_batch + key_head * key_stride_head
    value_start = value + batch * value_stride_batch + key_head * value_stride_head
    plain_start = plain_key + batch * plain_key_stride_batch + key_head * plain_key_stride_head
    rows = load_rows(query_start, tokens, present, query_stride_token, column, WIDTH)
    if NORMALIZER == 2:
        start = plain_query + batch * plain_query_stride_batch + head * plain_query_stride_head
        plain_rows = load_rows(start, tokens, present, plain_query_stride_token, plain_column, PLAIN)
    else:
        plain_rows = rows
    result = tl.zeros((BLOCK_TOKENS, BLOCK_VALUE), tl.float32)
    divisor = tl.zeros((BLOCK_TOKENS,), tl.float32)
    for tile in range(row_tile + 1):
        other_slot = tile * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
        others, there = slot_tokens(table, batch, block, other_slot, slots, num_tokens, table_stride_batch, slots)
        seen = other_slot[None, :] <= slot[:, None]
        keys = finite_or_zero(load_rows(key_start, others, there, key_stride_token, column, WIDTH))
        values = finite_or_zero(load_rows(value_start, others, there, value_stride_token, value_column, VALUE))
        scores = tl.where(seen, raw_product(rows, tl.trans(keys), TOKEN_TYPE, PRECISION, INTERPRETED), 0.0)
        result += product(scores, values, DOT_TYPE, PRECISION, INTERPRETED)
        if NORMALIZER == 2:
            keys = finite_or_zero(load_rows(plain_start, others, there, plain_key_stride_token, plain_column, PLAIN))
            scores = tl.where(seen, raw_product(plain_rows, tl.trans(keys), PLAIN_TYPE, PRECISION, INTERPRETED), 0.0)
        if NORMALIZER != 0:
            divisor += tl.sum(scores, axis=1)
    weight = tl.load(mixing + batch * mixing_stride_batch + head * mixing_stride_head + block * mixing_stride_diagonal)
    matrix = (batch * (HEADS // PREFIX_REPEATS) + prefix_head) * num_blocks + block
    matrix_rows = load_matrix(prefix + matrix * (WIDTH * VALUE), column, value_column, VALUE, 1, WIDTH, VALUE)
    result = result * weight + raw_product(rows, matrix_rows, DOT_TYPE, PRECISION, INTERPRETED) * factor
    if NORMALIZER != 0:
        sums = tl.load(prefix_sum + matrix * PLAIN + plain_column, mask=plain_column < PLAIN, other=0.0)
        divisor = divisor * weight + tl.sum(plain_rows.to(tl.float32) * sums[None, :], axis=1) + eps
        result = result / tl.where(present, divisor, 1.0)[:, None]
        if column_tile == 0:
            tl.store(denominator + (batch * num_tokens + tokens) * HEADS + head, divisor, mask=present)
    first_spoilt = tl.load(limit + (batch * (HEADS // REPEATS) + key_head) * num_blocks + block)
    result = tl.where((slot >= first_spoilt)[:, None], float("nan"), result)
    start = output + (batch * num_tokens * HEADS + head) * VALUE
    store_rows(start, tokens, present, HEADS * VALUE, value_column, result, VALUE, INTERPRETED)
