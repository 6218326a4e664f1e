# SPDX-License-Identifier: Apache-2.0
"""Block-parallel MHLA, backward.

    dq_t = S̃_b g'_t + δ_t z̃_b              dS̃_b = Σ q_t g'_tᵀ,  dz̃_b = Σ δ_t q_t       (sums by `outer`)
    dm_ib = dS̃_i · S_b + dz̃_i · z_b        dS_b = Σ_i m_ib dS̃_i,  dz_b = Σ_i m_ib dz̃_i  (by `mixing`)
    dk_t = dS_b v_t + dz_b                  dv_t = dS_bᵀ k_t

with g' = g / d for the denominator d = φ(q)·z̃ + eps, and its gradient δ = -g'·o = -q·(S̃ g') / d. For a normaliser's
pair p other than query and key, dz_b and δ_t z̃_b are gradients of p.

Summaries S and S̃ are computed again. Gradients are sums whose terms cancel: they need all 11 bits of float16
summaries, which is why their matrices meet bfloat16 rows as two halves. As in the forward pass, one group of lines
comes after the other.
Shape letters are those of `block`.
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
    factors,
    head_rows,
    load_rows,
    load_summary,
    place_of_program,
    row_product,
    slot_tokens,
    store_rows,
)
from .launching import (
    as_rows,
    dense_like,
    launch,
    line_groups,
    matrix_tiles,
    or_empty,
    padded,
    product_flops,
    repeated,
    row_count,
    summary_dtype,
    token_tensor,
)
from .mixing import count_mixed_heads, mix, mixing_gradient, sum_gradients
from .operators import operator
from .outer import outer


@triton.jit(do_not_specialize=COUNTS)
def apply_kernel(
    rows, outputs, queries, matrices, scales, vectors, scale, table, result, second, weight,
    first_line, lines, num_tokens, num_blocks, table_stride_batch,
    slots, splits, split_slots,
    heads, REPEATS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, VECTOR: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_VECTOR: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    TRANSPOSE: tl.constexpr, STORED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """result_t = scale_t · rows_tᵀ matrix_b(t), plus weight_t · vector_b(t).

    Matrices `[tiles, lines, M', ..., STORED]`, to be multiplied with `scales` `[lines, M']` if they are given, and
    `vectors` `[lines, M', VECTOR]` are those of a group of lines from `first_line` on. TRANSPOSE: matrices are COLUMNS
    × WIDTH. With `vectors`, the weighted vector is added to the result,
    or written to `second` if that is given. weight_t is 1 without `weight`. Otherwise it is the gradient of a
    denominator, written to `weight` `[B, T, H]`, where rows are output gradients and `scale` is one over the
    denominator: -scale_t rows_t · output_t from `outputs`, or the same from the products just made,
    -scale_t result_t · query_t from `queries`, free of the rounding of the outputs, where one tile holds all columns.
    """
    COLUMN_TILES: tl.constexpr = (COLUMNS + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    batch, row_head, block, part, matrix = place_of_program(
        splits * COLUMN_TILES, num_blocks, first_line, lines, heads, REPEATS
    )
    split, column_tile = part // COLUMN_TILES, part % COLUMN_TILES
    row_column = tl.arange(0, BLOCK_WIDTH)
    column = column_tile * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    weights = load_summary(
        matrices, matrix, lines, num_blocks, row_column, column, WIDTH, COLUMNS, STORED, TRANSPOSE
    )  # fmt: skip
    weights = factors(weights, PRECISION)
    factor = 1.0
    if scales is not None:
        factor = tl.load(scales + matrix)
    if vectors is not None:
        vector_column = column if second is None else tl.arange(0, BLOCK_VECTOR)
        vector = tl.load(vectors + matrix * VECTOR + vector_column, mask=vector_column < VECTOR, other=0.0)
    row_head_rows = head_rows(rows, batch, row_head)
    token_start = batch * num_tokens * (heads * REPEATS) + row_head
    block_table = table + batch * table_stride_batch + block * slots
    first = split * split_slots
    stop = tl.minimum(first + split_slots, slots)
    tile_slot = tl.arange(0, BLOCK_TOKENS)
    following, following_present = slot_tokens(block_table, first + tile_slot, stop, num_tokens)
    for offset in range(first, stop, BLOCK_TOKENS):
        # Known one tile ahead, tokens let the compiler load the next rows before it multiplies these.
        tokens, present = following, following_present
        next_slot = offset + BLOCK_TOKENS + tile_slot
        following, following_present = slot_tokens(block_table, next_slot, stop, num_tokens)
        per_token = token_start + tokens * (heads * REPEATS)
        values = load_rows(row_head_rows, tokens, present, row_column, WIDTH)
        output = row_product(values, weights, PRECISION) * factor
        if scale is not None:
            # After the product: gradients of half precision then enter it as they are.
            row_scale = tl.load(scale + per_token, mask=present, other=0.0)
            output *= row_scale[:, None]
        if weight is not None:
            if queries is None:
                others = load_rows(head_rows(outputs, batch, row_head), tokens, present, row_column, WIDTH)
                row_weight = denominator_gradient(others, values, row_scale)
            else:
                others = load_rows(head_rows(queries, batch, row_head), tokens, present, column, COLUMNS)
                row_weight = denominator_gradient(others, output, row_scale)
            if column_tile == 0:
                tl.store(weight + per_token, row_weight, mask=present)
        if vectors is not None:
            if weight is None:
                weighted = tl.zeros((BLOCK_TOKENS, 1), tl.float32) + vector[None, :]
            else:
                weighted = row_weight[:, None] * vector[None, :]
            if second is None:
                output += weighted
            elif column_tile == 0:
                second_rows = dense_head_rows(second, batch, row_head, num_tokens, heads * REPEATS, VECTOR)
                store_rows(second_rows, tokens, present, vector_column, weighted, VECTOR)
        result_rows = dense_head_rows(result, batch, row_head, num_tokens, heads * REPEATS, COLUMNS)
        store_rows(result_rows, tokens, present, column, output, COLUMNS)


def apply(
    rows: Tensor, matrices: Tensor, scales: Tensor | None, table: Tensor, groups: int, lines: tuple[int, int],
    result: Tensor, *, transpose: bool = False, scale: Tensor | None = None, vectors: Tensor | None = None,
    second: Tensor | None = None, outputs: Tensor | None = None, queries: Tensor | None = None,
    weight: Tensor | None = None,
) -> None:  # fmt: skip
    """Computes scale_t · rows_tᵀ matrix_b(t) + weight_t · vector_b(t) for a group of lines.

    Args:
        rows: `[B, T, H, D]`.
        matrices: The group's matrices, `[tiles · L, M', D, W]` in tiles of W of E columns, dense; with `transpose`,
            `[tiles · L, M', E, W]` in tiles of D columns.
        scales: What float16 matrices are to be multiplied with, float32 `[L, M']`.
        table: Token of each slot, int32 `[M, N]` or `[B, M, N]`; T where a slot is empty.
        groups: Heads of the matrices in a batch entry, a divisor of H.
        lines: The first line of the group and its number of lines, L.
        result: To be written, `[B, T, H, E]`, dense.
        transpose: Multiply with the transposed matrices.
        scale: float32 `[B, T, H]`; 1 if not given.
        vectors: The group's vectors, float32 `[L, M', P]`, dense.
        second: To be written if given, `[B, T, H, P]`, dense: the weighted vectors, which otherwise are added to the
            result (P = E).
        outputs: `[B, T, H, D]`: weight_t = -scale_t rows_t · outputs_t. Not needed where one program has all E
            columns.
        queries: `[B, T, H, E]`, from which outputs were computed with these matrices: the weights then come from the
            products, free of the outputs' rounding.
        weight: To be written, float32 `[B, T, H]`, dense; without it, weights are 1.
    """
    columns = result.shape[-1]
    vector_width = columns if vectors is None else vectors.shape[-1]
    programs, tile, options = matrix_tiles(rows, groups, columns, table, torch.float32)
    from_products = weight is not None and columns <= tile
    launch(
        apply_kernel, lines[1] * programs, as_rows(rows), None if from_products else as_rows(outputs),
        as_rows(queries) if from_products else None, matrices, scales, vectors, scale, table, result, second, weight,
        lines=lines, TRANSPOSE=transpose, STORED=matrices.shape[-1], VECTOR=vector_width,
        BLOCK_VECTOR=padded(vector_width), **options,
    )  # fmt: skip


def needs_output(width: int, columns: int, dtype: torch.dtype) -> bool:
    """Whether the backward pass reads outputs to find the gradient of the divisors.

    Heads are then so wide that no program of [`apply_kernel`] has all of a query's gradient.

    Args:
        width: K, of the features.
        columns: V.
        dtype: Type of the tokens.
    """
    return max(width, columns) > (128 if dtype == torch.bfloat16 else 64)


@operator("mhla_hf::block_attention_backward", differentiable=False)
def block_attention_backward(
    gradient: Tensor, output: Tensor | None, denominator: Tensor, query: Tensor, key: Tensor, value: Tensor,
    normalizer_query: Tensor | None, normalizer_key: Tensor | None, divisor: Tensor | None, mixing: Tensor,
    table: Tensor, divides: bool, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key, value, the normaliser's pair, divisor and mixing, empty for what is not given.

    Args beyond those of `block_attention`:
        gradient: Gradient of the output.
        output: `[B, T, H, V]`; needed where something is divided, see [`needs_output`].
        denominator: The denominators with eps, float32 `[B, T, H]`; empty unless `divides`.
    """
    batch, _, heads, width = query.shape
    groups, columns, blocks = key.shape[2], value.shape[-1], table.shape[-2]
    mixed_heads, mixing = count_mixed_heads(mixing.shape, heads, groups), mixing.contiguous()
    repeats = mixed_heads // groups
    dtype = summary_dtype(query.dtype, in_backward=True)
    grad_mixing = []
    scale = None
    if divides:
        scale = denominator.reciprocal()
    elif divisor is not None:
        # Divisors that were given may lie in memory in any order.
        scale = (divisor + eps).reciprocal().contiguous()
    weight = None if scale is None else token_tensor(query, table, 1, torch.float32).squeeze(-1)
    grad_query, grad_key, grad_value, grad_normalizer_query, grad_normalizer_key = (
        None if tokens is None else token_tensor(tokens, table, tokens.shape[-1])
        for tokens in (query, key, value, normalizer_query, normalizer_key)
    )
    assert grad_query is not None and grad_key is not None and grad_value is not None
    for lines in line_groups(batch * groups, (1 + repeats) * row_count(blocks) * width * columns * dtype.itemsize):
        row_lines = repeated(lines, repeats)
        summaries = outer(key, value, table, groups, lines, dtype=dtype, total=divides, plain=normalizer_key)
        mixed, scales, mixed_sums = mix(summaries, mixing, groups, lines)
        apply(
            gradient, mixed, scales, table, mixed_heads, row_lines, grad_query, transpose=True, scale=scale,
            vectors=mixed_sums, second=grad_normalizer_query, outputs=output, queries=query, weight=weight,
        )  # fmt: skip
        del mixed
        grad_mixed = outer(
            query, gradient, table, mixed_heads, row_lines, dtype=dtype, scale=scale, total=divides,
            plain=normalizer_query, weight=weight if divides else None,
        )  # fmt: skip
        grad_mixing.append(mixing_gradient(grad_mixed, summaries, mixing, lines, query.dtype))
        del summaries
        grad_summaries, scales, grad_sums = mix(grad_mixed, mixing, groups, lines, transpose=True)
        del grad_mixed
        apply(
            value, grad_summaries, scales, table, groups, lines, grad_key, transpose=True, vectors=grad_sums,
            second=grad_normalizer_key,
        )  # fmt: skip
        apply(key, grad_summaries, scales, table, groups, lines, grad_value)
    pair = or_empty(query, grad_normalizer_query, grad_normalizer_key)
    grad_divisor = or_empty(query, None if divisor is None else weight)
    return grad_query, grad_key, grad_value, *pair, *grad_divisor, sum_gradients(grad_mixing, mixing, batch)


@torch.library.register_fake("mhla_hf::block_attention_backward")
def _(gradient, output, denominator, *inputs):
    return or_empty(inputs[0], *(tensor if tensor is None else dense_like(tensor) for tensor in inputs[:7]))


def block_flops(query, key, value, mixing) -> int:
    """Products of block-parallel MHLA for tensors of these shapes: 2 B T K V (G + H), and 2 B S M² K V for mixing."""
    mixed_heads = count_mixed_heads(mixing, query[2], key[2])
    mixed = 2 * query[0] * mixed_heads * mixing[-1] ** 2 * query[-1] * value[-1]
    return product_flops(query, value[-1]) + product_flops(key, value[-1]) + mixed


@register_flop_formula(torch.ops.mhla_hf.block_attention_backward)
def _flops(*args, **kwargs) -> int:
    """Twice the forward pass, as of any product. What is computed again does not count."""
    query, key, value, _, _, _, mixing = args[3:10]
    return 2 * block_flops(query, key, value, mixing)
