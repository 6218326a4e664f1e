# SPDX-License-Identifier: Apache-2.0
"""Block-parallel MHLA by Triton kernels: summaries, mixing, attention, without permuting tokens into blocks."""

from __future__ import annotations

import torch

from ...layouts.blocks import BlockLayout
from ...layouts.sequences import SequenceLayout
from ..numerics import check_normalizer, normalizer_pair, records_gradients, repeat_heads
from .block_operators import block_attend, block_summary
from .launching import multiplies_exactly
from .mixing import mix_summaries_and_sums


def triton_block_mhla_attention(
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
    """Non-causal MHLA by Triton kernels; arguments as in [`mhla_hf.ops.block_mhla_attention`].

    Summaries are float32, but bfloat16 for bfloat16 tokens where no gradient is recorded; sums always run in float32.

    Returns:
        `[B, T, H, V]` in the dtype of `value`; zero for padding.

    Raises:
        ValueError: If `normalizer` is unknown.
    """
    check_normalizer(normalizer)
    num_heads, dtype = query.shape[2], value.dtype
    normalizer_query, normalizer_key = normalizer_pair(query, key, normalizer_query, normalizer_key)
    half = not records_gradients(query, key, value, mixing, normalizer_query, normalizer_key)
    with torch.autocast(query.device.type, enabled=False):
        query, key = query.to(dtype), key.to(dtype)
        table = layout.token_table(query.device)
        # Summaries are means over the slots: their size does not grow with the blocks'.
        slots = float(table.shape[-1])
        divides = normalizer != "none"
        plain_key = normalizer_key if divides else None
        summary, key_sum = block_summary(key, value, plain_key, table, 1 / slots, divides, half)
        to_mix = key_sum if normalizer == "query" else None
        exact = multiplies_exactly(dtype)
        summary, mixed_sum = mix_summaries_and_sums(mixing, summary, to_mix, num_heads, exact=exact)
        divisor = None
        if normalizer == "block_query":
            plain_query = query if normalizer_query is None else normalizer_query
            divisor = _block_query_divisor(plain_query, key_sum, mixing, layout)
        apart = normalizer_query if normalizer == "query" else None
        output, _ = block_attend(query, summary, mixed_sum, apart, divisor, table, slots, eps)
        return output


def _block_query_divisor(
    query: torch.Tensor, key_sum: torch.Tensor, mixing: torch.Tensor, layout: BlockLayout | SequenceLayout
) -> torch.Tensor:
    """Σ_b m_ib φ(q_bw)·z_b for the token at position w of block i, float32 `[B, T, H]`."""
    num_heads = query.shape[2]
    key_sum = repeat_heads(key_sum, num_heads, 1).movedim(1, 3)
    own = torch.einsum("bmnhk,bmkh->bhmn", layout.to_blocks(query).float(), key_sum)
    return layout.from_blocks((mixing.float() @ own).permute(0, 2, 3, 1))
