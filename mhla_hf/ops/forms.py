# SPDX-License-Identifier: Apache-2.0
"""The operator in plain torch, in three forms: dense (the oracle), block-parallel, and causal in chunks.

The dense form is slow on purpose, O(T²) in time and memory: one plain tensor expression for each formula, in the dtype
of its inputs. All other forms are tested against it. The block-parallel form is three batched matrix products, linear
in the number of tokens. In the chunked form finished chunks contribute whole, a token's own chunk up to the token.

Shape letters: B batch, T tokens, H feature heads, K query/key width, V value width, M blocks, N tokens of a block.
"""

from __future__ import annotations

import torch

from ..layouts.blocks import BlockLayout
from ..layouts.sequences import SequenceLayout
from .operands import (
    Operands,
    autocast_type,
    extend_mixing,
    finite_tokens,
    from_head_blocks,
    head_blocks,
    spoilt_tokens,
)
from .tables import mix_summaries, prefix_and_own, repeat_heads


def attend_naively(operands: Operands, mixing: torch.Tensor, layout: BlockLayout, causal: bool) -> torch.Tensor:
    """MHLA as a dense matrix product, in the dtype of the tokens, which is one.

    o = A v with A_tj = m_{b(t),b(j)} · φ(q_t)·φ(k_j), rows divided by the normaliser; j ≤ t only where causal.

    Args:
        operands: The tokens and the normaliser.
        mixing: `[M, M]` or `[H, M, M]`; where causal, see [`mhla_hf.ops.extend_mixing`] for blocks past the end.
        layout: Blocks of the T tokens.
        causal: Whether to look back only.

    Returns:
        `[B, T, H, V]`.
    """
    query, entry = operands.query, operands.entry
    tokens = operands.key, operands.value, operands.plain_key
    key, value, plain_key = (repeat_heads(tensor, query.shape[2], 2) for tensor in tokens)
    # m_{b(t),b(j)} for every pair of tokens, `[..., T, T]`.
    block = layout.block_of_token.to(query.device)
    if causal:
        mixing = extend_mixing(mixing, layout.num_blocks, causal=True)
    token_mixing = mixing.to(query.dtype)[..., block[:, None], block[None, :]]
    weights = token_mixing * torch.einsum("bthk,bjhk->bhtj", query, key)
    bad = ~value.isfinite().all(dim=-1, keepdim=True)
    if causal:
        weights, value = weights.tril(), value.masked_fill(bad, 0)
    numerator = torch.einsum("bhtj,bjhv->bthv", weights, value)
    if causal:
        # A zero weight does not stop the NaN of a later value.
        numerator = numerator.masked_fill(bad.cumsum(dim=1) > 0, float("nan"))
    if entry.dense is None:
        return numerator
    product = entry.dense(operands.plain_query, plain_key, token_mixing, layout, causal)
    return numerator / entry.divisor(product.transpose(1, 2).unsqueeze(-1), operands.eps)


def attend_by_block(operands: Operands, mixing: torch.Tensor, layout: BlockLayout | SequenceLayout) -> torch.Tensor:
    """MHLA by block summaries.

    S_b = Σ φ(k) vᵀ and z_b = Σ φ(k) for each block, S̃_i = Σ_b m_ib S_b and z̃_i = Σ_b m_ib z_b, then
    o_t = φ(q_t)ᵀ S̃ / (φ(q_t)ᵀ z̃ + eps) (paper, section 3). Sums over tokens are in float32 at least, which cannot
    overflow for fp16 inputs at any practical length.

    Args:
        operands: The tokens and the normaliser.
        mixing: Weights of the layout's own blocks, `[..., M, M]`.
        layout: The blocks.

    Returns:
        `[B, T, H, V]` in the dtype of the values; zero for padding.
    """
    query, key, value = operands.tokens
    plain_query, plain_key, dtype, entry = operands.plain_query, operands.plain_key, operands.dtype, operands.entry
    mixing = mixing.to(dtype)
    # Autocast would silently run the products in half precision, `.to(float32)` or not.
    with torch.autocast(autocast_type(query.device), enabled=False):
        query_blocks, key_blocks, value_blocks = (head_blocks(x, layout, dtype) for x in operands.tokens)
        summary = key_blocks.transpose(-1, -2) @ value_blocks
        output = from_head_blocks(query_blocks @ mix_summaries(mixing, summary, query.shape[2]), layout)
        if entry.block is not None:
            plain_query_blocks = query_blocks if plain_query is query else head_blocks(plain_query, layout, dtype)
            plain_key_blocks = key_blocks if plain_key is key else head_blocks(plain_key, layout, dtype)
            product = entry.block(plain_query_blocks, plain_key_blocks.sum(dim=-2), mixing)
            # Divided token by token: the empty slots of ragged blocks have no denominator.
            output = output / entry.divisor(from_head_blocks(product, layout), operands.eps)
        return output.to(value.dtype)


def attend_by_chunk(operands: Operands, mixing: torch.Tensor, layout: BlockLayout | SequenceLayout) -> torch.Tensor:
    """Causal MHLA in chunks, the blocks of a layout.

    o_t = φ(q_t)ᵀ (Σ_{b<i} m_ib S_b + m_ii Σ_{j≤t, j in i} φ(k_j) v_jᵀ), divided by the same expression with z.
    T need not be a multiple of the chunk. A NaN or Inf in a key or value makes the outputs of its head NaN from
    that token on, and leaves the tokens before it (and other documents) alone. One in a query stays with its token;
    under `"block_query"`, whose sum has the queries of earlier blocks in it, it reaches the tokens at the same
    position of later blocks.

    Args:
        operands: The tokens and the normaliser.
        mixing: Lower-triangular weights of the layout's own blocks, `[..., M, M]`; see
            [`mhla_hf.ops.extend_mixing`].
        layout: A 1-D layout made with `block_size`, or a [`SequenceLayout`].

    Returns:
        `[B, T, H, V]` in the dtype of the values; zero for padding.
    """
    query, dtype, entry = operands.query, operands.dtype, operands.entry
    mixing = mixing.to(dtype)
    with torch.autocast(autocast_type(query.device), enabled=False):
        *clean, bad = finite_tokens(operands)
        key, plain_key, value = (head_blocks(x, layout, dtype) for x in clean)
        output = from_head_blocks(prefix_and_own(head_blocks(query, layout, dtype), key, value, mixing)[0], layout)
        if entry.chunked is not None:
            product = entry.chunked(head_blocks(operands.plain_query, layout, dtype), plain_key, mixing)
            # Without the empty slots, whose denominator may be zero.
            output = output / entry.divisor(from_head_blocks(product, layout), operands.eps)
        output = output.masked_fill(spoilt_tokens(bad, layout, query.shape[2]), float("nan"))
    return output.to(operands.value.dtype)
