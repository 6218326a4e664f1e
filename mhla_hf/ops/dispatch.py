# SPDX-License-Identifier: Apache-2.0
"""`mhla_attention`: checks its arguments and hands them to the form that computes them best."""

from __future__ import annotations

import torch

from ..layouts.blocks import BlockLayout
from ..layouts.sequences import SequenceLayout
from ..utils.messages import check_choice
from .backends import choose_backend
from .forms import attend_by_block, attend_by_chunk, attend_naively
from .operands import Operands, check_attention, mixing_for
from .tables import OPERATOR_BACKENDS


def mhla_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mixing: torch.Tensor,
    layout: BlockLayout | SequenceLayout,
    *,
    normalizer_query: torch.Tensor | None = None,
    normalizer_key: torch.Tensor | None = None,
    normalizer: str = "query",
    causal: bool = False,
    eps: float = 1e-6,
    backend: str = "auto",
) -> torch.Tensor:
    """Multi-Head Linear Attention (arXiv 2601.07832, section 3).

    S_b = Σ_{j in b} φ(k_j) v_jᵀ, z_b = Σ_{j in b} φ(k_j), S̃_i = Σ_b m_ib S_b, z̃_i = Σ_b m_ib z_b and
    o_t = φ(q_t)ᵀ S̃_{b(t)} / (φ(q_t)ᵀ z̃_{b(t)} + eps). Linear in T while M² ≤ T. Sums run in float32 at least.

    Args:
        query: Feature-mapped (and rotated, where there is RoPE) queries `[B, T, H, K]`.
        key: Feature-mapped (and rotated) keys `[B, T, H_kv, K]`; H_kv is H or a divisor of it (grouped queries).
        value: Values `[B, T, H_kv, V]`.
        mixing: Mixing weights, `[M, M]` or `[H, M, M]`. Causal layouts and sequences may have more blocks than M: see
            [`mhla_hf.ops.extend_mixing`].
        layout: Blocks of the T tokens: a [`BlockLayout`], which for causal attention is 1-D and made with
            `block_size`, or a `SequenceLayout` for padded or packed sequences, whose padding gets zeros.
        normalizer_query: Queries `[B, T, H, K]` for the denominator, where they differ from `query` (unrotated ones).
        normalizer_key: Keys `[B, T, H_kv, K]` for the denominator, likewise.
        normalizer: `"query"`, `"block_query"` (blocks of equal shape only) or `"none"`.
        causal: Token t sees j ≤ t only; earlier blocks contribute whole.
        eps: Added to the denominator.
        backend: `"auto"`, `"torch"` (block-parallel or chunked), `"triton"` (the same by kernels) or `"naive"` (the
            dense oracle, for a [`BlockLayout`]); see [`mhla_hf.ops.choose_backend`].

    Returns:
        `[B, T, H, V]` in the dtype of `value`.

    Raises:
        ValueError: If an argument has a wrong shape, dtype, device or value; the message names the argument.

    Examples:
        >>> import torch
        >>> from mhla_hf import BlockLayout, mhla_attention
        >>> layout = BlockLayout(grid=(4, 6), blocks=(2, 3))
        >>> query, key, value = torch.rand(3, 1, layout.num_tokens, 2, 8)
        >>> mixing = torch.full((6, 6), 1 / 6)  # equal weights are vanilla linear attention
        >>> mhla_attention(query, key, value, mixing, layout).shape
        torch.Size([1, 24, 2, 8])
    """
    operands = Operands(query, key, value, normalizer_query, normalizer_key, normalizer, eps)
    check_choice("backend", backend, OPERATOR_BACKENDS)
    check_attention(operands, mixing, layout, causal)
    if backend == "naive":
        if isinstance(layout, SequenceLayout):
            raise ValueError("backend='naive' takes a BlockLayout, not a SequenceLayout.")
        return attend_naively(operands, mixing, layout, causal)
    mixing = mixing_for(mixing, layout, causal=causal)
    family = "causal" if causal else "block"
    backend = choose_backend(backend, query, key, value, normalizer_query, family=family)
    return attend_on(backend, operands, mixing, layout, causal=causal)


def attend_on(
    backend: str, operands: Operands, mixing: torch.Tensor, layout: BlockLayout | SequenceLayout, *, causal: bool
) -> torch.Tensor:
    """Compute the linear form of the operator, whose arguments have been checked.

    Args:
        backend: `"torch"` or `"triton"`, as [`mhla_hf.ops.choose_backend`] chose.
        operands: The tokens and the normaliser.
        mixing: Weights of the layout's own blocks, `[..., M, M]`.
        layout: The blocks.
        causal: Whether to look back only.

    Returns:
        `[B, T, H, V]` in the dtype of the values; zero for padding.
    """
    if backend == "triton":
        # Imported here alone: Triton need not be installed.
        from .triton.block import triton_block_mhla_attention
        from .triton.causal import triton_causal_mhla_attention

        kernels = triton_causal_mhla_attention if causal else triton_block_mhla_attention
        return kernels(
            *operands.tokens, mixing, layout, normalizer_query=operands.normalizer_query,
            normalizer_key=operands.normalizer_key, normalizer=operands.normalizer, eps=operands.eps,
        )  # fmt: skip
    form = attend_by_chunk if causal else attend_by_block
    return form(operands, mixing, layout)
