# SPDX-License-Identifier: Apache-2.0
"""The fused inference path: from projections to what the output projection reads, in two kernels and the mixing.

Shape letters: B batch, T tokens, H heads, G key/value heads (H or a divisor), K and V widths, M blocks.
"""

# No postponed annotations here: torch.library reads schemas from them.

import torch
import triton
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .fused_kernels import fused_attend_kernel, fused_summary_kernel, inverse_root_mean_square_kernel
from .launching import (
    MAX_TILE,
    column_tile,
    dense_rows,
    on_device,
    padded,
    product_options,
    row_strides,
    summary_dtype,
    token_tile,
    warps,
)


FEATURE_MAPS = ("identity", "relu", "elu", "exp")


def fits(width: int, value: int, rotary: bool, dtype: torch.dtype) -> bool:
    """Whether heads of these widths fit the fused kernels, which hold a whole summary beside the tokens."""
    room = MAX_TILE // 4 if dtype == torch.float32 else MAX_TILE
    return padded(width) * padded(value) <= room and not (rotary and width % 2)


def _inverse_norm(tokens: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean of squares + eps) over the heads and channels of each token, float32 `[B, T]`."""
    batch, num_tokens, heads, width = tokens.shape
    result = tokens.new_empty(batch, num_tokens, dtype=torch.float32)
    size = heads * width
    with on_device(tokens):
        inverse_root_mean_square_kernel[(batch * num_tokens,)](
            tokens,
            result,
            num_tokens,
            tokens.stride(0),
            tokens.stride(1),
            eps,
            WIDTH=size,
            BLOCK_WIDTH=padded(size),
            num_warps=4 if size <= 4096 else 8,
        )
    return result


def _heads_together(tokens: Tensor) -> Tensor:
    """The tensor, copied only where the heads of a token do not lie side by side."""
    tokens = dense_rows(tokens)
    return tokens if tokens.stride(2) == tokens.shape[3] else tokens.contiguous()


@torch.library.custom_op("mhla_hf::fused_summary", mutates_args=())
def fused_summary(
    key: Tensor,
    value: Tensor,
    norm_weight: Tensor | None,
    cosine: Tensor | None,
    sine: Tensor | None,
    table: Tensor,
    feature_map: str,
    norm_eps: float,
    scaling: float,
    feature_eps: float,
    factor: float,
    total: bool,
) -> tuple[Tensor, Tensor]:
    """factor Σ rotated(φ(k)) vᵀ and Σ φ(k) of each block, from projected keys.

    Args:
        key: `[B, T, G, K]`.
        value: `[B, T, G, V]`.
        norm_weight: Weight of an RMSNorm across heads, `[G · K]`; None for no norm.
        cosine: Table of rotary embeddings for neighbouring pairs of channels, float32 `[T, K / 2]`, dense; or None.
        sine: The same.
        table: Token of each slot, int32 `[M, N]`.
        feature_map: One of `FEATURE_MAPS`.
        norm_eps: Of the norm.
        scaling: Keys are multiplied with it before the feature map.
        feature_eps: Added to the features.
        factor: A number.
        total: Whether the sums are wanted.

    Returns:
        `[B, G, M, K, V]` as [`summary_dtype`] says for inference, with even channels before odd ones where rotated;
        and float32 `[B, G, M, K]`, empty unless `total`.
    """
    key, value = _heads_together(key), dense_rows(value)
    batch, num_tokens, heads, width = key.shape
    columns = value.shape[-1]
    blocks, slots = table.shape
    tile = column_tile(width, columns)
    summaries = key.new_empty(batch, heads, blocks, width, columns, dtype=summary_dtype(key.dtype, True))
    sums = key.new_empty((batch, heads, blocks, width) if total else (0,), dtype=torch.float32)
    norm = key if norm_weight is None else _inverse_norm(key, norm_eps)
    with on_device(key):
        fused_summary_kernel[(blocks * triton.cdiv(columns, tile) * batch * heads,)](
            key,
            value,
            norm,
            key if norm_weight is None else norm_weight,
            key if cosine is None else cosine,
            key if sine is None else sine,
            table,
            summaries,
            sums,
            num_tokens,
            batch * heads,
            *row_strides(key),
            *row_strides(value),
            scaling,
            feature_eps,
            factor,
            num_blocks=blocks,
            SLOTS=slots,
            HEADS=heads,
            WIDTH=width,
            VALUE=columns,
            BLOCK_WIDTH=padded(width),
            BLOCK_VALUE=tile,
            BLOCK_TOKENS=token_tile(slots, width),
            HAS_NORM=norm_weight is not None,
            HAS_ROTARY=cosine is not None,
            HAS_SUM=total,
            FEATURE_MAP=feature_map,
            num_warps=warps(width, tile),
            num_stages=2,
            **product_options(key.dtype, key.dtype, key.device),
        )
    return summaries, sums


@fused_summary.register_fake
def _(key, value, norm_weight, cosine, sine, table, feature_map, norm_eps, scaling, feature_eps, factor, total):
    shape = key.shape[0], key.shape[2], table.shape[0], key.shape[3]
    return (
        key.new_empty(*shape, value.shape[-1], dtype=summary_dtype(key.dtype, True)),
        key.new_empty(shape if total else (0,), dtype=torch.float32),
    )


@torch.library.custom_op("mhla_hf::fused_attend", mutates_args=())
def fused_attend(
    query: Tensor,
    summaries: Tensor,
    key_sums: Tensor | None,
    gate: Tensor | None,
    norm_weight: Tensor | None,
    output_weight: Tensor | None,
    cosine: Tensor | None,
    sine: Tensor | None,
    table: Tensor,
    feature_map: str,
    norm_eps: float,
    scaling: float,
    feature_eps: float,
    factor: float,
    eps: float,
    output_eps: float,
) -> Tensor:
    """norm(factor · rotated(φ(q))ᵀ S̃ / (φ(q)·z̃ + eps)) · silu(gate), from projected queries.

    Args:
        query: `[B, T, H, K]`.
        summaries: Mixed summaries of [`fused_summary`], `[B, G, M, K, V]`, dense.
        key_sums: Mixed sums, float32 `[B, G, M, K]`, dense; None does not divide.
        gate: What the gate's projection put out, `[B, T, H, V]`; None for no gate.
        norm_weight: Weight of the queries' RMSNorm across heads, `[H · K]`; None for no norm.
        output_weight: Weight of the RMSNorm of each head's output, `[V]`; None for no norm.
        cosine: See [`fused_summary`].
        sine: See [`fused_summary`].
        table: See [`fused_summary`].
        feature_map: See [`fused_summary`].
        norm_eps: Of the queries' norm.
        scaling: Queries are multiplied with it before the feature map.
        feature_eps: Added to the features.
        factor: A number.
        eps: Added to the denominator.
        output_eps: Of the outputs' norm.

    Returns:
        `[B, T, H, V]` in the dtype of `query`.
    """
    query = _heads_together(query)
    gates = query if gate is None else dense_rows(gate)
    batch, num_tokens, heads, width = query.shape
    groups, columns = summaries.shape[1], summaries.shape[-1]
    blocks, slots = table.shape
    output = query.new_empty(batch, num_tokens, heads, columns)
    norm = query if norm_weight is None else _inverse_norm(query, norm_eps)
    with on_device(query):
        fused_attend_kernel[(blocks * batch * heads,)](
            query,
            gates,
            norm,
            query if norm_weight is None else norm_weight,
            query if output_weight is None else output_weight,
            query if cosine is None else cosine,
            query if sine is None else sine,
            table,
            summaries,
            summaries if key_sums is None else key_sums,
            output,
            num_tokens,
            batch * heads,
            *row_strides(query),
            *row_strides(gates),
            scaling,
            feature_eps,
            factor,
            eps,
            output_eps,
            num_blocks=blocks,
            SLOTS=slots,
            HEADS=groups,
            REPEATS=heads // groups,
            WIDTH=width,
            VALUE=columns,
            BLOCK_WIDTH=padded(width),
            BLOCK_VALUE=padded(columns),
            BLOCK_TOKENS=token_tile(slots, width),
            HAS_NORM=norm_weight is not None,
            HAS_ROTARY=cosine is not None,
            NORMALIZE=key_sums is not None,
            OUTPUT_NORM=output_weight is not None,
            HAS_GATE=gate is not None,
            FEATURE_MAP=feature_map,
            num_warps=warps(width, columns),
            num_stages=2,
            **product_options(query.dtype, summaries.dtype, query.device),
        )
    return output


@fused_attend.register_fake
def _(query, summaries, *args):
    return query.new_empty(*query.shape[:-1], summaries.shape[-1])


@register_flop_formula(torch.ops.mhla_hf.fused_summary)
def _summary_flops(key, value, *args, **kwargs) -> int:
    """2 B T G K V, the matrix products alone."""
    return 2 * key[0] * key[1] * key[2] * key[3] * value[-1]


@register_flop_formula(torch.ops.mhla_hf.fused_attend)
def _attend_flops(query, summaries, *args, **kwargs) -> int:
    """2 B T H K V, the matrix products alone."""
    return 2 * query[0] * query[1] * query[2] * query[3] * summaries[-1]
