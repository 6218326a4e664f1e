# SPDX-License-Identifier: Apache-2.0
"""Block-parallel MHLA, backward: each token's row times a matrix of its block.

    dk_t = dS_b v_t + dz_b                  dv_t = dS_bᵀ k_t
    dq_t = S̃_b g'_t + δ_t z̃_b              dS̃_b = Σ q_t g'_tᵀ,  dz̃_b = Σ δ_t q_t       (sums by `outer`)

with g' = g / d for the denominator d = φ(q)·z̃ + eps, and its gradient δ = -g'·o = -q·(S̃ g') / d. For a normaliser's
pair p other than query and key, dz_b and δ_t z̃_b are gradients of p. Shape letters are those of `block`.
"""

# No postponed annotations here: torch.library and Triton read them from the functions themselves.

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .device_functions import (
    COUNTS,
    denominator_gradient,
    dense_head_rows,
    head_rows,
    load_matrix,
    load_rows,
    place_of_program,
    product,
    slot_tokens,
    store_rows,
)
from .launching import as_rows, dense_like, launch, matrix_options, padded, product_flops, token_tensor
from .outer import outer


@triton.jit(do_not_specialize=COUNTS)
def apply_kernel(
    rows, outputs, queries, matrices, vectors, scale, table, result, second, weight,
    first_line, lines, matrix_stride_row, matrix_stride_column, factor, num_tokens, num_blocks, table_stride_batch,
    slots, splits, split_slots,
    HEADS: tl.constexpr, REPEATS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, VECTOR: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_VECTOR: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """result_t = factor · scale_t · rows_tᵀ matrix_b(t), plus weight_t · vector_b(t).

    The strides of a matrix say whether it is transposed. With `vectors`, the weighted vector is added to the result,
    or written to `second` if that is given. weight_t is 1 without `weight`. Otherwise it is the gradient of a
    denominator, written to `weight` `[B, T, H]`, where rows are output gradients and `scale` is one over the
    denominator: -scale_t rows_t · output_t from `outputs`, or the same from the products just made,
    -scale_t result_t · query_t from `queries`, free of the rounding of the outputs, where one tile holds all columns.
    """
    COLUMN_TILES: tl.constexpr = (COLUMNS + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    batch, row_head, block, part, matrix = place_of_program(
        splits * COLUMN_TILES, num_blocks, first_line, lines, HEADS, REPEATS
    )
    split, column_tile = part // COLUMN_TILES, part % COLUMN_TILES
    row_column = tl.arange(0, BLOCK_WIDTH)
    column = column_tile * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    start = matrices + matrix * (WIDTH * COLUMNS)
    weights = load_matrix(start, row_column, column, matrix_stride_row, matrix_stride_column, WIDTH, COLUMNS)
    if vectors is not None:
        vector_column = column if second is None else tl.arange(0, BLOCK_VECTOR)
        vector = tl.load(vectors + matrix * VECTOR + vector_column, mask=vector_column < VECTOR, other=0.0)
    row_head_rows = head_rows(rows, batch, row_head)
    token_start = batch * num_tokens * (HEADS * REPEATS) + row_head
    block_table = table + batch * table_stride_batch + block * slots
    first = split * split_slots
    stop = tl.minimum(first + split_slots, slots)
    for offset in range(first, stop, BLOCK_TOKENS):
        slot = offset + tl.arange(0, BLOCK_TOKENS)
        tokens, present = slot_tokens(block_table, slot, stop, num_tokens)
        per_token = token_start + tokens * (HEADS * REPEATS)
        values = load_rows(row_head_rows, tokens, present, row_column, WIDTH)
        output = product(values, weights, PRECISION) * factor
        if scale is not None:
            # After the product: gradients of half precision then enter it as they are.
            row_scale = tl.load(scale + per_token, mask=present, other=0.0)
            output *= row_scale[:, None]
        if vectors is not None:
            if weight is None:
                weighted = tl.zeros((BLOCK_TOKENS, 1), tl.float32) + vector[None, :]
            else:
                if queries is None:
                    others = load_rows(head_rows(outputs, batch, row_head), tokens, present, row_column, WIDTH)
                    row_weight = denominator_gradient(others, values, row_scale)
                else:
                    others = load_rows(head_rows(queries, batch, row_head), tokens, present, column, COLUMNS)
                    row_weight = denominator_gradient(others, output, row_scale)
                if column_tile == 0:
                    tl.store(weight + per_token, row_weight, mask=present)
                weighted = row_weight[:, None] * vector[None, :]
            if second is None:
                output += weighted
            elif column_tile == 0:
                second_rows = dense_head_rows(second, batch, row_head, num_tokens, HEADS * REPEATS, VECTOR)
                store_rows(second_rows, tokens, present, vector_column, weighted, VECTOR)
        result_rows = dense_head_rows(result, batch, row_head, num_tokens, HEADS * REPEATS, COLUMNS)
        store_rows(result_rows, tokens, present, column, output, COLUMNS)


def apply(
    rows: Tensor,
    matrices: Tensor,
    table: Tensor,
    *,
    transpose: bool = False,
    factor: float,
    scale: Tensor | None = None,
    vectors: Tensor | None = None,
    vectors_dtype: torch.dtype | None = None,
    outputs: Tensor | None = None,
    queries: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """factor · scale_t · rows_tᵀ matrix_b(t) + weight_t · vector_b(t).

    Args:
        rows: `[B, T, H, D]`.
        matrices: `[B, G, M, D, E]`, dense; with `transpose`, `[B, G, M, E, D]`.
        table: Token of each slot, int32 `[M, N]` or `[B, M, N]`; T where a slot is empty.
        transpose: Multiply with the transposed matrices.
        factor: Factor of the products.
        scale: float32 `[B, T, H]`; 1 if not given.
        vectors: float32 `[B, G, M, P]`, dense.
        vectors_dtype: Return the weighted vectors by themselves, in this type; if not given, they are added to the
            result (P = E).
        outputs: `[B, T, H, D]`: weight_t = -scale_t rows_t · outputs_t; 1 if not given.
        queries: `[B, T, H, E]`, from which `outputs` were computed with these matrices; given beside them, the weights
            are free of the outputs' rounding where E is at most 128.

    Returns:
        The result `[B, T, H, E]` in the type of `rows`; the weighted vectors `[B, T, H, P]`, and the weights, float32
        `[B, T, H]`, each empty where it is not asked for.
    """
    columns = matrices.shape[-2 if transpose else -1]
    vector_width = columns if vectors is None else vectors.shape[-1]
    programs, column_tile, options = matrix_options(rows, matrices, table, columns)
    from_products = outputs is not None and queries is not None and columns <= column_tile
    result = token_tensor(rows, table, columns)
    apart = vectors is not None and vectors_dtype is not None
    second = token_tensor(rows, table, vector_width, vectors_dtype) if apart else rows.new_empty(0)
    weight = rows.new_empty(rows.shape[:3] if outputs is not None else (0,), dtype=torch.float32)
    launch(
        apply_kernel, programs,
        as_rows(rows),
        None if from_products else as_rows(outputs),
        as_rows(queries) if from_products else None,
        matrices, vectors, scale, table, result,
        second if apart else None,
        None if outputs is None else weight,
        matrix_stride_row=1 if transpose else columns,
        matrix_stride_column=rows.shape[-1] if transpose else 1,
        factor=factor, COLUMNS=columns, VECTOR=vector_width, BLOCK_COLUMNS=column_tile,
        BLOCK_VECTOR=padded(vector_width), **options,
    )  # fmt: skip
    return result, second, weight


@torch.library.custom_op("mhla_hf::block_summary_backward", mutates_args=())
def block_summary_backward(
    grad_summary: Tensor,
    grad_total: Tensor,
    key: Tensor,
    value: Tensor,
    plain: Tensor | None,
    table: Tensor,
    factor: float,
    total: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of key, value and plain (empty without one): each token's row times its block's gradient."""
    vectors = grad_total.contiguous() if total else None
    matrices = grad_summary.contiguous()
    vectors_dtype = None if plain is None else plain.dtype
    grad_key, grad_plain, _ = apply(
        value, matrices, table, transpose=True, factor=factor, vectors=vectors, vectors_dtype=vectors_dtype
    )
    grad_value, _, _ = apply(key, matrices, table, factor=factor)
    return grad_key, grad_value, grad_plain


@block_summary_backward.register_fake
def _(grad_summary, grad_total, key, value, plain, table, factor, total):
    grad_plain = key.new_empty(0) if plain is None or not total else dense_like(plain)
    return dense_like(key), dense_like(value), grad_plain


@register_flop_formula(torch.ops.mhla_hf.block_summary_backward)
def _summary_backward_flops(grad_summary, grad_total, key, *args, **kwargs) -> int:
    return 2 * product_flops(key, grad_summary[-1])


@torch.library.custom_op("mhla_hf::block_attend_backward", mutates_args=())
def block_attend_backward(
    grad_output: Tensor,
    output: Tensor,
    denominator: Tensor,
    query: Tensor,
    summary: Tensor,
    key_sum: Tensor | None,
    plain: Tensor | None,
    table: Tensor,
    factor: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, summary, key_sum and plain (the last two empty where there is none).

    `denominator` is d, empty where nothing is divided; S̃ counts with `factor`.
    """
    # Divisors that were given may lie in memory in any order.
    scale = denominator.reciprocal().contiguous() if denominator.numel() else None
    divides = key_sum is not None
    grad_query, grad_plain, weight = apply(
        grad_output,
        summary.contiguous(),
        table,
        transpose=True,
        factor=factor,
        scale=scale,
        vectors=None if key_sum is None else key_sum.contiguous(),
        vectors_dtype=None if plain is None else plain.dtype,
        outputs=output if divides else None,
        queries=query,
    )
    grad_summary, grad_key_sum, _ = outer(
        query,
        grad_output,
        table,
        summary.shape[1],
        factor=factor,
        dtype=summary.dtype,
        scale=scale,
        total=divides,
        plain=plain,
        weight=weight if divides else None,
    )
    return grad_query, grad_summary, grad_key_sum, grad_plain


@block_attend_backward.register_fake
def _(grad_output, output, denominator, query, summary, key_sum, plain, table, factor):
    nothing = query.new_empty(0)
    grad_key_sum = query.new_empty(0, dtype=torch.float32) if key_sum is None else dense_like(key_sum)
    grad_plain = nothing if plain is None or key_sum is None else dense_like(plain)
    return dense_like(query), dense_like(summary), grad_key_sum, grad_plain


@register_flop_formula(torch.ops.mhla_hf.block_attend_backward)
def _attend_backward_flops(grad_output, output, denominator, query, summary, *args, **kwargs) -> int:
    return 2 * product_flops(query, summary[-1])
