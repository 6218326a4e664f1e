# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel of causal MHLA, backward, for a normaliser's pair that is not query and key themselves.

For either side of the pair, as `causal_gradient_kernels` has it; there is no matrix product but that of a triangle of
weights with the rows of a chunk.
"""

# No postponed annotations here: Triton reads `tl.constexpr` from the functions themselves.
import triton
import triton.language as tl

from .causal_kernels import tile_of_program
from .rows import COUNTS, finite_or_zero, load_rows, product, slot_tokens, store_rows


@triton.jit(do_not_specialize=COUNTS)
def plain_gradient_kernel(
    rows,
    other,
    vectors,
    mixing,
    limit,
    table,
    weight,
    result,
    share,
    rows_stride_batch,
    rows_stride_token,
    rows_stride_head,
    other_stride_batch,
    other_stride_token,
    other_stride_head,
    mixing_stride_batch,
    mixing_stride_head,
    mixing_stride_diagonal,
    share_stride_part,
    num_tokens,
    num_blocks,
    table_stride_batch,
    slots,
    HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    VECTOR_REPEATS: tl.constexpr,
    PLAIN: tl.constexpr,
    BLOCK_PLAIN: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    OF_QUERY: tl.constexpr,
    DOT_TYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Gradients of one side of the normaliser's pair.

    OF_QUERY: result_t = weight_t (vector_i + m_ii Σ_{j ≤ t in i} other_j), with queries in `rows` and keys in `other`,
    and the gradient of m_ii in `share`, to be summed over its parts; HEADS query heads of which REPEATS share a key
    head and VECTOR_REPEATS a vector. Otherwise result_j = vector_i + m_ii Σ_{t ≥ j in i} weight_t other_t, with
    queries in `other`; HEADS key heads, for each of which REPEATS query heads are summed.
    """
    batch, head, block, row_tile, _ = tile_of_program(num_blocks, slots, HEADS, BLOCK_TOKENS, PLAIN, BLOCK_PLAIN)
    column = tl.arange(0, BLOCK_PLAIN)
    slot = row_tile * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    tokens, present = slot_tokens(table, batch, block, slot, slots, num_tokens, table_stride_batch, slots)
    key_head = head // REPEATS if OF_QUERY else head
    key_heads = HEADS // REPEATS if OF_QUERY else HEADS
    stop = tl.minimum(tl.load(limit + (batch * key_heads + key_head) * num_blocks + block), slots)
    last_tile = row_tile + 1 if OF_QUERY else (slots + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    total = tl.zeros((BLOCK_TOKENS, BLOCK_PLAIN), tl.float32)
    own_weight = 1.0
    for repeat in range(1 if OF_QUERY else REPEATS):
        query_head = head if OF_QUERY else head * REPEATS + repeat
        other_start = other + batch * other_stride_batch
        other_start += (key_head if OF_QUERY else query_head) * other_stride_head
        own_weight = tl.load(
            mixing + batch * mixing_stride_batch + query_head * mixing_stride_head + block * mixing_stride_diagonal
        )
        for tile in range(0 if OF_QUERY else row_tile, last_tile):
            other_slot = tile * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
            until = slots if OF_QUERY else stop
            others, there = slot_tokens(table, batch, block, other_slot, until, num_tokens, table_stride_batch, slots)
            other_rows = load_rows(other_start, others, there, other_stride_token, column, PLAIN)
            if OF_QUERY:
                counted = (other_slot[None, :] <= slot[:, None]).to(tl.float32)
                other_rows = finite_or_zero(other_rows)
            else:
                per_token = (batch * num_tokens + others) * (HEADS * REPEATS) + query_head
                weights = tl.load(weight + per_token, mask=there, other=0.0) * own_weight
                counted = tl.where(other_slot[None, :] >= slot[:, None], weights[None, :], 0.0)
            total += product(counted, other_rows, DOT_TYPE, PRECISION, INTERPRETED)
    vector_head = head // VECTOR_REPEATS if OF_QUERY else head
    vector_heads = HEADS // VECTOR_REPEATS if OF_QUERY else HEADS
    vector_start = vectors + ((batch * vector_heads + vector_head) * num_blocks + block) * PLAIN
    vector = tl.load(vector_start + column, mask=column < PLAIN, other=0.0)
    if OF_QUERY:
        used = present & (slot < stop)
        row_weight = tl.load(weight + (batch * num_tokens + tokens) * HEADS + head, mask=used, other=0.0)
        rows_start = rows + batch * rows_stride_batch + head * rows_stride_head
        queries = load_rows(rows_start, tokens, used, rows_stride_token, column, PLAIN).to(tl.float32)
        shares = row_weight * tl.sum(queries * total, axis=1)
        total = row_weight[:, None] * (vector[None, :] + own_weight * total)
        share_start = share + row_tile * share_stride_part + (batch * HEADS + head) * num_blocks
        tl.store(share_start + block, tl.sum(shares, axis=0))
    else:
        total += vector[None, :]
    start = result + (batch * num_tokens * HEADS + head) * PLAIN
    store_rows(start, tokens, present, HEADS * PLAIN, column, total, PLAIN, INTERPRETED)
