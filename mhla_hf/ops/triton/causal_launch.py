# SPDX-License-Identifier: Apache-2.0
"""Launches of the causal kernels on plain tensors: no autograd, no custom operators.

Shape letters: B batch, T tokens, H query heads, G key heads (H or a divisor), S heads of the prefix (H, or G where all
heads share the mixing weights), K and V widths, P width of the normaliser's pair, M chunks, N slots of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .block_launch import token_tensor
from .causal_gradient_kernels import key_gradient_kernel, plain_gradient_kernel, query_gradient_kernel
from .causal_kernels import causal_attend_kernel, limit_kernel
from .launching import (
    MAX_TILE,
    dense_rows,
    multiplies_from_shared_memory,
    on_device,
    padded,
    product_options,
    row_strides,
    table_stride,
    token_tile,
)
from .mixing import mixing_strides


TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def _common_type(*tensors: torch.Tensor) -> tl.dtype:
    """The type that products of these tensors' rows are exact in."""
    dtypes = {tensor.dtype for tensor in tensors}
    return TYPES[dtypes.pop()] if len(dtypes) == 1 else tl.float32


def _diagonal_strides(mixing: torch.Tensor) -> tuple[int, int, int]:
    batch, head, row, column = mixing_strides(mixing)
    return batch, head, row + column


def _options(
    tokens: torch.Tensor, matrices: torch.Tensor, slots: int, width: int, columns: int
) -> tuple[int, dict[str, Any]]:
    """The tile of columns, and what all kernels take: slots, a tile of them, types of products, warps.

    Tiles are smaller than the block kernels' where rows of tokens or products are large: the scores of a chunk have to
    find room in the registers beside them. Chosen from what the compiler uses of them for compute capabilities 8.0 and
    9.0, so that nothing spills.
    """
    row_bytes = padded(width) * tokens.element_size()
    roomy = multiplies_from_shared_memory(tokens.device)
    wide = padded(width) > 128
    # Summaries in bfloat16 take half the room, and so does everything that they are multiplied with.
    tight = matrices.dtype == torch.float32
    halved = tight and (tokens.dtype == torch.float32 or not (roomy or wide))
    # Masks of padded widths take registers too.
    quartered = tokens.dtype == torch.float32 and 64 < width < 128
    largest = MAX_TILE // 4 if quartered else MAX_TILE // 2 if halved else MAX_TILE
    column_tile = min(padded(columns), largest // padded(width))
    most_tokens = 16 if tight and wide else 64 if roomy or (row_bytes <= 128 and not tight) else 32
    options = {
        "slots": slots,
        "BLOCK_TOKENS": min(token_tile(slots, width), most_tokens),
        "num_warps": 4 if row_bytes * column_tile <= 128 * 64 else 8,
        "num_stages": 2,
        **product_options(tokens.dtype, matrices.dtype, tokens.device),
    }
    return column_tile, options


def limits(first_bad: torch.Tensor, starts: torch.Tensor | None, slots: int) -> torch.Tensor:
    """The slot of each chunk from which on outputs are NaN, int32 `[B, G, M]`; N where none are.

    Args:
        first_bad: The first bad slot of each chunk, int32 `[B, G, M]`, N where there is none.
        starts: The first chunk of each chunk's document, int32 `[B, M]`; `None` for one document.
        slots: N.
    """
    batch, heads, blocks = first_bad.shape
    limit = torch.empty_like(first_bad)
    tile = min(64, padded(blocks))
    with on_device(first_bad):
        limit_kernel[(batch * heads, triton.cdiv(blocks, tile))](
            first_bad,
            first_bad if starts is None else starts,
            limit,
            blocks,
            slots,
            0 if starts is None else starts.stride(0),
            HEADS=heads,
            HAS_STARTS=starts is not None,
            BLOCK=tile,
        )
    return limit


def causal_attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    prefix: torch.Tensor,
    mixing: torch.Tensor,
    limit: torch.Tensor,
    table: torch.Tensor,
    *,
    factor: float,
    eps: float,
    prefix_sum: torch.Tensor | None,
    plain: tuple[torch.Tensor, torch.Tensor] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs from the mixed prefix and the own chunk.

    Args:
        query: `[B, T, H, K]`.
        key: `[B, T, G, K]`.
        value: `[B, T, G, V]`.
        prefix: 1 / factor of Σ_{b<i} m_ib S_b, `[B, S, M, K, V]`, dense.
        mixing: float32 `[M, M]`, `[1 or H, M, M]` or `[B, 1 or H, M, M]`; the diagonal is read.
        limit: See [`limits`].
        table: Token of each slot, int32 `[M, N]` or `[B, M, N]`; T where a slot is empty.
        factor: A number.
        eps: Added to the denominator.
        prefix_sum: Σ_{b<i} m_ib z_b, float32 `[B, S, M, P]`, dense; without it nothing is divided.
        plain: Queries and keys of the normaliser, where they differ.

    Returns:
        `[B, T, H, V]`, zero for padding, and the denominators with eps, float32 `[B, T, H]` (empty where nothing is
        divided).
    """
    query, key, value = dense_rows(query), dense_rows(key), dense_rows(value)
    plain_query, plain_key = (query, key) if plain is None else (dense_rows(plain[0]), dense_rows(plain[1]))
    batch, num_tokens, heads, width = query.shape
    blocks, slots = table.shape[-2:]
    columns = value.shape[-1]
    value_tile, options = _options(query, prefix, slots, max(width, plain_key.shape[-1]), columns)
    if query.dtype == torch.float32 and 64 < query.shape[-1] < 128:
        options["BLOCK_TOKENS"] = min(options["BLOCK_TOKENS"], 32)
    output = token_tensor(query, table, columns, None)
    divides = prefix_sum is not None
    denominator = query.new_empty((batch, num_tokens, heads) if divides else (0,), dtype=torch.float32)
    tiles = triton.cdiv(columns, value_tile) * triton.cdiv(slots, options["BLOCK_TOKENS"])
    with on_device(query):
        causal_attend_kernel[(batch * heads * blocks * tiles,)](
            query,
            key,
            value,
            plain_query,
            plain_key,
            prefix,
            prefix if prefix_sum is None else prefix_sum,
            mixing,
            limit,
            table,
            output,
            denominator,
            num_tokens,
            blocks,
            table_stride(table),
            *row_strides(query),
            *row_strides(key),
            *row_strides(value),
            *row_strides(plain_query),
            *row_strides(plain_key),
            *_diagonal_strides(mixing),
            factor,
            eps,
            HEADS=heads,
            REPEATS=heads // key.shape[2],
            PREFIX_REPEATS=heads // prefix.shape[1],
            WIDTH=width,
            VALUE=columns,
            PLAIN=plain_key.shape[-1],
            BLOCK_WIDTH=padded(width),
            BLOCK_VALUE=value_tile,
            BLOCK_PLAIN=padded(plain_key.shape[-1]),
            NORMALIZER=0 if not divides else 1 if plain is None else 2,
            TOKEN_TYPE=_common_type(query, key),
            PLAIN_TYPE=_common_type(plain_query, plain_key),
            **options,
        )
    return output, denominator


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
    batch, num_tokens, heads, width = query.shape
    blocks, slots = table.shape[-2:]
    columns = value.shape[-1]
    tile, options = _options(query, prefix, slots, columns, width)
    result = token_tensor(query, table, width, None)
    weight = query.new_empty((batch, num_tokens, heads) if scale is not None else (0,), dtype=torch.float32)
    parts = triton.cdiv(width, tile) * triton.cdiv(slots, options["BLOCK_TOKENS"])
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
            num_tokens,
            blocks,
            table_stride(table),
            *row_strides(gradient),
            *row_strides(query),
            *row_strides(key),
            *row_strides(value),
            *_diagonal_strides(mixing),
            share.stride(0),
            factor,
            HEADS=heads,
            REPEATS=heads // key.shape[2],
            PREFIX_REPEATS=heads // prefix.shape[1],
            WIDTH=width,
            VALUE=columns,
            BLOCK_WIDTH=tile,
            BLOCK_VALUE=padded(columns),
            NORMALIZER=0 if scale is None else 2 if prefix_sum is None else 1,
            TOKEN_TYPE=_common_type(gradient, value, key),
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
    batch, num_tokens, heads, width = rows.shape
    blocks, slots = table.shape[-2:]
    columns = other.shape[-1]
    tile, options = _options(rows, matrices, slots, width, columns)
    result = token_tensor(rows, table, columns, None)
    tiles = triton.cdiv(columns, tile) * triton.cdiv(slots, options["BLOCK_TOKENS"])
    with on_device(rows):
        key_gradient_kernel[(batch * heads * blocks * tiles,)](
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
            num_tokens,
            blocks,
            table_stride(table),
            *row_strides(rows),
            *row_strides(inner),
            *row_strides(other),
            1 if transpose else columns,
            width if transpose else 1,
            *_diagonal_strides(mixing),
            factor,
            HEADS=heads,
            REPEATS=inner.shape[2] // heads,
            WIDTH=width,
            COLUMNS=columns,
            BLOCK_WIDTH=padded(width),
            BLOCK_COLUMNS=tile,
            HAS_SCALE=scale is not None,
            HAS_WEIGHT=weight is not None,
            TOKEN_TYPE=_common_type(rows, inner),
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
    batch, num_tokens, heads, width = rows.shape
    blocks, slots = table.shape[-2:]
    # One tile holds all columns: there are no matrices.
    _, options = _options(rows, vectors, slots, width, width)
    result = token_tensor(rows, table, width, None)
    parts = triton.cdiv(slots, options["BLOCK_TOKENS"])
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
            num_tokens,
            blocks,
            table_stride(table),
            *row_strides(rows),
            *row_strides(other),
            *_diagonal_strides(mixing),
            share.stride(0),
            HEADS=heads,
            REPEATS=max(heads, other.shape[2]) // min(heads, other.shape[2]),
            VECTOR_REPEATS=heads // vectors.shape[1],
            PLAIN=width,
            BLOCK_PLAIN=padded(width),
            OF_QUERY=of_query,
            **options,
        )
    return result, share.sum(0) if of_query else share
