# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel that files the summaries of new tokens in the recurrent state and sums up the state's prefixes.

Matrices of the state are `[K, V + 1]`, with the normaliser z in the last column; those of new tokens come apart.
"""

# No postponed annotations here: Triton reads `tl.constexpr` from the functions themselves.
import triton
import triton.language as tl

from .decode_kernels import weight_at
from .rows import COUNTS, to_type


@triton.jit(do_not_specialize=(*COUNTS, "room", "old_room", "last"))
def file_kernel(
    summary,
    key_sum,
    first_bad,
    old_summaries,
    old_current,
    mixing,
    before,
    after,
    summaries,
    prefix,
    upcoming,
    num_blocks,
    room,
    old_room,
    last,
    mixing_stride_head,
    mixing_stride_row,
    mixing_stride_column,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    PER_HEAD: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_INDICES: tl.constexpr,
    BLOCK_ELEMENTS: tl.constexpr,
    HAS_PAST: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Writes all finished blocks to `summaries`, and Σ_b m_ib S_b over them for the current block i and for i + 1.

    A program takes some elements of the matrices of one key head, of which there are HEADS; REPEATS query heads share
    each, and have prefixes of their own if PER_HEAD. `summary` is S / BLOCK_SIZE of the `num_blocks` blocks that the
    new tokens may reach, from the one on that was the current one at position `before`; blocks earlier than that come
    from `old_summaries`, which have `old_room`, and `old_current` belongs to it too, if HAS_PAST. `summaries` have
    `room` and end in zeros.
    """
    PREFIXES: tl.constexpr = REPEATS if PER_HEAD else 1
    COLUMNS: tl.constexpr = VALUE + 1
    TILES: tl.constexpr = (WIDTH * COLUMNS + BLOCK_ELEMENTS - 1) // BLOCK_ELEMENTS
    tile, state_row = tl.program_id(0) % TILES, (tl.program_id(0) // TILES).to(tl.int64)
    batch, head = state_row // HEADS, state_row % HEADS
    first = tl.maximum(tl.load(before + batch) - 1, 0) // BLOCK_SIZE
    place = tl.load(after + batch)
    block = tl.maximum(place - 1, 0) // BLOCK_SIZE
    offset = place - block * BLOCK_SIZE
    element = tile * BLOCK_ELEMENTS + tl.arange(0, BLOCK_ELEMENTS)
    within = element < WIDTH * COLUMNS
    row, column = element // COLUMNS, element % COLUMNS
    in_products, in_sums = within & (column < VALUE), within & (column == VALUE)
    if HAS_PAST:
        begun = tl.load(old_current + state_row * (WIDTH * COLUMNS) + element, mask=within, other=0.0)
    for repeat in range(PREFIXES):
        weights = mixing + (head * REPEATS + repeat if PER_HEAD else 0) * mixing_stride_head
        mixed = tl.zeros((BLOCK_ELEMENTS,), tl.float32)
        ahead = tl.zeros((BLOCK_ELEMENTS,), tl.float32)
        for start in range(0, room, BLOCK_INDICES):
            index = (start + tl.arange(0, BLOCK_INDICES)).to(tl.int64)
            finished = (index < block) & (index < room)
            local = index - first
            new = finished & (local >= 0)
            matrix = state_row * num_blocks + local
            bad = tl.load(first_bad + matrix, mask=new, other=BLOCK_SIZE) < BLOCK_SIZE
            products = summary + matrix[:, None] * (WIDTH * VALUE) + (row * VALUE + column)[None, :]
            chosen = tl.load(products, mask=new[:, None] & in_products[None, :], other=0.0).to(tl.float32) * BLOCK_SIZE
            sums = key_sum + matrix[:, None] * WIDTH + row[None, :]
            chosen += tl.load(sums, mask=new[:, None] & in_sums[None, :], other=0.0)
            if HAS_PAST:
                old = old_summaries + (state_row * old_room + index)[:, None] * (WIDTH * COLUMNS) + element[None, :]
                is_old = (finished & (local < 0))[:, None] & within[None, :]
                chosen += tl.load(old, mask=is_old, other=0.0).to(tl.float32)
                chosen += tl.where((new & (local == 0))[:, None], begun[None, :], 0.0)
            chosen = tl.where(bad[:, None], float("nan"), chosen)
            if repeat == 0:
                filed = summaries + (state_row * room + index)[:, None] * (WIDTH * COLUMNS) + element[None, :]
                kept = to_type(chosen, summaries.dtype.element_ty, INTERPRETED)
                tl.store(filed, kept, mask=(index < room)[:, None] & within[None, :])
            known = tl.where(finished, index, 0)
            weight = weight_at(weights, block, known, last, mixing_stride_row, mixing_stride_column)
            mixed += tl.sum(tl.where(finished, weight, 0.0)[:, None] * chosen, axis=0)
            # Of the block after this one, as far as decoding token by token would have summed it up.
            weight = weight_at(weights, block + 1, known, last, mixing_stride_row, mixing_stride_column)
            summed = finished & (index % BLOCK_SIZE < offset)
            ahead += tl.sum(tl.where(summed, weight, 0.0)[:, None] * chosen, axis=0)
        start_of_prefix = (state_row * PREFIXES + repeat) * (WIDTH * COLUMNS)
        tl.store(prefix + start_of_prefix + element, mixed, mask=within)
        tl.store(upcoming + start_of_prefix + element, ahead, mask=within)
