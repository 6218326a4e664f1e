# SPDX-License-Identifier: Apache-2.0
"""Launches of the fused forward kernels on plain tensors: no autograd, no custom operators.

Shape letters: B batch, T tokens, H heads of the rows, G heads of the summaries (H or a divisor), K and V widths,
M blocks, N slots of a block. ψ and φ are as in `fused_kernels`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton

from .fused_kernels import fused_attend_kernel, fused_outer_kernel, inverse_root_mean_square_kernel
from .launching import (
    MAX_TILE,
    column_tile,
    dense_rows,
    multiplies_from_shared_memory,
    on_device,
    padded,
    product_options,
    row_strides,
    token_tile,
    warps,
)


@dataclass(frozen=True)
class Features:
    """How projected queries or keys become features.

    Attributes:
        norm_weight: Weight of an RMSNorm across heads, `[H · K]`; None for no norm.
        inverse_norm: What [`inverse_norm`] returns for the rows; read only where there is a norm.
        cosine: Table of rotary embeddings for neighbouring pairs of channels, float32 `[T, K / 2]`, dense; or None.
        sine: The same.
        table: Token of each slot, int32 `[M, N]`.
        feature_map: `kernel` of an entry of [`mhla_hf.ops.FEATURE_MAPS`].
        scaling: Rows are multiplied with it before the feature map.
        feature_eps: Added to the features.
    """

    norm_weight: torch.Tensor | None
    inverse_norm: torch.Tensor
    cosine: torch.Tensor | None
    sine: torch.Tensor | None
    table: torch.Tensor
    feature_map: str
    scaling: float
    feature_eps: float

    def tensors(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Norm, its weight, cosines and sines, with `rows` in place of what is not there."""
        return (
            rows if self.norm_weight is None else self.inverse_norm,
            rows if self.norm_weight is None else self.norm_weight,
            rows if self.cosine is None else self.cosine,
            rows if self.sine is None else self.sine,
        )

    def options(self, width: int, value: int, value_tile: int, most_tokens: int) -> dict[str, Any]:
        """What all kernels take for rows of this width: flags, tiles of `most_tokens` at most, warps."""
        slots = self.table.shape[1]
        return {
            "slots": slots,
            "WIDTH": width,
            "VALUE": value,
            # Even and odd channels are multiplied apart, 16 of each at least.
            "BLOCK_WIDTH": padded(width) if self.cosine is None else max(32, padded(width)),
            "BLOCK_VALUE": value_tile,
            "BLOCK_TOKENS": min(token_tile(slots, width), most_tokens),
            "HAS_NORM": self.norm_weight is not None,
            "HAS_ROTARY": self.cosine is not None,
            "FEATURE_MAP": self.feature_map,
            "num_warps": warps(width, value_tile),
            "num_stages": 2,
        }


def fits(width: int, value: int, rotary: bool, dtype: torch.dtype) -> bool:
    """Whether heads of these widths fit the fused kernels, which hold a whole summary beside the tokens.

    For float16 it is held twice, to be multiplied exactly: wide ones would find no room in smaller GPUs.
    """
    room = MAX_TILE if dtype == torch.bfloat16 else MAX_TILE // 4
    return padded(width) * padded(value) <= room and not (rotary and width % 2)


def _most_tokens(rows: torch.Tensor, summaries: torch.Tensor) -> int:
    """Tokens at a time that find room in registers, and in shared memory beside a summary `[..., K, V]`."""
    if rows.dtype != torch.bfloat16:
        return 32
    small = padded(summaries.shape[-2]) * padded(summaries.shape[-1]) * summaries.element_size() <= 32 * 1024
    return 64 if small or multiplies_from_shared_memory(summaries.device) else 16


def heads_together(tokens: torch.Tensor) -> torch.Tensor:
    """The tensor, copied only where the heads of a token do not lie side by side."""
    tokens = dense_rows(tokens)
    return tokens if tokens.stride(2) == tokens.shape[3] else tokens.contiguous()


def inverse_norm(tokens: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / sqrt(mean of squares + eps) over the heads and channels of each token, float32 `[B, T]`."""
    tokens = heads_together(tokens)
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
            num_warps=row_warps(size),
        )
    return result


def row_warps(size: int) -> int:
    """Warps of a program that holds one row of so many channels."""
    return 4 if size <= 4096 else 8


def outer(
    rows: torch.Tensor,
    value: torch.Tensor,
    features: Features,
    groups: int,
    *,
    factor: float,
    total: bool,
    dtype: torch.dtype,
    scale: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """factor Σ ψ(x_t) (scale_t value_t)ᵀ and Σ weight_t φ(x_t) over the tokens of each block.

    Args:
        rows: Projected queries or keys x, `[B, T, H, K]`.
        value: `[B, T, H, V]`.
        features: What becomes of the rows.
        groups: G; H / G heads in a row are summed.
        factor: A number.
        total: Whether the second is wanted.
        dtype: Of the products.
        scale: float32 `[B, T, H]`; 1 if not given.
        weight: float32 `[B, T, H]`; 1 if not given.

    Returns:
        `[B, G, M, K, V]`, and float32 `[B, G, M, K]` (empty unless `total`).
    """
    rows, value = heads_together(rows), dense_rows(value)
    batch, num_tokens, heads, width = rows.shape
    columns, blocks = value.shape[-1], features.table.shape[0]
    tile = column_tile(width, columns)
    # Scales take registers, and so do the masks of padded widths, and products of more than bfloat16.
    padding = 64 < width < 128
    few_registers = rows.dtype == torch.float32 or (padding and not multiplies_from_shared_memory(rows.device))
    most_tokens = 16 if few_registers else 32 if padding or scale is not None or rows.dtype != torch.bfloat16 else 64
    products = rows.new_empty(batch, groups, blocks, width, columns, dtype=dtype)
    sums = rows.new_empty((batch, groups, blocks, width) if total else (0,), dtype=torch.float32)
    with on_device(rows):
        fused_outer_kernel[(blocks * triton.cdiv(columns, tile) * batch * groups,)](
            rows,
            value,
            *features.tensors(rows),
            rows if scale is None else scale,
            rows if weight is None else weight,
            features.table,
            products,
            sums,
            num_tokens,
            batch * groups,
            *row_strides(rows),
            *row_strides(value),
            features.scaling,
            features.feature_eps,
            factor,
            num_blocks=blocks,
            HEADS=groups,
            REPEATS=heads // groups,
            HAS_SCALE=scale is not None,
            HAS_SUM=total,
            HAS_WEIGHT=weight is not None,
            **features.options(width, columns, tile, most_tokens),
            **product_options(rows.dtype, rows.dtype if scale is None else dtype, rows.device),
        )
    return products, sums


def attend(
    query: torch.Tensor,
    summaries: torch.Tensor,
    key_sums: torch.Tensor | None,
    features: Features,
    *,
    factor: float,
    eps: float = 0.0,
    gate: torch.Tensor | None = None,
    output_weight: torch.Tensor | None = None,
    output_eps: float = 0.0,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """norm(factor · ψ(q)ᵀ S̃ / (φ(q)·z̃ + eps)) · silu(gate).

    Args:
        query: Projected, `[B, T, H, K]`.
        summaries: S̃, `[B, G, M, K, V]`, dense.
        key_sums: z̃, float32 `[B, G, M, K]`, dense; None does not divide.
        features: What becomes of the queries.
        factor: A number.
        eps: Added to the denominator.
        gate: `[B, T, H, V]`; None for no gate.
        output_weight: Weight of the RMSNorm of each head's output, `[V]`; None for no norm.
        output_eps: Of that norm.
        dtype: Of the result; that of `query` if not given.

    Returns:
        `[B, T, H, V]`.
    """
    query = heads_together(query)
    gates = query if gate is None else dense_rows(gate)
    batch, num_tokens, heads, width = query.shape
    groups, columns, blocks = summaries.shape[1], summaries.shape[-1], summaries.shape[2]
    output = query.new_empty(batch, num_tokens, heads, columns, dtype=dtype)
    with on_device(query):
        fused_attend_kernel[(blocks * batch * heads,)](
            query,
            gates,
            query if output_weight is None else output_weight,
            *features.tensors(query),
            features.table,
            summaries,
            summaries if key_sums is None else key_sums,
            output,
            num_tokens,
            batch * heads,
            *row_strides(query),
            *row_strides(gates),
            features.scaling,
            features.feature_eps,
            factor,
            eps,
            output_eps,
            num_blocks=blocks,
            HEADS=groups,
            REPEATS=heads // groups,
            NORMALIZE=key_sums is not None,
            OUTPUT_NORM=output_weight is not None,
            HAS_GATE=gate is not None,
            **features.options(width, columns, padded(columns), _most_tokens(query, summaries)),
            **product_options(query.dtype, summaries.dtype, query.device),
        )
    return output
