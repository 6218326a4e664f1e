# SPDX-License-Identifier: Apache-2.0
"""The chunked form of causal MHLA: finished chunks contribute whole, a token's own chunk up to the token itself.

Shape letters: B batch, T tokens, H feature heads, K query/key width, V value width, M chunks, C tokens of a chunk.
"""

from __future__ import annotations

import torch

from ..layouts.blocks import BlockLayout
from ..layouts.sequences import SequenceLayout, earlier_blocks
from .checks import check_form
from .mixing import prefix_and_own, repeat_heads
from .numerics import Operands, autocast_type, from_head_blocks, head_blocks


def causal_mhla_attention(
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
    """Causal MHLA in chunks, the blocks of `layout`; arguments as in [`mhla_hf.ops.mhla_attention`], but two.

    o_t = φ(q_t)ᵀ (Σ_{b<i} m_ib S_b + m_ii Σ_{j≤t, j in i} φ(k_j) v_jᵀ), divided by the same expression with z.
    T need not be a multiple of the chunk. A NaN or Inf in a key or value makes the outputs of its head NaN from
    that token on, and leaves the tokens before it (and other documents) alone. One in a query stays with its token;
    under `"block_query"`, whose sum has the queries of earlier blocks in it, it reaches the tokens at the same
    position of later blocks.

    Args:
        mixing: Lower-triangular weights of the layout's own blocks, `[..., M, M]`; see
            [`mhla_hf.ops.extend_mixing`].
        layout: A 1-D layout made with `block_size`, or a [`SequenceLayout`].

    Returns:
        `[B, T, H, V]` in the dtype of `value`; zero for padding.

    Raises:
        ValueError: If an argument has a wrong shape, dtype, device or value; the message names the argument.
    """
    operands = Operands(query, key, value, normalizer_query, normalizer_key, normalizer, eps)
    check_form(operands, mixing, layout)
    return attend_by_chunk(operands, mixing, layout)


def attend_by_chunk(operands: Operands, mixing: torch.Tensor, layout: BlockLayout | SequenceLayout) -> torch.Tensor:
    """[`causal_mhla_attention`] without its checks."""
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


def finite_tokens(operands: Operands) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys, keys of the normaliser and values with zeros for bad tokens, and which those are, `[B, T, H_kv]`.

    The products of chunks multiply what a token must not see by zero, which does not stop a NaN.
    """
    tokens = operands.key, operands.plain_key, operands.value
    finite = [x.isfinite().all(-1) for x in tokens]
    bad = ~(finite[0] & finite[1] & finite[2])
    key, plain_key, value = (x.masked_fill(bad.unsqueeze(-1), 0) for x in tokens)
    return key, plain_key, value, bad


def spoilt_tokens(bad: torch.Tensor, layout: BlockLayout | SequenceLayout, num_heads: int) -> torch.Tensor:
    """Tokens at or after a bad one `[B, T, H_kv]` of their document and head: bool `[B, T, H, 1]`."""
    flags = head_blocks(bad.unsqueeze(-1).to(torch.float32), layout).squeeze(-1)
    before = (
        layout.earlier_blocks()
        if isinstance(layout, SequenceLayout)
        else earlier_blocks(layout.num_blocks, bad.device)
    )
    earlier = before.to(flags.dtype) @ flags.sum(dim=-1, keepdim=True)
    counts = (flags.cumsum(dim=-1) + earlier).unsqueeze(-1)
    return repeat_heads(from_head_blocks(counts, layout), num_heads, 2) > 0
