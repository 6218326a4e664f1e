# SPDX-License-Identifier: Apache-2.0
"""Block-parallel MHLA, forward: summaries, mixing and outputs, without permuting tokens into blocks.

    S_b = Σ_{t in b} φ(k_t) v_tᵀ,  z_b = Σ_{t in b} φ(k_t)            summaries, by `outer`
    S̃_i = Σ_b m_ib S_b,  z̃_i = Σ_b m_ib z_b                           mixing, by `mixing`
    o_t = φ(q_t)ᵀ S̃_{b(t)} / (φ(q_t)·z̃_{b(t)} + eps)                  outputs, by the kernel below

One custom operator does all of it; where the summaries would take too much memory, for one group of lines (heads of
batch entries) after the other. Summaries are not kept for the backward pass, and are the same with and without
gradients: float16 with a power of two each, or float32 beside float32 tokens that are multiplied exactly.

Shape letters: B batch, T tokens, H heads, G heads of the summaries (H or a divisor), K and V widths, P width of the
normaliser's pair, M blocks, N slots of a block, L lines of a group.
"""

# No postponed annotations here: torch.library and Triton read them from the functions themselves.

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ...layouts.blocks import BlockLayout
from ...layouts.sequences import SequenceLayout
from ..normalizers import PRODUCTS
from ..operands import Operands, from_head_blocks, head_blocks
from .block_gradient import block_attention_backward, block_flops, needs_output
from .device_functions import (
    COUNTS,
    denominators,
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
    empty_denominators,
    launch,
    line_groups,
    matrix_tiles,
    padded,
    repeated,
    row_count,
    summary_dtype,
    token_tensor,
)
from .mixing import count_mixed_heads, mix
from .operators import operator
from .outer import outer
from .small import serves_by_small_kernels, small_attention


def triton_block_mhla_attention(operands: Operands, mixing: Tensor, layout: BlockLayout | SequenceLayout) -> Tensor:
    """Non-causal MHLA by Triton kernels, without checks.

    Args:
        operands: The tokens and the normaliser.
        mixing: Weights of the layout's own blocks, `[..., M, M]`.
        layout: The blocks.

    Returns:
        `[B, T, H, V]` in the dtype of the values; zero for padding.
    """
    query, key, value = operands.tokens
    entry, eps = operands.entry, operands.eps
    mixing = mixing.float()
    divisor, divides = None, bool(entry.kernel)
    if entry.kernel is None:
        with torch.autocast(query.device.type, enabled=False):
            key_sum = head_blocks(operands.normalizer_key, layout, torch.float32).sum(-2)
            query_blocks = head_blocks(operands.normalizer_query, layout, torch.float32)
            products = PRODUCTS[operands.normalizer].block(query_blocks, key_sum, mixing)
            divisor, eps = entry.divisor(from_head_blocks(products, layout).squeeze(-1), eps), 0.0
    pair = operands.pair if divides else (None, None)
    tokens, table = (query.to(value.dtype), key.to(value.dtype), value), layout.token_table(query.device)
    if pair[0] is None and divisor is None and serves_by_small_kernels(*tokens, mixing, operands.normalizer):
        return small_attention(*tokens, mixing, table, divides, eps)[0]
    output, _ = block_attention(*tokens, *pair, divisor, mixing, table, divides, eps)
    return output


@triton.jit(do_not_specialize=COUNTS)
def attend_kernel(
    query, plain, summary, scales, key_sum, divisor, table, output, denominator,
    first_line, lines, eps, num_tokens, num_blocks, table_stride_batch, slots, splits, split_slots,
    heads, REPEATS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, PLAIN: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_PLAIN: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    STORED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """output_t = query_tᵀ summary_b(t), divided by plain_t · key_sum_b(t) + eps.

    heads is the number of heads of `summary`, REPEATS the query heads that share one; for a group of lines from
    `first_line` on, `summary` is `[tiles, lines, M', WIDTH, STORED]`, to be multiplied with `scales` `[lines, M']` if
    they are given, and `key_sum` `[lines, M', PLAIN]`. With `key_sum`, the
    divisor is written to `denominator`, and `plain` is the query where it is None. Without it, the divisor is
    `divisor` + eps, `[B, T, H]`, or 1 where that is None.
    """
    COLUMN_TILES: tl.constexpr = (COLUMNS + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    batch, row_head, block, part, matrix = place_of_program(
        splits * COLUMN_TILES, num_blocks, first_line, lines, heads, REPEATS
    )
    split, column_tile = part // COLUMN_TILES, part % COLUMN_TILES
    row_column = tl.arange(0, BLOCK_WIDTH)
    column = column_tile * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    plain_column = tl.arange(0, BLOCK_PLAIN)
    weights = load_summary(
        summary, matrix, lines, num_blocks, row_column, column, WIDTH, COLUMNS, STORED, False
    )  # fmt: skip
    weights = factors(weights, PRECISION)
    factor = 1.0
    if scales is not None:
        factor = tl.load(scales + matrix)
    if key_sum is not None:
        sums = tl.load(key_sum + matrix * PLAIN + plain_column, mask=plain_column < PLAIN, other=0.0)
    queries = head_rows(query, batch, row_head)
    outputs = dense_head_rows(output, batch, row_head, num_tokens, heads * REPEATS, COLUMNS)
    block_table = table + batch * table_stride_batch + block * slots
    first = split * split_slots
    stop = tl.minimum(first + split_slots, slots)
    tile_slot = tl.arange(0, BLOCK_TOKENS)
    for offset in range(first, stop, BLOCK_TOKENS):
        tokens, present = slot_tokens(block_table, offset + tile_slot, stop, num_tokens)
        rows = load_rows(queries, tokens, present, row_column, WIDTH)
        result = row_product(rows, weights, PRECISION)
        row_factor = tl.full((BLOCK_TOKENS,), 1.0, tl.float32) * factor
        per_token = (batch * num_tokens + tokens) * (heads * REPEATS) + row_head
        if key_sum is not None:
            plain_rows = rows
            if plain is not None:
                plain_rows = load_rows(head_rows(plain, batch, row_head), tokens, present, plain_column, PLAIN)
            divisors = denominators(plain_rows, sums, eps)
            if column_tile == 0:
                tl.store(denominator + per_token, divisors, mask=present)
            row_factor /= tl.where(present, divisors, 1.0)
        elif divisor is not None:
            row_factor /= tl.where(present, tl.load(divisor + per_token, mask=present, other=1.0) + eps, 1.0)
        store_rows(outputs, tokens, present, column, result * row_factor[:, None], COLUMNS)


@operator("mhla_hf::block_attention")
def block_attention(
    query: Tensor, key: Tensor, value: Tensor, normalizer_query: Tensor | None, normalizer_key: Tensor | None,
    divisor: Tensor | None, mixing: Tensor, table: Tensor, divides: bool, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Block-parallel MHLA.

    Args:
        query: `[B, T, H, K]`.
        key: `[B, T, G, K]`, of the same dtype.
        value: `[B, T, G, V]`, of the same dtype.
        normalizer_query: Queries of the normaliser where there is one and they differ, `[B, T, H, P]`.
        normalizer_key: Keys of the normaliser, given together with them, `[B, T, G, P]`.
        divisor: Divisor in place of φ(q)·z̃, float32 `[B, T, H]`; not where `divides`.
        mixing: float32 `[M, M]`, `[1 or H, M, M]` or `[B, 1 or H, M, M]`.
        table: Token of each slot, int32 `[M, N]` or `[B, M, N]`, T where a slot is empty.
        divides: Whether to divide by φ(q)·z̃ + eps.
        eps: Added to either divisor.

    Returns:
        `[B, T, H, V]` in the dtype of `query`, and the denominators, float32 `[B, T, H]`, for the backward pass; they
        are empty unless `divides`.
    """
    batch, _, heads, width = query.shape
    groups, columns, blocks = key.shape[2], value.shape[-1], table.shape[-2]
    dtype = summary_dtype(query.dtype)
    mixed_heads, mixing = count_mixed_heads(mixing.shape, heads, groups), mixing.contiguous()
    repeats = mixed_heads // groups
    output = token_tensor(query, table, columns)
    denominator = empty_denominators(query, table, divides)
    plain_width = width if normalizer_query is None else normalizer_query.shape[-1]
    programs, _, options = matrix_tiles(query, mixed_heads, columns, table, dtype)
    divisor = None if divisor is None else divisor.contiguous()
    for lines in line_groups(batch * groups, (1 + repeats) * row_count(blocks) * width * columns * dtype.itemsize):
        summaries = outer(key, value, table, groups, lines, dtype=dtype, total=divides, plain=normalizer_key)
        mixed, scales, mixed_sums = mix(summaries, mixing, groups, lines, twice=query.dtype == torch.float16)
        row_lines = repeated(lines, repeats)
        launch(
            attend_kernel, row_lines[1] * programs, as_rows(query), as_rows(normalizer_query), mixed, scales,
            mixed_sums, divisor, table, output, denominator,
            lines=row_lines, eps=eps, PLAIN=plain_width, BLOCK_PLAIN=padded(plain_width), STORED=mixed.shape[3],
            **options,
        )  # fmt: skip
    return output, denominator


@torch.library.register_fake("mhla_hf::block_attention")
def _(query, key, value, normalizer_query, normalizer_key, divisor, mixing, table, divides, eps):
    output = query.new_empty(*query.shape[:-1], value.shape[-1])
    return output, query.new_empty(query.shape[:3] if divides else (0,), dtype=torch.float32)


def _context(ctx, inputs, output):
    query, key, value, normalizer_query, normalizer_key, divisor, mixing, table, ctx.divides, ctx.eps = inputs
    ctx.mark_non_differentiable(output[1])
    divided = ctx.divides or divisor is not None
    kept = output[0] if divided and needs_output(query.shape[-1], value.shape[-1], query.dtype) else None
    ctx.save_for_backward(kept, output[1], query, key, value, normalizer_query, normalizer_key, divisor, mixing, table)


def _backward(ctx, gradient, _):
    # Checkpointing hands them out once.
    saved = ctx.saved_tensors
    gradients = block_attention_backward(gradient, *saved, ctx.divides, ctx.eps)
    inputs = saved[2:9]
    return *(None if tensor is None else part for part, tensor in zip(gradients, inputs)), None, None, None


block_attention.register_autograd(_backward, setup_context=_context)


@register_flop_formula(torch.ops.mhla_hf.block_attention)
def _flops(query, key, value, normalizer_query, normalizer_key, divisor, mixing, *args, **kwargs) -> int:
    return block_flops(query, key, value, mixing)
