# SPDX-License-Identifier: Apache-2.0
"""The table of normalisers: configuration, command line, forms of the operator and kernels take them from here.

A normaliser divides o_t by a function of a product of queries and key sums z_b = Σ φ(k_j). A new one is an entry of
[`NORMALIZERS`]; the kernels divide by it where it has a `kernel`, and plain torch serves elsewhere. Importing this
module does not import torch.

Shape letters: B batch, T tokens, H heads, H_kv key/value heads, K query/key width, M blocks, N tokens of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .mixing import diagonal_weights, mix_summaries, prefix_and_own, repeat_heads


if TYPE_CHECKING:
    import torch

    from ..layouts.blocks import BlockLayout


@dataclass(frozen=True, kw_only=True)
class Normalizer:
    """One normaliser: o_t / divisor(product_t, eps).

    Attributes:
        name: Value of the option `normalizer`.
        formula: The divisor as text.
        dense: Product of queries and keys `[B, T, H, K]` by token weights `[..., T, T]` over a layout, causal or not:
            `[B, H, T]`. `None` for a normaliser that does not divide, as in the two after it.
        block: Product of query blocks `[B, H, M, N, K]` and key sums `[B, H_kv, M, K]` by mixing weights
            `[..., M, M]`: `[B, H, M, N, 1]`.
        chunked: Causal product of query and key blocks `[B, H or H_kv, M, N, K]` by lower-triangular mixing weights:
            `[B, H, M, N, 1]`.
        divisor: From the product and eps.
        gradient: Derivative of the divisor with respect to the product; with `divisor` the definition that the
            kernels are tested against.
        kernel: Division in the kernels: 0 for none, 1 by φ(q)·z̃ + eps; `None` for a divisor that torch computes.
        mixes_sums: Whether the product is φ(q_t)·z̃ with z̃_i = Σ_b m_ib z_b, so that z is one more column of the
            summaries. Sequences and decoding need that; without it blocks must have equal shapes.
    """

    name: str
    formula: str
    dense: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, BlockLayout, bool], torch.Tensor] | None = None
    block: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    chunked: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    divisor: Callable[[Any, float], Any] = lambda product, eps: product + eps
    gradient: Callable[[Any, float], Any] = lambda product, eps: 1.0
    kernel: int | None = None
    mixes_sums: bool = True

    @property
    def divides(self) -> bool:
        """`True` if there is a divisor at all."""
        return self.block is not None


def _dense_mixed_sums(
    query: torch.Tensor, key: torch.Tensor, weights: torch.Tensor, layout: BlockLayout, causal: bool
) -> torch.Tensor:
    scores = weights * (query.transpose(1, 2) @ key.permute(0, 2, 3, 1))
    return (scores.tril() if causal else scores).sum(-1)


def _block_mixed_sums(query: torch.Tensor, key_sum: torch.Tensor, mixing: torch.Tensor) -> torch.Tensor:
    return query @ mix_summaries(mixing, key_sum.unsqueeze(-1), query.shape[1])


def _chunked_mixed_sums(query: torch.Tensor, key: torch.Tensor, mixing: torch.Tensor) -> torch.Tensor:
    return prefix_and_own(query, key, None, mixing)[0]


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


def _block_aligned_queries(query: torch.Tensor, key_sum: torch.Tensor, mixing: torch.Tensor) -> torch.Tensor:
    """Each block's own queries against its own key sum, then mixed over blocks."""
    own = (query @ repeat_heads(key_sum, query.shape[1], 1).unsqueeze(-1)).squeeze(-1)
    return (mixing @ own).unsqueeze(-1)


def _chunked_aligned_queries(query: torch.Tensor, key: torch.Tensor, mixing: torch.Tensor) -> torch.Tensor:
    """Σ_{b<i} m_ib φ(q_bw)·z_b + m_ii φ(q_iw)·Σ_{j≤t, j in i} φ(k_j)."""
    key = repeat_heads(key, query.shape[1], 1)
    whole = (query @ key.sum(dim=-2, keepdim=True).transpose(-1, -2)).squeeze(-1)
    running = (query * key.cumsum(dim=-2)).sum(dim=-1, keepdim=True)
    # A zero weight does not stop the NaN of a later chunk's query. Those of earlier ones are part of the sum.
    bad = ~whole.isfinite()
    earlier = (mixing.tril(-1) @ whole.masked_fill(bad, 0)).masked_fill(bad.cumsum(dim=-2) > bad, float("nan"))
    return earlier.unsqueeze(-1) + diagonal_weights(mixing) * running


_ENTRIES = (
    Normalizer(
        name="query",
        formula="φ(q_t)·Σ_b m_ib z_b + eps",
        dense=_dense_mixed_sums,
        block=_block_mixed_sums,
        chunked=_chunked_mixed_sums,
        kernel=1,
    ),
    Normalizer(
        name="block_query",
        formula="Σ_b m_ib φ(q_bw)·z_b + eps for the token at position w of block i",
        dense=_dense_aligned_queries,
        block=_block_aligned_queries,
        chunked=_chunked_aligned_queries,
        mixes_sums=False,
    ),
    Normalizer(name="none", formula="1", kernel=0),
)

NORMALIZERS: dict[str, Normalizer] = {entry.name: entry for entry in _ENTRIES}
"""All normalisers by name."""

SEQUENCE_NORMALIZERS = tuple(entry.name for entry in _ENTRIES if entry.mixes_sums)
"""Names of those that serve sequences and decoding."""
