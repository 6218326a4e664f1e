# SPDX-License-Identifier: Apache-2.0
"""Decoding: one token of every batch entry from the recurrent state, in one launch.

At position t in block i, with S the summary of the current block, P_i = Σ_{b<i} m_ib S_b the prefix of that block
and P_{i+1} as much of the next one's as is summed up (matrices have z in the last column):

    S ← S + φ(k_t) [v_t, 1]ᵀ          o_t = φ(q_t)ᵀ (P_i + m_ii S)          divided by its last column + eps
    P_{i+1} ← P_{i+1} + Σ_s m_{i+1,b(s)} S_{b(s)}      over the slots s of the ring with s mod N = t mod N
    P_{i+1} ← P_{i+1} + m_{i+1,l} E                    with the last token of a block

for the block b(s) in slot s, and the sum E of all that has left the ring, which stands for the last of them, l.
A token that starts a block files the current summary into the ring, adds what it finds there to E, and takes over the
next prefix first. All programs read the old state and write the new one to other memory, but for the slot that a
summary is filed into: for each of its numbers, one program reads it, writes it, and needs it.

Of the programs of a key head, the first STEP_TILES take some columns of its matrices each: they add the token to the
current summary, take over the next prefix where the token starts a block, and compute the output. The others take some
numbers of its summaries each: they file the current one, and sum up the token's share of the next block's prefix.

Shape letters: B batch, H query heads, G key heads (H or a divisor), S heads of the prefix (H, or G where all heads
share the mixing weights), K and V widths, P width of the normaliser's pair (K), N tokens of a block, R slots of the
ring, M stored blocks of the mixing weights.
"""

# No postponed annotations here: torch.library and Triton read them from the functions themselves.

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .device_functions import COUNTS, head_rows
from .launching import as_rows, ceil_divide, dense_like, launch, padded
from .operators import operator


# Elements of a summary that a program mixes for the next block, and slots of the ring that it reads at a time.
SHARE_ELEMENTS = 256
SHARE_SLOTS = 4
# Elements of a summary that a program adds the token to and computes the output from.
STEP_ELEMENTS = 4096


class MixingWeights(NamedTuple):
    """Mixing weights as kernels take them.

    Attributes:
        data: float32 `[1 or H, M, M]`.
        decay: float32 `[1 or H]`; None for 1.
        stride_head: Stride of a head; 0 where all share the weights.
        stride_row: Stride of a row.
        stride_column: Stride of a column.
        stride_decay: Stride of the decay.
        last: M - 1.
    """

    data: Tensor
    decay: Tensor | None
    stride_head: int
    stride_row: int
    stride_column: int
    stride_decay: int
    last: int


class StateMatrices(NamedTuple):
    """Matrices `[K, V + 1]` of the recurrent state as kernels take them, dense.

    Attributes:
        current: Summary of the current block, float32 `[B, G, K, V + 1]`.
        prefix: Mixed prefix of the current block, float32 `[B, S, K, V + 1]`.
        upcoming: As much of the next block's prefix as is summed up.
        left: E, float32 `[B, S, K, V + 1]`.
    """

    current: Tensor
    prefix: Tensor
    upcoming: Tensor
    left: Tensor


@triton.jit
def decay_of(weights, head, distance):
    """The decay to the power of a distance of 0 or more."""
    factor = tl.full((), 1.0, tl.float32)
    if weights.decay is not None:
        # Not 0, whose logarithm times 0 is not a number.
        decay = tl.maximum(tl.load(weights.decay + head * weights.stride_decay), 1e-37)
        factor = tl.exp2(tl.log2(decay) * distance.to(tl.float32))
    return factor


@triton.jit
def weight_at(weights, head, row, column, mask=None):
    """m at (row, column ≤ row); past the last row, the last row's weight at the same distance or its decayed last."""
    distance = row - column
    far = tl.maximum(weights.last - distance, 0)
    row, column = tl.minimum(row, weights.last), tl.where(row <= weights.last, column, far)
    place = head * weights.stride_head + row * weights.stride_row + column * weights.stride_column
    weight = tl.load(weights.data + place, mask=mask, other=None if mask is None else 0.0)
    return weight * decay_of(weights, head, tl.maximum(distance - weights.last, 0))


@triton.jit
def _token_row(rows, batch, head, column, WIDTH: tl.constexpr):
    start, _ = head_rows(rows, batch, head)
    return tl.load(start + column, mask=column < WIDTH, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=COUNTS)
def decode_kernel(
    query, key, value, normalizer_query, normalizer_key, valid, weights, summaries, state, num_left, position,
    output, new_state, new_num_left, new_position,
    valid_stride_batch, slots, eps,
    BLOCK_SIZE: tl.constexpr, heads, REPEATS: tl.constexpr, PER_HEAD: tl.constexpr, WIDTH: tl.constexpr,
    VALUE: tl.constexpr, BLOCK_WIDTH: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, STEP_TILES: tl.constexpr,
    SHARE_SLOTS: tl.constexpr, SHARE_ELEMENTS: tl.constexpr, DIVIDES: tl.constexpr,
):  # fmt: skip
    """One token; heads key heads, each shared by REPEATS query heads, which have prefixes of their own if PER_HEAD.

    `normalizer_query` and `normalizer_key` are query and key where they are None.
    """
    PREFIXES: tl.constexpr = REPEATS if PER_HEAD else 1
    COLUMNS: tl.constexpr = VALUE + 1
    TILES: tl.constexpr = STEP_TILES + (WIDTH * COLUMNS + SHARE_ELEMENTS - 1) // SHARE_ELEMENTS
    tile, state_row = tl.program_id(0) % TILES, (tl.program_id(0) // TILES).to(tl.int64)
    batch, head = state_row // heads, state_row % heads
    place = tl.load(position + batch)
    counted = place >= 0
    if valid is not None:
        counted = tl.load(valid + batch * valid_stride_batch) != 0
    block, offset = place // BLOCK_SIZE, place % BLOCK_SIZE
    starting = (offset == 0) & (block > 0) & counted
    before = tl.maximum(block - 1, 0)
    slot = before % slots
    old_num_left = tl.load(num_left + batch)
    now_left = tl.where(starting, tl.maximum(old_num_left, before - slots + 1), old_num_left)
    if tile < STEP_TILES:
        row = tl.arange(0, BLOCK_WIDTH)
        column = tile * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
        inside = (row < WIDTH)[:, None] & (column < COLUMNS)[None, :]
        element = row[:, None] * COLUMNS + column[None, :]
        in_row = row < WIDTH
        sums = row * COLUMNS + VALUE
        keys = _token_row(key, batch, head, row, WIDTH)
        plain = keys
        if normalizer_key is not None:
            plain = _token_row(normalizer_key, batch, head, row, WIDTH)
        values = _token_row(value, batch, head, column, VALUE)
        old = tl.load(state.current + state_row * WIDTH * COLUMNS + element, mask=inside, other=0.0)
        old_sums = tl.load(state.current + state_row * WIDTH * COLUMNS + sums, mask=in_row, other=0.0)
        added = tl.where((column == VALUE)[None, :], plain[:, None], keys[:, None] * values[None, :])
        new = tl.where(starting, 0.0, old) + tl.where(counted, added, 0.0)
        new_sums = tl.where(starting, 0.0, old_sums) + tl.where(counted, plain, 0.0)
        tl.store(new_state.current + state_row * WIDTH * COLUMNS + element, new, mask=inside)
        for repeat in range(REPEATS):
            query_head = head * REPEATS + repeat
            weight_head = query_head if PER_HEAD else 0
            own = weight_at(weights, weight_head, block, block)
            prefix_row = (state_row * PREFIXES + (repeat if PER_HEAD else 0)) * WIDTH * COLUMNS
            if starting:
                taken = weight_at(weights, weight_head, block, before)
                mixed = tl.load(state.upcoming + prefix_row + element, mask=inside, other=0.0) + taken * old
                mixed_sums = tl.load(state.upcoming + prefix_row + sums, mask=in_row, other=0.0) + taken * old_sums
            else:
                mixed = tl.load(state.prefix + prefix_row + element, mask=inside, other=0.0)
                mixed_sums = tl.load(state.prefix + prefix_row + sums, mask=in_row, other=0.0)
            if PER_HEAD or repeat == 0:
                tl.store(new_state.prefix + prefix_row + element, mixed, mask=inside)
            queries = _token_row(query, batch, query_head, row, WIDTH)
            result = tl.sum(queries[:, None] * (mixed + own * new), axis=0)
            if DIVIDES:
                if normalizer_query is not None:
                    queries = _token_row(normalizer_query, batch, query_head, row, WIDTH)
                result = result / (tl.sum(queries * (mixed_sums + own * new_sums), axis=0) + eps)
            result = tl.where(counted, result, 0.0).to(output.dtype.element_ty)
            start = output + (batch * heads * REPEATS + query_head) * VALUE
            tl.store(start + column, result, mask=column < VALUE)
        if (tile == 0) & (head == 0):
            tl.store(new_num_left + batch, now_left)
            tl.store(new_position + batch, place + counted.to(tl.int64))
    else:
        flat = (tile - STEP_TILES) * SHARE_ELEMENTS + tl.arange(0, SHARE_ELEMENTS)
        within = flat < WIDTH * COLUMNS
        finished = tl.load(state.current + state_row * WIDTH * COLUMNS + flat, mask=within, other=0.0)
        finished = finished.to(summaries.dtype.element_ty)
        leaving = tl.zeros((SHARE_ELEMENTS,), tl.float32)
        if starting:
            # Zeros lie there where no block leaves.
            filed = summaries + (state_row * slots + slot) * WIDTH * COLUMNS + flat
            leaving = tl.load(filed, mask=within, other=0.0).to(tl.float32)
            # No thread writes before another has read.
            tl.debug_barrier()
            tl.store(filed, finished, mask=within)
        fresh = tl.where(starting, slot, -1)
        for repeat in range(PREFIXES):
            weight_head = head * REPEATS + repeat if PER_HEAD else 0
            share = tl.zeros((SHARE_ELEMENTS,), tl.float32)
            for first in range(0, (slots + BLOCK_SIZE - 1) // BLOCK_SIZE, SHARE_SLOTS):
                index = offset + BLOCK_SIZE * (first + tl.arange(0, SHARE_SLOTS)).to(tl.int64)
                # The last finished block that goes into each of these slots.
                held = block - 1 - (block - 1 - index + slots) % slots
                used = (index < slots) & (held >= 0)
                pointers = summaries + (state_row * slots + index)[:, None] * (WIDTH * COLUMNS) + flat[None, :]
                read = (used & (index != fresh))[:, None] & within[None, :]
                chosen = tl.load(pointers, mask=read, other=0.0).to(tl.float32)
                chosen = tl.where((index == fresh)[:, None], finished.to(tl.float32)[None, :], chosen)
                share += tl.sum(weight_at(weights, weight_head, block + 1, held, used)[:, None] * chosen, axis=0)
            upcoming_row = (state_row * PREFIXES + repeat) * WIDTH * COLUMNS
            left = tl.load(state.left + upcoming_row + flat, mask=within, other=0.0)
            left = left * decay_of(weights, weight_head, now_left - old_num_left) + leaving
            tl.store(new_state.left + upcoming_row + flat, left, mask=within)
            if (offset == BLOCK_SIZE - 1) & (now_left > 0):
                share += weight_at(weights, weight_head, block + 1, now_left - 1) * left
            summed = tl.load(state.upcoming + upcoming_row + flat, mask=within, other=0.0)
            summed = tl.where(starting, 0.0, summed) + tl.where(counted, share, 0.0)
            tl.store(new_state.upcoming + upcoming_row + flat, summed, mask=within)


@operator("mhla_hf::decode_token", writes=("summaries",))
def decode_token(
    query: Tensor, key: Tensor, value: Tensor, normalizer_query: Tensor | None, normalizer_key: Tensor | None,
    valid: Tensor | None, mixing: Tensor, decay: Tensor | None, summaries: Tensor, current: Tensor, prefix: Tensor,
    upcoming: Tensor, left: Tensor, num_left: Tensor, position: Tensor, block_size: int, divides: bool, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """One token of every batch entry; see [`mhla_hf.ops.mhla_step`] and [`mhla_hf.ops.MHLAState`].

    Args:
        query: `[B, 1, H, K]`.
        key: `[B, 1, G, K]`.
        value: `[B, 1, G, V]`.
        normalizer_query: Queries of the normaliser where they differ, `[B, 1, H, K]`.
        normalizer_key: Keys of the normaliser, given together with them, `[B, 1, G, K]`.
        valid: BoolTensor `[B, 1]`, False for padding.
        mixing: float32 `[1 or H, M, M]`.
        decay: float32, of as many heads; `None` for 1.
        summaries: The ring of finished blocks `[B, G, R, K, V + 1]`, dense; the slot that a full block is filed into
            is written to.
        current: float32 `[B, G, K, V + 1]`.
        prefix: float32 `[B, S, K, V + 1]`.
        upcoming: float32 `[B, S, K, V + 1]`.
        left: float32 `[B, S, K, V + 1]`.
        num_left: LongTensor `[B]`.
        position: LongTensor `[B]`.
        block_size: Tokens of a block.
        divides: Whether to divide by the normaliser.
        eps: Added to the denominator.

    Returns:
        `[B, 1, H, V]` in the dtype of `value`, and in their order the new tensors of the state but for `summaries`.
    """
    state = StateMatrices(*(x.contiguous() for x in (current, prefix, upcoming, left)))
    new_state = StateMatrices(*map(torch.empty_like, state))
    num_left, position = num_left.contiguous(), position.contiguous()
    new_num_left, new_position = torch.empty_like(num_left), torch.empty_like(position)
    (batch, heads, width, columns), query_heads = current.shape, query.shape[2]
    output = value.new_empty(batch, 1, query_heads, columns - 1)
    rows = padded(width)
    tile = max(8, min(32, STEP_ELEMENTS // rows))
    is_per_head = len(mixing) > 1
    head, row, column = mixing.stride()
    weights = MixingWeights(
        mixing, decay, head if is_per_head else 0, row, column, 0 if decay is None else decay.stride(0),
        mixing.shape[-1] - 1,
    )  # fmt: skip
    step_tiles = ceil_divide(columns, tile)
    launch(
        decode_kernel, batch * heads * (step_tiles + ceil_divide(width * columns, SHARE_ELEMENTS)),
        as_rows(query), as_rows(key), as_rows(value), as_rows(normalizer_query), as_rows(normalizer_key), valid,
        weights, summaries, state, num_left, position, output, new_state, new_num_left, new_position,
        valid_stride_batch=0 if valid is None else valid.stride(0), slots=summaries.shape[2], eps=eps,
        BLOCK_SIZE=block_size, heads=heads, REPEATS=query_heads // heads, PER_HEAD=is_per_head, WIDTH=width,
        VALUE=columns - 1, BLOCK_WIDTH=rows, BLOCK_COLUMNS=tile, STEP_TILES=step_tiles, SHARE_SLOTS=SHARE_SLOTS,
        SHARE_ELEMENTS=SHARE_ELEMENTS, DIVIDES=divides, num_warps=4,
    )  # fmt: skip
    return output, *new_state, new_num_left, new_position


@torch.library.register_fake("mhla_hf::decode_token")
def _(
    query, key, value, normalizer_query, normalizer_key, valid, mixing, decay, summaries,
    current, prefix, upcoming, left, num_left, position, block_size, divides, eps,
):  # fmt: skip
    state = map(dense_like, (current, prefix, upcoming, left, num_left, position))
    return value.new_empty(*query.shape[:-1], value.shape[-1]), *state


@register_flop_formula(torch.ops.mhla_hf.decode_token)
def _decode_flops(
    query, key, value, normalizer_query, normalizer_key, valid, mixing, decay, summaries, current, prefix, upcoming,
    left, num_left, position, block_size, *args, **kwargs,
) -> int:  # fmt: skip
    """2 B K V for a key head's token, 4 B K V for a query head's weighted sum and product with the query, and 2 B K V
    for each slot in the share of a next prefix.
    """
    elements = current[0] * current[2] * current[3]
    share = -(-summaries[2] // block_size)
    return 2 * elements * current[1] + 4 * elements * query[2] + 2 * elements * prefix[1] * share
