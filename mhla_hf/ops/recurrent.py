# SPDX-License-Identifier: Apache-2.0
"""The recurrent form of causal MHLA: a ring of block summaries, one sum of all before it, and what is mixed from them.

[`mhla_extend`] runs a prompt, or any number of tokens more, in chunks from a state; [`mhla_step`] decodes one token of
every batch entry; [`rewind_state`] takes the last tokens back. Every batch entry has its own position, so that
sequences of different lengths decode side by side. Nothing here reads a value back from the device, and neither the
cost of a step nor the state grows with the length: blocks that leave the ring are farther than the stored weights
reach and go into one sum (see `band.py`), and the mixed prefix of the next block is summed up a few slots a token,
while the current block fills.

Shape letters: B batch, T tokens, H query heads, H_kv key/value heads, K query/key width, V value width, R slots of the
ring, I blocks that new tokens may reach, the one they begin in first. Summaries carry the normaliser z as their last
column, hence V + 1. S is the heads of the mixing weights, 1 or H; H_m is H where S is, else H_kv.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F

from ..layouts.blocks import BlockLayout, cached, check_count, indices
from ..layouts.sequences import SequenceLayout
from .backends import choose_backend
from .band import StoredMixing, numerator_and_product
from .operands import (
    MHLAState,
    Operands,
    autocast_type,
    check_decay,
    check_mixing,
    check_recurrent,
    check_state,
    check_tokens,
    check_valid,
    current_block,
    divide,
    finite_tokens,
    head_blocks,
    records_gradients,
    ring_slots,
    spoil_tokens,
    surely_none,
)
from .sums import mix_summaries, repeat_heads


# Long texts run in parts of this many chunks of blocks; only one part's summaries exist at a time.
PART_CHUNKS = 4


def empty_state(
    batch_size: int,
    num_heads: int,
    key_width: int,
    value_width: int,
    block_size: int,
    num_stored_blocks: int,
    *,
    num_mixing_heads: int | None = None,
    rewindable: int = 0,
    max_tokens: int | None = None,
    dtype: torch.dtype = torch.float32,
    summary_dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> MHLAState:
    """Return the state before the first token.

    Args:
        batch_size: B.
        num_heads: H_kv.
        key_width: K.
        value_width: V.
        block_size: Tokens of a block, N.
        num_stored_blocks: M of the mixing weights. The ring has M - 2 slots, and some more for rewinding.
        num_mixing_heads: H_m; H_kv if not given.
        rewindable: Tokens that [`rewind_state`] may take back.
        max_tokens: Tokens that the state will see at most, which is not checked token by token; makes the ring smaller
            where these have fewer blocks. See [`MHLAState.with_room`] for more.
        dtype: The accumulation dtype.
        summary_dtype: The dtype that finished blocks are kept in; `dtype` if not given.
        device: Device of the state.

    Raises:
        ValueError: If a size is not a positive integer (`rewindable` may be 0).
    """
    mixing_heads = num_heads if num_mixing_heads is None else num_mixing_heads
    sizes = {"batch_size": batch_size, "num_heads": num_heads, "key_width": key_width, "value_width": value_width}
    sizes |= {"block_size": block_size, "num_stored_blocks": num_stored_blocks, "num_mixing_heads": mixing_heads}
    for name, size in sizes.items():
        check_count(name, size)
    check_count("rewindable", rewindable, minimum=0)
    if max_tokens is not None:
        check_count("max_tokens", max_tokens)
    slots = ring_slots(block_size, num_stored_blocks, rewindable, max_tokens)
    shape = (key_width, value_width + 1)
    summaries = torch.zeros(batch_size, num_heads, slots, *shape, dtype=summary_dtype or dtype, device=device)
    current = torch.zeros(batch_size, num_heads, *shape, dtype=dtype, device=device)
    prefix, upcoming, left = (
        torch.zeros(batch_size, mixing_heads, *shape, dtype=dtype, device=device) for _ in range(3)
    )
    num_left, position = (torch.zeros(batch_size, dtype=torch.long, device=device) for _ in range(2))
    return MHLAState(
        summaries, current, prefix, upcoming, left, num_left, position, block_size, num_stored_blocks, is_empty=True
    )  # fmt: skip


def mhla_extend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mixing: torch.Tensor,
    state: MHLAState,
    *,
    mixing_decay: torch.Tensor | None = None,
    valid: torch.Tensor | None = None,
    normalizer_query: torch.Tensor | None = None,
    normalizer_key: torch.Tensor | None = None,
    normalizer: str = "query",
    eps: float = 1e-6,
) -> tuple[torch.Tensor, MHLAState]:
    """Run any number of tokens through the chunked form after the tokens that `state` has seen.

    Serves the prompt, a prompt in parts, and the next turn of a conversation. `state` stays valid. Where no gradient
    is recorded, memory beside inputs and outputs does not grow with their number.

    Args:
        query: Feature-mapped queries `[B, T, H, K]`.
        key: Feature-mapped keys `[B, T, H_kv, K]`.
        value: Values `[B, T, H_kv, V]`.
        mixing: `[M, M]` or `[H, M, M]`, lower triangle used; see [`mhla_hf.ops.extend_mixing`] for longer texts.
        state: The state before these tokens.
        mixing_decay: See [`mhla_hf.ops.mhla_attention`].
        valid: BoolTensor `[B, T]`, False for padding, which is skipped and gets zeros; `None` for no padding.
        normalizer_query: Unrotated queries where they differ from `query`.
        normalizer_key: Unrotated keys where they differ from `key`.
        normalizer: `"query"` or `"none"`.
        eps: Added to the denominator.

    Returns:
        The output `[B, T, H, V]` in the dtype of `value`, and the [`MHLAState`] after these tokens.

    Raises:
        ValueError: If an argument has a wrong type, shape, dtype, device or value, or does not fit the state; the
            message names the argument. `"block_query"` is refused: it needs the queries of a block when that is full.
    """
    operands = Operands(query, key, value, normalizer_query, normalizer_key, normalizer, eps)
    check_recurrent(operands, mixing, mixing_decay, state, valid)
    if query.shape[1] < 1:
        raise ValueError("query has no tokens.")
    blocks = (query.shape[1] - 1) // state.block_size
    if state.is_empty and valid is None and state.num_slots < min(blocks, state.num_stored_blocks - 1):
        raise ValueError(
            f"state has room for {state.num_slots} finished blocks of {state.block_size} tokens, but query has "
            f"{query.shape[1]} tokens; make it with more max_tokens, or see MHLAState.with_room."
        )
    return extend(operands, StoredMixing.of(mixing, mixing_decay, operands.dtype), state, valid)


def mhla_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mixing: torch.Tensor,
    state: MHLAState,
    *,
    mixing_decay: torch.Tensor | None = None,
    valid: torch.Tensor | None = None,
    normalizer_query: torch.Tensor | None = None,
    normalizer_key: torch.Tensor | None = None,
    normalizer: str = "query",
    eps: float = 1e-6,
    backend: str = "auto",
) -> tuple[torch.Tensor, MHLAState]:
    """Decode one token for each batch entry in O(K·V), independent of the length before it.

    Arguments as in [`mhla_hf.ops.mhla_extend`], with T = 1, but these.

    Args:
        state: The state after the tokens before. Its summaries are written to, unless gradients are recorded.
        valid: BoolTensor `[B, 1]`; the state of an entry whose token is padding stays as it is.
        backend: See [`mhla_hf.ops.choose_backend`]; the kernel, which does the whole step in one launch, serves where
            no gradient is recorded.

    Returns:
        The output `[B, 1, H, V]` in the dtype of `value`, and the state after this token.

    Raises:
        ValueError: If more than one token is given, or as in [`mhla_hf.ops.mhla_extend`].
    """
    operands = Operands(query, key, value, normalizer_query, normalizer_key, normalizer, eps)
    check_recurrent(operands, mixing, mixing_decay, state, valid)
    if query.shape[1] != 1:
        raise ValueError(f"mhla_step takes one token, got query with {query.shape[1]}; use mhla_extend for several.")
    backend = choose_backend(
        backend, query, key, value, normalizer_query, normalizer_key, products=False, family="decode",
        normalizer=normalizer,
    )  # fmt: skip
    return step(operands, StoredMixing.of(mixing, mixing_decay, operands.dtype), state, valid, backend)


def rewind_state(
    state: MHLAState,
    mixing: torch.Tensor,
    key: torch.Tensor,
    normalizer_key: torch.Tensor,
    value: torch.Tensor,
    valid: torch.Tensor,
    *,
    mixing_decay: torch.Tensor | None = None,
    kept: torch.Tensor | None = None,
) -> MHLAState:
    """Take the last tokens back out of a state, all or some of them; no more than it was made for.

    Args:
        state: The state after these tokens.
        mixing: As in [`mhla_hf.ops.mhla_extend`].
        key: The tokens' feature-mapped keys `[B, T, H_kv, K]`.
        normalizer_key: The same, unrotated.
        value: Their values `[B, T, H_kv, V]`.
        valid: BoolTensor `[B, T]`, False for padding.
        mixing_decay: As in [`mhla_hf.ops.mhla_extend`].
        kept: BoolTensor `[B, T]`, which of the valid tokens stay in the state; `None` for none of them.

    Returns:
        The state before them, or with those that are kept alone, up to rounding.

    Raises:
        ValueError: If an argument does not fit the state; the message names the argument.
    """
    check_tokens(Operands(normalizer_key, key, value))
    check_mixing(mixing, key, None)
    check_decay(mixing_decay, key, None)
    check_valid(valid, key)
    check_valid(kept, key, "kept")
    check_state(state, key, value, mixing, mixing_decay)
    stored = StoredMixing.of(mixing, mixing_decay, state.current.dtype)
    return rewind(state, stored, key, normalizer_key, value, valid, kept)


def rewind(
    state: MHLAState,
    mixing: StoredMixing,
    key: torch.Tensor,
    normalizer_key: torch.Tensor,
    value: torch.Tensor,
    valid: torch.Tensor,
    kept: torch.Tensor | None = None,
) -> MHLAState:
    """[`rewind_state`] without its checks."""
    dtype, size, slots = state.current.dtype, state.block_size, state.num_slots
    block = current_block(state.position, size)
    index = torch.cat([_blocks_in_slots(block, slots), block[:, None]], dim=1)
    summaries = torch.cat([state.summaries.to(dtype), state.current.unsqueeze(2)], dim=2)
    position = state.position - valid.sum(dim=1)
    taken = _membership(valid, position, size, index).to(dtype)
    if kept is not None:
        # Tokens behind one that is taken out move up, some of them to the block before. The others cancel out.
        kept = kept & valid
        taken = taken - _membership(kept, position, size, index).to(dtype)
        position = position + kept.sum(dim=1)
    removed = torch.einsum("btn,bthk,bthv->bhnkv", taken, key.to(dtype), value.to(dtype))
    removed_keys = torch.einsum("btn,bthk->bhnk", taken, normalizer_key.to(dtype))
    summaries = summaries - torch.cat([removed, removed_keys.unsqueeze(-1)], dim=-1)
    target = current_block(position, size)
    current = _summary_at(summaries, torch.where(target == block, slots, target % slots))
    # A slot of a block that is not finished any more stays empty: what lay there before has left the ring.
    ring = torch.where((index < target[:, None])[:, None, :-1, None, None], summaries[:, :, :-1], 0)
    return _settled(state, ring, state.left, state.num_left, current, position, mixing)


def _membership(valid: torch.Tensor, position: torch.Tensor, size: int, index: torch.Tensor) -> torch.Tensor:
    """Which of the blocks `index` `[B, n]` each valid token belongs to where they follow `position`: `[B, T, n]`."""
    token_block = (position[:, None] + valid.long().cumsum(dim=1) - 1).clamp(min=0) // size
    return (token_block[..., None] == index[:, None]) & valid[..., None]


def extend(
    operands: Operands, mixing: StoredMixing, state: MHLAState, valid: torch.Tensor | None
) -> tuple[torch.Tensor, MHLAState]:
    """[`mhla_extend`] without its checks; the weights are in the accumulation dtype."""
    num_tokens, part = operands.query.shape[1], PART_CHUNKS * mixing.chunk_blocks * state.block_size
    tensors = *operands.tokens, *operands.pair, mixing.weights, mixing.decay, state.current, state.left
    # On the meta device there is nothing to hold.
    if num_tokens <= part or operands.value.is_meta or torch.compiler.is_compiling() or records_gradients(*tensors):
        return _extend(operands, mixing, state, valid)
    output = operands.value.new_empty(*operands.query.shape[:3], operands.value.shape[3])
    # Then every part but the last one ends where a block does.
    are_whole = state.is_empty and valid is None
    for start in range(0, num_tokens, part):
        places = slice(start, start + part)
        of_part = None if valid is None else valid[:, places]
        if are_whole and start:
            block = state.position // state.block_size
            state = _start_block(state, mixing, block, torch.ones_like(block, dtype=torch.bool))
        output[:, places], state = _extend(operands.cut(places), mixing, state, of_part, are_whole)
    return output, state


def _extend(
    operands: Operands, mixing: StoredMixing, state: MHLAState, valid: torch.Tensor | None, starts_block: bool = False
) -> tuple[torch.Tensor, MHLAState]:
    """[`extend`] in one go. `starts_block` says that the last block is full and filed, and there is no padding."""
    query, size = operands.query, state.block_size
    layout, lead = _layout_after(state, valid, query, starts_block)
    first = state.position // size if starts_block else current_block(state.position, size)
    position = state.position + (query.shape[1] if valid is None else valid.sum(dim=1))
    with torch.autocast(autocast_type(query.device), enabled=False):
        past = None if state.is_empty else _mixed_past(mixing, first, layout.num_blocks, state)
        output, summaries = _attend_chunks(operands, mixing, first, past, layout, lead)
        if valid is not None:
            output = output.masked_fill(~valid[..., None, None], 0)
        state = _advance(state, summaries, first, position, mixing)
    return output.to(operands.value.dtype), state


def _attend_chunks(
    operands: Operands,
    mixing: StoredMixing,
    first: torch.Tensor,
    past: torch.Tensor | None,
    layout: BlockLayout | SequenceLayout,
    lead: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs `[B, T, H, V]`, and what the new tokens add to their blocks, `[B, H_kv, I, K, V + 1]`.

    `first` `[B]` is the block of the layout's first one, `past` is what [`_mixed_past`] returns, and `lead` slots of
    the layout come before the tokens.
    """
    *clean, bad = finite_tokens(operands)
    query, normalizer_query, key, normalizer_key, value = (
        head_blocks(F.pad(x, (0, 0, 0, 0, lead, 0)) if lead else x, layout, mixing.weights.dtype)
        for x in (operands.query, operands.normalizer_query, *clean)
    )
    pair = None if operands.pair[0] is None else (normalizer_query, normalizer_key)
    # Where the blocks' text began.
    start = None if past is None else -first[:, None].expand(-1, layout.num_blocks)
    output, product, summaries = numerator_and_product(query, key, value, pair, mixing, start, past)
    output = divide(operands, output, product if operands.entry.divides else None, layout)
    if bad is not None:
        bad = F.pad(bad, (0, 0, lead, 0))
        output = spoil_tokens(output, bad, layout)
        spoilt_blocks = head_blocks(bad.unsqueeze(-1), layout).any(dim=-2, keepdim=True)
        summaries = summaries.masked_fill(spoilt_blocks, float("nan"))
    return output[:, lead:], summaries


def _layout_after(
    state: MHLAState, valid: torch.Tensor | None, query: torch.Tensor, starts_block: bool
) -> tuple[BlockLayout | SequenceLayout, int]:
    """The blocks of the new tokens, and how many slots before them stand for tokens that the state has seen."""
    num_tokens, size = query.shape[1], state.block_size
    if valid is None and (state.is_empty or starts_block):
        return cached(BlockLayout, (num_tokens,), None, (size,)), 0
    if valid is None:
        valid = torch.ones(query.shape[:2], dtype=torch.bool, device=query.device)
    if state.is_empty:
        return SequenceLayout(valid, size), 0
    filled = state.position - current_block(state.position, size) * size
    slots = indices(size, valid.device) < filled[:, None]
    return SequenceLayout(torch.cat([slots, valid], dim=1), size), size


def _blocks_in_slots(num_finished: torch.Tensor, slots: int) -> torch.Tensor:
    """The block that each slot of a ring holds after `num_finished` `[B]` blocks, `[B, R]`; below 0 where none."""
    last = num_finished[:, None] - 1
    return last - (last - indices(slots, last.device)) % slots


def _slot_weights(mixing: StoredMixing, rows: torch.Tensor, num_finished: torch.Tensor, slots: int) -> torch.Tensor:
    """Weights of the slots for blocks `rows` `[B, I]`, `[B, S, I, R]`."""
    held = _blocks_in_slots(num_finished, slots)
    weights = mixing.at(rows[:, :, None], held.clamp(min=0)[:, None])
    return torch.where((held >= 0)[:, None, None], weights, 0)


def _left_weights(mixing: StoredMixing, rows: torch.Tensor, num_left: torch.Tensor) -> torch.Tensor:
    """Weights of the sum of blocks that have left the ring for blocks `rows` `[B, I]`, `[B, S, I, 1, 1]`.

    The sum stands where the last one of them does.
    """
    return mixing.at(rows[:, :, None], (num_left - 1).clamp(min=0)[:, None, None]).unsqueeze(-1)


def _mixed_past(mixing: StoredMixing, first: torch.Tensor, num_blocks: int, state: MHLAState) -> torch.Tensor:
    """Σ_b m_ib S_b over all that the state has seen, the current block `first` included, for the blocks from it on.

    Returns:
        `[B, H_m, I, K, V + 1]`.
    """
    rows = first[:, None] + indices(num_blocks, first.device)
    weights = _slot_weights(mixing, rows, first, state.num_slots)
    weights = torch.cat([weights, mixing.at(rows[:, :, None], rows[:, None, :1])], dim=-1)
    summaries = torch.cat([state.summaries.to(state.current.dtype), state.current.unsqueeze(2)], dim=2)
    mixed = mix_summaries(weights, summaries, state.prefix.shape[1])
    return torch.addcmul(mixed, _left_weights(mixing, rows, state.num_left), state.left.unsqueeze(2))


def _advance(
    state: MHLAState, summaries: torch.Tensor, first: torch.Tensor, position: torch.Tensor, mixing: StoredMixing
) -> MHLAState:
    """The state at `position`, given what new tokens add to the blocks from `first` on: `[B, H_kv, I, K, V + 1]`."""
    count, slots, heads = summaries.shape[2], state.num_slots, state.prefix.shape[1]
    if not state.is_empty:
        begun = F.pad(state.current.unsqueeze(2), (0, 0, 0, 0, 0, count - 1))
        summaries = summaries + begun
    block = current_block(position, state.block_size)
    held = _blocks_in_slots(block, slots)
    local = held - first[:, None]
    index = local.clamp(0, count - 1)[:, None, :, None, None].expand(-1, summaries.shape[1], -1, *summaries.shape[-2:])
    is_new = (local >= 0)[:, None, :, None, None]
    ring = torch.where(is_new, summaries.gather(2, index), state.summaries.to(summaries.dtype))
    num_left = torch.maximum(state.num_left, block - slots)
    left = state.left
    # The blocks that leave: out of the ring, and of the new ones where they are more than it holds.
    groups = [] if state.is_empty else [(state.summaries.to(left.dtype), _blocks_in_slots(first, slots))]
    if (beyond := count - 1 - slots) > 0:
        groups.append((summaries[:, :, :beyond], first[:, None] + indices(beyond, first.device)))
    if groups:
        left = _decayed(mixing, num_left - state.num_left) * left
    for leaving, blocks in groups:
        stays = (blocks < state.num_left[:, None]) | (blocks >= num_left[:, None])
        weights = mixing.decayed((num_left[:, None] - 1 - blocks).clamp(min=0)).movedim(0, 1)
        if not surely_none(stays):
            # A zero weight does not stop a NaN.
            leaving = leaving.masked_fill(stays[:, None, :, None, None], 0)
        left = left + mix_summaries(weights.unsqueeze(2), leaving, heads).squeeze(2)
    current = _summary_at(summaries, block - first)
    return _settled(state, ring, left, num_left, current, position, mixing)


def _decayed(mixing: StoredMixing, distance: torch.Tensor) -> torch.Tensor:
    """The decay to the power of a distance of each batch entry `[B]`, `[B, S or 1, 1, 1]`."""
    # Contiguous, or products would take these strides, and compiled decoding would be recompiled for them.
    return mixing.decayed(distance).transpose(0, 1).contiguous()[..., None, None]


def step(
    operands: Operands, mixing: StoredMixing, state: MHLAState, valid: torch.Tensor | None, backend: str
) -> tuple[torch.Tensor, MHLAState]:
    """[`mhla_step`] without its checks, on a chosen backend; the weights are in the accumulation dtype."""
    (query, key, value), entry = operands.tokens, operands.entry
    dtype, size, num_heads = state.current.dtype, state.block_size, query.shape[2]
    if backend == "triton" and serves_kernels(operands, mixing, state):
        # Imported here alone: Triton need not be installed.
        from .triton.decode import decode_token

        # The kernel writes where a dense tensor would have the block.
        summaries = state.summaries.contiguous()
        output, *tensors = decode_token(
            *operands.tokens, *operands.pair, valid, mixing.weights, mixing.decay, summaries,
            state.current, state.prefix, state.upcoming, state.left, state.num_left, state.position,
            size, entry.divides, operands.eps,
        )  # fmt: skip
        current, prefix, upcoming, left, num_left, position = tensors
        state = MHLAState(
            summaries, current, prefix, upcoming, left, num_left, position, size, state.num_stored_blocks
        )  # fmt: skip
        return output, state
    block, offset = state.position // size, state.position % size
    counted = None if valid is None else valid[:, 0]
    starting = (offset == 0) & (block > 0)
    starting = starting if counted is None else starting & counted
    with torch.autocast(autocast_type(query.device), enabled=False):
        if not surely_none(starting):
            state = _start_block(state, mixing, block, starting)
        key, normalizer_key, value_row = (x.to(dtype).transpose(1, 2) for x in (key, operands.normalizer_key, value))
        added = torch.cat([key.transpose(-1, -2) @ value_row, normalizer_key.transpose(-1, -2)], dim=-1)
        current = state.current + _where_counted(counted, added)
        own = mixing.at(block[:, None, None], block[:, None, None])
        mixed = repeat_heads(state.prefix, num_heads, 1) + own * repeat_heads(current, num_heads, 1)
        output = query.to(dtype).transpose(1, 2) @ mixed[..., :-1]
        if entry.divides:
            normalizer_query = operands.normalizer_query.to(dtype).transpose(1, 2)
            output = output / entry.divisor(normalizer_query @ mixed[..., -1:], operands.eps)
        upcoming = state.upcoming + _where_counted(counted, _upcoming_share(state, mixing, block, offset))
        output = _where_counted(counted, output)
    position = state.position + (1 if counted is None else counted.long())
    state = dataclasses.replace(state, current=current, upcoming=upcoming, position=position, is_empty=False)
    return output.transpose(1, 2).to(value.dtype), state


def _where_counted(counted: torch.Tensor | None, tensor: torch.Tensor) -> torch.Tensor:
    """Zero `[B, ...]` of four axes for the batch entries whose token is padding."""
    return tensor if counted is None else torch.where(counted[:, None, None, None], tensor, 0)


def _start_block(state: MHLAState, mixing: StoredMixing, block: torch.Tensor, starting: torch.Tensor) -> MHLAState:
    """File the full current block of the batch entries that are `starting` a block `[B]`."""
    before, heads = (block - 1).clamp(min=0), state.prefix.shape[1]
    start = starting[:, None, None, None]
    # Entries that start no block write back what stands there.
    entries = indices(block.shape[0], block.device)
    slot = before % state.num_slots
    oldest = state.summaries[entries, :, slot]
    # The slot is empty where no block leaves.
    num_left = torch.where(starting, torch.maximum(state.num_left, before - state.num_slots + 1), state.num_left)
    left = _decayed(mixing, num_left - state.num_left) * state.left + repeat_heads(
        oldest.to(state.left.dtype), heads, 1
    )
    filed = torch.where(start, state.current.to(oldest.dtype), oldest)
    # Written in place unless autograd still needs what stood there.
    write = state.summaries.index_put if records_gradients(filed, state.summaries) else state.summaries.index_put_
    all_heads = indices(state.summaries.shape[1], block.device)[None, :]
    summaries = write((entries[:, None], all_heads, slot[:, None]), filed)
    own = mixing.at(block[:, None, None], before[:, None, None]) * repeat_heads(state.current, heads, 1)
    return dataclasses.replace(
        state,
        summaries=summaries,
        current=torch.where(start, 0, state.current),
        prefix=torch.where(start, state.upcoming + own, state.prefix),
        upcoming=torch.where(start, 0, state.upcoming),
        left=torch.where(start, left, state.left),
        num_left=num_left,
    )


def _upcoming_share(state: MHLAState, mixing: StoredMixing, block: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """This token's share of the next block's prefix: slots s ≡ offset modulo the block size; all that has left, last.

    Every slot comes up exactly once while a block fills.
    """
    size, slots, share = state.block_size, state.num_slots, torch.zeros_like(state.upcoming)
    row = (block + 1)[:, None]
    count = -(-slots // size)
    if torch.compiler.is_compiling():
        # Compilers take a size of 1 for another case than all greater ones. What is too many is not `inside`.
        count = torch.sym_max(2, count)
    chosen = offset[:, None] + size * indices(count, block.device)
    inside, chosen = chosen < slots, chosen.clamp(max=slots - 1)
    held = _blocks_in_slots(block, slots).gather(1, chosen)
    inside, is_last = inside & (held >= 0), offset == size - 1
    if not surely_none(inside):
        weights = mixing.at(row[:, :, None], held.clamp(min=0)[:, None])
        weights = torch.where(inside[:, None, None], weights, 0)
        entries = indices(block.shape[0], block.device)[:, None]
        summaries = state.summaries[entries, :, chosen].transpose(1, 2).to(state.current.dtype)
        share = share + mix_summaries(weights, summaries, state.prefix.shape[1]).squeeze(2)
    if not surely_none(is_last):
        of_left = _left_weights(mixing, row, state.num_left).squeeze(2) * state.left
        share = share + torch.where(is_last[:, None, None, None], of_left, 0)
    return share


def serves_kernels(operands: Operands, mixing: StoredMixing, state: MHLAState) -> bool:
    """Return whether the Triton kernel can move this state on, without gradients and float64."""
    heads = operands.query.shape[2] if mixing.is_per_head else state.current.shape[1]
    if state.current.dtype != torch.float32 or state.prefix.shape[1] != heads or operands.entry.kernel is None:
        return False
    held = state.summaries, state.current, state.prefix, state.upcoming, state.left
    return not records_gradients(*operands.tokens, *operands.pair, mixing.weights, mixing.decay, *held)


def _summary_at(summaries: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the summary at place `index` `[B]` of `[B, H_kv, n, K, V + 1]`: `[B, H_kv, K, V + 1]`."""
    index = index[:, None, None, None, None].expand(-1, summaries.shape[1], 1, *summaries.shape[-2:])
    return summaries.gather(2, index).squeeze(2)


def _settled(
    state: MHLAState,
    ring: torch.Tensor,
    left: torch.Tensor,
    num_left: torch.Tensor,
    current: torch.Tensor,
    position: torch.Tensor,
    mixing: StoredMixing,
) -> MHLAState:
    """Rebuild the state at `position`, including the prefix sums that decoding would have accumulated."""
    size, slots, heads = state.block_size, ring.shape[2], state.prefix.shape[1]
    block = current_block(position, size)
    # A state before its first token has summed up nothing.
    offset = position - block * size
    rows = torch.stack([block, block + 1], dim=1)
    weights = _slot_weights(mixing, rows, block, slots)
    seen = indices(slots, position.device) % size < offset[:, None]
    weights = torch.stack([weights[:, :, 0], torch.where(seen[:, None], weights[:, :, 1], 0)], dim=2)
    prefix, upcoming = mix_summaries(weights, ring, heads).unbind(2)
    of_left = _left_weights(mixing, rows, num_left) * left.unsqueeze(2)
    prefix = prefix + of_left[:, :, 0]
    upcoming = upcoming + torch.where((offset == size)[:, None, None, None], of_left[:, :, 1], 0)
    # Strides do not tell how a state was made: compiled decoding would be recompiled for others.
    return MHLAState(
        ring.to(state.summaries.dtype), current.contiguous(), prefix.contiguous(), upcoming.contiguous(),
        left.contiguous(), num_left, position, size, state.num_stored_blocks,
    )  # fmt: skip
