# SPDX-License-Identifier: Apache-2.0
"""Launches of the backward causal kernels on plain tensors: no autograd, no custom operators.

Shape letters: B batch, T tokens, H query heads, G key heads (H or a divisor), S heads of the prefix (H, or G where all
heads share the mixing weights), K and V widths, P width of the normaliser's pair, M chunks, N slots of a chunk.
"""

from __future__ import annotations

import torch
import triton

from .causal_gradient_kernels import key_gradient_kernel, query_gradient_kernel
from .causal_launch import causal_options, common_type, diagonal_strides
from .causal_pair_kernels import plain_gradient_kernel
from .launching import dense_rows, on_device, padded, row_strides, token_tensor


def query_gradient(
    gradient: torch.Tensor,
    output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    prefix: torch.Tensor,
    mixing: torch.Tensor,
    limit: torch.Tensor,
    table: torch.Tensor,
    *,
    factor: float,
    scale: torch.Tensor | None,
    prefix_sum: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of the queries, of the denominators, and of m_ii.

    Args:
        gradient: Of the outputs, `[B, T, H, V]`.
        output: `[B, T, H, V]`.
        query: As in [`causal_attend`], like all that follows.
        key: `[B, T, G, K]`.
        value: `[B, T, G, V]`.
        prefix: `[B, S, M, K, V]`.
        mixing: The weights.
        limit: See [`limits`].
        table: Token of each slot.
        factor: A number.
        scale: One over the denominators, float32 `[B, T, H]`; `None` where nothing is divided.
        prefix_sum: Where the normaliser's pair is query and key themselves, `[B, S, M, K]`.

    Returns:
        `[B, T, H, K]` in the type of `query`, float32 `[B, T, H]` (empty without `scale`), and float32 `[B, H, M]`,
        but for the part of a normaliser's pair of its own.
    """
    gradient, output = dense_rows(gradient), output.contiguous()
    query, key, value = dense_rows(query), dense_rows(key), dense_rows(value)
    batch, _, heads, width = query.shape
    blocks, columns = table.shape[-2], value.shape[-1]
    tile, parts, options = causal_options(query, prefix, table, columns, width)
    result = token_tensor(query, table, width)
    weight = query.new_empty(query.shape[:3] if scale is not None else (0,), dtype=torch.float32)
    share = query.new_empty(parts, batch, heads, blocks, dtype=torch.float32)
    with on_device(query):
        query_gradient_kernel[(batch * heads * blocks * parts,)](
            gradient,
            output,
            query,
            key,
            value,
            prefix,
            prefix if prefix_sum is None else prefix_sum,
            mixing,
            limit,
            table,
            share if scale is None else scale,
            result,
            weight,
            share,
            *row_strides(gradient, query, key, value),
            *diagonal_strides(mixing),
            share.stride(0),
            factor,
            REPEATS=heads // key.shape[2],
            PREFIX_REPEATS=heads // prefix.shape[1],
            WIDTH=width,
            VALUE=columns,
            BLOCK_WIDTH=tile,
            BLOCK_VALUE=padded(columns),
            NORMALIZER=0 if scale is None else 2 if prefix_sum is None else 1,
            TOKEN_TYPE=common_type(gradient, value, key),
            **options,
        )
    return result, weight, share.sum(0)


def key_gradient(
    rows: torch.Tensor,
    inner: torch.Tensor,
    other: torch.Tensor,
    matrices: torch.Tensor,
    mixing: torch.Tensor,
    limit: torch.Tensor,
    table: torch.Tensor,
    *,
    transpose: bool,
    factor: float,
    scale: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    vectors: torch.Tensor | None = None,
) -> torch.Tensor:
    """m_ii Σ_{t ≥ j} (scale_t rows_j · inner_t + weight_t) other_t over the chunk, plus what comes of summaries.

    The gradient of values for rows = keys, inner = queries, other = gradients of the outputs; that of keys for
    rows = values, inner = gradients of the outputs, other = queries.

    Args:
        rows: `[B, T, G, D]`.
        inner: `[B, T, H, D]`.
        other: `[B, T, H, E]`.
        matrices: Gradients of the summaries, dense, `[B, G, M, D, E]`, or with `transpose` `[B, G, M, E, D]`.
        mixing: As in [`causal_attend`].
        limit: See [`limits`].
        table: Token of each slot.
        transpose: Multiply with the transposed matrices.
        factor: What the matrices are multiplied with.
        scale: float32 `[B, T, H]`; 1 if not given.
        weight: float32 `[B, T, H]`; given together with `vectors`.
        vectors: Added to the rows of each chunk, float32 `[B, G, M, E]`, dense.

    Returns:
        `[B, T, G, E]` in the type of `rows`.
    """
    rows, inner, other = dense_rows(rows), dense_rows(inner), dense_rows(other)
    batch, _, heads, width = rows.shape
    columns = other.shape[-1]
    tile, tiles, options = causal_options(rows, matrices, table, width, columns)
    result = token_tensor(rows, table, columns)
    with on_device(rows):
        key_gradient_kernel[(batch * heads * table.shape[-2] * tiles,)](
            rows,
            inner,
            other,
            matrices,
            matrices if vectors is None else vectors,
            mixing,
            limit,
            table,
            matrices if scale is None else scale,
            matrices if weight is None else weight,
            result,
            *row_strides(rows, inner, other),
            1 if transpose else columns,
            width if transpose else 1,
            *diagonal_strides(mixing),
            factor,
            REPEATS=inner.shape[2] // heads,
            WIDTH=width,
            COLUMNS=columns,
            BLOCK_WIDTH=padded(width),
            BLOCK_COLUMNS=tile,
            HAS_SCALE=scale is not None,
            HAS_WEIGHT=weight is not None,
            TOKEN_TYPE=common_type(rows, inner),
            **options,
        )
    return result


def plain_gradient(
    rows: torch.Tensor,
    other: torch.Tensor,
    vectors: torch.Tensor,
    mixing: torch.Tensor,
    limit: torch.Tensor,
    table: torch.Tensor,
    weight: torch.Tensor,
    *,
    of_query: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradient of one side of a normaliser's pair of its own.

    Args:
        rows: The side whose gradient is wanted: queries `[B, T, H, P]` with `of_query`, else keys `[B, T, G, P]`.
        other: The other side.
        vectors: Mixed sums `[B, S, M, P]` with `of_query`, else gradients of the chunks' sums `[B, G, M, P]`; float32,
            dense.
        mixing: As in [`causal_attend`].
        limit: See [`limits`].
        table: Token of each slot.
        weight: Gradients of the denominators, float32 `[B, T, H]`.
        of_query: Which side it is.

    Returns:
        The gradient of `rows`, and with `of_query` this pair's part of the gradient of m_ii, float32 `[B, H, M]`
        (otherwise empty).
    """
    rows, other = dense_rows(rows), dense_rows(other)
    batch, _, heads, width = rows.shape
    blocks = table.shape[-2]
    _, _, options = causal_options(rows, vectors, table, width, width)
    result = token_tensor(rows, table, width)
    # One tile holds all columns: there are no matrices.
    parts = triton.cdiv(table.shape[-1], options["BLOCK_TOKENS"])
    share = rows.new_empty((parts, batch, heads, blocks) if of_query else (0,), dtype=torch.float32)
    with on_device(rows):
        plain_gradient_kernel[(batch * heads * blocks * parts,)](
            rows,
            other,
            vectors,
            mixing,
            limit,
            table,
            weight,
            result,
            share,
            *row_strides(rows, other),
            *diagonal_strides(mixing),
            share.stride(0),
            REPEATS=max(heads, other.shape[2]) // min(heads, other.shape[2]),
            VECTOR_REPEATS=heads // vectors.shape[1],
            PLAIN=width,
            BLOCK_PLAIN=padded(width),
            OF_QUERY=of_query,
            **options,
        )
    return result, share.sum(0) if of_query else share
