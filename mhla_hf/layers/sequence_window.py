# SPDX-License-Identifier: Apache-2.0
"""The softmax window of sequences, whole or token by token with what decoding remembers.

See [`mhla_hf.layers.window`]: blocks are counted from the start of every document, and one landmark stands for all
tokens outside a window. Sinks, the first tokens of a document, are keys of every window as well, and of no landmark:
language models put up to half of their attention on the first token, whose value is small, and no mean of keys and no
sum of features can hold that much on one token (arXiv 2309.17453). A window that has a document's first block has its
sinks already.

The shape letters are those of [`mhla_hf.layers.window`], and X sinks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ..layouts.blocks import BlockLayout, cached, indices
from ..ops.band import StoredMixing, sequence_mixing
from ..ops.operands import first_blocks, from_head_blocks, head_blocks
from ..ops.sums import mix_summaries, repeat_heads
from .state import TokenSequence, WindowState
from .window import NOTHING, attend_blocks, blocks_seen, landmark_token, of_seen, slots_seen, widened


@dataclass(frozen=True)
class Past:
    """What tokens that go on from others need to know of those, beside what their windows hold.

    Attributes:
        sums: Number and sum of the keys that are in no window, `[B, H_kv, 1 + K]`.
        blocks: Number of blocks before the first token, LongTensor `[B]`.
        sinks: Keys and values of the sinks, `[B, H_kv, X, K]` and `[B, H_kv, X, V]`.
    """

    sums: torch.Tensor
    blocks: torch.Tensor
    sinks: tuple[torch.Tensor, torch.Tensor]


def sequence_window_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: str,
    window_size: int,
    sequence: TokenSequence,
    *,
    scale: float | None = None,
    sink_tokens: int = 0,
    past: Past | None = None,
) -> torch.Tensor:
    """Softmax attention of the tokens of a sequence to those of their windows and to a landmark for all others.

    Arguments that are not listed are those of [`grid_window_attention`]. Blocks are counted from the start of every
    document, without padding. With causal attention a token sees its own block up to itself and, where the window is
    `"adjacent"`, the block before it; the landmark stands for all tokens before those blocks, or for all others of the
    document where attention is not causal.

    Args:
        window: `"block"` or `"adjacent"`.
        window_size: Tokens of a block.
        sequence: Padding and documents; its state is not looked at.
        sink_tokens: Number X of first tokens of a document that all windows have, at most a block.
        past: The tokens before these.

    Returns:
        `[B, T, H, W]` as there; zero for padding.
    """
    length, device = query.shape[1], query.device
    scale = query.shape[3] ** -0.5 if scale is None else scale
    offsets = _offsets_seen(window, sequence.causal)
    layout = sequence.layout(query, window_size)
    first = first_blocks(layout)
    seen = cached(blocks_seen, (layout.num_blocks,), offsets, device)
    if isinstance(layout, BlockLayout):
        mask = cached(slots_seen, layout, offsets, device)
    else:
        mask = of_seen((layout.token_table(device) < length)[:, None], seen)
        if first is not None:
            # Blocks of another document are as good as missing. Those past the last one have no document.
            same = F.pad(first, (0, 1), value=-1)[:, seen] == first[:, :, None]
            mask = mask & same[:, None, ..., None]
    mask = mask.unsqueeze(-3)
    if sequence.causal:
        mask = mask & cached(_up_to_itself, mask.shape[-1], offsets, device)
    # Blocks of short texts may be shorter than the sinks.
    sink_tokens = min(sink_tokens, mask.shape[-1])
    mask = mask.flatten(-2)
    if sink_tokens:
        # Of each block in its document, `[B or 1, M]`.
        index = (indices(layout.num_blocks, device) - (0 if first is None else first)).view(-1, layout.num_blocks)
        index = index if past is None else index + past.blocks[:, None]
        # Blocks beyond the reach of the first one have all sinks before them, others see these as tokens of a block.
        far = (index > -offsets[0])[:, None, :, None, None]
        mask = torch.cat([mask, far.expand(*mask.shape[:-1], sink_tokens)], dim=-1)
    # All see the landmark, blocks without tokens as well, so that nothing divides by zero.
    mask = F.pad(mask, (0, 1), value=True)
    if sequence.causal or sequence.documents is not None:
        # What is masked still spoils a softmax that is not finite. The tokens that see it are spoilt by MHLA.
        key, value = _finite(key, value)
    queries, keys, values = (head_blocks(x, layout) for x in (query, key, value))
    # With a channel that counts the tokens of a block.
    filled = head_blocks(torch.ones_like(key[:, :, :1, :1]), layout).expand(*keys.shape[:4], 1)
    counted = torch.cat([filled, keys], dim=-1)
    if sink_tokens:
        # They take no part in the landmark.
        is_sink = (index == 0)[..., None] & (indices(keys.shape[3], device) < sink_tokens)
        counted = counted.masked_fill(is_sink[:, None, ..., None], 0)
    sums = counted.sum(3, dtype=torch.promote_types(key.dtype, torch.float32))
    # Blocks beyond the window are all those farther away than its last one.
    places = indices(2 - offsets[0], device)
    beyond = StoredMixing(((places[:, None] - places).abs() > -offsets[0]).to(sums.dtype)[None])
    if sequence.causal:
        sums = beyond.mix_earlier(sums, sums.shape[1], first)
    else:
        sums = mix_summaries(sequence_mixing(beyond, layout), sums.unsqueeze(-1), sums.shape[1]).squeeze(-1)
    if past is not None:
        sums = sums + past.sums.unsqueeze(2)
    rest = _one_landmark(queries, sums.unsqueeze(3), scale)
    tokens = widened(queries, keys, values, rest, scale)
    others = [[x.expand(*keys.shape[:3], 1, -1)] for x in landmark_token(tokens[1], scale)]
    if sink_tokens:
        pair = [_of_first_blocks(x[:, :, :, :sink_tokens], first) for x in (keys, values)]
        if past is not None:
            pair = [x.unsqueeze(2) for x in _finite(*past.sinks)]
        sinks = widened(queries[..., :0, :], pair[0], pair[1], rest[..., :0], scale)[1:]
        others = [[x.expand(-1, -1, keys.shape[2], -1, -1), *other] for x, other in zip(sinks, others)]
    keys, values = (torch.cat([of_seen(x, seen).flatten(3, 4), *other], dim=3) for x, other in zip(tokens[1:], others))
    return from_head_blocks(attend_blocks(tokens[0], keys, values, mask, scale), layout)


def _finite(key: torch.Tensor, value: torch.Tensor) -> list[torch.Tensor]:
    """Keys and values `[..., D]` with zeros for tokens of which a number is not finite."""
    bad = ~(key.isfinite().all(-1) & value.isfinite().all(-1))
    return [x.masked_fill(bad.unsqueeze(-1), 0) for x in (key, value)]


def _of_first_blocks(blocks: torch.Tensor, first: torch.Tensor | None) -> torch.Tensor:
    """The first block `[B, H, M or 1, N, D]` of each block's document, from all `[B, H, M, N, D]`."""
    return blocks[:, :, :1] if first is None else blocks.take_along_dim(first[:, None, :, None, None], dim=2)


def _one_landmark(query: torch.Tensor, sums: torch.Tensor, scale: float) -> torch.Tensor:
    """Logarithm of what the mean of the keys outside the window estimates softmax attention to give to them.

    Args:
        query: `[B, H, ..., K]`.
        sums: Number and sum of these keys, `[B, H_kv, ..., 1 + K]`.
        scale: Scale of q·k.

    Returns:
        `[B, H, ...]`.
    """
    sums = repeat_heads(sums, query.shape[1], 1)
    count = sums[..., 0].clamp(min=1)
    logits = (query * sums[..., 1:]).sum(-1) * scale / count
    return torch.where(sums[..., 0] > 0, logits + count.log(), NOTHING)


def empty_window_state(
    key: torch.Tensor, value: torch.Tensor, window: str, window_size: int, rewindable: int, sink_tokens: int = 0
) -> WindowState:
    """Return the state before the first token.

    Args:
        key: Any keys `[B, T, H_kv, K]` of the type and device to come.
        value: Values `[B, T, H_kv, V]` likewise.
        window: `"block"` or `"adjacent"`.
        window_size: Tokens of a block.
        rewindable: Number of tokens that may be taken back.
        sink_tokens: Number X of first tokens that stay.
    """
    size = _reach(window, window_size) + rewindable + sink_tokens
    keys, values = (x.new_zeros(x.shape[0], x.shape[2], size + 1, x.shape[3]) for x in (key, value))
    position = torch.zeros(key.shape[0], dtype=torch.long, device=key.device)
    left = keys.new_zeros(*keys.shape[:2], keys.shape[3], dtype=torch.promote_types(keys.dtype, torch.float32))
    return WindowState(keys, values, position, left, position + sink_tokens, sink_tokens, is_empty=True)


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
    """Attend to the window and the landmark of each of these tokens, those that the state has seen included.

    Arguments that are not listed are those of [`grid_window_attention`][mhla_hf.layers.window.grid_window_attention].

    Args:
        state: The state before these tokens.
        window: `"block"` or `"adjacent"`.
        window_size: Tokens of a block.
        valid: BoolTensor `[B, T]`, False for padding, which is skipped and gets zeros; `None` for no padding.

    Returns:
        What [`grid_window_attention`][mhla_hf.layers.window.grid_window_attention] does, and the state after these
        tokens.
    """
    first = _first_seen(state.position, window, window_size)
    if query.shape[1] == 1:
        scale = query.shape[3] ** -0.5 if scale is None else scale
        after = state.with_tokens(key, value, valid)
        sums = after.before(first)
        visible = after.held(state.position) >= first.clamp(min=state.sink_tokens)
        if state.sink_tokens:
            sinks = indices(state.sink_tokens, query.device) <= state.position[:, None]
            visible = torch.cat([visible, sinks], dim=-1)
        # Query heads that share their keys stand side by side as tokens.
        queries = query[:, 0].unflatten(1, (key.shape[2], -1)) * scale
        keys, values = (ring[:, :, :-1] for ring in (after.keys, after.values))
        logits = (queries @ keys.mT).masked_fill(~visible[:, None, None], float("-inf"))
        rest = _one_landmark(query.transpose(1, 2), sums.unsqueeze(2), scale).unflatten(1, queries.shape[1:3])
        logits = torch.cat([rest, logits], dim=-1)
        rest, own = logits.softmax(dim=-1).to(value.dtype).split([1, keys.shape[2]], dim=-1)
        output = torch.cat([own.sum(-1, keepdim=True), rest, own @ values], dim=-1).flatten(1, 2).unsqueeze(1)
        return (output if valid is None else output.masked_fill(~valid[..., None, None], 0)), after
    before: tuple[torch.Tensor, torch.Tensor] | None = None
    tokens, seen, lead = (query, key, value), valid, 0
    if not state.is_empty:
        # The past that the new tokens see goes before them, from the start of a block on.
        lead = _reach(window, window_size)
        position, sums = first + indices(lead, query.device), state.before(first)
        held = state.tokens_at(position)
        tokens = F.pad(query, (0, 0, 0, 0, lead, 0)), torch.cat([held[0], key], 1), torch.cat([held[1], value], 1)
        known = (position >= 0) & (position < state.position[:, None])
        new = torch.ones(query.shape[:2], dtype=torch.bool, device=query.device) if valid is None else valid
        seen = torch.cat([known, new], dim=1)
        before = sums, first[:, 0].clamp(min=0) // window_size
    # Sinks may be among the new tokens, and what they take the place of has been read.
    after = state.with_tokens(key, value, valid)
    past = None if before is None else Past(*before, after.sinks)
    options: dict[str, Any] = {"scale": scale, "sink_tokens": state.sink_tokens, "past": past}
    output = sequence_window_attention(*tokens, window, window_size, TokenSequence(True, seen), **options)
    return output[:, lead:], after


def _reach(window: str, window_size: int) -> int:
    """The most tokens that a token sees, itself included."""
    return window_size if window == "block" else 2 * window_size


def _first_seen(position: torch.Tensor, window: str, window_size: int) -> torch.Tensor:
    """The first position that the token at `position` sees, `[B, 1]`; below 0 where its block is the first one."""
    before = 0 if window == "block" else 1
    return ((position // window_size - before) * window_size)[:, None]


def _offsets_seen(window: str, causal: bool) -> tuple[int, ...]:
    if window == "block":
        return (0,)
    return (-1, 0) if causal else (-1, 0, 1)


def _up_to_itself(size: int, offsets: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Mask of the tokens that a token of a block may look back to, BoolTensor `[N, S, N]`."""
    earlier = torch.ones(size, size, dtype=torch.bool, device=device).tril()
    own = torch.tensor([offset == 0 for offset in offsets], device=device)
    return earlier[:, None, :] | ~own[:, None]
