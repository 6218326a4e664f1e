# SPDX-License-Identifier: Apache-2.0
"""The recurrent form of causal MHLA: decoding from a state of block summaries, one or several tokens at a time.

Every batch entry has its own position, so that sequences of different lengths decode side by side. No step reads a
value back from the device, and its cost does not grow with the length: the mixed prefix of the next block is summed up
a few finished blocks a token, while the current block fills.

Shape letters: B batch, T tokens, H query heads, H_kv key/value heads, K query/key width, V value width, n blocks that
there is room for. Summaries carry the normaliser z as their last column, hence V + 1. H_m is H_kv where all heads
share the mixing weights, else H.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..sequence_layout import SequenceLayout, mixing_at
from .backends import choose_backend
from .causal import spoilt_tokens
from .numerics import (
    accumulation_dtype,
    check_normalizer,
    from_head_blocks,
    head_blocks,
    mix_summaries,
    normalizer_pair,
    records_gradients,
    repeat_heads,
)


@dataclass(frozen=True)
class MHLAState:
    """Decoding state of one causal MHLA layer. [`mhla_step`] writes into `summaries`: go on with what it returns.

    Attributes:
        summaries: Finished blocks, `[B, H_kv, n, K, V + 1]`, zeros after them.
        current: The current block's summary so far, `[B, H_kv, K, V + 1]`. A full block stays the current one until
            the next token comes.
        prefix: Σ_{b<i} m_ib S_b for the current block i, `[B, H_m, K, V + 1]`.
        upcoming: The same for block i + 1, as far as it is summed up, `[B, H_m, K, V + 1]`.
        position: Tokens seen so far, LongTensor `[B]`.
        block_size: Tokens of a block.
    """

    summaries: torch.Tensor
    current: torch.Tensor
    prefix: torch.Tensor
    upcoming: torch.Tensor
    position: torch.Tensor
    block_size: int

    @property
    def num_blocks(self) -> int:
        """Finished blocks that there is room for, n."""
        return self.summaries.shape[2]

    def with_room(self, num_blocks: int) -> MHLAState:
        """Returns a state with room for at least `num_blocks` finished blocks."""
        missing = num_blocks - self.num_blocks
        if missing <= 0:
            return self
        return dataclasses.replace(self, summaries=F.pad(self.summaries, (0, 0, 0, 0, 0, missing)))


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
    """Returns the state before the first token.

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
        device: Where the state lives.

    Raises:
        ValueError: If `block_size` is not positive.
    """
    if block_size < 1:
        raise ValueError(f"block_size={block_size} must be a positive integer.")
    mixing_heads = num_heads if num_mixing_heads is None else num_mixing_heads
    size = (key_width, value_width + 1)
    return MHLAState(
        torch.zeros(batch_size, num_heads, num_blocks, *size, dtype=summary_dtype or dtype, device=device),
        torch.zeros(batch_size, num_heads, *size, dtype=dtype, device=device),
        torch.zeros(batch_size, mixing_heads, *size, dtype=dtype, device=device),
        torch.zeros(batch_size, mixing_heads, *size, dtype=dtype, device=device),
        torch.zeros(batch_size, dtype=torch.long, device=device),
        block_size,
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
) -> tuple[torch.Tensor, MHLAState]:
    """Runs any number of tokens through the chunked form after the tokens that `state` has seen.

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

    Returns:
        The output `[B, T, H, V]` in the dtype of `value`, and the [`MHLAState`] after these tokens.

    Raises:
        ValueError: If `normalizer` is `"block_query"`, whose state would grow with every token, or there is no token.
    """
    _check_normalizer(normalizer)
    if query.shape[1] < 1:
        raise ValueError("query has no tokens.")
    dtype, size, num_heads = accumulation_dtype(value.dtype), state.block_size, query.shape[2]
    if valid is None:
        valid = torch.ones(query.shape[:2], dtype=torch.bool, device=query.device)
    plain_query = query if normalizer_query is None else normalizer_query
    plain_key = key if normalizer_key is None else normalizer_key

    first_block = _current_block(state.position, size)
    # Leading slots stand for the tokens that the current block holds already.
    filled = state.position - first_block * size
    slots = torch.arange(size, device=valid.device) < filled[:, None]
    layout = SequenceLayout(torch.cat([slots, valid], dim=1), size)
    with torch.autocast(query.device.type, enabled=False):
        # The products below multiply what a token must not see by zero, which does not stop a NaN.
        bad = ~(key.isfinite().all(-1) & plain_key.isfinite().all(-1) & value.isfinite().all(-1))
        key, plain_key, value_blocks = (x.masked_fill(bad.unsqueeze(-1), 0) for x in (key, plain_key, value))
        query, plain_query, key, plain_key, value_blocks = (
            head_blocks(F.pad(x.to(dtype), (0, 0, 0, 0, size, 0)), layout)
            for x in (query, plain_query, key, plain_key, value_blocks)
        )
        spoilt_blocks = head_blocks(F.pad(bad.unsqueeze(-1), (0, 0, 0, 0, size, 0)), layout).any(dim=-2, keepdim=True)
        products = key.transpose(-1, -2) @ value_blocks
        summaries = torch.cat([products, plain_key.sum(dim=-2).unsqueeze(-1)], dim=-1)
        first = torch.arange(summaries.shape[2], device=valid.device)[:, None, None] == 0
        summaries = summaries + torch.where(first, state.current.unsqueeze(2), 0)

        mixing = mixing.to(dtype)
        local = first_block[:, None] + torch.arange(layout.num_blocks, device=valid.device)
        own_mixing = mixing_at(mixing, local[:, :, None], local[:, None, :]).tril()
        prefix = mix_summaries(own_mixing.tril(-1), summaries, num_heads) + _mixed_past(
            mixing, local, state, num_heads
        )
        diagonal = own_mixing.diagonal(dim1=-2, dim2=-1)[..., None, None]
        # What the current block held before these tokens, with the block's own weight.
        prefix = prefix + torch.where(first, diagonal * repeat_heads(state.current, num_heads, 1).unsqueeze(2), 0)

        key, plain_key, value_blocks = (repeat_heads(x, num_heads, 1) for x in (key, plain_key, value_blocks))
        own = (query @ key.transpose(-1, -2)).tril() @ value_blocks
        output = from_head_blocks(query @ prefix[..., :-1] + diagonal * own, layout)
        if normalizer == "query":
            own = (plain_query @ plain_key.transpose(-1, -2)).tril().sum(dim=-1, keepdim=True)
            output = output / (from_head_blocks(plain_query @ prefix[..., -1:] + diagonal * own, layout) + eps)
        spoilt = spoilt_tokens(F.pad(bad, (0, 0, size, 0)), layout, num_heads)
        output = output.masked_fill(spoilt, float("nan"))[:, size:].masked_fill(~valid[..., None, None], 0)
        state = _advance(state, summaries.masked_fill(spoilt_blocks, float("nan")), local, valid, mixing)
    return output.to(value.dtype), state


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
    """Decodes one token for each batch entry in O(K·V), whatever came before.

    Args:
        query: Feature-mapped query of the token, `[B, 1, H, K]`.
        key: Feature-mapped key, `[B, 1, H_kv, K]`.
        value: Value, `[B, 1, H_kv, V]`.
        mixing: As in [`mhla_extend`].
        state: The state after the tokens before, with room for one block more than those finished. Its summaries are
            written to, unless gradients are recorded.
        valid: BoolTensor `[B, 1]`; the state of an entry whose token is padding stays as it is.
        normalizer_query: Unrotated query where it differs from `query`.
        normalizer_key: Unrotated key where it differs from `key`.
        normalizer: `"query"` or `"none"`.
        eps: Added to the denominator.
        backend: See [`mhla_hf.ops.choose_backend`]; the kernel, which does the whole step in one launch, serves where
            no gradient is recorded.

    Returns:
        The output `[B, 1, H, V]` in the dtype of `value`, and the state after this token.

    Raises:
        ValueError: If more than one token is given, or `normalizer` is `"block_query"`.
    """
    _check_normalizer(normalizer)
    if query.shape[1] != 1:
        raise ValueError(f"mhla_step takes one token, got query with {query.shape[1]}; use mhla_extend for several.")
    dtype, size, num_heads = state.current.dtype, state.block_size, query.shape[2]
    mixing = mixing.to(dtype)
    pair = normalizer_pair(query, key, normalizer_query, normalizer_key)
    if _has_kernel(state, mixing, num_heads) and not records_gradients(
        query, key, value, mixing, *pair, state.summaries, state.current, state.prefix, state.upcoming
    ):
        if choose_backend(backend, query, key, value, *pair) == "triton":
            return _step_by_kernel(query, key, value, pair, mixing, state, valid, normalizer == "query", eps)
    counted = torch.ones_like(state.position) if valid is None else valid[:, 0].long()
    block, offset = state.position // size, state.position % size
    with torch.autocast(query.device.type, enabled=False):
        state = _start_block(state, mixing, block, (offset == 0) & (block > 0) & counted.bool())
        plain_key = key if normalizer_key is None else normalizer_key
        key, plain_key, value_row = (x.to(dtype).transpose(1, 2) for x in (key, plain_key, value))
        added = torch.cat([key.transpose(-1, -2) @ value_row, plain_key.transpose(-1, -2)], dim=-1)
        keep = counted.bool()[:, None, None, None]
        current = state.current + torch.where(keep, added, 0)
        own = _weights(mixing, block, block)
        mixed = repeat_heads(state.prefix, num_heads, 1) + own * repeat_heads(current, num_heads, 1)
        output = query.to(dtype).transpose(1, 2) @ mixed[..., :-1]
        if normalizer == "query":
            plain_query = (query if normalizer_query is None else normalizer_query).to(dtype).transpose(1, 2)
            output = output / (plain_query @ mixed[..., -1:] + eps)
        upcoming = state.upcoming + torch.where(keep, _upcoming_share(state, mixing, block, offset), 0)
        output = output.masked_fill(~keep, 0)
    state = dataclasses.replace(state, current=current, upcoming=upcoming, position=state.position + counted)
    return output.transpose(1, 2).to(value.dtype), state


def _has_kernel(state: MHLAState, mixing: torch.Tensor, num_heads: int) -> bool:
    """Whether the kernel knows this state: it takes no float64, and files blocks where there is room for them."""
    per_head = mixing.dim() > 2 and mixing.shape[0] != 1
    heads = num_heads if per_head else state.current.shape[1]
    return state.current.dtype == torch.float32 and state.num_blocks > 0 and state.prefix.shape[1] == heads


def _step_by_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pair: tuple[torch.Tensor | None, torch.Tensor | None],
    mixing: torch.Tensor,
    state: MHLAState,
    valid: torch.Tensor | None,
    divides: bool,
    eps: float,
) -> tuple[torch.Tensor, MHLAState]:
    # Imported here alone: Triton need not be installed.
    from .triton.decode import decode_token

    output, current, prefix, upcoming, position = decode_token(
        query, key, value, *pair, valid, mixing, state.summaries, state.current, state.prefix, state.upcoming,
        state.position, state.block_size, divides, eps,
    )  # fmt: skip
    state = dataclasses.replace(state, current=current, prefix=prefix, upcoming=upcoming, position=position)
    return output, state


def rewind_state(
    state: MHLAState,
    mixing: torch.Tensor,
    key: torch.Tensor,
    normalizer_key: torch.Tensor,
    value: torch.Tensor,
    valid: torch.Tensor,
) -> MHLAState:
    """Takes the last tokens back out of a state.

    Args:
        state: The state after these tokens.
        mixing: As in [`mhla_extend`].
        key: The tokens' feature-mapped keys `[B, T, H_kv, K]`.
        normalizer_key: The same, unrotated.
        value: Their values `[B, T, H_kv, V]`.
        valid: BoolTensor `[B, T]`, False for padding.

    Returns:
        The state before them, up to rounding.
    """
    dtype, size = state.current.dtype, state.block_size
    state = state.with_room(state.num_blocks + 1)
    index = torch.arange(state.num_blocks, device=valid.device)
    here = _current_block(state.position, size)
    summaries = torch.where(
        (index == here[:, None])[:, None, :, None, None], state.current.unsqueeze(2), state.summaries.to(dtype)
    )
    position = state.position - valid.sum(dim=1)
    token_block = (position[:, None] + valid.long().cumsum(dim=1) - 1).clamp(min=0) // size
    member = (token_block[..., None] == index) & valid[..., None]
    columns = torch.cat([value.to(dtype), torch.ones_like(value[..., :1], dtype=dtype)], dim=-1)
    removed = torch.einsum("btn,bthk,bthv->bhnkv", member.to(dtype), key.to(dtype), columns[..., :-1])
    removed_keys = torch.einsum("btn,bthk->bhnk", member.to(dtype), normalizer_key.to(dtype))
    summaries = summaries - torch.cat([removed, removed_keys.unsqueeze(-1)], dim=-1)
    return _settle(state, summaries, position, mixing.to(dtype))


def _check_normalizer(normalizer: str) -> None:
    check_normalizer(normalizer, ("query", "none"), " for decoding token by token")


def _current_block(position: torch.Tensor, block_size: int) -> torch.Tensor:
    """Index of the block that the last token went to, `[B]`."""
    return (position - 1).clamp(min=0) // block_size


def _weights(mixing: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    """One weight for each batch entry: `[B, 1 or H, 1, 1]`."""
    return mixing_at(mixing, row[:, None, None], column[:, None, None])


def _mixed_past(mixing: torch.Tensor, rows: torch.Tensor, state: MHLAState, num_heads: int) -> torch.Tensor | int:
    """Σ_b m_ib S_b over the finished blocks, for blocks `rows` `[B, I]`: `[B, H, I, K, V + 1]`."""
    if state.num_blocks == 0:
        return 0
    weights = mixing_at(mixing, rows[:, :, None], torch.arange(state.num_blocks, device=rows.device)[None, None])
    # Slots after the finished blocks are zero, but a weight there may be anything.
    finished = (
        torch.arange(state.num_blocks, device=rows.device) < _current_block(state.position, state.block_size)[:, None]
    )
    weights = torch.where(finished[:, None, None], weights, 0)
    return mix_summaries(weights, state.summaries.to(state.current.dtype), num_heads)


def _advance(
    state: MHLAState, summaries: torch.Tensor, blocks: torch.Tensor, valid: torch.Tensor, mixing: torch.Tensor
) -> MHLAState:
    """Writes the summaries `[B, H_kv, I, K, V + 1]` of blocks `blocks` `[B, I]` and moves on past the valid tokens."""
    room = state.num_blocks
    kept = state.summaries.to(summaries.dtype)
    # One slot more for blocks that there is no room for: those past the last token, which are empty, and the current
    # one, which is kept apart.
    target = blocks.clamp(max=room)[:, None, :, None, None].expand_as(summaries)
    everything = F.pad(kept, (0, 0, 0, 0, 0, 1)).scatter(2, target, summaries)
    position = state.position + valid.sum(dim=1)
    last = _current_block(position, state.block_size)
    local = (last - blocks[:, 0])[:, None, None, None, None].expand(-1, summaries.shape[1], 1, *summaries.shape[-2:])
    current = summaries.gather(2, local).squeeze(2)
    return _settle(state, everything[:, :, :room], position, mixing, current)


def _settle(
    state: MHLAState,
    summaries: torch.Tensor,
    position: torch.Tensor,
    mixing: torch.Tensor,
    current: torch.Tensor | None = None,
) -> MHLAState:
    """The state at `position`, given the summaries of all blocks; everything derived is computed anew."""
    size, index = state.block_size, torch.arange(summaries.shape[2], device=position.device)
    block = _current_block(position, size)
    if current is None:
        at_block = block[:, None, None, None, None].expand(-1, summaries.shape[1], 1, *summaries.shape[-2:])
        current = summaries.gather(2, at_block).squeeze(2)
    finished = index < block[:, None]
    summaries = torch.where(finished[:, None, :, None, None], summaries, 0)
    # A state before its first token has summed up nothing.
    offset = (position - block * size)[:, None]
    rows = torch.stack([block, block + 1], dim=1)
    weights = mixing_at(mixing, rows[:, :, None], index[None, None, :])
    seen = torch.stack([finished, finished & (index % size < offset)], dim=1)
    weights = torch.where(seen[:, None], weights, 0)
    mixed = mix_summaries(weights, summaries, state.prefix.shape[1])
    return MHLAState(
        summaries.to(state.summaries.dtype), current, mixed[:, :, 0], mixed[:, :, 1], position, state.block_size
    )


def _start_block(state: MHLAState, mixing: torch.Tensor, block: torch.Tensor, starting: torch.Tensor) -> MHLAState:
    """Files the full current block of the batch entries that are `starting` a block `[B]`."""
    if state.num_blocks == 0:
        return state
    before = (block - 1).clamp(min=0)
    start = starting[:, None, None, None]
    # Entries that start no block write back what stands there.
    entries = torch.arange(block.shape[0], device=block.device)
    slot = before.clamp(max=state.num_blocks - 1)
    filed = torch.where(start, state.current.to(state.summaries.dtype), state.summaries[entries, :, slot])
    if torch.is_grad_enabled() and (filed.requires_grad or state.summaries.requires_grad):
        summaries = state.summaries.index_put((entries[:, None], _all_heads(state), slot[:, None]), filed)
    else:
        summaries = state.summaries.index_put_((entries[:, None], _all_heads(state), slot[:, None]), filed)
    heads = state.prefix.shape[1]
    own = _weights(mixing, block, before) * repeat_heads(state.current, heads, 1)
    return dataclasses.replace(
        state,
        summaries=summaries,
        current=torch.where(start, 0, state.current),
        prefix=torch.where(start, state.upcoming + own, state.prefix),
        upcoming=torch.where(start, 0, state.upcoming),
    )


def _all_heads(state: MHLAState) -> torch.Tensor:
    return torch.arange(state.summaries.shape[1], device=state.summaries.device)[None, :]


def _upcoming_share(state: MHLAState, mixing: torch.Tensor, block: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """This token's share of the next block's prefix: finished blocks b with b ≡ offset modulo the block size.

    Every finished block comes up exactly once while a block fills.
    """
    if state.num_blocks == 0:
        return torch.zeros_like(state.upcoming)
    strides = -(-state.num_blocks // state.block_size)
    index = offset[:, None] + state.block_size * torch.arange(strides, device=block.device)
    weights = mixing_at(mixing, (block + 1)[:, None, None], index[:, None, :])
    weights = torch.where((index < block[:, None])[:, None, None], weights, 0)
    entries = torch.arange(block.shape[0], device=block.device)[:, None]
    chosen = state.summaries[entries, :, index.clamp(max=state.num_blocks - 1)].transpose(1, 2)
    return mix_summaries(weights, chosen.to(state.current.dtype), state.prefix.shape[1]).squeeze(2)
