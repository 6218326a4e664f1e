# SPDX-License-Identifier: Apache-2.0
"""The products of queries and key sums that normalisers divide by, in the dense, block-parallel and chunked forms.

Shape letters: B batch, T tokens, H heads, H_kv key/value heads, K query/key width, M blocks, N tokens of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..layouts.blocks import BlockLayout
from .band import StoredMixing, prefix_and_own
from .sums import BlockMixing, mix_summaries, repeat_heads


class Products(NamedTuple):
    """The product of one normaliser in each form.

    Attributes:
        dense: Takes queries and keys `[B, T, H, K]` and token weights `[..., T, T]` over a layout, causal or not:
            `[B, H, T]`.
        block: Takes query blocks `[B, H, M, N, K]`, key sums `[B, H_kv, M, K]` and mixing weights `[..., M, M]`:
            `[B, H, M, N, 1]`.
        chunked: Causal, of query and key blocks `[B, H or H_kv, M, N, K]` with stored mixing weights and the first
            block of each block's document: `[B, H, M, N, 1]`.
    """

    dense: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, BlockLayout, bool], torch.Tensor]
    block: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | BlockMixing], torch.Tensor]
    chunked: Callable[[torch.Tensor, torch.Tensor, StoredMixing, torch.Tensor | None], torch.Tensor]


def _dense_mixed_sums(
    query: torch.Tensor, key: torch.Tensor, weights: torch.Tensor, layout: BlockLayout, causal: bool
) -> torch.Tensor:
    scores = weights * (query.transpose(1, 2) @ key.permute(0, 2, 3, 1))
    return (scores.tril() if causal else scores).sum(-1)


def _block_mixed_sums(query: torch.Tensor, key_sum: torch.Tensor, mixing: torch.Tensor | BlockMixing) -> torch.Tensor:
    mixed = mix_summaries(mixing, key_sum.unsqueeze(-1), query.shape[1])
    # Quicker on a CPU than a product with one column.
    return (query * mixed.transpose(-1, -2)).sum(-1, keepdim=True)


def _chunked_mixed_sums(
    query: torch.Tensor, key: torch.Tensor, mixing: StoredMixing, first: torch.Tensor | None
) -> torch.Tensor:
    return prefix_and_own(query, key, key.new_ones(*key.shape[:-1], 1), mixing, first)[0]


def _dense_aligned_queries(
    query: torch.Tensor, key: torch.Tensor, weights: torch.Tensor, layout: BlockLayout, causal: bool
) -> torch.Tensor:
    """Σ_b m_ib φ(q_bw)·z_b over tokens: token t pairs key j of block b with the query of block b at t's position."""
    block, position = layout.block_of_token.to(query.device), layout.position_in_block.to(query.device)
    token_at = block.new_zeros(layout.num_blocks, layout.max_block_tokens)
    token_at[block, position] = block.new_ones(len(block)).cumsum(0) - 1
    # partner[t, j] is the token of j's block that stands at t's position.
    partner = token_at[block[None, :], position[:, None]]
    scores = query.transpose(1, 2) @ key.permute(0, 2, 3, 1)
    scores = weights * scores.gather(2, partner.expand(*scores.shape[:2], -1, -1))
    return (scores.tril() if causal else scores).sum(-1)


def _block_aligned_queries(
    query: torch.Tensor, key_sum: torch.Tensor, mixing: torch.Tensor | BlockMixing
) -> torch.Tensor:
    """Each block's own queries against its own key sum, then mixed over blocks."""
    return mix_summaries(mixing, query @ repeat_heads(key_sum, query.shape[1], 1).unsqueeze(-1), query.shape[1])


def _chunked_aligned_queries(
    query: torch.Tensor, key: torch.Tensor, mixing: StoredMixing, first: torch.Tensor | None
) -> torch.Tensor:
    """Σ_{b<i} m_ib φ(q_bw)·z_b + m_ii φ(q_iw)·Σ_{j≤t, j in i} φ(k_j)."""
    num_heads, num_blocks = query.shape[1:3]
    key = repeat_heads(key, num_heads, 1)
    whole = (query @ key.sum(dim=-2, keepdim=True).transpose(-1, -2)).squeeze(-1)
    running = (query * key.cumsum(dim=-2)).sum(dim=-1, keepdim=True)
    # A zero weight does not stop the NaN of a later block's query. Those of earlier ones are part of the sum.
    bad = ~whole.isfinite()
    earlier = mixing.mix_earlier(whole.masked_fill(bad, 0), num_heads, first)
    counts = bad.int().cumsum(dim=-2) - bad.int()
    if first is not None:
        counts = counts - counts.gather(-2, first[:, None, :, None].expand_as(counts))
    earlier = earlier.masked_fill(counts > 0, float("nan"))
    return earlier.unsqueeze(-1) + mixing.own(num_blocks, first)[..., None, None] * running


PRODUCTS: dict[str, Products] = {
    "query": Products(_dense_mixed_sums, _block_mixed_sums, _chunked_mixed_sums),
    "block_query": Products(_dense_aligned_queries, _block_aligned_queries, _chunked_aligned_queries),
}
"""By name of the normaliser; `"none"` has no product."""
