# SPDX-License-Identifier: Apache-2.0
"""The block-parallel form of non-causal MHLA: three batched matrix products, linear in the number of tokens.

Shape letters: B batch, T tokens, H feature heads, K query/key width, V value width, M blocks, N tokens of a block.
"""

from __future__ import annotations

import torch

from ..layouts.blocks import BlockLayout
from ..layouts.sequences import SequenceLayout
from .checks import check_form
from .mixing import mix_summaries
from .numerics import Operands, autocast_type, from_head_blocks, head_blocks


def block_mhla_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mixing: torch.Tensor,
    layout: BlockLayout | SequenceLayout,
    *,
    normalizer_query: torch.Tensor | None = None,
    normalizer_key: torch.Tensor | None = None,
    normalizer: str = "query",
    eps: float = 1e-6,
) -> torch.Tensor:
    """MHLA by block summaries; arguments as in [`mhla_hf.ops.mhla_attention`].

    S_b = Σ φ(k) vᵀ and z_b = Σ φ(k) for each block, S̃_i = Σ_b m_ib S_b and z̃_i = Σ_b m_ib z_b, then
    o_t = φ(q_t)ᵀ S̃ / (φ(q_t)ᵀ z̃ + eps) (paper, section 3). Sums over tokens are in float32 at least, which cannot
    overflow for fp16 inputs at any practical length.

    Returns:
        `[B, T, H, V]` in the dtype of `value`.

    Raises:
        ValueError: If an argument has a wrong shape, dtype, device or value; the message names the argument.
    """
    operands = Operands(query, key, value, normalizer_query, normalizer_key, normalizer, eps)
    check_form(operands, mixing, layout)
    return attend_by_block(operands, mixing, layout)


def attend_by_block(operands: Operands, mixing: torch.Tensor, layout: BlockLayout | SequenceLayout) -> torch.Tensor:
    """[`block_mhla_attention`] without its checks."""
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
