# SPDX-License-Identifier: Apache-2.0
"""Launches of the fused kernels' gradients on plain tensors: no autograd, no custom operators.

Shape letters: B batch, T tokens, H heads of the rows, G heads of the summaries (H or a divisor), K and V widths,
M blocks. ψ and φ are as in `fused_kernels`.
"""

from __future__ import annotations

import torch
import triton

from .fused_gradient_kernels import fused_gradient_kernel, norm_gradient_kernel, output_gradient_kernel
from .fused_launch import Features, heads_together, row_warps
from .launching import (
    FEW_PROGRAMS,
    dense_rows,
    multiplies_from_shared_memory,
    on_device,
    padded,
    product_options,
    row_strides,
)


def gradient(
    rows: torch.Tensor,
    outputs: torch.Tensor,
    matrices: torch.Tensor,
    vectors: torch.Tensor | None,
    features: Features,
    *,
    factor: float,
    eps: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradient of norm(x_t) where that of ψ(x_t) is factor · scale_t · matrix_b(t) outputs_t.

    Args:
        rows: Projected queries or keys x, `[B, T, H, K]`.
        outputs: Values, or gradients of outputs, `[B, T, H, V]`.
        matrices: Gradients of summaries, or mixed summaries, `[B, G, M, K, V]`, dense.
        vectors: float32 `[B, G, M, K]`, dense: added to the gradient of φ(x_t), or see `eps`.
        features: What becomes of the rows.
        factor: A number.
        eps: If given, rows are queries whose results are divided by φ(x_t)·vector_b(t) + eps, and scale_t is one over
            that. Otherwise it is 1.

    Returns:
        The gradient, `[B, T, H, K]` in the dtype of `rows`; scale, and the gradient of the denominators, float32
        `[B, T, H]` (both empty without `eps`).
    """
    rows, outputs = heads_together(rows), dense_rows(outputs)
    batch, num_tokens, heads, width = rows.shape
    groups, columns, blocks = matrices.shape[1], matrices.shape[-1], matrices.shape[2]
    divides = vectors is not None and eps is not None
    # With both the features and their gradient at hand, or factors of more than bfloat16, there are no registers for
    # more.
    few_registers = divides or not multiplies_from_shared_memory(rows.device)
    most_tokens = 16 if rows.dtype != torch.bfloat16 else 32 if few_registers else 64
    result = torch.empty_like(rows, memory_format=torch.contiguous_format)
    per_token = (batch, num_tokens, heads) if divides else (0,)
    scale, weight = (rows.new_empty(per_token, dtype=torch.float32) for _ in range(2))
    with on_device(rows):
        fused_gradient_kernel[(blocks * batch * heads,)](
            rows,
            outputs,
            *features.tensors(rows),
            features.table,
            matrices,
            matrices if vectors is None else vectors,
            result,
            scale,
            weight,
            num_tokens,
            batch * heads,
            *row_strides(rows),
            *row_strides(outputs),
            features.scaling,
            features.feature_eps,
            factor,
            0.0 if eps is None else eps,
            num_blocks=blocks,
            HEADS=groups,
            REPEATS=heads // groups,
            VECTORS=0 if vectors is None else 2 if divides else 1,
            **{**features.options(width, columns, padded(columns), most_tokens), "num_warps": 8},
            **product_options(rows.dtype, matrices.dtype, rows.device),
        )
    return result, scale, weight


def norm_gradient_(rows: torch.Tensor, gradient: torch.Tensor, features: Features) -> torch.Tensor | None:
    """Turns the gradient of norm(x), dense `[B, T, H, K]`, into that of x, in place; nothing without a norm.

    Returns:
        The gradient of the norm's weight, `[H · K]` in its dtype; None without a norm.
    """
    if features.norm_weight is None:
        return None
    rows = heads_together(rows)
    batch, num_tokens, heads, width = rows.shape
    size, count = heads * width, batch * num_tokens
    share = triton.cdiv(count, FEW_PROGRAMS)
    partial = rows.new_empty(triton.cdiv(count, share), size, dtype=torch.float32)
    with on_device(rows):
        norm_gradient_kernel[(partial.shape[0],)](
            rows,
            features.inverse_norm,
            features.norm_weight,
            gradient,
            partial,
            num_tokens,
            count,
            share,
            rows.stride(0),
            rows.stride(1),
            WIDTH=size,
            BLOCK_WIDTH=padded(size),
            INTERPRETED=rows.device.type != "cuda",
            num_warps=row_warps(size),
        )
    return partial.sum(0).to(features.norm_weight.dtype)


def output_gradient_(
    output: torch.Tensor,
    gradient: torch.Tensor,
    gate: torch.Tensor | None,
    output_weight: torch.Tensor | None,
    output_eps: float,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Through norm(output) · silu(gate): overwrites the output, dense `[B, T, H, V]`, with its gradient.

    Args:
        output: What entered the norm.
        gradient: `[B, T, H, V]`.
        gate: `[B, T, H, V]` or None.
        output_weight: `[V]` or None.
        output_eps: Of the norm.

    Returns:
        The gradients of gate and weight in their dtypes; None for what is not there.
    """
    gradient = gradient.contiguous()
    gates = output if gate is None else dense_rows(gate)
    batch, num_tokens, heads, columns = output.shape
    count, rows_tile = batch * num_tokens * heads, max(1, 4096 // padded(columns))
    share = triton.cdiv(triton.cdiv(count, rows_tile), 4 * FEW_PROGRAMS) * rows_tile
    grad_gate = None if gate is None else torch.empty_like(gate, memory_format=torch.contiguous_format)
    partial = output.new_empty(triton.cdiv(count, share), columns, dtype=torch.float32)
    with on_device(output):
        output_gradient_kernel[(partial.shape[0],)](
            output,
            gates,
            output if output_weight is None else output_weight,
            gradient,
            output if grad_gate is None else grad_gate,
            partial,
            num_tokens,
            count,
            share,
            *row_strides(gates),
            output_eps,
            HEADS=heads,
            VALUE=columns,
            BLOCK_VALUE=padded(columns),
            BLOCK_ROWS=rows_tile,
            OUTPUT_NORM=output_weight is not None,
            HAS_GATE=gate is not None,
            INTERPRETED=output.device.type != "cuda",
            num_warps=4,
        )
    return grad_gate, None if output_weight is None else partial.sum(0).to(output_weight.dtype)
