# SPDX-License-Identifier: Apache-2.0
"""`mhla_extend`: the prompt, or any number of tokens more, in chunks from a state.

Shape letters as in `recurrent.py`. I is the number of blocks that new tokens may reach, the one they begin in first.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..layouts.blocks import BlockLayout
from ..layouts.sequences import SequenceLayout, extend_mixing, mixing_at
from ..layouts.tables import cached, indices
from .backends import choose_backend
from .causal import finite_tokens, spoilt_tokens
from .mixing import mix_summaries, prefix_and_own
from .numerics import Operands, autocast_type, from_head_blocks, head_blocks
from .recurrent import (
    MHLAState,
    block_summary_at,
    check_recurrent,
    current_block,
    serves_kernels,
    settled_state,
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
    check_recurrent(operands, mixing, state, valid, backend)
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
    query, plain_query, key, plain_key, value = (
        head_blocks(F.pad(x, (0, 0, 0, 0, lead, 0)) if lead else x, layout, mixing.dtype)
        for x in (operands.query, operands.plain_query, *clean)
    )
    past_products, past_sums = (None, None) if past is None else (past[..., :-1], past[..., -1:])
    output, products = prefix_and_own(query, key, value, mixing, past_products)
    output = from_head_blocks(output, layout)
    if operands.entry.divides:
        product, sums = prefix_and_own(plain_query, plain_key, None, mixing, past_sums)
        output = output / operands.entry.divisor(from_head_blocks(product, layout), operands.eps)
    else:
        sums = plain_key.sum(dim=-2).unsqueeze(-1)
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
    return settled_state(state, everything, block_summary_at(summaries, local), position, mixing)
