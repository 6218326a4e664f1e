# SPDX-License-Identifier: Apache-2.0
"""Attention over sequences: padded, packed with several documents, or decoded with a cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..layouts.blocks import BlockLayout, check_count
from ..layouts.sequences import SequenceLayout
from ..ops import attend_blocks, extend_mixing
from ..ops.checks import check_mixing, check_options, check_sequence_normalizer, check_tokens, check_valid


class DecodingCache(Protocol):
    """What keeps the decoding state of one layer between calls."""

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mixing: torch.Tensor,
        *,
        block_size: int,
        valid: torch.Tensor | None,
        backend: str,
        **options: Any,
    ) -> torch.Tensor:
        """Attends to the tokens seen so far and to these, and remembers these; arguments as in [`mhla_step`]."""
        ...

    def attend_window(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        window: str,
        window_size: int,
        valid: torch.Tensor | None,
        scale: float | None,
    ) -> torch.Tensor:
        """Attends to the window of each of these tokens, after `attend` did; arguments as in [`extend_window`]."""
        ...


@dataclass(frozen=True)
class TokenSequence:
    """What one call of a layer has to know about its tokens.

    Attributes:
        causal: Token t sees j ≤ t only.
        valid: BoolTensor `[B, T]`, False for padding; `None` for no padding.
        documents: Document of each token, LongTensor `[B, T]`, see [`SequenceLayout`]; `None` for one a row.
        num_documents: An upper bound of their number in a row.
        cache: Where decoding goes on from; `None` to attend to these tokens only.
    """

    causal: bool
    valid: torch.Tensor | None = None
    documents: torch.Tensor | None = None
    num_documents: int = 1
    cache: DecodingCache | None = None


def sequence_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mixing: torch.Tensor,
    block_size: int,
    sequence: TokenSequence,
    *,
    backend: str = "auto",
    **options: Any,
) -> torch.Tensor:
    """MHLA over the tokens of a sequence, in blocks of `block_size` valid tokens.

    Args:
        query: Feature-mapped queries `[B, T, H, K]`.
        key: Feature-mapped keys `[B, T, H_kv, K]`.
        value: Values `[B, T, H_kv, V]`.
        mixing: `[M, M]` or `[H, M, M]`, extended for longer sequences.
        block_size: Tokens of a block.
        sequence: Padding, documents and cache.
        backend: See [`mhla_hf.ops.choose_backend`]; with a cache too.
        **options: `normalizer`, `normalizer_query`, `normalizer_key` and `eps` of [`mhla_hf.ops.mhla_attention`].

    Returns:
        `[B, T, H, V]` in the dtype of `value`; zero for padding.

    Raises:
        ValueError: If there are documents together with a cache, or a cache without causal attention, or an argument
            has a wrong type, shape, dtype, device or value; the message names the argument.
    """
    if sequence.cache is not None:
        if sequence.documents is not None:
            raise ValueError("Packed sequences cannot be decoded with a cache: pass use_cache=False.")
        if not sequence.causal:
            raise ValueError("Only causal attention can be decoded with a cache.")
        return sequence.cache.attend(
            query, key, value, mixing, block_size=block_size, valid=sequence.valid, backend=backend, **options
        )
    check_count("block_size", block_size)
    check_options("query", sequence.causal, options.get("eps", 0.0), backend)
    check_sequence_normalizer(options.get("normalizer", "query"), " for sequences")
    pair = options.get("normalizer_query"), options.get("normalizer_key")
    check_tokens(query, key, value, *pair)
    check_mixing(mixing, query.shape[2], query.device)
    check_valid(sequence.valid, key)
    options.update(causal=sequence.causal, backend=backend)
    if sequence.valid is None and sequence.documents is None:
        dense = BlockLayout(grid=(query.shape[1],), block_size=(block_size,))
        weights = extend_mixing(mixing, dense.num_blocks, causal=sequence.causal)
        return attend_blocks(query, key, value, weights, dense, **options)
    valid = sequence.valid
    if valid is None:
        valid = torch.ones(query.shape[:2], dtype=torch.bool, device=query.device)
    layout = SequenceLayout(valid, block_size, sequence.documents, sequence.num_documents)
    weights = layout.mixing_matrix(mixing, causal=sequence.causal)
    return attend_blocks(query, key, value, weights, layout, **options)
