# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel that decodes one token of every batch entry: output, state and the next block's prefix in one go.

Of the programs of a key head, the first STEP_TILES take some columns of its matrices each: they add the token to the
current summary, file it and take over the next prefix where the token starts a block, and compute the output. The
others sum up the token's share of the next block's prefix; they read summaries of many blocks and are as many as the
longest context needs. All read the old state and write the new one elsewhere, but for the summary that is filed, which
nobody else reads.

Matrices of the state are `[K, V + 1]`, with the normaliser z in the last column.
"""

# No postponed annotations here: Triton reads `tl.constexpr` from the functions themselves.
import triton
import triton.language as tl

from .rows import COUNTS, to_type


@triton.jit
def weight_at(mixing, row, column, last, stride_row, stride_column):
    """m at (row, column ≤ row); past the last row, the last row's weight at the same distance or its farthest one."""
    far = tl.maximum(last - (row - column), 0)
    row, column = tl.minimum(row, last), tl.where(row <= last, column, far)
    return tl.load(mixing + row * stride_row + column * stride_column)


@triton.jit
def _token_row(tokens, batch, head, column, stride_batch, stride_head, WIDTH: tl.constexpr):
    start = tokens + batch * stride_batch + head * stride_head
    return tl.load(start + column, mask=column < WIDTH, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=COUNTS)
def decode_kernel(
    query,
    key,
    value,
    plain_query,
    plain_key,
    valid,
    mixing,
    summaries,
    current,
    prefix,
    upcoming,
    position,
    output,
    new_current,
    new_prefix,
    new_upcoming,
    new_position,
    num_blocks,
    last,
    query_stride_batch,
    query_stride_head,
    key_stride_batch,
    key_stride_head,
    value_stride_batch,
    value_stride_head,
    plain_query_stride_batch,
    plain_query_stride_head,
    plain_key_stride_batch,
    plain_key_stride_head,
    valid_stride_batch,
    mixing_stride_head,
    mixing_stride_row,
    mixing_stride_column,
    eps,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    PER_HEAD: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    STEP_TILES: tl.constexpr,
    SHARE_BLOCKS: tl.constexpr,
    SHARE_ELEMENTS: tl.constexpr,
    HAS_VALID: tl.constexpr,
    DIVIDES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One token; HEADS key heads, each shared by REPEATS query heads, which have prefixes of their own if PER_HEAD."""
    PREFIXES: tl.constexpr = REPEATS if PER_HEAD else 1
    COLUMNS: tl.constexpr = VALUE + 1
    TILES: tl.constexpr = STEP_TILES + (WIDTH * COLUMNS + SHARE_ELEMENTS - 1) // SHARE_ELEMENTS
    tile, state_row = tl.program_id(0) % TILES, (tl.program_id(0) // TILES).to(tl.int64)
    batch, head = state_row // HEADS, state_row % HEADS
    place = tl.load(position + batch)
    counted = place >= 0
    if HAS_VALID:
        counted = tl.load(valid + batch * valid_stride_batch) != 0
    block, offset = place // BLOCK_SIZE, place % BLOCK_SIZE
    starting = (offset == 0) & (block > 0) & counted
    before = tl.maximum(block - 1, 0)
    if tile < STEP_TILES:
        row = tl.arange(0, BLOCK_WIDTH)
        column = tile * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
        inside = (row < WIDTH)[:, None] & (column < COLUMNS)[None, :]
        element = row[:, None] * COLUMNS + column[None, :]
        in_row = row < WIDTH
        sums = row * COLUMNS + VALUE
        keys = _token_row(key, batch, head, row, key_stride_batch, key_stride_head, WIDTH)
        plain = _token_row(plain_key, batch, head, row, plain_key_stride_batch, plain_key_stride_head, WIDTH)
        values = _token_row(value, batch, head, column, value_stride_batch, value_stride_head, VALUE)
        old = tl.load(current + state_row * WIDTH * COLUMNS + element, mask=inside, other=0.0)
        old_sums = tl.load(current + state_row * WIDTH * COLUMNS + sums, mask=in_row, other=0.0)
        if starting:
            filed = summaries + (state_row * num_blocks + tl.minimum(before, num_blocks - 1)) * WIDTH * COLUMNS
            tl.store(filed + element, to_type(old, summaries.dtype.element_ty, INTERPRETED), mask=inside)
        added = tl.where((column == VALUE)[None, :], plain[:, None], keys[:, None] * values[None, :])
        new = tl.where(starting, 0.0, old) + tl.where(counted, added, 0.0)
        new_sums = tl.where(starting, 0.0, old_sums) + tl.where(counted, plain, 0.0)
        tl.store(new_current + state_row * WIDTH * COLUMNS + element, new, mask=inside)
        for repeat in range(REPEATS):
            query_head = head * REPEATS + repeat
            weights = mixing + (query_head if PER_HEAD else 0) * mixing_stride_head
            own = weight_at(weights, block, block, last, mixing_stride_row, mixing_stride_column)
            prefix_row = (state_row * PREFIXES + (repeat if PER_HEAD else 0)) * WIDTH * COLUMNS
            if starting:
                taken = weight_at(weights, block, before, last, mixing_stride_row, mixing_stride_column)
                mixed = tl.load(upcoming + prefix_row + element, mask=inside, other=0.0) + taken * old
                mixed_sums = tl.load(upcoming + prefix_row + sums, mask=in_row, other=0.0) + taken * old_sums
            else:
                mixed = tl.load(prefix + prefix_row + element, mask=inside, other=0.0)
                mixed_sums = tl.load(prefix + prefix_row + sums, mask=in_row, other=0.0)
            if PER_HEAD or repeat == 0:
                tl.store(new_prefix + prefix_row + element, mixed, mask=inside)
            queries = _token_row(query, batch, query_head, row, query_stride_batch, query_stride_head, WIDTH)
            result = tl.sum(queries[:, None] * (mixed + own * new), axis=0)
            if DIVIDES:
                queries = _token_row(
                    plain_query, batch, query_head, row, plain_query_stride_batch, plain_query_stride_head, WIDTH
                )
                result = result / (tl.sum(queries * (mixed_sums + own * new_sums), axis=0) + eps)
            result = to_type(tl.where(counted, result, 0.0), output.dtype.element_ty, INTERPRETED)
            start = output + (batch * HEADS * REPEATS + query_head) * VALUE
            tl.store(start + column, result, mask=column < VALUE)
        if (tile == 0) & (head == 0):
            tl.store(new_position + batch, place + counted.to(tl.int64))
    else:
        flat = (tile - STEP_TILES) * SHARE_ELEMENTS + tl.arange(0, SHARE_ELEMENTS)
        within = flat < WIDTH * COLUMNS
        finished = tl.load(current + state_row * WIDTH * COLUMNS + flat, mask=within, other=0.0)
        finished = to_type(finished, summaries.dtype.element_ty, INTERPRETED).to(tl.float32)
        # The block that this very token files may not be there yet.
        fresh = tl.where(starting, before, -1)
        for repeat in range(PREFIXES):
            line_start = mixing + (head * REPEATS + repeat if PER_HEAD else 0) * mixing_stride_head
            share = tl.zeros((SHARE_ELEMENTS,), tl.float32)
            for first in range(0, (num_blocks + BLOCK_SIZE - 1) // BLOCK_SIZE, SHARE_BLOCKS):
                index = offset + BLOCK_SIZE * (first + tl.arange(0, SHARE_BLOCKS)).to(tl.int64)
                used = (index < block) & (index < num_blocks)
                pointers = summaries + (state_row * num_blocks + index)[:, None] * (WIDTH * COLUMNS) + flat[None, :]
                read = (used & (index != fresh))[:, None] & within[None, :]
                chosen = tl.load(pointers, mask=read, other=0.0).to(tl.float32)
                chosen = tl.where((index == fresh)[:, None], finished[None, :], chosen)
                far = tl.maximum(last - (block + 1 - index), 0)
                line = line_start + tl.minimum(block + 1, last) * mixing_stride_row
                picked = tl.where(block + 1 <= last, index, far)
                share += tl.sum(
                    tl.load(line + picked * mixing_stride_column, mask=used, other=0.0)[:, None] * chosen, axis=0
                )
            upcoming_row = (state_row * PREFIXES + repeat) * WIDTH * COLUMNS
            summed = tl.load(upcoming + upcoming_row + flat, mask=within, other=0.0)
            summed = tl.where(starting, 0.0, summed) + tl.where(counted, share, 0.0)
            tl.store(new_upcoming + upcoming_row + flat, summed, mask=within)
