# SPDX-License-Identifier: Apache-2.0
"""Prompts: many tokens run through causal attention, and the recurrent state moves past them.

Outputs are those of `causal`, with the prefix that the state adds. Filed are, for the blocks b that are finished,

    S_b = Σ_{j in b} φ(k_j) [v_j, 1]ᵀ          P_i = Σ_b m_ib S_b,  P_{i+1} = Σ_b m_{i+1,b} S_b

for the current block i; of P_{i+1}, as much as decoding token by token would have summed up. Matrices of the state are
`[K, V + 1]`, with the normaliser z in the last column; those of new tokens come apart.

Shape letters: B batch, T tokens, H query heads, G key heads (H or a divisor), S heads of the prefix (H, or G where all
heads share the mixing weights), K and V widths, N tokens of a block, I blocks that the tokens may reach, the state's
current block first, n blocks that the state has room for.
"""

# No postponed annotations here: torch.library and Triton read them from the functions themselves.

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ...layouts.blocks import BlockLayout
from ...layouts.sequences import SequenceLayout
from ..operands import MHLAState, current_block
from .causal import causal_stages
from .causal_gradient import causal_flops
from .decode import is_per_head, mixing_weights, weight_at
from .device_functions import COUNTS
from .launching import ceil_divide, launch
from .outer import outer


# Elements of a summary that a program files, and blocks that it reads at a time.
FILED_ELEMENTS = 256
FILED_BLOCKS = 8


def attend_prompt(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pair: tuple[Tensor | None, Tensor | None],
    mixing: Tensor,
    own: Tensor,
    past: Tensor | None,
    layout: BlockLayout | SequenceLayout,
    lead: int,
    state: MHLAState,
    position: Tensor,
    *,
    divides: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """[`mhla_hf.ops.mhla_extend`] by kernels.

    Args:
        query: `[B, T, H, K]`.
        key: `[B, T, G, K]`.
        value: `[B, T, G, V]`.
        pair: Queries and keys of the normaliser where they differ.
        mixing: float32 `[M, M]` or `[1 or H, M, M]`.
        own: The weights of the layout's own blocks, float32.
        past: The state's part of the prefix of these blocks, float32 `[B, S, I, K, V + 1]`; `None` for nothing.
        layout: Blocks of `lead` slots for tokens that are past, and the new tokens.
        lead: Number of those slots.
        state: The state before these tokens.
        position: The state's position after them.
        divides: Whether to divide by the normaliser.
        eps: Added to the denominator.

    Returns:
        The output `[B, T, H, V]`, and the new state's summaries, current summary, prefix and upcoming prefix.
    """
    table = layout.token_table(query.device)
    # Slots that a layout of few tokens lacks, so that every length makes blocks of one size.
    table = F.pad(table, (0, state.block_size - table.shape[-1]), value=lead + query.shape[1])
    if lead:
        # Past tokens leave their slots empty: the state has them.
        table = torch.where(table < lead, query.shape[1], table - lead)
    held = (None, None) if past is None else (state.summaries, state.current)
    return extend_state(
        query.to(value.dtype), key.to(value.dtype), value, *pair, mixing, own, table, past, *held,
        state.position, position, state.num_blocks, state.summaries.dtype, divides, eps,
    )  # fmt: skip


@torch.library.custom_op("mhla_hf::extend_state", mutates_args=())
def extend_state(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    normalizer_query: Tensor | None,
    normalizer_key: Tensor | None,
    mixing: Tensor,
    own: Tensor,
    table: Tensor,
    past: Tensor | None,
    old_summaries: Tensor | None,
    old_current: Tensor | None,
    before: Tensor,
    after: Tensor,
    room: int,
    dtype: torch.dtype,
    divides: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Outputs of new tokens, and the state after them; see [`mhla_hf.ops.MHLAState`].

    Args:
        query: `[B, T, H, K]`.
        key: `[B, T, G, K]`, of the same dtype.
        value: `[B, T, G, V]`, of the same dtype.
        normalizer_query: Queries of the normaliser where they differ, `[B, T, H, K]`.
        normalizer_key: Keys of the normaliser, given together with them, `[B, T, G, K]`.
        mixing: float32 `[M, M]` or `[1 or H, M, M]`.
        own: The weights of the I blocks, float32 `[I, I]`, `[1 or H, I, I]` or `[B, 1 or H, I, I]`.
        table: Token of each slot, int32 `[I, N]` or `[B, I, N]`, T where a slot is empty.
        past: See [`attend_prompt`].
        old_summaries: Finished blocks of the state before, `[B, G, n, K, V + 1]`; `None` for a state without tokens.
        old_current: The summary of its current block, float32 `[B, G, K, V + 1]`, given together with them.
        before: Tokens seen before these, LongTensor `[B]`.
        after: Tokens seen after these, LongTensor `[B]`.
        room: n.
        dtype: Dtype of finished blocks.
        divides: Whether to divide by the normaliser.
        eps: Added to the denominator.

    Returns:
        `[B, T, H, V]`; summaries of finished blocks `[B, G, n, K, V + 1]` in `dtype`; and in float32 the summary of
        the current block `[B, G, K, V + 1]`, its prefix and the next block's `[B, S, K, V + 1]`.
    """
    slots = table.shape[-1]
    output, _, summary, key_sum, first_bad, _ = causal_stages(
        query, key, value, normalizer_query, normalizer_key, own, table,
        starts=None, divides=divides, total=True, half=dtype == torch.bfloat16, eps=eps, past=past,
    )  # fmt: skip
    # Again for the one block that is kept in float32: tokens will be added to it.
    local = current_block(after, slots) - current_block(before, slots)
    entries = table.expand(query.shape[0], -1, -1)
    slot_tokens = entries.gather(1, local[:, None, None].expand(-1, 1, slots))
    products, sums, bad = outer(
        key, value, slot_tokens, key.shape[2],
        factor=1.0, dtype=torch.float32, total=True, plain=normalizer_key, finite=True,
    )  # fmt: skip
    current = torch.cat([products, sums.unsqueeze(-1)], dim=-1).squeeze(2)
    if old_current is not None:
        current = current + torch.where((local == 0)[:, None, None, None], old_current, 0)
    current = current.masked_fill((bad < slots).unsqueeze(-1), float("nan"))
    filed = _file(
        summary, key_sum, first_bad, mixing, before, after, old_summaries, old_current,
        room=room, block_size=slots, prefixes=query.shape[2] if is_per_head(mixing) else key.shape[2], dtype=dtype,
    )  # fmt: skip
    return output, filed[0], current, *filed[1:]


@triton.jit(do_not_specialize=(*COUNTS, "room", "old_room"))
def file_kernel(
    summary, key_sum, first_bad, old_summaries, old_current, weights, before, after, summaries, prefix, upcoming,
    num_blocks, room, old_room,
    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, REPEATS: tl.constexpr, PER_HEAD: tl.constexpr, WIDTH: tl.constexpr,
    VALUE: tl.constexpr, BLOCK_INDICES: tl.constexpr, BLOCK_ELEMENTS: tl.constexpr,
):  # fmt: skip
    """Writes all finished blocks to `summaries`, and Σ_b m_ib S_b over them for the current block i and for i + 1.

    A program takes some elements of the matrices of one key head, of which there are HEADS; REPEATS query heads share
    each, and have prefixes of their own if PER_HEAD. `summary` is S / BLOCK_SIZE of the `num_blocks` blocks that the
    new tokens may reach, from the one on that was the current one at position `before`; blocks earlier than that come
    from `old_summaries`, which have `old_room`, and `old_current` belongs to it too, unless both are None. `summaries`
    have `room` and end in zeros.
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
    if old_summaries is not None:
        begun = tl.load(old_current + state_row * (WIDTH * COLUMNS) + element, mask=within, other=0.0)
    for repeat in range(PREFIXES):
        weight_head = head * REPEATS + repeat if PER_HEAD else 0
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
            if old_summaries is not None:
                old = old_summaries + (state_row * old_room + index)[:, None] * (WIDTH * COLUMNS) + element[None, :]
                is_old = (finished & (local < 0))[:, None] & within[None, :]
                chosen += tl.load(old, mask=is_old, other=0.0).to(tl.float32)
                chosen += tl.where((new & (local == 0))[:, None], begun[None, :], 0.0)
            chosen = tl.where(bad[:, None], float("nan"), chosen)
            if repeat == 0:
                filed = summaries + (state_row * room + index)[:, None] * (WIDTH * COLUMNS) + element[None, :]
                kept = chosen.to(summaries.dtype.element_ty)
                tl.store(filed, kept, mask=(index < room)[:, None] & within[None, :])
            known = tl.where(finished, index, 0)
            weight = weight_at(weights, weight_head, block, known)
            mixed += tl.sum(tl.where(finished, weight, 0.0)[:, None] * chosen, axis=0)
            # Of the block after this one, as far as decoding token by token would have summed it up.
            weight = weight_at(weights, weight_head, block + 1, known)
            summed = finished & (index % BLOCK_SIZE < offset)
            ahead += tl.sum(tl.where(summed, weight, 0.0)[:, None] * chosen, axis=0)
        start_of_prefix = (state_row * PREFIXES + repeat) * (WIDTH * COLUMNS)
        tl.store(prefix + start_of_prefix + element, mixed, mask=within)
        tl.store(upcoming + start_of_prefix + element, ahead, mask=within)


def _file(
    summary: Tensor,
    key_sum: Tensor,
    first_bad: Tensor,
    mixing: Tensor,
    before: Tensor,
    after: Tensor,
    old_summaries: Tensor | None,
    old_current: Tensor | None,
    *,
    room: int,
    block_size: int,
    prefixes: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Finished blocks `[B, G, room, K, V + 1]` of this dtype, and float32 prefixes `[B, prefixes, K, V + 1]`."""
    batch, heads, num_blocks, width, columns = summary.shape
    summaries = summary.new_empty(batch, heads, room, width, columns + 1, dtype=dtype)
    prefix = summary.new_empty(batch, prefixes, width, columns + 1, dtype=torch.float32)
    upcoming = torch.empty_like(prefix)
    launch(
        file_kernel, batch * heads * ceil_divide(width * (columns + 1), FILED_ELEMENTS), summary, key_sum, first_bad,
        None if old_summaries is None else old_summaries.contiguous(),
        None if old_current is None else old_current.contiguous(),
        mixing_weights(mixing, prefixes), before.contiguous(), after.contiguous(), summaries, prefix, upcoming,
        num_blocks=num_blocks, room=room, old_room=0 if old_summaries is None else old_summaries.shape[2],
        BLOCK_SIZE=block_size, HEADS=heads, REPEATS=prefixes // heads, PER_HEAD=is_per_head(mixing), WIDTH=width,
        VALUE=columns, BLOCK_INDICES=FILED_BLOCKS, BLOCK_ELEMENTS=FILED_ELEMENTS, num_warps=4,
    )  # fmt: skip
    return summaries, prefix, upcoming


@extend_state.register_fake
def _(
    query, key, value, normalizer_query, normalizer_key, mixing, own, table, past, old_summaries, old_current,
    before, after, room, dtype, divides, eps,
):  # fmt: skip
    batch, groups = key.shape[0], key.shape[2]
    prefixes = query.shape[2] if is_per_head(mixing) else groups
    matrix = key.shape[-1], value.shape[-1] + 1
    prefix = query.new_empty(batch, prefixes, *matrix, dtype=torch.float32)
    return (
        query.new_empty(*query.shape[:-1], value.shape[-1]),
        query.new_empty(batch, groups, room, *matrix, dtype=dtype),
        query.new_empty(batch, groups, *matrix, dtype=torch.float32),
        prefix,
        torch.empty_like(prefix),
    )


@register_flop_formula(torch.ops.mhla_hf.extend_state)
def _extend_flops(
    query, key, value, normalizer_query, normalizer_key, mixing, own, table, past, old_summaries, old_current,
    before, after, room, *args, **kwargs,
) -> int:  # fmt: skip
    """Causal attention; the current block once more; and 4 B S n K (V + 1) for the state's two prefixes."""
    per_head = len(mixing) > 2 and mixing[0] != 1
    matrix = key[-1] * (value[-1] + 1)
    current = 2 * key[0] * key[2] * table[-1] * matrix
    prefixes = 4 * key[0] * (query[2] if per_head else key[2]) * room * matrix
    return causal_flops(query, key, value, own, table) + current + prefixes
