# SPDX-License-Identifier: Apache-2.0
"""What a layer is told of a sequence, and what it remembers between calls.

Decoding with a causal softmax window keeps a ring of the last keys and values, constant in size: a token sees its own
block up to itself and, with an `"adjacent"` window, the block before it. The ring keeps as many tokens more as may be
taken back, so that taking back is counting back. Keys that leave the ring are added up for the landmark that stands
for all tokens before a window: no later call can take them back. The first tokens of a text may be sinks, which every
window has: they have columns of their own, and are never in the ring or in the sum. Every batch entry has its own
position, and no step reads a value back from the device.

Shape letters: B batch, T tokens, H heads, H_kv key/value heads, K query/key width, V value width, R tokens of
the ring, X sinks.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..layouts.blocks import BlockLayout, cached, indices, is_open
from ..layouts.sequences import SequenceLayout
from ..ops.band import StoredMixing
from ..ops.operands import MHLAState, Operands, records_gradients
from ..ops.recurrent import empty_state, extend, step


@dataclass(frozen=True)
class WindowState:
    """Last keys and values of a causal window. `extend_window` may write into it: go on with what it returns.

    Attributes:
        keys: `[B, H_kv, R + X + 1, K]`; the token at position p is in column p mod R, or R + p where it is a sink. The
            last column is never read.
        values: The same of width V.
        position: Tokens seen so far, without padding, LongTensor `[B]`.
        left: Sum of the keys that have left the ring, `[B, H_kv, K]` in fp32.
        num_left: Number of these tokens and of sinks, LongTensor `[B]`.
        sink_tokens: X.
        is_empty: Whether no entry has seen a token, where this is known without asking the device.
    """

    keys: torch.Tensor
    values: torch.Tensor
    position: torch.Tensor
    left: torch.Tensor
    num_left: torch.Tensor
    sink_tokens: int = 0
    is_empty: bool = False

    @property
    def size(self) -> int:
        """Tokens that the ring holds, R."""
        return self.keys.shape[2] - 1 - self.sink_tokens

    @property
    def sinks(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the sinks, `[B, H_kv, X, K]` and `[B, H_kv, X, V]`."""
        return self.keys[:, :, self.size : -1], self.values[:, :, self.size : -1]

    def _column(self, position: torch.Tensor) -> torch.Tensor:
        """The column of a position."""
        column = position % self.size
        return torch.where(position < self.sink_tokens, self.size + position, column) if self.sink_tokens else column

    def rewound(self, valid: torch.Tensor, kept: torch.Tensor | None = None) -> WindowState:
        """Return the state before the last tokens, or with those that are kept alone.

        Args:
            valid: BoolTensor `[B, T]`, False for padding among them.
            kept: BoolTensor `[B, T]`, which of the valid ones stay; `None` for none of them.
        """
        before = dataclasses.replace(self, position=self.position - valid.sum(dim=1))
        if kept is None:
            return before
        position = before.position[:, None] + valid.long().cumsum(dim=1) - 1
        return before.with_tokens(*self.tokens_at(position), kept & valid)

    def held(self, last: torch.Tensor) -> torch.Tensor:
        """Position that each column of the ring is for, LongTensor `[B, R]`: the latest up to `last` `[B]`."""
        last = last[:, None]
        return last - (last - indices(self.size, last.device)) % self.size

    def before(self, position: torch.Tensor) -> torch.Tensor:
        """Return number and sum of the keys before `position` `[B, 1]` but sinks, `[B, H_kv, 1 + K]` in fp32."""
        held = self.held(self.position - 1)
        total = self.left + self._sum(self.keys, (held >= self.num_left[:, None]) & (held < position))
        count = (position - self.sink_tokens).clamp(min=0)[:, None].expand(-1, total.shape[1], -1)
        return torch.cat([count.to(total.dtype), total], dim=-1)

    def _sum(self, keys: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Sum `[B, H_kv, K]` of some of the first T of keys `[B, H_kv, *, K]`, chosen by `[B, T]`."""
        return (
            keys[:, :, : chosen.shape[1]].masked_fill(~chosen[:, None, :, None], 0).sum(dim=2, dtype=self.left.dtype)
        )

    def tokens_at(self, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys `[B, T, H_kv, K]` and values at `position` `[B, T]`, as far as the ring holds them."""
        column = self._column(position)[:, None, :, None]
        keys, values = (
            ring.gather(2, column.expand(-1, ring.shape[1], -1, ring.shape[3])).transpose(1, 2)
            for ring in (self.keys, self.values)
        )
        return keys, values

    def with_tokens(self, key: torch.Tensor, value: torch.Tensor, valid: torch.Tensor | None) -> WindowState:
        """Return the state after these tokens: the last ones of each entry in their columns."""
        length, size, sinks = key.shape[1], self.size, self.sink_tokens
        count = torch.arange(1, length + 1, device=key.device)[None] if valid is None else valid.cumsum(dim=1)
        position = self.position[:, None] + count - 1
        after = self.position + count[:, -1]
        kept = (position >= after[:, None] - size) | (position < sinks)
        column = torch.where(kept if valid is None else kept & valid, self._column(position), size + sinks)
        column = column[:, None, :, None]
        # Tokens of a long text leave the ring without having been in it.
        num_left = torch.maximum(self.num_left, after - size)
        held, bound = self.held(self.position - 1), num_left[:, None]
        leaving = (held >= self.num_left[:, None]) & (held < bound)
        passing = (position >= sinks) & (position < bound)
        passing = passing if valid is None else passing & valid
        left = self.left + self._sum(self.keys, leaving) + self._sum(key.transpose(1, 2), passing)
        rings = []
        for ring, new in ((self.keys, key), (self.values, value)):
            index = column.expand(-1, ring.shape[1], -1, ring.shape[3])
            # Gradients of earlier calls still need what they saw.
            write = ring.scatter if records_gradients(ring, new) else ring.scatter_
            rings.append(write(2, index, new.transpose(1, 2).to(ring.dtype)))
        return WindowState(rings[0], rings[1], after, left, num_left, sinks)


@dataclass(frozen=True)
class LastTokens:
    """The tokens of one call as [`mhla_hf.ops.rewind_state`] needs them to take them back.

    Attributes:
        mixing: The stored mixing weights, without their history.
        key: Feature-mapped keys `[B, T, H_kv, K]`.
        normalizer_key: The same, unrotated.
    """

    mixing: StoredMixing
    key: torch.Tensor
    normalizer_key: torch.Tensor


@dataclass(frozen=True)
class DecodingState:
    """The state that one layer decodes from, and the one that it returns for the caller to store.

    Attributes:
        blocks: Block summaries; `None` before the first token.
        window: Keys and values of the softmax window; `None` before the first token, or without a window.
        max_tokens: Tokens that `blocks` will see at most; `None` for any number.
        summary_dtype: Dtype that finished blocks are kept in; `None` for the accumulation dtype.
        rewindable: Tokens that can be taken back.
        last: The tokens of the call that returned this state.
    """

    blocks: MHLAState | None = None
    window: WindowState | None = None
    max_tokens: int | None = None
    summary_dtype: torch.dtype | None = None
    rewindable: int = 0
    last: LastTokens | None = None


@dataclass(frozen=True)
class TokenSequence:
    """The tokens of one call of a layer.

    Attributes:
        causal: Token t sees j ≤ t only.
        valid: BoolTensor `[B, T]`, False for padding; `None` for no padding.
        documents: Document of each token, LongTensor `[B, T]`, see [`SequenceLayout`]; `None` for one a row.
        num_documents: An upper bound of their number in a row.
        state: State that decoding resumes from; `None` to attend to these tokens only.
            Not together with documents.
    """

    causal: bool
    valid: torch.Tensor | None = None
    documents: torch.Tensor | None = None
    num_documents: int = 1
    state: DecodingState | None = None

    @property
    def is_plain(self) -> bool:
        """Whether these are the tokens of one document a row, without padding or a state."""
        return self.valid is None and self.documents is None and self.state is None

    def positions(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return how many valid tokens of its document stand before each token of `[B, T, ...]`, `[B or 1, T]`.

        Those that a state has seen count.
        """
        position = indices(tokens.shape[1], tokens.device)[None]
        if self.valid is not None:
            position = self.valid.long().cumsum(dim=1) - self.valid.long()
        if self.documents is not None:
            starts = F.pad(self.documents.diff(dim=1) != 0, (1, 0), value=True)
            position = position - torch.where(starts, position, 0).cummax(dim=1).values
        if self.state is not None and self.state.blocks is not None:
            position = position + self.state.blocks.position[:, None]
        return position

    def layout(self, tokens: torch.Tensor, block_size: int) -> BlockLayout | SequenceLayout:
        """Return the blocks of these tokens `[B, T, ...]`; the state is not looked at."""
        valid = self.valid
        if valid is None and self.documents is None and not is_open(tokens.shape[1]):
            return cached(BlockLayout, (tokens.shape[1],), None, (block_size,))
        if valid is None:
            valid = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
        return SequenceLayout(valid, block_size, self.documents, self.num_documents)


def decode(
    operands: Operands, mixing: StoredMixing, block_size: int, sequence: TokenSequence, backend: str
) -> tuple[torch.Tensor, DecodingState]:
    """MHLA of a sequence's tokens to those that its state has seen and to themselves, without checks.

    Args:
        operands: The tokens and the normaliser.
        mixing: The stored weights, in the dtype of the sums.
        block_size: Tokens of a block.
        sequence: Padding and the state.
        backend: `"torch"` or, for one token, `"triton"`.

    Returns:
        `[B, T, H, V]`, zero for padding; and the state after these tokens.
    """
    (query, key, value), state = operands.tokens, sequence.state
    assert state is not None
    blocks = state.blocks
    if blocks is None:
        blocks = empty_state(
            key.shape[0], key.shape[2], key.shape[3], value.shape[3], block_size, mixing.num_blocks,
            num_mixing_heads=query.shape[2] if mixing.is_per_head else None, rewindable=state.rewindable,
            max_tokens=state.max_tokens, dtype=operands.dtype, summary_dtype=state.summary_dtype, device=key.device,
        )  # fmt: skip
    if key.shape[1] == 1:
        output, blocks = step(operands, mixing, blocks, sequence.valid, backend)
    else:
        output, blocks = extend(operands, mixing, blocks, sequence.valid)
    last = LastTokens(mixing.detach(), key, operands.normalizer_key)
    return output, dataclasses.replace(state, blocks=blocks, last=last)


def without_sinks(
    key: torch.Tensor, normalizer_key: torch.Tensor, sequence: TokenSequence | None, sink_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Feature-mapped keys `[B, T, H_kv, K]` with zeros for sinks, which are in every window and so not in MHLA.

    Args:
        key: Keys of the numerator.
        normalizer_key: Keys of the normaliser, or the same tensor.
        sequence: Where documents begin; `None` for tokens of a grid, of whom the first ones are the sinks.
        sink_tokens: Number of sinks of a document.
    """
    position = indices(key.shape[1], key.device)[None] if sequence is None else sequence.positions(key)
    # Not filled in, so that a sink that is no number spoils what attends to it.
    kept = (position >= sink_tokens).to(key.dtype)[..., None, None]
    masked = key * kept
    return masked, masked if normalizer_key is key else normalizer_key * kept
