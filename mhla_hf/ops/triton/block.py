# SPDX-License-Identifier: Apache-2.0
"""Block-parallel MHLA, forward: summaries, mixing and outputs, without permuting tokens into blocks.

    S_b = Σ_{t in b} φ(k_t) v_tᵀ,  z_b = Σ_{t in b} φ(k_t)            summaries, by `outer`
    S̃_i = Σ_b m_ib S_b,  z̃_i = Σ_b m_ib z_b                           mixing, by `mixing`
    o_t = φ(q_t)ᵀ S̃_{b(t)} / (φ(q_t)·z̃_{b(t)} + eps)                  outputs, by the kernel below

Shape letters: B batch, T tokens, H heads, G heads of the summaries (H or a divisor), K and V widths, P width of the
normaliser's pair, M blocks, N slots of a block.
"""

# No postponed annotations here: torch.library and Triton read them from the functions themselves.

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ...layouts.blocks import BlockLayout
from ...layouts.sequences import SequenceLayout
from ..normalizers import NORMALIZERS
from ..numerics import Operands, from_head_blocks, head_blocks, records_gradients
from .block_gradient import block_attend_backward, block_summary_backward
from .device_functions import (
    COUNTS,
    denominators,
    dense_head_rows,
    divide,
    head_rows,
    load_matrix,
    load_rows,
    place_of_program,
    product,
    slot_tokens,
    store_rows,
)
from .launching import (
    as_rows,
    launch,
    matrix_options,
    multiplies_exactly,
    padded,
    product_flops,
    summary_dtype,
    token_tensor,
)
from .mixing import mix_summaries_and_sums
from .outer import outer


def triton_block_mhla_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixing: Tensor,
    layout: BlockLayout | SequenceLayout,
    *,
    normalizer_query: Tensor | None = None,
    normalizer_key: Tensor | None = None,
    normalizer: str = "query",
    eps: float = 1e-6,
) -> Tensor:
    """Non-causal MHLA by Triton kernels; arguments as in [`mhla_hf.ops.block_mhla_attention`].

    Summaries are float32, but bfloat16 for bfloat16 tokens where no gradient is recorded; sums always run in float32.

    Returns:
        `[B, T, H, V]` in the dtype of `value`; zero for padding.
    """
    entry = NORMALIZERS[normalizer]
    num_heads, dtype = query.shape[2], value.dtype
    normalizer_query, normalizer_key = Operands(query, key, value, normalizer_query, normalizer_key).pair
    half = not records_gradients(query, key, value, mixing, normalizer_query, normalizer_key)
    with torch.autocast(query.device.type, enabled=False):
        query, key = query.to(dtype), key.to(dtype)
        table = layout.token_table(query.device)
        # Summaries are means over the slots: their size does not grow with the blocks'.
        slots = float(table.shape[-1])
        plain_key = normalizer_key if entry.divides else None
        summary, key_sum = block_summary(key, value, plain_key, table, 1 / slots, entry.divides, half)
        to_mix = key_sum if entry.kernel else None
        exact = multiplies_exactly(dtype)
        summary, mixed_sum = mix_summaries_and_sums(mixing, summary, to_mix, num_heads, exact=exact)
        divisor = None
        if entry.block is not None and entry.kernel is None:
            plain_query = query if normalizer_query is None else normalizer_query
            products = entry.block(head_blocks(plain_query, layout, torch.float32), key_sum, mixing.float())
            divisor, eps = entry.divisor(from_head_blocks(products, layout).squeeze(-1), eps), 0.0
        apart = normalizer_query if entry.kernel else None
        output, _ = block_attend(query, summary, mixed_sum, apart, divisor, table, slots, eps)
        return output


@torch.library.custom_op("mhla_hf::block_summary", mutates_args=())
def block_summary(
    key: Tensor, value: Tensor, plain: Tensor | None, table: Tensor, factor: float, total: bool, half: bool
) -> tuple[Tensor, Tensor]:
    """factor · S_b = factor Σ φ(k) vᵀ, and z_b = Σ φ(k).

    Args:
        key: `[B, T, G, K]`.
        value: `[B, T, G, V]`.
        plain: Keys of the normaliser where they differ, `[B, T, G, P]`.
        table: Token of each slot, int32 `[M, N]` or `[B, M, N]`, T where a slot is empty.
        factor: Factor of the summaries.
        total: Whether z is wanted.
        half: See [`summary_dtype`].

    Returns:
        `[B, G, M, K, V]` in [`summary_dtype`], and float32 `[B, G, M, P]`, empty unless `total`.
    """
    dtype = summary_dtype(key.dtype, half)
    summary, key_sum, _ = outer(key, value, table, key.shape[2], factor=factor, total=total, plain=plain, dtype=dtype)
    return summary, key_sum


@block_summary.register_fake
def _(key, value, plain, table, factor, total, half):
    shape = key.shape[0], key.shape[2], table.shape[-2]
    width = key.shape[-1] if plain is None else plain.shape[-1]
    return (
        key.new_empty(*shape, key.shape[-1], value.shape[-1], dtype=summary_dtype(key.dtype, half)),
        key.new_empty((*shape, width) if total else (0,), dtype=torch.float32),
    )


def _summary_context(ctx, inputs, output):
    key, value, plain, table, ctx.factor, ctx.total, _ = inputs
    ctx.save_for_backward(key, value, plain, table)


def _summary_backward(ctx, grad_summary, grad_total):
    key, value, plain, table = ctx.saved_tensors
    grad_key, grad_value, grad_plain = block_summary_backward(
        grad_summary, grad_total, key, value, plain, table, ctx.factor, ctx.total
    )
    return grad_key, grad_value, grad_plain if plain is not None and ctx.total else None, None, None, None, None


block_summary.register_autograd(_summary_backward, setup_context=_summary_context)


@register_flop_formula(torch.ops.mhla_hf.block_summary)
def _summary_flops(key, value, *args, **kwargs) -> int:
    return product_flops(key, value[-1])


@triton.jit(do_not_specialize=COUNTS)
def attend_kernel(
    query, plain, summary, key_sum, divisor, table, output, denominator,
    first_line, lines, factor, eps, num_tokens, num_blocks, table_stride_batch, slots, splits, split_slots,
    HEADS: tl.constexpr, REPEATS: tl.constexpr, WIDTH: tl.constexpr, VALUE: tl.constexpr, PLAIN: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr, BLOCK_VALUE: tl.constexpr, BLOCK_PLAIN: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """output_t = factor · query_tᵀ summary_b(t), divided by plain_t · key_sum_b(t) + eps.

    HEADS is the number of heads of `summary`, REPEATS the query heads that share one; for a group of lines from
    `first_line` on, `summary` is `[lines, M, WIDTH, VALUE]` and `key_sum` `[lines, M, PLAIN]`. With `key_sum`, the
    divisor is written to `denominator`, and `plain` is the query where it is None. Without it, the divisor is
    `divisor` + eps, `[B, T, H]`, or 1 where that is None.
    """
    COLUMN_TILES: tl.constexpr = (VALUE + BLOCK_VALUE - 1) // BLOCK_VALUE
    batch, row_head, block, part, matrix = place_of_program(
        splits * COLUMN_TILES, num_blocks, first_line, lines, HEADS, REPEATS
    )
    split, column_tile = part // COLUMN_TILES, part % COLUMN_TILES
    column = tl.arange(0, BLOCK_WIDTH)
    value_column = column_tile * BLOCK_VALUE + tl.arange(0, BLOCK_VALUE)
    plain_column = tl.arange(0, BLOCK_PLAIN)
    weights = load_matrix(summary + matrix * (WIDTH * VALUE), column, value_column, VALUE, 1, WIDTH, VALUE)
    if key_sum is not None:
        sums = tl.load(key_sum + matrix * PLAIN + plain_column, mask=plain_column < PLAIN, other=0.0)
    queries = head_rows(query, batch, row_head)
    outputs = dense_head_rows(output, batch, row_head, num_tokens, HEADS * REPEATS, VALUE)
    block_table = table + batch * table_stride_batch + block * slots
    first = split * split_slots
    stop = tl.minimum(first + split_slots, slots)
    for offset in range(first, stop, BLOCK_TOKENS):
        slot = offset + tl.arange(0, BLOCK_TOKENS)
        tokens, present = slot_tokens(block_table, slot, stop, num_tokens)
        rows = load_rows(queries, tokens, present, column, WIDTH)
        result = product(rows, weights, PRECISION) * factor
        per_token = (batch * num_tokens + tokens) * (HEADS * REPEATS) + row_head
        if key_sum is not None:
            plain_rows = rows
            if plain is not None:
                plain_rows = load_rows(head_rows(plain, batch, row_head), tokens, present, plain_column, PLAIN)
            divisors = denominators(plain_rows, sums, eps)
            if column_tile == 0:
                tl.store(denominator + per_token, divisors, mask=present)
            result = divide(result, divisors, present)
        elif divisor is not None:
            divisors = tl.load(divisor + per_token, mask=present, other=1.0) + eps
            result = divide(result, divisors, present)
        store_rows(outputs, tokens, present, value_column, result, VALUE)


@torch.library.custom_op("mhla_hf::block_attend", mutates_args=())
def block_attend(
    query: Tensor,
    summary: Tensor,
    key_sum: Tensor | None,
    plain: Tensor | None,
    divisor: Tensor | None,
    table: Tensor,
    factor: float,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """factor · φ(q)ᵀ S̃ / (φ(q)ᵀ z̃ + eps).

    Args:
        query: `[B, T, H, K]`.
        summary: Mixed summaries `[B, G, M, K, V]`, G a divisor of H.
        key_sum: Mixed z, float32 `[B, G, M, P]`; with neither this nor `divisor` nothing is divided.
        plain: Queries of the normaliser where they differ, `[B, T, H, P]`.
        divisor: Divisor in place of φ(q)ᵀ z̃, float32 `[B, T, H]`.
        table: See [`block_summary`].
        factor: Factor of the products.
        eps: Added to the denominator.

    Returns:
        `[B, T, H, V]` in the dtype of `query`, and the denominators, float32 `[B, T, H]`, for the backward pass; they
        are empty where nothing is divided or `divisor` is given.
    """
    value, plain_width = summary.shape[-1], query.shape[-1] if plain is None else plain.shape[-1]
    programs, value_tile, options = matrix_options(query, summary, table, value)
    output = token_tensor(query, table, value)
    denominator = query.new_empty(query.shape[:3] if key_sum is not None else (0,), dtype=torch.float32)
    launch(
        attend_kernel, programs,
        as_rows(query),
        as_rows(plain),
        summary.contiguous(),
        None if key_sum is None else key_sum.contiguous(),
        None if divisor is None else divisor.contiguous(),
        table, output, denominator,
        factor=factor, eps=eps, VALUE=value, PLAIN=plain_width, BLOCK_VALUE=value_tile,
        BLOCK_PLAIN=padded(plain_width), **options,
    )  # fmt: skip
    return output, denominator


@block_attend.register_fake
def _(query, summary, key_sum, plain, divisor, table, factor, eps):
    output = query.new_empty(*query.shape[:-1], summary.shape[-1])
    return output, query.new_empty(query.shape[:-1] if key_sum is not None else (0,), dtype=torch.float32)


def _attend_context(ctx, inputs, output):
    query, summary, key_sum, plain, divisor, table, ctx.factor, ctx.eps = inputs
    ctx.mark_non_differentiable(output[1])
    denominator = output[1] if divisor is None else divisor
    ctx.given = divisor is not None
    ctx.save_for_backward(output[0], denominator, query, summary, key_sum, plain, table)


def _attend_backward(ctx, grad_output, _):
    output, denominator, query, summary, key_sum, plain, table = ctx.saved_tensors
    grad_divisor = None
    if ctx.given:
        denominator = denominator + ctx.eps
        grad_divisor = -(grad_output.float() * output.float()).sum(-1) / denominator
    grad_query, grad_summary, grad_key_sum, grad_plain = block_attend_backward(
        grad_output, output, denominator, query, summary, key_sum, plain, table, ctx.factor
    )
    if key_sum is None:
        grad_key_sum = None
    if key_sum is None or plain is None:
        grad_plain = None
    return grad_query, grad_summary, grad_key_sum, grad_plain, grad_divisor, None, None, None


block_attend.register_autograd(_attend_backward, setup_context=_attend_context)


@register_flop_formula(torch.ops.mhla_hf.block_attend)
def _attend_flops(query, summary, *args, **kwargs) -> int:
    return product_flops(query, summary[-1])
