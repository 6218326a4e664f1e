# SPDX-License-Identifier: Apache-2.0
"""Kernels of MHLA with hedgehog features: summaries and outputs from projected rows, with the features inside.

    summary_b = factor Σ_{t in b} φ(k_t) v_tᵀ,  sum_b = Σ_{t in b} φ(k_t)                [2K, V] and [2K]
    output_t  = factor · φ(q_t)ᵀ matrix_{b(t)} / (φ(q_t)·vector_{b(t)} + eps)            [V]

with φ of `hedgehog_map`, whose first K numbers belong to p and whose last K to -p. A program computes both halves
of the features of its tokens, since their softmax needs the exponentials of both, and sums or multiplies all of them
with a tile of the columns of v. Where summaries `[2K, V]` need two tiles, p is computed by two programs; the rows of k
and q are then in L2 for the second.

Summaries multiply with W from the left: features are then columns of `[K, tokens]`, and enter the next product as they
come out of the first one.

Shape letters are those of `hedgehog_map`, and G heads of the summaries, V width of values, M blocks, N slots.
"""

# No postponed annotations here: Triton reads `tl.constexpr` from the functions themselves.

from typing import Any

import torch
import triton
import triton.language as tl

from .device_functions import (
    COUNTS,
    dense_head_rows,
    factors,
    head_rows,
    load_matrix,
    load_rows,
    place_of_program,
    product,
    row_product,
    slot_tokens,
    store_rows,
)
from .hedgehog_map import (
    LOG2_E,
    Projection,
    add_feature_eps,
    exponentials,
    load_weight,
    projection_precision,
    projection_scale,
    turned_rows,
)
from .launching import (
    MAX_TILE,
    as_rows,
    ceil_divide,
    launch,
    multiplies_exactly,
    multiplies_from_shared_memory,
    padded,
    product_precision,
    table_sizes,
)


@triton.jit(do_not_specialize=COUNTS)
def hedgehog_summary_kernel(
    key, value, projection, table, summaries, sums,
    first_line, lines, factor, num_tokens, num_blocks, table_stride_batch, slots,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, VALUE: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
    BLOCK_VALUE: tl.constexpr, BLOCK_TOKENS: tl.constexpr, LOG2_E: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Summaries `[lines, M, 2 · WIDTH, VALUE]`, and sums unless None, float32 `[lines, M, 2 · WIDTH]`."""
    COLUMN_TILES: tl.constexpr = (VALUE + BLOCK_VALUE - 1) // BLOCK_VALUE
    PADDED: tl.constexpr = WIDTH < BLOCK_WIDTH
    batch, head, block, column_tile, matrix = place_of_program(COLUMN_TILES, num_blocks, first_line, lines, HEADS, 1)
    feature = tl.arange(0, BLOCK_WIDTH)
    inside = feature < WIDTH
    value_column = column_tile * BLOCK_VALUE + tl.arange(0, BLOCK_VALUE)
    weight = load_weight(projection, head, WIDTH, BLOCK_WIDTH, PRECISION)
    head_of_keys, head_of_values = head_rows(key, batch, head), head_rows(value, batch, head)
    plus_summary = tl.zeros((BLOCK_WIDTH, BLOCK_VALUE), tl.float32)
    minus_summary = tl.zeros((BLOCK_WIDTH, BLOCK_VALUE), tl.float32)
    plus_sum = tl.zeros((BLOCK_WIDTH,), tl.float32)
    minus_sum = tl.zeros((BLOCK_WIDTH,), tl.float32)
    block_table = table + batch * table_stride_batch + block * slots
    for offset in range(0, slots, BLOCK_TOKENS):
        tokens, present = slot_tokens(block_table, offset + tl.arange(0, BLOCK_TOKENS), slots, num_tokens)
        turned = turned_rows(
            head_of_keys, projection, head, tokens, present, BLOCK_TOKENS, WIDTH, BLOCK_WIDTH, PRECISION
        )
        values = load_rows(head_of_values, tokens, present, value_column, VALUE)
        scale = projection_scale(projection, batch, tokens, present, num_tokens, BLOCK_TOKENS) * LOG2_E
        exponents = product(weight, tl.trans(turned), PRECISION) * scale[None, :]
        plus, minus, total = exponentials(exponents, inside[:, None], 0, PADDED)
        plus, minus = add_feature_eps(plus, minus, total, projection.feature_eps, inside[:, None], 0, PADDED)
        # Features of absent tokens are zero.
        inverse = tl.where(present, 1.0 / total, 0.0)[None, :]
        plus, minus = plus * inverse, minus * inverse
        plus_summary += product(plus, values, PRECISION)
        minus_summary += product(minus, values, PRECISION)
        if sums is not None:
            plus_sum += tl.sum(plus, axis=1)
            minus_sum += tl.sum(minus, axis=1)
    pointers = summaries + matrix * (2 * WIDTH * VALUE) + feature[:, None] * VALUE + value_column[None, :]
    mask = inside[:, None] & (value_column < VALUE)[None, :]
    tl.store(pointers, (plus_summary * factor).to(summaries.dtype.element_ty), mask=mask)
    pointers += WIDTH * VALUE
    tl.store(pointers, (minus_summary * factor).to(summaries.dtype.element_ty), mask=mask)
    if sums is not None:
        if column_tile == 0:
            tl.store(sums + matrix * (2 * WIDTH) + feature, plus_sum, mask=inside)
            tl.store(sums + matrix * (2 * WIDTH) + WIDTH + feature, minus_sum, mask=inside)


@triton.jit(do_not_specialize=COUNTS)
def hedgehog_attend_kernel(
    query, projection, table, matrices, vectors, output, denominator,
    first_line, lines, factor, eps, num_tokens, num_blocks, table_stride_batch, slots,
    HEADS: tl.constexpr, REPEATS: tl.constexpr, WIDTH: tl.constexpr, VALUE: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
    BLOCK_VALUE: tl.constexpr, BLOCK_TOKENS: tl.constexpr, LOG2_E: tl.constexpr, PRECISION: tl.constexpr,
    FEATURE_PRECISION: tl.constexpr,
):  # fmt: skip
    """Outputs of HEADS · REPEATS heads; REPEATS of them in a row share a line of `matrices` and `vectors`.

    With `vectors` the divisors are written to `denominator`, `[B, T, H]`.
    PRECISION is that of products with W, FEATURE_PRECISION that of products with `matrices`.
    """
    COLUMN_TILES: tl.constexpr = (VALUE + BLOCK_VALUE - 1) // BLOCK_VALUE
    PADDED: tl.constexpr = WIDTH < BLOCK_WIDTH
    batch, head, block, column_tile, matrix = place_of_program(
        COLUMN_TILES, num_blocks, first_line, lines, HEADS, REPEATS
    )
    feature = tl.arange(0, BLOCK_WIDTH)
    inside = feature < WIDTH
    value_column = column_tile * BLOCK_VALUE + tl.arange(0, BLOCK_VALUE)
    weight = load_weight(projection, head, WIDTH, BLOCK_WIDTH, PRECISION)
    start = matrices + matrix * (2 * WIDTH * VALUE)
    plus_matrix = load_matrix(start, feature, value_column, VALUE, 1, WIDTH, VALUE)
    minus_matrix = load_matrix(start + WIDTH * VALUE, feature, value_column, VALUE, 1, WIDTH, VALUE)
    plus_matrix, minus_matrix = factors(plus_matrix, FEATURE_PRECISION), factors(minus_matrix, FEATURE_PRECISION)
    queries = head_rows(query, batch, head)
    outputs = dense_head_rows(output, batch, head, num_tokens, HEADS * REPEATS, VALUE)
    block_table = table + batch * table_stride_batch + block * slots
    for offset in range(0, slots, BLOCK_TOKENS):
        tokens, present = slot_tokens(block_table, offset + tl.arange(0, BLOCK_TOKENS), slots, num_tokens)
        turned = turned_rows(queries, projection, head, tokens, present, BLOCK_TOKENS, WIDTH, BLOCK_WIDTH, PRECISION)
        scale = projection_scale(projection, batch, tokens, present, num_tokens, BLOCK_TOKENS) * LOG2_E
        exponents = product(turned, tl.trans(weight), PRECISION) * scale[:, None]
        plus, minus, total = exponentials(exponents, inside[None, :], 1, PADDED)
        plus, minus = add_feature_eps(plus, minus, total, projection.feature_eps, inside[None, :], 1, PADDED)
        if vectors is not None:
            # Read for each tile, by a place that changes in no way a compiler sees: they would take 64 registers.
            pointers = vectors + (matrix + offset // slots) * (2 * WIDTH) + feature
            plus_vector = tl.load(pointers, mask=inside, other=0.0)
            minus_vector = tl.load(pointers + WIDTH, mask=inside, other=0.0)
            divisors = tl.sum(plus * plus_vector[None, :], axis=1) + tl.sum(minus * minus_vector[None, :], axis=1)
            divisors += eps * total
            if column_tile == 0:
                per_token = (batch * num_tokens + tokens) * (HEADS * REPEATS) + head
                tl.store(denominator + per_token, divisors / total, mask=present)
        result = row_product(plus, plus_matrix, FEATURE_PRECISION)
        result += row_product(minus, minus_matrix, FEATURE_PRECISION)
        # The division of the softmax comes last, once a row.
        if vectors is not None:
            total = divisors
        result = result * (factor / tl.where(present, total, 1.0))[:, None]
        store_rows(outputs, tokens, present, value_column, result, VALUE)


def _options(rows: torch.Tensor, table: torch.Tensor, columns: int, tile: int, most_tokens: int) -> dict[str, Any]:
    width = rows.shape[-1]
    return {
        **table_sizes(table, rows),
        "WIDTH": width,
        "VALUE": columns,
        "BLOCK_WIDTH": padded(width),
        "BLOCK_VALUE": tile,
        "BLOCK_TOKENS": min(padded(table.shape[-1]), most_tokens),
        "LOG2_E": LOG2_E,
        "PRECISION": projection_precision(rows.dtype),
    }


def hedgehog_summaries(
    key: torch.Tensor,
    value: torch.Tensor,
    projection: Projection,
    table: torch.Tensor,
    lines: tuple[int, int],
    *,
    factor: float,
    dtype: torch.dtype,
    total: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The summaries of a group of lines, and the sums of their features.

    Args:
        key: Projected keys, `[B, T, G, K]`.
        value: `[B, T, G, V]`.
        projection: See [`Projection`].
        table: Token of each slot, int32 `[M, N]` or `[B, M, N]`.
        lines: The first line of the group and its number of lines, L.
        factor: Factor of the summaries.
        dtype: Dtype of the summaries.
        total: Whether to sum features.

    Returns:
        `[L, M, 2K, V]`; and float32 `[L, M, 2K]`, None if not `total`.
    """
    width, columns, blocks = key.shape[-1], value.shape[-1], table.shape[-2]
    from_shared_memory = multiplies_from_shared_memory(key.device)
    tile = min(padded(columns), (MAX_TILE if from_shared_memory else MAX_TILE // 2) // padded(width))
    most_tokens = 32 if key.dtype == torch.bfloat16 else 16
    summaries = key.new_empty(lines[1], blocks, 2 * width, columns, dtype=dtype)
    sums = key.new_empty(summaries.shape[:3], dtype=torch.float32) if total else None
    launch(
        hedgehog_summary_kernel, lines[1] * ceil_divide(columns, tile) * blocks,
        as_rows(key), as_rows(value), projection, table, summaries, sums,
        lines=lines, factor=factor, HEADS=key.shape[2],
        num_warps=8 if 2 * padded(width) * tile > 64 * 64 else 4, num_stages=3,
        **_options(key, table, columns, tile, most_tokens),
    )  # fmt: skip
    return summaries, sums


def hedgehog_attend(
    query: torch.Tensor,
    projection: Projection,
    table: torch.Tensor,
    heads: int,
    lines: tuple[int, int],
    matrices: torch.Tensor,
    vectors: torch.Tensor | None,
    output: torch.Tensor,
    denominator: torch.Tensor,
    *,
    factor: float,
    eps: float,
) -> None:
    """Computes the outputs of a group of lines, and their denominators.

    Args:
        query: Projected queries, `[B, T, H, K]`.
        projection: See [`Projection`].
        table: Token of each slot, int32 `[M, N]` or `[B, M, N]`.
        heads: Heads of mixed summaries in a batch entry.
        lines: The first line of mixed summaries of the group and their number, L.
        matrices: Mixed summaries of the group, `[L, M, 2K, V]`, dense.
        vectors: Mixed sums, float32 `[L, M, 2K]`, dense; None does not divide.
        output: To be written, `[B, T, H, V]`, dense.
        denominator: To be written where something is divided, float32 `[B, T, H]`, dense.
        factor: Factor of the products.
        eps: Added to the denominator.
    """
    width, columns, sharing = query.shape[-1], output.shape[-1], query.shape[2] // heads
    from_shared_memory = multiplies_from_shared_memory(query.device)
    # Room for a tile of summaries beside W; both are held twice to be multiplied exactly.
    room = MAX_TILE if from_shared_memory else MAX_TILE // 8 if multiplies_exactly(query.dtype) else MAX_TILE // 2
    tile = min(padded(columns), room // padded(width))
    most_tokens = 64 if from_shared_memory and query.dtype == torch.bfloat16 else 16
    launch(
        hedgehog_attend_kernel, lines[1] * sharing * ceil_divide(columns, tile) * table.shape[-2],
        as_rows(query), projection, table, matrices, vectors, output, denominator,
        lines=lines, factor=factor, eps=eps, HEADS=heads, REPEATS=sharing,
        FEATURE_PRECISION=product_precision(query.dtype, matrices.dtype),
        # What is read ahead would take the room of a second program.
        num_warps=4 if padded(width) * tile <= 64 * 64 or from_shared_memory else 8,
        num_stages=1 if from_shared_memory and padded(width) > 64 else 2,
        **_options(query, table, columns, tile, most_tokens),
    )  # fmt: skip
