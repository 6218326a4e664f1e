# SPDX-License-Identifier: Apache-2.0
"""Launches of the kernels that multiply tokens with matrices of their blocks: no autograd, no custom operators.

Shape letters: B batch, T tokens, H heads, G heads of the summaries (H or a divisor), K and V widths, M blocks,
N slots of a block.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from .block_kernels import apply_kernel, attend_kernel
from .launching import (
    MAX_TILE,
    column_tile,
    dense_rows,
    multiplies_exactly,
    multiplies_from_shared_memory,
    on_device,
    padded,
    product_options,
    row_strides,
    split_slots,
    table_arguments,
    token_tensor,
    token_tile,
    warps,
)


def _options(
    rows: torch.Tensor, matrices: torch.Tensor, table: torch.Tensor, columns: int
) -> tuple[int, int, dict[str, Any]]:
    """Number of programs, columns of matrices that each takes, and what both kernels are told.

    Args:
        rows: `[B, T, H, D]`.
        matrices: `[B, G, M, ...]`.
        table: Token of each slot, `[M, N]` or `[B, M, N]`.
        columns: Columns of a matrix.
    """
    batch, _, heads, width = rows.shape
    groups, blocks = matrices.shape[1:3]
    columns_tile, tokens_tile = column_tile(width, columns), token_tile(table.shape[-1], width)
    roomy = multiplies_from_shared_memory(rows.device)
    if multiplies_exactly(rows.dtype):
        # Both halves of the factors have to find room.
        columns_tile = columns_tile if roomy else min(columns_tile, MAX_TILE // 2 // padded(width))
        tokens_tile = min(tokens_tile, max(16, 2048 // padded(width)))
    elif matrices.dtype == torch.float32 and not roomy:
        # These GPUs have less shared memory, too: a tile of the matrices takes two thirds of it.
        fewest = 16 if rows.dtype == torch.float32 else 32
        tokens_tile = min(tokens_tile, max(fewest, 4096 // padded(width)))
    programs = batch * heads * blocks * triton.cdiv(columns, columns_tile)
    splits, share = split_slots(table.shape[-1], tokens_tile, programs)
    options = {
        **table_arguments(table, rows),
        "splits": splits,
        "split_slots": share,
        "HEADS": groups,
        "REPEATS": heads // groups,
        "WIDTH": width,
        "BLOCK_WIDTH": padded(width),
        "BLOCK_TOKENS": tokens_tile,
        "num_warps": warps(width, columns_tile),
        "num_stages": 2,
        **product_options(rows.dtype, matrices.dtype, rows.device),
    }
    return programs * splits, columns_tile, options


def attend(
    query: torch.Tensor,
    summary: torch.Tensor,
    table: torch.Tensor,
    *,
    factor: float = 1.0,
    eps: float = 0.0,
    key_sum: torch.Tensor | None = None,
    plain: torch.Tensor | None = None,
    denominator: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """factor · query_tᵀ summary_b(t) / (plain_t · key_sum_b(t) + eps).

    Args:
        query: `[B, T, H, K]`.
        summary: `[B, G, M, K, V]`, dense.
        table: Token of each slot, int32 `[M, N]` or `[B, M, N]`; T where a slot is empty.
        factor: A number.
        eps: Added to the denominator.
        key_sum: float32 `[B, G, M, P]`, dense; without it and without `denominator` nothing is divided.
        plain: `[B, T, H, P]`; the query if not given.
        denominator: float32 `[B, T, H]`, in place of `key_sum`.

    Returns:
        `[B, T, H, V]`, and the denominators with eps, float32 `[B, T, H]` (empty where they are not computed here).
    """
    query = dense_rows(query)
    rows = query if plain is None else dense_rows(plain)
    value = summary.shape[-1]
    programs, value_tile, options = _options(query, summary, table, value)
    output = token_tensor(query, table, value)
    computed = query.new_empty(query.shape[:3] if key_sum is not None else (0,), dtype=torch.float32)
    normalizer = 0
    if denominator is not None:
        normalizer = 3
    elif key_sum is not None:
        normalizer = 1 if plain is None else 2
    with on_device(query):
        attend_kernel[(programs,)](
            query,
            rows,
            summary,
            summary if key_sum is None else key_sum,
            table,
            output,
            computed if denominator is None else denominator,
            *row_strides(query, rows),
            factor,
            eps,
            VALUE=value,
            PLAIN=rows.shape[-1],
            BLOCK_VALUE=value_tile,
            BLOCK_PLAIN=padded(rows.shape[-1]),
            NORMALIZER=normalizer,
            **options,
        )
    return output, computed


def apply(
    rows: torch.Tensor,
    matrices: torch.Tensor,
    table: torch.Tensor,
    *,
    transpose: bool = False,
    factor: float = 1.0,
    scale: torch.Tensor | None = None,
    vectors: torch.Tensor | None = None,
    vectors_dtype: torch.dtype | None = None,
    outputs: torch.Tensor | None = None,
    queries: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """factor · scale_t · rows_tᵀ matrix_b(t) + weight_t · vector_b(t).

    Args:
        rows: `[B, T, H, D]`.
        matrices: `[B, G, M, D, E]`, dense; with `transpose`, `[B, G, M, E, D]`.
        table: As in [`attend`].
        transpose: Multiply with the transposed matrices.
        factor: A number.
        scale: float32 `[B, T, H]`; 1 if not given.
        vectors: float32 `[B, G, M, P]`, dense.
        vectors_dtype: Return the weighted vectors on their own, in this type; if not given, they are added to the
            result (P = E).
        outputs: `[B, T, H, D]`: weight_t = -scale_t rows_t · outputs_t; 1 if not given.
        queries: `[B, T, H, E]`, what `outputs` were made of with these matrices; given beside them, the weights are
            free of the outputs' rounding where E is at most 128.

    Returns:
        The result `[B, T, H, E]` in the type of `rows`; the weighted vectors `[B, T, H, P]`, and the weights, float32
        `[B, T, H]`, each empty where it is not asked for.
    """
    rows = dense_rows(rows)
    columns = matrices.shape[-2 if transpose else -1]
    vector_width = columns if vectors is None else vectors.shape[-1]
    programs, columns_tile, options = _options(rows, matrices, table, columns)
    weight_mode = 0 if outputs is None else 2 if queries is not None and columns <= columns_tile else 1
    others = (rows, outputs, queries)[weight_mode]
    assert others is not None
    others = dense_rows(others)
    result = token_tensor(rows, table, columns)
    apart = vectors is not None and vectors_dtype is not None
    second = token_tensor(rows, table, vector_width, vectors_dtype) if apart else rows.new_empty(0)
    weight = rows.new_empty(rows.shape[:3] if outputs is not None else (0,), dtype=torch.float32)
    with on_device(rows):
        apply_kernel[(programs,)](
            rows,
            others,
            matrices,
            matrices if vectors is None else vectors,
            rows if scale is None else scale,
            table,
            result,
            second,
            weight,
            *row_strides(rows, others),
            1 if transpose else columns,
            rows.shape[-1] if transpose else 1,
            factor,
            COLUMNS=columns,
            VECTOR=vector_width,
            BLOCK_COLUMNS=columns_tile,
            BLOCK_VECTOR=padded(vector_width),
            HAS_SCALE=scale is not None,
            WEIGHT=weight_mode,
            VECTORS=0 if vectors is None else 2 if apart else 1,
            **options,
        )
    return result, second, weight
