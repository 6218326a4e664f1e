# SPDX-License-Identifier: Apache-2.0
"""Launches of the forward causal kernels on plain tensors: no autograd, no custom operators.

Shape letters: B batch, T tokens, H query heads, G key heads (H or a divisor), S heads of the prefix (H, or G where all
heads share the mixing weights), K and V widths, P width of the normaliser's pair, M chunks, N slots of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .causal_kernels import causal_attend_kernel, limit_kernel
from .launching import (
    MAX_TILE,
    dense_rows,
    is_padded,
    multiplies_exactly,
    multiplies_from_shared_memory,
    on_device,
    padded,
    product_options,
    row_strides,
    table_arguments,
    token_tensor,
    token_tile,
)
from .mixing import mixing_strides


TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def common_type(*tensors: torch.Tensor) -> tl.dtype:
    """The type that products of these tensors' rows are exact in."""
    dtypes = {tensor.dtype for tensor in tensors}
    return TYPES[dtypes.pop()] if len(dtypes) == 1 else tl.float32


def diagonal_strides(mixing: torch.Tensor) -> tuple[int, int, int]:
    """Strides of batch and head of mixing weights, and of their diagonal."""
    batch, head, row, column = mixing_strides(mixing)
    return batch, head, row + column


def causal_options(
    tokens: torch.Tensor, matrices: torch.Tensor, table: torch.Tensor, width: int, columns: int
) -> tuple[int, int, dict[str, Any]]:
    """The tile of columns, the number of tiles of a chunk, and what all causal kernels are told.

    Tiles are smaller than the block kernels' where rows of tokens or products are large: the scores of a chunk have to
    find room in the registers beside them. Chosen from what the compiler uses of them for compute capabilities 8.0 and
    9.0, so that nothing spills.

    Args:
        tokens: `[B, T, H, D]`, H being the heads of the launch.
        matrices: What tokens are multiplied with.
        table: Token of each slot, `[M, N]` or `[B, M, N]`.
        width: Of the rows that a program holds whole.
        columns: Of the result.
    """
    slots = table.shape[-1]
    row_bytes = padded(width) * tokens.element_size()
    roomy = multiplies_from_shared_memory(tokens.device)
    wide = padded(width) > 128
    # Summaries in bfloat16 take half the room, and so does everything that they are multiplied with.
    tight = matrices.dtype == torch.float32
    exact = multiplies_exactly(tokens.dtype)
    halved = tight and (exact or tokens.dtype == torch.float32 or wide or not roomy)
    quartered = is_padded(width) and (exact or tokens.dtype == torch.float32)
    largest = MAX_TILE // 4 if quartered else MAX_TILE // 2 if halved else MAX_TILE
    column_tile = min(padded(columns), largest // padded(width))
    if (tight and wide) or (is_padded(width) and not roomy) or exact:
        most_tokens = 16
    elif quartered or not (roomy or (row_bytes <= 128 and not tight)):
        most_tokens = 32
    else:
        most_tokens = 64
    token_block = min(token_tile(slots, width), most_tokens)
    options = {
        **table_arguments(table, tokens),
        "HEADS": tokens.shape[2],
        "BLOCK_TOKENS": token_block,
        "num_warps": 4 if row_bytes * column_tile <= 128 * 64 and not exact else 8,
        "num_stages": 2,
        **product_options(tokens.dtype, matrices.dtype, tokens.device),
    }
    return column_tile, triton.cdiv(columns, column_tile) * triton.cdiv(slots, token_block), options


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
    batch, _, heads, width = query.shape
    columns = value.shape[-1]
    value_tile, tiles, options = causal_options(query, prefix, table, max(width, plain_key.shape[-1]), columns)
    output = token_tensor(query, table, columns)
    divides = prefix_sum is not None
    denominator = query.new_empty(query.shape[:3] if divides else (0,), dtype=torch.float32)
    with on_device(query):
        causal_attend_kernel[(batch * heads * table.shape[-2] * tiles,)](
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
            *row_strides(query, key, value, plain_query, plain_key),
            *diagonal_strides(mixing),
            factor,
            eps,
            REPEATS=heads // key.shape[2],
            PREFIX_REPEATS=heads // prefix.shape[1],
            WIDTH=width,
            VALUE=columns,
            PLAIN=plain_key.shape[-1],
            BLOCK_WIDTH=padded(width),
            BLOCK_VALUE=value_tile,
            BLOCK_PLAIN=padded(plain_key.shape[-1]),
            NORMALIZER=0 if not divides else 1 if plain is None else 2,
            TOKEN_TYPE=common_type(query, key),
            PLAIN_TYPE=common_type(plain_query, plain_key),
            **options,
        )
    return output, denominator
