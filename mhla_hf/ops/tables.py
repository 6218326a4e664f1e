# SPDX-License-Identifier: Apache-2.0
"""The tables of feature maps φ and normalisers, and the sums over blocks that the forms are made of.

Configuration, command line, layers and kernels take names and definitions from here. A new feature map is an entry of
[`FEATURE_MAPS`], and a branch of `feature_map` and of `feature_map_gradient` in `ops/triton/feature_maps.py` where
the fused kernels shall compute it. A normaliser divides o_t by a function of a product of queries and key sums
z_b = Σ φ(k_j); a new one is an entry of [`NORMALIZERS`]: kernels divide by it where it has a `kernel`, plain torch
elsewhere. Importing this module does not import torch.

Shape letters: B batch, T tokens, H heads, H_kv key/value heads, K query/key width, V value width, M blocks, N tokens
of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol


if TYPE_CHECKING:
    import torch

    from ..layouts.blocks import BlockLayout


BACKENDS = ("auto", "torch", "triton")
OPERATOR_BACKENDS = (*BACKENDS, "naive")
"""Those of [`mhla_hf.ops.mhla_attention`]; `"naive"`, the dense oracle, can be asked for by name only."""


@dataclass(frozen=True, kw_only=True)
class FeatureMap:
    """One feature map.

    Attributes:
        forward: φ of tokens `[B, T, H, K]`. Learned maps take their weight `[H, K, K]` as a second argument.
        gradient: Gradient with respect to x, from the gradient with respect to φ(x) and x; `None` for autograd alone.
            Together with `forward` the definition that the kernels are tested against.
        kernel: The constant by which the fused kernels know the map; `None` where they do not.
        is_learned: Whether it has a weight for each feature head, which starts as the identity.
        width_factor: Features for each of the K channels.
        is_exact: Whether it rounds nothing: every result is an input or zero.
    """

    forward: Callable[..., torch.Tensor]
    gradient: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    kernel: str | None = None
    is_learned: bool = False
    width_factor: int = 1
    is_exact: bool = False


def _elu(tokens: torch.Tensor) -> torch.Tensor:
    from torch.nn.functional import elu

    return elu(tokens) + 1


def _hedgehog(tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    import torch

    projected = torch.einsum("bthk,hfk->bthf", tokens, weight)
    return torch.cat([projected, -projected], dim=-1).softmax(dim=-1)


FEATURE_MAPS: dict[str, FeatureMap] = {
    # φ(x) = max(x, 0)
    "relu": FeatureMap(
        forward=lambda tokens: tokens.relu(),
        gradient=lambda gradient, tokens: gradient.masked_fill(tokens <= 0, 0),
        kernel="relu",
        is_exact=True,
    ),
    # φ(x) = elu(x) + 1
    "elu": FeatureMap(
        forward=_elu,
        gradient=lambda gradient, tokens: gradient * tokens.clamp(max=0).exp(),
        kernel="elu",
    ),
    # φ(x) = exp(x)
    "exp": FeatureMap(
        forward=lambda tokens: tokens.exp(),
        gradient=lambda gradient, tokens: gradient * tokens.exp(),
        kernel="exp",
    ),
    # φ(x) = softmax([Wx, -Wx]) with a learned W a head, twice as many features
    "hedgehog": FeatureMap(forward=_hedgehog, is_learned=True, width_factor=2),
    # φ(x) = x
    "identity": FeatureMap(
        forward=lambda tokens: tokens,
        gradient=lambda gradient, tokens: gradient,
        kernel="identity",
        is_exact=True,
    ),
}
"""All feature maps, by value of the option `feature_map`."""


def repeat_heads(tensor: torch.Tensor, num_heads: int, dim: int) -> torch.Tensor:
    """Gives each query head its key/value head (grouped-query attention).

    Args:
        tensor: Has H_kv heads on axis `dim`.
        num_heads: H, a multiple of H_kv.
        dim: The axis of heads.

    Returns:
        The tensor with H heads on that axis, each of its heads H / H_kv times in a row; itself when H = H_kv.
    """
    repeats = num_heads // tensor.shape[dim]
    return tensor if repeats == 1 else tensor.repeat_interleave(repeats, dim=dim)


class BlockMixing(Protocol):
    """Mixing of blocks that are so many, or have weights of such a kind, that a matrix of all pairs costs more."""

    def mix(self, summary: torch.Tensor, num_heads: int) -> torch.Tensor:
        """Return Σ_b m_ib S_b, `[B, H, M, K, V]` from `[B, H_kv, M, K, V]`."""

    def matrix(self) -> torch.Tensor:
        """Return the weights of all pairs, `[..., M, M]`."""


class StoredMixing(Protocol):
    """What the causal forms take of [`mhla_hf.ops.band.StoredMixing`], whose module imports this one."""

    def mix_earlier(self, summary: torch.Tensor, num_heads: int, first: torch.Tensor | None = None) -> torch.Tensor:
        """Return Σ_{b<i} m_ib S_b for every block i."""

    def own(self, num_blocks: int, first: torch.Tensor | None = None) -> torch.Tensor:
        """Return m_ii of every block."""


def mix_summaries(mixing: torch.Tensor | BlockMixing, summary: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Σ_b m_ib S_b for every row i of `mixing` and every query head.

    Args:
        mixing: `[..., I, M]`; the axes before the last two are none, `[H]`, `[B, 1]` or `[B, H]`. Or a
            [`BlockMixing`].
        summary: `[B, H_kv, M, K, V]`.
        num_heads: H.

    Returns:
        `[B, H, I, K, V]`. A mixing matrix that all heads share is applied before the heads are repeated.
    """
    import torch

    if not isinstance(mixing, torch.Tensor):
        return mixing.mix(summary, num_heads)
    per_head = mixing.dim() > 2 and mixing.shape[-3] != 1
    if per_head:
        summary = repeat_heads(summary, num_heads, 1)
    # Expanded, as matmul would make one matrix of all summaries and copy them for that, and gradients once more.
    mixing = mixing.expand(*summary.shape[:2], *mixing.shape[-2:])
    mixed = (mixing @ summary.flatten(-2)).unflatten(-1, summary.shape[-2:])
    return repeat_heads(mixed, num_heads, 1)


def own_weights(mixing: StoredMixing, num_blocks: int, first: torch.Tensor | None) -> torch.Tensor:
    """m_ii shaped to broadcast over `[B, H, M, N, D]`."""
    return mixing.own(num_blocks, first)[..., None, None]


def prefix_and_own(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mixing: StoredMixing,
    first: torch.Tensor | None,
    past: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """φ(q)ᵀ applied to the mixed earlier blocks plus the causal part of the own block.

    Args:
        query: `[B, H, M, N, K]`.
        key: `[B, H_kv, M, N, K]`.
        value: `[B, H_kv, M, N, V]`.
        mixing: The stored weights.
        first: The first block of each block's document, `[B, M]`; `None` for one document.
        past: Mixed summaries of tokens before these, added to the earlier blocks, `[B, H or H_kv, M, K, V]`.

    Returns:
        `[B, H, M, N, V]`, and the blocks' summaries `[B, H_kv, M, K, V]`.
    """
    import torch

    num_heads, num_blocks = query.shape[1:3]
    summaries = key.transpose(-1, -2) @ value
    prefix = mixing.mix_earlier(summaries, num_heads, first)
    if past is not None:
        prefix = prefix + repeat_heads(past, num_heads, 1)
    key, value = repeat_heads(key, num_heads, 1), repeat_heads(value, num_heads, 1)
    own = (query @ key.transpose(-1, -2)).tril() @ value
    return torch.addcmul(query @ prefix, own_weights(mixing, num_blocks, first), own), summaries


def numerator_and_product(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pair: tuple[torch.Tensor, torch.Tensor] | None,
    mixing: StoredMixing,
    first: torch.Tensor | None,
    past: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[`prefix_and_own`] of the values and of a column of ones, which makes the normaliser's product and z.

    Args:
        query: `[B, H, M, N, K]`.
        key: `[B, H_kv, M, N, K]`.
        value: `[B, H_kv, M, N, V]`.
        pair: Queries and keys of the normaliser where they differ.
        mixing: The stored weights.
        first: The first block of each block's document, `[B, M]`; `None` for one document.
        past: Mixed summaries of tokens before these, `[B, H or H_kv, M, K, V + 1]`.

    Returns:
        `[B, H, M, N, V]` and `[B, H, M, N, 1]`, and the blocks' summaries `[B, H_kv, M, K, V + 1]`.
    """
    import torch

    ones = value.new_ones(*value.shape[:-1], 1)
    if pair is None:
        output, summaries = prefix_and_own(query, key, torch.cat([value, ones], dim=-1), mixing, first, past)
        return *output.split((value.shape[-1], 1), dim=-1), summaries
    past, past_sums = (None, None) if past is None else (past[..., :-1], past[..., -1:])
    output, products = prefix_and_own(query, key, value, mixing, first, past)
    product, sums = prefix_and_own(*pair, ones, mixing, first, past_sums)
    return output, product, torch.cat([products, sums], dim=-1)


@dataclass(frozen=True, kw_only=True)
class Normalizer:
    """One normaliser: o_t / divisor(product_t, eps).

    Attributes:
        dense: Product of queries and keys `[B, T, H, K]` by token weights `[..., T, T]` over a layout, causal or not:
            `[B, H, T]`. `None` for a normaliser that does not divide, as in the two after it.
        block: Product of query blocks `[B, H, M, N, K]` and key sums `[B, H_kv, M, K]` by mixing weights
            `[..., M, M]`: `[B, H, M, N, 1]`.
        chunked: Causal product of query and key blocks `[B, H or H_kv, M, N, K]` by stored mixing weights, with the
            first block of each block's document: `[B, H, M, N, 1]`.
        divisor: From the product and eps.
        gradient: Derivative of the divisor with respect to the product; with `divisor` the definition that the
            kernels are tested against.
        kernel: Division in the kernels: 0 for none, 1 by φ(q)·z̃ + eps; `None` for a divisor that torch computes.
        mixes_sums: Whether the product is φ(q_t)·z̃ with z̃_i = Σ_b m_ib z_b, so that z is one more column of the
            summaries. Decoding needs that; without it blocks must have equal shapes unless attention is causal.
    """

    dense: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, BlockLayout, bool], torch.Tensor] | None = None
    block: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | BlockMixing], torch.Tensor] | None = None
    chunked: Callable[[torch.Tensor, torch.Tensor, StoredMixing, torch.Tensor | None], torch.Tensor] | None = None
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


def _block_mixed_sums(query: torch.Tensor, key_sum: torch.Tensor, mixing: torch.Tensor | BlockMixing) -> torch.Tensor:
    return query @ mix_summaries(mixing, key_sum.unsqueeze(-1), query.shape[1])


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
    return earlier.unsqueeze(-1) + own_weights(mixing, num_blocks, first) * running


NORMALIZERS: dict[str, Normalizer] = {
    # Divides by φ(q_t)·Σ_b m_ib z_b + eps
    "query": Normalizer(dense=_dense_mixed_sums, block=_block_mixed_sums, chunked=_chunked_mixed_sums, kernel=1),
    # Divides by Σ_b m_ib φ(q_bw)·z_b + eps for the token at position w of block i
    "block_query": Normalizer(
        dense=_dense_aligned_queries,
        block=_block_aligned_queries,
        chunked=_chunked_aligned_queries,
        mixes_sums=False,
    ),
    "none": Normalizer(kernel=0),
}
"""All normalisers, by value of the option `normalizer`."""

SEQUENCE_NORMALIZERS = tuple(name for name, entry in NORMALIZERS.items() if entry.mixes_sums)
"""Names of those that serve decoding, and sequences that look both ways."""
