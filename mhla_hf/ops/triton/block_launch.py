# SPDX-License-Identifier: Apache-2.0
"""Launches of the block kernels on plain tensors: no autograd, no custom operators.

Shape letters: B batch, T tokens, H heads, G heads of the summaries (H or a divisor), K and V widths, M blocks,
N slots of a block.
"""

from __future__ import annotations

import torch
import triton

from .block_kernels import apply_kernel, attend_kernel, outer_kernel
from .launching import (
    column_tile,
    dense_rows,
    multiplies_from_shared_memory,
    on_device,
    padded,
    product_options,
    row_strides,
    split_slots,
    table_stride,
    token_tile,
    warps,
)


def token_tensor(tokens: torch.Tensor, table: torch.Tensor, width: int, dtype: torch.dtype | None) -> torch.Tensor:
    """A tensor `[B, T, H, width]` to write; zeros where the layout may leave tokens out (padding)."""
    shape = (*tokens.shape[:-1], width)
    return tokens.new_zeros(shape, dtype=dtype) if table.dim() == 3 else tokens.new_empty(shape, dtype=dtype)


def outer(
    left: torch.Tensor,
    right: torch.Tensor,
    table: torch.Tensor,
    num_heads: int,
    *,
    factor: float = 1.0,
    scale: torch.Tensor | None = None,
    total: bool = False,
    plain: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    limit: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """factor Σ_t left_t ⊗ (scale_t right_t) for each block, and Σ_t weight_t plain_t.

    Args:
        left: `[B, T, H, K]`.
        right: `[B, T, H, V]`.
        table: Token of each slot, int32 `[M, N]` or `[B, M, N]`; T where a slot is empty.
        num_heads: G; H / G heads in a row are summed.
        factor: A number.
        scale: float32 `[B, T, H]`; 1 if not given.
        total: Whether to sum `plain` too.
        plain: `[B, T, H, P]`; `left` if not given.
        weight: float32 `[B, T, H]`; 1 if not given.
        dtype: Of the products.
        limit: int32 `[B, H', M]`, H' a divisor of H: the slots of a block from there on are left out.

    Returns:
        The products `[B, G, M, K, V]`, and the sums, float32 `[B, G, M, P]` (empty if not `total`).
    """
    options = {"factor": factor, "scale": scale, "total": total, "plain": plain, "weight": weight, "dtype": dtype}
    product, sums, _ = _outer(left, right, table, num_heads, limit=limit, finite=False, **options)
    return product, sums


def finite_outer(
    left: torch.Tensor,
    right: torch.Tensor,
    table: torch.Tensor,
    *,
    factor: float,
    total: bool,
    plain: torch.Tensor | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[`outer`] for each head of the rows, with zero for numbers that are not finite.

    Returns:
        The products, the sums, and the first slot of each block whose rows were not all finite, int32 `[B, H, M]`; the
        number of slots where all were.
    """
    options = {"factor": factor, "total": total, "plain": plain, "dtype": dtype}
    return _outer(left, right, table, left.shape[2], scale=None, weight=None, limit=None, finite=True, **options)


def _outer(
    left: torch.Tensor,
    right: torch.Tensor,
    table: torch.Tensor,
    num_heads: int,
    *,
    factor: float,
    scale: torch.Tensor | None,
    total: bool,
    plain: torch.Tensor | None,
    weight: torch.Tensor | None,
    dtype: torch.dtype,
    limit: torch.Tensor | None,
    finite: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    left, right = dense_rows(left), dense_rows(right)
    batch, num_tokens, heads, width = left.shape
    value = right.shape[-1]
    blocks, slots = table.shape[-2:]
    rows = left if plain is None else dense_rows(plain)
    plain_width = rows.shape[-1]
    value_tile, tile = column_tile(width, value), token_tile(slots, max(width, value))
    few_registers = left.dtype == torch.float32 and not multiplies_from_shared_memory(left.device)
    # Masks of padded widths take registers too.
    if few_registers or 64 < width < 128:
        tile = min(tile, 32)
    tiles = blocks * triton.cdiv(value, value_tile)
    splits, share = split_slots(slots, tile, tiles * batch * num_heads)
    product = left.new_empty(
        splits, batch, num_heads, blocks, width, value, dtype=dtype if splits == 1 else torch.float32
    )
    sums_shape = (splits, batch, num_heads, blocks, plain_width) if total else (0,)
    sums = left.new_empty(sums_shape, dtype=torch.float32)
    parts = splits * triton.cdiv(value, value_tile)
    bad = left.new_empty((parts, batch, num_heads, blocks) if finite else (0,), dtype=torch.int32)
    with on_device(left):
        outer_kernel[(batch * num_heads * tiles * splits,)](
            left,
            right,
            rows,
            left if scale is None else scale,
            left if weight is None else weight,
            table,
            product,
            sums,
            bad if limit is None else limit,
            num_tokens,
            table_stride(table),
            *row_strides(left),
            *row_strides(right),
            *row_strides(rows),
            product.stride(0),
            sums.stride(0),
            bad.stride(0),
            factor,
            num_blocks=blocks,
            slots=slots,
            splits=splits,
            split_slots=share,
            HEADS=num_heads,
            REPEATS=heads // num_heads,
            LEFT=width,
            RIGHT=value,
            PLAIN=plain_width,
            BLOCK_LEFT=padded(width),
            BLOCK_RIGHT=value_tile,
            BLOCK_PLAIN=padded(plain_width),
            BLOCK_TOKENS=tile,
            HAS_SCALE=scale is not None,
            HAS_WEIGHT=weight is not None,
            TOTAL=0 if not total else 1 if plain is None else 2,
            BAD=1 if finite else 0 if limit is None else 2,
            BAD_REPEATS=1 if limit is None else heads // limit.shape[1],
            num_warps=warps(width, value_tile),
            num_stages=2,
            # Without a scale the rows enter as they are, whatever the type of the products.
            **product_options(left.dtype, left.dtype if scale is None else dtype, left.device),
        )
    if finite:
        bad = bad[0] if parts == 1 else bad.amin(0)
    if splits == 1:
        return product[0], sums[0] if total else sums, bad
    return product.sum(0).to(dtype), sums.sum(0) if total else sums, bad


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
        table: As in [`outer`].
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
    batch, num_tokens, heads, width = query.shape
    groups, blocks, value = summary.shape[1], summary.shape[2], summary.shape[-1]
    slots = table.shape[-1]
    value_tile, tile = column_tile(width, value), token_tile(slots, width)
    tiles = blocks * triton.cdiv(value, value_tile)
    splits, share = split_slots(slots, tile, tiles * batch * heads)
    output = token_tensor(query, table, value, None)
    computed = query.new_empty((batch, num_tokens, heads) if key_sum is not None else (0,), dtype=torch.float32)
    normalizer = 0
    if denominator is not None:
        normalizer = 3
    elif key_sum is not None:
        normalizer = 1 if plain is None else 2
    with on_device(query):
        attend_kernel[(batch * heads * tiles * splits,)](
            query,
            rows,
            summary,
            summary if key_sum is None else key_sum,
            table,
            output,
            computed if denominator is None else denominator,
            num_tokens,
            table_stride(table),
            *row_strides(query),
            *row_strides(rows),
            factor,
            eps,
            num_blocks=blocks,
            slots=slots,
            splits=splits,
            split_slots=share,
            HEADS=groups,
            REPEATS=heads // groups,
            WIDTH=width,
            VALUE=value,
            PLAIN=rows.shape[-1],
            BLOCK_WIDTH=padded(width),
            BLOCK_VALUE=value_tile,
            BLOCK_PLAIN=padded(rows.shape[-1]),
            BLOCK_TOKENS=tile,
            NORMALIZER=normalizer,
            num_warps=warps(width, value_tile),
            num_stages=2,
            **product_options(query.dtype, summary.dtype, query.device),
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
        table: As in [`outer`].
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
    batch, num_tokens, heads, width = rows.shape
    groups, blocks = matrices.shape[1:3]
    columns = matrices.shape[-2 if transpose else -1]
    vector_width = columns if vectors is None else vectors.shape[-1]
    slots = table.shape[-1]
    tile_columns, tile = column_tile(width, columns), token_tile(slots, width)
    tiles = blocks * triton.cdiv(columns, tile_columns)
    splits, share = split_slots(slots, tile, tiles * batch * heads)
    weight_mode = 0 if outputs is None else 2 if queries is not None and tiles == blocks else 1
    others = (rows, outputs, queries)[weight_mode]
    assert others is not None
    others = dense_rows(others)
    result = token_tensor(rows, table, columns, None)
    apart = vectors is not None and vectors_dtype is not None
    second = token_tensor(rows, table, vector_width, vectors_dtype) if apart else rows.new_empty(0)
    weight = rows.new_empty((batch, num_tokens, heads) if outputs is not None else (0,), dtype=torch.float32)
    with on_device(rows):
        apply_kernel[(batch * heads * tiles * splits,)](
            rows,
            others,
            matrices,
            matrices if vectors is None else vectors,
            rows if scale is None else scale,
            table,
            result,
            second,
            weight,
            num_tokens,
            table_stride(table),
            *row_strides(rows),
            *row_strides(others),
            1 if transpose else columns,
            width if transpose else 1,
            factor,
            num_blocks=blocks,
            slots=slots,
            splits=splits,
            split_slots=share,
            HEADS=groups,
            REPEATS=heads // groups,
            WIDTH=width,
            COLUMNS=columns,
            VECTOR=vector_width,
            BLOCK_WIDTH=padded(width),
            BLOCK_COLUMNS=tile_columns,
            BLOCK_VECTOR=padded(vector_width),
            BLOCK_TOKENS=tile,
            HAS_SCALE=scale is not None,
            WEIGHT=weight_mode,
            VECTORS=0 if vectors is None else 2 if apart else 1,
            num_warps=warps(width, tile_columns),
            num_stages=2,
            **product_options(rows.dtype, matrices.dtype, rows.device),
        )
    return result, second, weight
