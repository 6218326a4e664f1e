# SPDX-License-Identifier: Apache-2.0
"""Decoding with a causal softmax window: a ring of the last keys and values, constant in size.

A token sees its own block up to itself and, with an `"adjacent"` window, the block before it. The ring keeps as many
tokens more as may be taken back, so that taking back is counting back. Every batch entry has its own position, and no
step reads a value back from the device.

Shape letters: B batch, T tokens, H heads, H_kv key/value heads, K query/key width, V value width, R tokens of
the ring.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..layouts.tables import indices
from ..ops.operands import records_gradients
from .sequence import TokenSequence
from .window import sequence_window_attention


@dataclass(frozen=True)
class WindowState:
    """Last keys and values of a causal window. [`extend_window`] may write into it: go on with what it returns.

    Attributes:
        keys: `[B, H_kv, R + 1, K]`; the token at position p is in column p mod R. The last column is never read.
        values: The same of width V.
        position: Tokens seen so far, without padding, LongTensor `[B]`.
        is_empty: Whether no entry has seen a token, where this is known without asking the device.
    """

    keys: torch.Tensor
    values: torch.Tensor
    position: torch.Tensor
    is_empty: bool = False

    @property
    def size(self) -> int:
        """Tokens that the ring holds, R."""
        return self.keys.shape[2] - 1

    def rewound(self, valid: torch.Tensor, kept: torch.Tensor | None = None) -> WindowState:
        """The state before the last tokens, or with those that are kept alone.

        Args:
            valid: BoolTensor `[B, T]`, False for padding among them.
            kept: BoolTensor `[B, T]`, which of the valid ones stay; `None` for none of them.
        """
        before = dataclasses.replace(self, position=self.position - valid.sum(dim=1))
        if kept is None:
            return before
        position = before.position[:, None] + valid.long().cumsum(dim=1) - 1
        return _with_tokens(before, *self.tokens_at(position), kept & valid)

    def tokens_at(self, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys `[B, T, H_kv, K]` and values of the tokens at `position` `[B, T]`, as far as the ring holds them."""
        column = (position % self.size)[:, None, :, None]
        keys, values = (
            ring.gather(2, column.expand(-1, ring.shape[1], -1, ring.shape[3])).transpose(1, 2)
            for ring in (self.keys, self.values)
        )
        return keys, values


def empty_window_state(
    key: torch.Tensor, value: torch.Tensor, window: str, window_size: int, rewindable: int
) -> WindowState:
    """The state before the first token.

    Args:
        key: Any keys `[B, T, H_kv, K]` of the type and device to come.
        value: Values `[B, T, H_kv, V]` likewise.
        window: `"block"` or `"adjacent"`.
        window_size: Tokens of a block.
        rewindable: Number of tokens that may be taken back.
    """
    size = _reach(window, window_size) + rewindable
    keys, values = (x.new_zeros(x.shape[0], x.shape[2], size + 1, x.shape[3]) for x in (key, value))
    position = torch.zeros(key.shape[0], dtype=torch.long, device=key.device)
    return WindowState(keys, values, position, is_empty=True)


def extend_window(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    state: WindowState,
    window: str,
    window_size: int,
    *,
    valid: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, WindowState]:
    """Attends to the window of each of these tokens, those that the state has seen included.

    Arguments that are not listed are those of [`grid_window_attention`][mhla_hf.layers.window.grid_window_attention].

    Args:
        state: The state before these tokens.
        window: `"block"` or `"adjacent"`.
        window_size: Tokens of a block.
        valid: BoolTensor `[B, T]`, False for padding, which is skipped and gets zeros; `None` for no padding.

    Returns:
        The output `[B, T, H, V]`, and the state after these tokens.
    """
    if query.shape[1] == 1:
        state, before = _with_tokens(state, key, value, valid), state.position
        return _attend_one(query, state, before, window, window_size, valid, scale), state
    tokens, seen, lead = (query, key, value), valid, 0
    if not state.is_empty:
        # The past that the new tokens see goes before them, from the start of a block on.
        lead = _reach(window, window_size)
        position = _first_seen(state.position, window, window_size) + indices(lead, query.device)
        past = state.tokens_at(position)
        tokens = F.pad(query, (0, 0, 0, 0, lead, 0)), torch.cat([past[0], key], 1), torch.cat([past[1], value], 1)
        known = (position >= 0) & (position < state.position[:, None])
        new = torch.ones(query.shape[:2], dtype=torch.bool, device=query.device) if valid is None else valid
        seen = torch.cat([known, new], dim=1)
    output = sequence_window_attention(*tokens, window, window_size, TokenSequence(True, seen), scale=scale)
    return output[:, lead:], _with_tokens(state, key, value, valid)


def _attend_one(
    query: torch.Tensor,
    state: WindowState,
    position: torch.Tensor,
    window: str,
    window_size: int,
    valid: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:
    """Attention of one token at `position` `[B]` to the ring, which has it already: `[B, 1, H, V]`."""
    column, last = indices(state.size, query.device), position[:, None]
    # What each column holds is the latest position that belongs there.
    held = last - (last - column) % state.size
    visible = held >= _first_seen(position, window, window_size).clamp(min=0)
    # Query heads that share their keys stand side by side as tokens.
    queries = query[:, 0].unflatten(1, (state.keys.shape[1], -1))
    keys, values = (ring.narrow(2, 0, state.size) for ring in (state.keys, state.values))
    output = F.scaled_dot_product_attention(queries, keys, values, attn_mask=visible[:, None, None], scale=scale)
    output = output.flatten(1, 2).unsqueeze(1)
    return output if valid is None else output.masked_fill(~valid[..., None, None], 0)


def _with_tokens(
    state: WindowState, key: torch.Tensor, value: torch.Tensor, valid: torch.Tensor | None
) -> WindowState:
    """The state after these tokens: the last ones of each entry in their columns."""
    length, size = key.shape[1], state.size
    count = torch.arange(1, length + 1, device=key.device)[None] if valid is None else valid.cumsum(dim=1)
    position = state.position[:, None] + count - 1
    after = state.position + count[:, -1]
    kept = position >= after[:, None] - size
    column = torch.where(kept if valid is None else kept & valid, position % size, size)[:, None, :, None]
    rings = []
    for ring, new in ((state.keys, key), (state.values, value)):
        index = column.expand(-1, ring.shape[1], -1, ring.shape[3])
        # Gradients of earlier calls still need what they saw.
        write = ring.scatter if records_gradients(ring, new) else ring.scatter_
        rings.append(write(2, index, new.transpose(1, 2).to(ring.dtype)))
    return WindowState(rings[0], rings[1], after)


def _reach(window: str, window_size: int) -> int:
    """The most tokens that a token sees, itself included."""
    return window_size if window == "block" else 2 * window_size


def _first_seen(position: torch.Tensor, window: str, window_size: int) -> torch.Tensor:
    """The first position that the token at `position` sees, `[B, 1]`; below 0 where its block is the first one."""
    before = 0 if window == "block" else 1
    return ((position // window_size - before) * window_size)[:, None]
