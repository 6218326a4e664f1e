# SPDX-License-Identifier: Apache-2.0
"""The recurrent form of causal MHLA: a state of block summaries, and the prefixes that are mixed from them.

[`mhla_extend`] runs a prompt, or any number of tokens more, in chunks from a state; [`mhla_step`] decodes one token of
every batch entry; [`rewind_state`] takes the last tokens back. Every batch entry has its own position, so that
sequences of different lengths decode side by side. Nothing here reads a value back from the device, and the cost of a
step does not grow with the length: the mixed prefix of the next block is summed up a few finished blocks a token,
while the current block fills.

Shape letters: B batch, T tokens, H query heads, H_kv key/value heads, K query/key width, V value width, n finished
blocks with room in the state, I blocks that new tokens may reach, the one they begin in first. Summaries carry the
normaliser z as their last column, hence V + 1. H_m is H_kv where all heads share the mixing weights, else H.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..layouts.blocks import BlockLayout, cached, check_count, indices
from ..layouts.sequences import SequenceLayout
from .backends import choose_backend
from .operands import (
    MHLAState,
    Operands,
    autocast_type,
    check_mixing,
    check_recurrent,
    check_state,
    check_tokens,
    check_valid,
    current_block,
    extend_mixing,
    finite_tokens,
    from_head_blocks,
    head_blocks,
    mixing_at,
    records_gradients,
    spoilt_tokens,
)
from .tables import mix_summaries, prefix_and_own, repeat_heads


def empty_state(
    batch_size: int,
    num_heads: int,
    key_width: int,
    value_width: int,
    block_size: int,
    *,
    num_mixing_heads: int | None = None,
    num_blocks: int = 0,
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
        block_size: Tokens of a block.
        num_mixing_heads: H_m; H_kv if not given.
        num_blocks: Room for that many finished blocks.
        dtype: The accumulation dtype.
        summary_dtype: The dtype that finished blocks are kept in; `dtype` if not given.
        device: Device of the state.

    Raises:
        ValueError: If a size is not a positive integer (`num_blocks` may be 0).
    """
    mixing_heads = num_heads if num_mixing_heads is None else num_mixing_heads
    sizes = {"batch_size": batch_size, "num_heads": num_heads, "key_width": key_width, "value_width": value_width}
    for name, size in {**sizes, "block_size": block_size, "num_mixing_heads": mixing_heads}.items():
        check_count(name, size)
    check_count("num_blocks", num_blocks, minimum=0)
    shape = (key_width, value_width + 1)
    return MHLAState(
        torch.zeros(batch_size, num_heads, num_blocks, *shape, dtype=summary_dtype or dtype, device=device),
        torch.zeros(batch_size, num_heads, *shape, dtype=dtype, device=device),
        torch.zeros(batch_size, mixing_heads, *shape, dtype=dtype, device=device),
        torch.zeros(batch_size, mixing_heads, *shape, dtype=dtype, device=device),
        torch.zeros(batch_size, dtype=torch.long, device=device),
        block_size,
        is_empty=True,
    )


def mhla_extend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mixing: torch.Tensor,
    state: MHLAState,
    *,
    valid: torch.Tensor | None = None,
    normalizer_query: torch.Tensor | None = None,
    normalizer_key: torch.Tensor | None = None,
    normalizer: str = "query",
    eps: float = 1e-6,
    backend: str = "auto",
) -> tuple[torch.Tensor, MHLAState]:
    """Run any number of tokens through the chunked form after the tokens that `state` has seen.

    Serves the prompt, a prompt in parts, and the next turn of a conversation. `state` stays valid.

    Args:
        query: Feature-mapped queries `[B, T, H, K]`.
        key: Feature-mapped keys `[B, T, H_kv, K]`.
        value: Values `[B, T, H_kv, V]`.
        mixing: `[M, M]` or `[H, M, M]`, lower triangle used; see [`mhla_hf.ops.extend_mixing`] for longer texts.
        state: The state before these tokens; must have room for the blocks that they finish.
        valid: BoolTensor `[B, T]`, False for padding, which is skipped and gets zeros; `None` for no padding.
        normalizer_query: Unrotated queries where they differ from `query`.
        normalizer_key: Unrotated keys where they differ from `key`.
        normalizer: `"query"` or `"none"`.
        eps: Added to the denominator.
        backend: See [`mhla_hf.ops.choose_backend`]; the kernels of causal attention serve where no gradient is
            recorded. What they read is the new tokens; what the past adds to the new blocks is mixed in plain torch.

    Returns:
        The output `[B, T, H, V]` in the dtype of `value`, and the [`MHLAState`] after these tokens.

    Raises:
        ValueError: If an argument has a wrong type, shape, dtype, device or value, or does not fit the state; the
            message names the argument. `"block_query"` is refused: its state would grow with every token. Whether a
            state that has seen tokens has room for more is not checked, which would wait for the device.
    """
    operands = Operands(query, key, value, normalizer_query, normalizer_key, normalizer, eps)
    check_recurrent(operands, mixing, state, valid)
    if query.shape[1] < 1:
        raise ValueError("query has no tokens.")
    finished = (query.shape[1] - 1) // state.block_size
    if state.is_empty and valid is None and finished > state.num_blocks:
        raise ValueError(
            f"state has room for {state.num_blocks} finished blocks, but these tokens finish {finished}: "
            "see MHLAState.with_room."
        )
    backend = choose_backend(backend, query, key, value, normalizer_query, normalizer_key, family="prompt")
    return extend(operands, mixing, state, valid, backend)


def mhla_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mixing: torch.Tensor,
    state: MHLAState,
    *,
    valid: torch.Tensor | None = None,
    normalizer_query: torch.Tensor | None = None,
    normalizer_key: torch.Tensor | None = None,
    normalizer: str = "query",
    eps: float = 1e-6,
    backend: str = "auto",
) -> tuple[torch.Tensor, MHLAState]:
    """Decode one token for each batch entry in O(K·V), whatever came before.

    Arguments as in [`mhla_hf.ops.mhla_extend`], with T = 1, but these.

    Args:
        state: The state after the tokens before, with room for one block more than those finished. Its summaries are
            written to, unless gradients are recorded.
        valid: BoolTensor `[B, 1]`; the state of an entry whose token is padding stays as it is.
        backend: See [`mhla_hf.ops.choose_backend`]; the kernel, which does the whole step in one launch, serves where
            no gradient is recorded.

    Returns:
        The output `[B, 1, H, V]` in the dtype of `value`, and the state after this token.

    Raises:
        ValueError: If more than one token is given, or as in [`mhla_hf.ops.mhla_extend`].
    """
    operands = Operands(query, key, value, normalizer_query, normalizer_key, normalizer, eps)
    check_recurrent(operands, mixing, state, valid)
    if query.shape[1] != 1:
        raise ValueError(f"mhla_step takes one token, got query with {query.shape[1]}; use mhla_extend for several.")
    backend = choose_backend(
        backend, query, key, value, normalizer_query, normalizer_key, products=False, family="decode"
    )
    return step(operands, mixing, state, valid, backend)


def rewind_state(
    state: MHLAState,
    mixing: torch.Tensor,
    key: torch.Tensor,
    normalizer_key: torch.Tensor,
    value: torch.Tensor,
    valid: torch.Tensor,
    *,
    kept: torch.Tensor | None = None,
) -> MHLAState:
    """Take the last tokens back out of a state, all or some of them.

    Args:
        state: The state after these tokens.
        mixing: As in [`mhla_hf.ops.mhla_extend`].
        key: The tokens' feature-mapped keys `[B, T, H_kv, K]`.
        normalizer_key: The same, unrotated.
        value: Their values `[B, T, H_kv, V]`.
        valid: BoolTensor `[B, T]`, False for padding.
        kept: BoolTensor `[B, T]`, which of the valid tokens stay in the state; `None` for none of them.

    Returns:
        The state before them, or with those that are kept alone, up to rounding.

    Raises:
        ValueError: If an argument does not fit the state; the message names the argument.
    """
    check_tokens(Operands(normalizer_key, key, value))
    check_mixing(mixing, key, None)
    check_valid(valid, key)
    check_valid(kept, key, "kept")
    check_state(state, key, value, mixing)
    dtype, size, room = state.current.dtype, state.block_size, state.num_blocks
    # A slot for the current block, which there need not be room for yet.
    index = indices(room + 1, valid.device)
    here = index == current_block(state.position, size)[:, None]
    summaries = state.with_room(room + 1).summaries.to(dtype)
    summaries = torch.where(here[:, None, :, None, None], state.current.unsqueeze(2), summaries)
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
    current = block_summary_at(summaries, current_block(position, size))
    return rebuild_state(state, summaries[:, :, :room], current, position, mixing.to(dtype))


def _membership(valid: torch.Tensor, position: torch.Tensor, size: int, index: torch.Tensor) -> torch.Tensor:
    """Which of the blocks `index` each valid token belongs to where they follow `position` `[B]`: `[B, T, n]`."""
    token_block = (position[:, None] + valid.long().cumsum(dim=1) - 1).clamp(min=0) // size
    return (token_block[..., None] == index) & valid[..., None]


def extend(
    operands: Operands, mixing: torch.Tensor, state: MHLAState, valid: torch.Tensor | None, backend: str
) -> tuple[torch.Tensor, MHLAState]:
    """[`mhla_extend`] without its checks, on a chosen backend."""
    query = operands.query
    mixing = mixing.to(operands.dtype)
    layout, lead = _layout_after(state, valid, query)
    first = current_block(state.position, state.block_size)
    blocks = first[:, None] + indices(layout.num_blocks, query.device)
    position = state.position + (query.shape[1] if valid is None else valid.sum(dim=1))
    with torch.autocast(autocast_type(query.device), enabled=False):
        if state.is_empty:
            own, past = extend_mixing(mixing, layout.num_blocks, causal=True), None
        else:
            own = mixing_at(mixing, blocks[:, :, None], blocks[:, None, :]).tril()
            past = _mixed_past(mixing, blocks, state)
        if backend == "triton" and serves_kernels(operands, mixing, state):
            # Imported here alone: Triton need not be installed.
            from .triton.prompt import attend_prompt

            output, *tensors = attend_prompt(
                *operands.tokens, operands.pair, mixing, own, past, layout, lead, state, position,
                divides=operands.entry.divides, eps=operands.eps,
            )  # fmt: skip
            summaries, current, prefix, upcoming = tensors
            return output, MHLAState(summaries, current, prefix, upcoming, position, state.block_size)
        output, summaries = _attend_chunks(operands, own, past, layout, lead)
        if valid is not None:
            output = output.masked_fill(~valid[..., None, None], 0)
        state = _advance(state, summaries, blocks, position, mixing)
    return output.to(operands.value.dtype), state


def _attend_chunks(
    operands: Operands,
    mixing: torch.Tensor,
    past: torch.Tensor | None,
    layout: BlockLayout | SequenceLayout,
    lead: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs `[B, T, H, V]`, and what the new tokens add to their blocks, `[B, H_kv, I, K, V + 1]`, in plain torch.

    `mixing` are the weights of the layout's blocks, `past` is what [`_mixed_past`] returns, and `lead` slots of the
    layout come before the tokens.
    """
    *clean, bad = finite_tokens(operands)
    if lead:
        bad = F.pad(bad, (0, 0, lead, 0))
    query, normalizer_query, key, normalizer_key, value = (
        head_blocks(F.pad(x, (0, 0, 0, 0, lead, 0)) if lead else x, layout, mixing.dtype)
        for x in (operands.query, operands.normalizer_query, *clean)
    )
    past_products, past_sums = (None, None) if past is None else (past[..., :-1], past[..., -1:])
    output, products = prefix_and_own(query, key, value, mixing, past_products)
    output = from_head_blocks(output, layout)
    if operands.entry.divides:
        product, sums = prefix_and_own(normalizer_query, normalizer_key, None, mixing, past_sums)
        output = output / operands.entry.divisor(from_head_blocks(product, layout), operands.eps)
    else:
        sums = normalizer_key.sum(dim=-2).unsqueeze(-1)
    output = output.masked_fill(spoilt_tokens(bad, layout, query.shape[1]), float("nan"))[:, lead:]
    spoilt_blocks = head_blocks(bad.unsqueeze(-1), layout).any(dim=-2, keepdim=True)
    return output, torch.cat([products, sums], dim=-1).masked_fill(spoilt_blocks, float("nan"))


def _layout_after(
    state: MHLAState, valid: torch.Tensor | None, query: torch.Tensor
) -> tuple[BlockLayout | SequenceLayout, int]:
    """The blocks of the new tokens, and how many slots before them stand for tokens that the state has seen."""
    num_tokens, size = query.shape[1], state.block_size
    if valid is None and state.is_empty:
        return cached(BlockLayout, (num_tokens,), None, (size,)), 0
    if valid is None:
        valid = torch.ones(query.shape[:2], dtype=torch.bool, device=query.device)
    if state.is_empty:
        return SequenceLayout(valid, size), 0
    filled = state.position - current_block(state.position, size) * size
    slots = indices(size, valid.device) < filled[:, None]
    return SequenceLayout(torch.cat([slots, valid], dim=1), size), size


def _mixed_past(mixing: torch.Tensor, blocks: torch.Tensor, state: MHLAState) -> torch.Tensor:
    """Σ_b m_ib S_b over all that the state has seen, the current block included, for blocks `blocks` `[B, I]`.

    Returns:
        `[B, H_m, I, K, V + 1]`.
    """
    index, heads = indices(state.num_blocks, blocks.device), state.prefix.shape[1]
    weights = mixing_at(mixing, blocks[:, :, None], index[None, None])
    # Slots after the finished blocks are zero, but a weight there may be anything.
    weights = torch.where((index < blocks[:, :1])[:, None, None], weights, 0)
    finished = mix_summaries(weights, state.summaries.to(state.current.dtype), heads)
    weights = mixing_at(mixing, blocks[:, :, None], blocks[:, None, :1])
    return finished + mix_summaries(weights, state.current.unsqueeze(2), heads)


def _advance(
    state: MHLAState, summaries: torch.Tensor, blocks: torch.Tensor, position: torch.Tensor, mixing: torch.Tensor
) -> MHLAState:
    """The state at `position`, given what the new tokens add to blocks `blocks` `[B, I]`: `[B, H_kv, I, K, V + 1]`."""
    room = state.num_blocks
    if state.is_empty:
        everything = F.pad(summaries, (0, 0, 0, 0, 0, room - summaries.shape[2]))
    else:
        first = indices(summaries.shape[2], blocks.device)[:, None, None] == 0
        summaries = summaries + torch.where(first, state.current.unsqueeze(2), 0)
        # One slot more for blocks that there is no room for: those past the last token, which are empty, and the
        # current one, which is kept apart.
        target = blocks.clamp(max=room)[:, None, :, None, None].expand_as(summaries)
        kept = F.pad(state.summaries.to(summaries.dtype), (0, 0, 0, 0, 0, 1))
        everything = kept.scatter(2, target, summaries)[:, :, :room]
    local = current_block(position, state.block_size) - blocks[:, 0]
    return rebuild_state(state, everything, block_summary_at(summaries, local), position, mixing)


def step(
    operands: Operands, mixing: torch.Tensor, state: MHLAState, valid: torch.Tensor | None, backend: str
) -> tuple[torch.Tensor, MHLAState]:
    """[`mhla_step`] without its checks, on a chosen backend."""
    (query, key, value), entry = operands.tokens, operands.entry
    dtype, size, num_heads = state.current.dtype, state.block_size, query.shape[2]
    mixing = mixing.to(dtype)
    # The kernel files every block that is full.
    if backend == "triton" and state.num_blocks > 0 and serves_kernels(operands, mixing, state):
        # Imported here alone: Triton need not be installed.
        from .triton.decode import decode_token

        # The kernel writes where a dense tensor would have the block.
        summaries = state.summaries.contiguous()
        output, current, prefix, upcoming, position = decode_token(
            *operands.tokens, *operands.pair, valid, mixing, summaries, state.current, state.prefix, state.upcoming,
            state.position, size, entry.divides, operands.eps,
        )  # fmt: skip
        return output, MHLAState(summaries, current, prefix, upcoming, position, size)
    counted = torch.ones_like(state.position) if valid is None else valid[:, 0].long()
    block, offset = state.position // size, state.position % size
    with torch.autocast(autocast_type(query.device), enabled=False):
        state = _start_block(state, mixing, block, (offset == 0) & (block > 0) & counted.bool())
        key, normalizer_key, value_row = (x.to(dtype).transpose(1, 2) for x in (key, operands.normalizer_key, value))
        added = torch.cat([key.transpose(-1, -2) @ value_row, normalizer_key.transpose(-1, -2)], dim=-1)
        keep = counted.bool()[:, None, None, None]
        current = state.current + torch.where(keep, added, 0)
        own = _weights(mixing, block, block)
        mixed = repeat_heads(state.prefix, num_heads, 1) + own * repeat_heads(current, num_heads, 1)
        output = query.to(dtype).transpose(1, 2) @ mixed[..., :-1]
        if entry.divides:
            normalizer_query = operands.normalizer_query.to(dtype).transpose(1, 2)
            output = output / entry.divisor(normalizer_query @ mixed[..., -1:], operands.eps)
        upcoming = state.upcoming + torch.where(keep, _upcoming_share(state, mixing, block, offset), 0)
        output = output.masked_fill(~keep, 0)
    state = MHLAState(state.summaries, current, state.prefix, upcoming, state.position + counted, size)
    return output.transpose(1, 2).to(value.dtype), state


def _weights(mixing: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    """One weight for each batch entry: `[B, 1 or H, 1, 1]`."""
    return mixing_at(mixing, row[:, None, None], column[:, None, None])


def _start_block(state: MHLAState, mixing: torch.Tensor, block: torch.Tensor, starting: torch.Tensor) -> MHLAState:
    """File the full current block of the batch entries that are `starting` a block `[B]`."""
    if state.num_blocks == 0:
        return state
    before = (block - 1).clamp(min=0)
    start = starting[:, None, None, None]
    # Entries that start no block write back what stands there.
    entries = indices(block.shape[0], block.device)
    slot = before.clamp(max=state.num_blocks - 1)
    filed = torch.where(start, state.current.to(state.summaries.dtype), state.summaries[entries, :, slot])
    # Written in place unless autograd still needs what stood there.
    write = state.summaries.index_put if records_gradients(filed, state.summaries) else state.summaries.index_put_
    all_heads = indices(state.summaries.shape[1], block.device)[None, :]
    summaries = write((entries[:, None], all_heads, slot[:, None]), filed)
    heads = state.prefix.shape[1]
    own = _weights(mixing, block, before) * repeat_heads(state.current, heads, 1)
    current = torch.where(start, 0, state.current)
    prefix = torch.where(start, state.upcoming + own, state.prefix)
    upcoming = torch.where(start, 0, state.upcoming)
    return MHLAState(summaries, current, prefix, upcoming, state.position, state.block_size)


def _upcoming_share(state: MHLAState, mixing: torch.Tensor, block: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """This token's share of the next block's prefix: finished blocks b with b ≡ offset modulo the block size.

    Every finished block comes up exactly once while a block fills.
    """
    if state.num_blocks == 0:
        return torch.zeros_like(state.upcoming)
    strides = -(-state.num_blocks // state.block_size)
    if torch.compiler.is_compiling():
        # One more than needed: a single one would be compiled in, and others recompiled.
        strides = strides + 1
    index = offset[:, None] + state.block_size * indices(strides, block.device)
    weights = mixing_at(mixing, (block + 1)[:, None, None], index[:, None, :])
    weights = torch.where((index < block[:, None])[:, None, None], weights, 0)
    entries = indices(block.shape[0], block.device)[:, None]
    chosen = state.summaries[entries, :, index.clamp(max=state.num_blocks - 1)].transpose(1, 2)
    return mix_summaries(weights, chosen.to(state.current.dtype), state.prefix.shape[1]).squeeze(2)


def serves_kernels(operands: Operands, mixing: torch.Tensor, state: MHLAState) -> bool:
    """Return whether Triton kernels can move this state on: they keep no gradients and no float64."""
    per_head = mixing.dim() > 2 and mixing.shape[0] != 1
    heads = operands.query.shape[2] if per_head else state.current.shape[1]
    if state.current.dtype != torch.float32 or state.prefix.shape[1] != heads or operands.entry.kernel is None:
        return False
    held = state.summaries, state.current, state.prefix, state.upcoming
    return not records_gradients(*operands.tokens, *operands.pair, mixing, *held)


def block_summary_at(summaries: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the summary of block `index` `[B]` out of `[B, H_kv, n, K, V + 1]`: `[B, H_kv, K, V + 1]`."""
    index = index[:, None, None, None, None].expand(-1, summaries.shape[1], 1, *summaries.shape[-2:])
    return summaries.gather(2, index).squeeze(2)


def rebuild_state(
    state: MHLAState, summaries: torch.Tensor, current: torch.Tensor, position: torch.Tensor, mixing: torch.Tensor
) -> MHLAState:
    """Return the state at `position` with these summaries of all blocks, and recompute all that derives from them."""
    size, index = state.block_size, indices(summaries.shape[2], position.device)
    block = current_block(position, size)
    finished = index < block[:, None]
    summaries = torch.where(finished[:, None, :, None, None], summaries, 0)
    # A state before its first token has summed up nothing.
    offset = (position - block * size)[:, None]
    rows = torch.stack([block, block + 1], dim=1)
    weights = mixing_at(mixing, rows[:, :, None], index[None, None, :])
    seen = torch.stack([finished, finished & (index % size < offset)], dim=1)
    weights = torch.where(seen[:, None], weights, 0)
    # Strides do not tell how a state was made: compiled decoding would be recompiled for others.
    prefix, upcoming = (
        part.contiguous() for part in mix_summaries(weights, summaries, state.prefix.shape[1]).unbind(2)
    )
    return MHLAState(
        summaries.to(state.summaries.dtype), current.contiguous(), prefix, upcoming, position, state.block_size
    )
