# SPDX-License-Identifier: Apache-2.0
"""The dense definition of MHLA: every T × T weight is written out. The oracle that all other forms are tested against.

Slow on purpose: O(T²) time and memory, one plain tensor expression per formula, in the dtype of its inputs.
Shape letters: B batch, T tokens, H feature heads, K query/key width, V value width, M blocks.
"""

from __future__ import annotations

import torch

from ..layouts.blocks import BlockLayout
from ..layouts.sequences import extend_mixing
from .checks import check_attention, check_same_dtype
from .mixing import repeat_heads
from .numerics import Operands


def naive_mhla_weights(
    query: torch.Tensor,
    key: torch.Tensor,
    mixing: torch.Tensor,
    layout: BlockLayout,
    *,
    causal: bool = False,
) -> torch.Tensor:
    """Unnormalised attention weights A_tj = m_{b(t),b(j)} · φ(q_t)·φ(k_j).

    Args:
        query: Feature-mapped queries `[B, T, H, K]`.
        key: Feature-mapped keys `[B, T, H, K]`.
        mixing: `[M, M]` or `[H, M, M]`; row i holds the weights that block i gives to the blocks.
        layout: Blocks of the T tokens.
        causal: Keep only j ≤ t.

    Returns:
        `[B, H, T, T]` in the dtype of `query`.
    """
    operands = Operands(query, key, key)
    check_attention(operands, mixing, layout, causal)
    check_same_dtype(operands)
    return _weights(query, key, _token_mixing(query, mixing, layout, causal), causal)


def naive_mhla_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mixing: torch.Tensor,
    layout: BlockLayout,
    *,
    normalizer_query: torch.Tensor | None = None,
    normalizer_key: torch.Tensor | None = None,
    normalizer: str = "query",
    causal: bool = False,
    eps: float = 1e-6,
) -> torch.Tensor:
    """MHLA as a dense matrix product; arguments as in [`mhla_hf.ops.mhla_attention`].

    Returns:
        `[B, T, H, V]` in the dtype of the inputs.
    """
    operands = Operands(query, key, value, normalizer_query, normalizer_key, normalizer, eps)
    check_attention(operands, mixing, layout, causal)
    return attend_naively(operands, mixing, layout, causal)


def attend_naively(operands: Operands, mixing: torch.Tensor, layout: BlockLayout, causal: bool) -> torch.Tensor:
    """[`naive_mhla_attention`] with the check of dtypes alone."""
    check_same_dtype(operands)
    query, entry = operands.query, operands.entry
    tokens = operands.key, operands.value, operands.plain_key
    key, value, plain_key = (repeat_heads(tensor, query.shape[2], 2) for tensor in tokens)
    token_mixing = _token_mixing(query, mixing, layout, causal)
    weights = _weights(query, key, token_mixing, causal)
    bad = ~value.isfinite().all(dim=-1, keepdim=True)
    numerator = torch.einsum("bhtj,bjhv->bthv", weights, value.masked_fill(bad, 0) if causal else value)
    if causal:
        # A zero weight does not stop the NaN of a later value.
        numerator = numerator.masked_fill(bad.cumsum(dim=1) > 0, float("nan"))
    if entry.dense is None:
        return numerator
    product = entry.dense(operands.plain_query, plain_key, token_mixing, layout, causal)
    return numerator / entry.divisor(product.transpose(1, 2).unsqueeze(-1), operands.eps)


def _weights(query: torch.Tensor, key: torch.Tensor, token_mixing: torch.Tensor, causal: bool) -> torch.Tensor:
    weights = token_mixing * torch.einsum("bthk,bjhk->bhtj", query, key)
    return weights.tril() if causal else weights


def _token_mixing(query: torch.Tensor, mixing: torch.Tensor, layout: BlockLayout, causal: bool) -> torch.Tensor:
    """m_{b(t),b(j)} for every pair of tokens, `[..., T, T]` in the dtype of `query`."""
    block = layout.block_of_token.to(query.device)
    if causal:
        mixing = extend_mixing(mixing, layout.num_blocks, causal=True)
    return mixing.to(query.dtype)[..., block[:, None], block[None, :]]
