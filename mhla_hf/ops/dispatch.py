# SPDX-License-Identifier: Apache-2.0
"""`mhla_attention`: checks its arguments and hands them to the form that computes them best."""

from __future__ import annotations

from typing import Any

import torch

from ..config import BACKENDS
from ..layout import BlockLayout
from ..sequence_layout import SequenceLayout, extend_mixing
from .backends import choose_backend
from .block import block_mhla_attention
from .causal import causal_mhla_attention
from .naive import naive_mhla_attention
from .numerics import check_normalizer


# `"naive"`, the dense oracle, can be asked for by name only.
OPERATOR_BACKENDS = (*BACKENDS, "naive")


def mhla_attention(
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
    backend: str = "auto",
) -> torch.Tensor:
    """Multi-Head Linear Attention (arXiv 2601.07832, section 3).

    S_b = Σ_{j in b} φ(k_j) v_jᵀ, z_b = Σ_{j in b} φ(k_j), S̃_i = Σ_b m_ib S_b, z̃_i = Σ_b m_ib z_b and
    o_t = φ(q_t)ᵀ S̃_{b(t)} / (φ(q_t)ᵀ z̃_{b(t)} + eps). Linear in T while M² ≤ T. Sums run in float32 at least.

    Args:
        query: Feature-mapped (and rotated, where there is RoPE) queries `[B, T, H, K]`.
        key: Feature-mapped (and rotated) keys `[B, T, H_kv, K]`; H_kv is H or a divisor of it (grouped queries).
        value: Values `[B, T, H_kv, V]`.
        mixing: Mixing weights, `[M, M]` or `[H, M, M]`. Causal layouts may have more blocks than M: see
            [`mhla_hf.ops.extend_mixing`].
        layout: Blocks of the T tokens. Causal attention needs a 1-D layout made with `block_size`.
        normalizer_query: Queries `[B, T, H, K]` for the denominator, where they differ from `query` (unrotated ones).
        normalizer_key: Keys `[B, T, H_kv, K]` for the denominator, likewise.
        normalizer: `"query"`, `"block_query"` (blocks of equal shape only) or `"none"`.
        causal: Token t sees j ≤ t only; earlier blocks contribute whole.
        eps: Added to the denominator.
        backend: `"auto"`, `"torch"` (block-parallel or chunked), `"triton"` (the same by kernels) or `"naive"` (the
            dense oracle); see [`mhla_hf.ops.choose_backend`].

    Returns:
        `[B, T, H, V]` in the dtype of `value`.

    Raises:
        ValueError: If an argument has a wrong shape, dtype, device or value; the message names the argument.
    """
    _check_arguments(
        query, key, value, mixing, layout, normalizer_query, normalizer_key, normalizer, causal, eps, backend
    )
    options: dict[str, Any] = {"normalizer_query": normalizer_query, "normalizer_key": normalizer_key}
    options.update(normalizer=normalizer, eps=eps)
    if backend == "naive":
        return naive_mhla_attention(query, key, value, mixing, layout, causal=causal, **options)
    if causal:
        mixing = extend_mixing(mixing, layout.num_blocks, causal=True)
    return attend_blocks(query, key, value, mixing, layout, causal=causal, backend=backend, **options)


def attend_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mixing: torch.Tensor,
    layout: BlockLayout | SequenceLayout,
    *,
    causal: bool,
    backend: str = "auto",
    **options: Any,
) -> torch.Tensor:
    """The linear form of the operator by the backend that is best for it; nothing is checked.

    Args:
        query: `[B, T, H, K]`.
        key: `[B, T, H_kv, K]`.
        value: `[B, T, H_kv, V]`.
        mixing: Weights of the layout's own blocks, `[..., M, M]`.
        layout: The blocks, those of padded or packed sequences too.
        causal: Whether to look back only.
        backend: See [`mhla_hf.ops.choose_backend`].
        **options: `normalizer`, `normalizer_query`, `normalizer_key` and `eps` of [`mhla_attention`].

    Returns:
        `[B, T, H, V]` in the dtype of `value`; zero for padding.
    """
    tokens = query, key, value
    form = causal_mhla_attention if causal else block_mhla_attention
    if choose_backend(backend, *tokens, options.get("normalizer_query")) == "triton":
        # Imported here alone: Triton need not be installed.
        from .triton.block import triton_block_mhla_attention
        from .triton.causal import triton_causal_mhla_attention

        form = triton_causal_mhla_attention if causal else triton_block_mhla_attention
    return form(*tokens, mixing, layout, **options)


def _check_arguments(
    query, key, value, mixing, layout, normalizer_query, normalizer_key, normalizer, causal, eps, backend
) -> None:
    check_normalizer(normalizer)
    if backend not in OPERATOR_BACKENDS:
        raise ValueError(f"backend={backend!r} is not one of {', '.join(map(repr, OPERATOR_BACKENDS))}.")
    if not isinstance(layout, BlockLayout):
        raise ValueError(f"layout must be a BlockLayout, got {type(layout).__name__}.")
    if not isinstance(eps, (int, float)) or not eps >= 0:
        raise ValueError(f"eps={eps!r} must be at least 0.")
    tensors = {"query": query, "key": key, "value": value}
    for name, tensor in tensors.items():
        _check_tokens(name, tensor, query, key if name == "value" else None)
    tensors.update(normalizer_query=normalizer_query, normalizer_key=normalizer_key)
    for name in ("normalizer_query", "normalizer_key"):
        if tensors[name] is not None:
            _check_tokens(name, tensors[name], query, query if name == "normalizer_query" else key)
    for name in ("key", "normalizer_query", "normalizer_key"):
        tensor = tensors[name]
        # The denominator's pair may be as wide as it likes, as long as the two agree.
        partner = normalizer_query if name == "normalizer_key" and normalizer_query is not None else query
        if tensor is not None and tensor.shape[-1] != partner.shape[-1]:
            raise ValueError(f"{name} has width {tensor.shape[-1]}, but its counterpart has {partner.shape[-1]}.")
    layout.check_length(query.shape[1], "query")
    _check_mixing(mixing, layout, query, causal)
    _check_layout(layout, normalizer, causal)


def _check_tokens(name: str, tensor: torch.Tensor, query: torch.Tensor, same_heads: torch.Tensor | None) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(tensor).__name__}.")
    if tensor.dim() != 4:
        raise ValueError(f"{name} must be [batch, tokens, heads, width], got shape {tuple(tensor.shape)}.")
    heads = tensor.shape[2]
    grouped = heads > 0 and query.shape[2] % heads == 0 if same_heads is None else heads == same_heads.shape[2]
    if tensor.shape[:2] != query.shape[:2] or not grouped:
        raise ValueError(
            f"{name} has [batch, tokens, heads] = {tuple(tensor.shape[:3])}, but query has {tuple(query.shape[:3])}."
        )
    if not tensor.is_floating_point():
        raise ValueError(f"{name} must be floating point, got {tensor.dtype}.")
    if tensor.device != query.device:
        raise ValueError(f"{name} is on {tensor.device}, but query is on {query.device}.")


def _check_mixing(mixing: torch.Tensor, layout: BlockLayout, query: torch.Tensor, causal: bool) -> None:
    if not isinstance(mixing, torch.Tensor) or not mixing.is_floating_point():
        raise ValueError(
            f"mixing must be a floating-point tensor, got {getattr(mixing, 'dtype', type(mixing).__name__)}."
        )
    if mixing.device != query.device:
        raise ValueError(f"mixing is on {mixing.device}, but query is on {query.device}.")
    shape, num_heads = tuple(mixing.shape), query.shape[2]
    if mixing.dim() not in (2, 3) or shape[-1] != shape[-2]:
        raise ValueError(f"mixing must be [blocks, blocks] or [heads, blocks, blocks], got shape {shape}.")
    if mixing.dim() == 3 and shape[0] not in (1, num_heads):
        raise ValueError(f"mixing has {shape[0]} heads, but query has {num_heads}.")
    if not causal and shape[-1] != layout.num_blocks:
        raise ValueError(f"mixing has {shape[-1]} blocks, but the layout has {layout.num_blocks} ({layout.blocks}).")


def _check_layout(layout: BlockLayout, normalizer: str, causal: bool) -> None:
    if causal:
        lengths = layout.tile_lengths[0]
        if len(layout.grid) != 1 or any(length != lengths[0] for length in lengths[:-1]) or lengths[-1] > lengths[0]:
            raise ValueError(f"causal=True needs a 1-D layout made with block_size, got {layout!r}.")
    if normalizer == "block_query" and not layout.is_uniform:
        raise ValueError(
            f"normalizer='block_query' pairs tokens at the same position of each block and needs blocks of equal "
            f"shape, but {layout!r} has uneven ones. Use normalizer='query', or a grid that the blocks divide."
        )
