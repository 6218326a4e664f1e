# SPDX-License-Identifier: Apache-2.0
"""Attention over sequences: padded, packed with several documents, or decoded from a state."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..layouts.blocks import BlockLayout
from ..layouts.sequences import SequenceLayout
from ..layouts.tables import cached
from ..ops import MHLAState, empty_state, extend_mixing
from ..ops.dispatch import attend_on
from ..ops.operands import Operands
from ..ops.recurrent import extend, step


if TYPE_CHECKING:
    from .window_state import WindowState


@dataclass(frozen=True)
class LastTokens:
    """The tokens of one call as [`mhla_hf.ops.rewind_state`] needs them to take them back.

    Attributes:
        mixing: The mixing weights.
        key: Feature-mapped keys `[B, T, H_kv, K]`.
        normalizer_key: The same, unrotated.
    """

    mixing: torch.Tensor
    key: torch.Tensor
    normalizer_key: torch.Tensor


@dataclass(frozen=True)
class DecodingState:
    """The state that one layer decodes from, and the one that it returns for the caller to store.

    Attributes:
        blocks: Block summaries; `None` before the first token.
        window: Keys and values of the softmax window; `None` before the first token, or without a window.
        num_blocks: Finished blocks that `blocks` has room for when it is made.
        summary_dtype: Dtype that finished blocks are kept in; `None` for the accumulation dtype.
        rewindable: Tokens that a window can take back.
        last: The tokens of the call that returned this state.
    """

    blocks: MHLAState | None = None
    window: WindowState | None = None
    num_blocks: int = 2
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
        state: State that decoding resumes from, with room for these tokens; `None` to attend to these tokens only.

    Raises:
        ValueError: If there is a state together with documents.
    """

    causal: bool
    valid: torch.Tensor | None = None
    documents: torch.Tensor | None = None
    num_documents: int = 1
    state: DecodingState | None = None

    def __post_init__(self) -> None:
        if self.state is not None and self.documents is not None:
            raise ValueError("Packed sequences cannot be decoded with a cache: pass use_cache=False.")


def attend_sequence(
    operands: Operands, mixing: torch.Tensor, block_size: int, sequence: TokenSequence, backend: str
) -> torch.Tensor:
    """MHLA over the tokens of a sequence, in blocks of `block_size` valid tokens, without checks.

    Args:
        operands: The tokens and the normaliser.
        mixing: `[M, M]` or `[H, M, M]`, extended for longer sequences.
        block_size: Tokens of a block.
        sequence: Padding and documents; its state is not looked at.
        backend: `"torch"` or `"triton"`.

    Returns:
        `[B, T, H, V]` in the dtype of the values; zero for padding.
    """
    weights, layout = sequence_blocks(mixing, operands.query, block_size, sequence)
    return attend_on(backend, operands, weights, layout, causal=sequence.causal)


def sequence_blocks(
    mixing: torch.Tensor, query: torch.Tensor, block_size: int, sequence: TokenSequence
) -> tuple[torch.Tensor, BlockLayout | SequenceLayout]:
    """The blocks of a sequence's tokens, and the mixing weights among them.

    Args:
        mixing: As in [`attend_sequence`], like `block_size`.
        query: `[B, T, ...]`.
        block_size: Tokens of a block.
        sequence: Padding and documents; its state is not looked at.

    Returns:
        `[M, M]`, `[H, M, M]` or `[B, 1 or H, M, M]`, and the layout.
    """
    valid, causal = sequence.valid, sequence.causal
    if valid is None and sequence.documents is None:
        dense = cached(BlockLayout, (query.shape[1],), None, (block_size,))
        return extend_mixing(mixing, dense.num_blocks, causal=causal), dense
    if valid is None:
        valid = torch.ones(query.shape[:2], dtype=torch.bool, device=query.device)
    layout = SequenceLayout(valid, block_size, sequence.documents, sequence.num_documents)
    return layout.mixing_matrix(mixing, causal=causal), layout


def decode_sequence(
    operands: Operands, mixing: torch.Tensor, block_size: int, sequence: TokenSequence, backend: str
) -> tuple[torch.Tensor, DecodingState]:
    """MHLA of a sequence's tokens to those that its state has seen and to themselves, without checks.

    Args:
        operands: The tokens and the normaliser.
        mixing: As in [`attend_sequence`], like `block_size`.
        block_size: Tokens of a block.
        sequence: Padding and the state.
        backend: `"torch"` or `"triton"`.

    Returns:
        `[B, T, H, V]` in the dtype of `value`, zero for padding; and the state after these tokens.
    """
    _, key, value = operands.tokens
    state = sequence.state
    assert state is not None
    blocks = state.blocks
    if blocks is None:
        blocks = empty_state(
            key.shape[0], key.shape[2], key.shape[3], value.shape[3], block_size,
            num_mixing_heads=None if mixing.dim() == 2 else mixing.shape[0], num_blocks=state.num_blocks,
            dtype=operands.dtype, summary_dtype=state.summary_dtype, device=key.device,
        )  # fmt: skip
    attend = step if key.shape[1] == 1 else extend
    output, blocks = attend(operands, mixing, blocks, sequence.valid, backend)
    last = LastTokens(mixing, key, operands.plain_key)
    return output, dataclasses.replace(state, blocks=blocks, last=last)
