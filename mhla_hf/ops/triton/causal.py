# SPDX-License-Identifier: Apache-2.0
"""Causal MHLA in chunks, forward: summaries, mixed prefix, and one pass over the tokens of each chunk.

    S_b = Σ_{j in b} φ(k_j) v_jᵀ,  z_b = Σ_{j in b} φ(k_j)                                   summaries, by `outer`
    P_i = Σ_{b<i} m_ib S_b,  p_i = Σ_{b<i} m_ib z_b                                          prefix, by `ops/band.py`
    n_t = φ(q_t)ᵀ P_i + m_ii Σ_{j in i, j≤t} (φ(q_t)·φ(k_j)) v_j                             the kernel below
    d_t = φ(q_t)·p_i + m_ii Σ_{j in i, j≤t} φ(q_t)·φ(k_j) + eps,  o_t = n_t / d_t            for chunk i = b(t)

A chunk is worked on in tiles of rows; a row tile meets the tiles of its chunk up to its own. Scores are products of
tokens in the tokens' own type, which float32 sums hold exactly. From the first slot on whose key or value is not
finite, outputs are NaN; the others do not read it.

Shape letters: B batch, T tokens, H query heads, G key heads (H or a divisor), S heads of the prefix (H, or G where all
heads share the mixing weights), K and V widths, P width of the normaliser's pair, M chunks, N slots of a chunk.
"""

# No postponed annotations here: torch.library and Triton read them from the functions themselves.

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ...layouts.blocks import BlockLayout
from ...layouts.sequences import SequenceLayout
from ..band import StoredMixing
from ..operands import Operands, first_blocks
from .causal_gradient import causal_attention_backward, causal_flops, mix_earlier
from .chunks import (
    chunk_options,
    inner_tile,
    is_per_head,
    matrix_product,
    other_tile,
    score_product,
    tile_of_program,
)
from .device_functions import (
    COUNTS,
    denominators,
    dense_head_rows,
    divide,
    head_rows,
    load_rows,
    matrix_of_block,
    store_rows,
    token_product,
)
from .launching import as_rows, empty_denominators, launch, padded, row_count, token_tensor
from .operators import operator
from .outer import outer


def triton_causal_mhla_attention(
    operands: Operands, mixing: StoredMixing, layout: BlockLayout | SequenceLayout
) -> Tensor:
    """Causal MHLA by Triton kernels, without checks, for normalisers that the kernels have.

    Beside bfloat16 tokens, summaries and prefix are float16 with a power of two each where a matrix mixes them.
    Otherwise they are float32, as in the backward pass, which computes them once more. Sums always run in float32.

    Args:
        operands: The tokens and the normaliser.
        mixing: The stored weights, float32.
        layout: The blocks.

    Returns:
        `[B, T, H, V]` in the dtype of the values; zero for padding.
    """
    query, key, value = operands.tokens
    divides = operands.entry.divides
    pair: tuple[torch.Tensor | None, torch.Tensor | None] = operands.pair if divides else (None, None)
    first, blocks = first_blocks(layout), layout.num_blocks
    rows = row_count(blocks)
    # Empty blocks are a document of their own.
    others = None if first is None else F.pad(first, (0, rows - blocks), value=blocks)
    table = layout.token_table(query.device)
    if blocks == 1:
        # A chunk that is not full: with empty slots after it, most lengths share what is compiled.
        table = F.pad(table, (0, padded(table.shape[-1]) - table.shape[-1]), value=query.shape[1])
    with torch.autocast(query.device.type, enabled=False):
        own = mixing.own(blocks, first).reshape(-1, len(mixing.weights), blocks)
        output, *_ = causal_attention(
            query.to(value.dtype), key.to(value.dtype), value, *pair, *mixing.earlier_weights(rows, others), own,
            table, first, divides, operands.eps,
        )  # fmt: skip
    return output


def limits(first_bad: Tensor, starts: Tensor | None, slots: int) -> Tensor:
    """The slot of each chunk from which on outputs are NaN, int32 `[B, G, M]`; N where none are.

    Args:
        first_bad: The first bad slot of each chunk, int32 `[B, G, M]`, N where there is none.
        starts: The first chunk of each chunk's document, LongTensor `[B, M]`; `None` for one document.
        slots: N.
    """
    chunk = torch.arange(first_bad.shape[-1], device=first_bad.device)
    last_bad = torch.where(first_bad < slots, chunk, -1).cummax(-1).values
    before = F.pad(last_bad[..., :-1], (1, 0), value=-1)
    return first_bad.masked_fill(before >= (0 if starts is None else starts[:, None]), 0)


@triton.jit(do_not_specialize=COUNTS)
def causal_attend_kernel(
    query, key, value, normalizer_query, normalizer_key, prefix, scales, prefix_sum, limit, diagonal, table, output,
    denominator,
    first_line, lines,
    mixing_stride_batch, mixing_stride_head, mixing_stride_diagonal,
    eps, num_tokens, num_blocks, table_stride_batch, slots,
    heads, REPEATS: tl.constexpr, PREFIX_REPEATS: tl.constexpr, WIDTH: tl.constexpr, VALUE: tl.constexpr,
    PLAIN: tl.constexpr, STORED: tl.constexpr, BLOCK_WIDTH: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    BLOCK_PLAIN: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_INNER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """output_t = (query_tᵀ prefix_i + m_ii Σ_{j ≤ t in i} (query_t · key_j) value_j) / d_t for chunk i.

    heads is the number of query heads; REPEATS of them share a key head, PREFIX_REPEATS a prefix, which is to be
    multiplied with `scales` if they are given. With `prefix_sum`, d_t is written to `denominator`, from
    `normalizer_query` and `normalizer_key` if they are given; without it, nothing is divided. Rows from the chunk's
    `limit` on become NaN.
    """
    (
        batch, head, line, block, row_tile, column_tile, value_column, block_table, slot, tokens, present, stop
    ) = tile_of_program(
        table, limit, num_tokens, num_blocks, table_stride_batch, slots, first_line, lines,
        heads, REPEATS, BLOCK_TOKENS, VALUE, BLOCK_VALUE,
    )  # fmt: skip
    key_head = head // REPEATS
    column, plain_column = tl.arange(0, BLOCK_WIDTH), tl.arange(0, BLOCK_PLAIN)
    queries = head_rows(query, batch, head)
    key_rows, value_rows = head_rows(key, batch, key_head), head_rows(value, batch, key_head)
    rows = load_rows(queries, tokens, present, column, WIDTH)
    own = diagonal + batch * mixing_stride_batch + head * mixing_stride_head
    weight = tl.load(own + block * mixing_stride_diagonal)
    matrix = matrix_of_block(line // PREFIX_REPEATS, block, num_blocks)
    result = matrix_product(
        rows, queries, tokens, present, prefix, matrix, lines * REPEATS // PREFIX_REPEATS, num_blocks, value_column,
        WIDTH, VALUE, STORED, BLOCK_INNER, False, PRECISION,
    )  # fmt: skip
    if scales is not None:
        result *= tl.load(scales + matrix)
    divisor = tl.zeros((BLOCK_TOKENS,), tl.float32)
    if prefix_sum is not None:
        sums = tl.load(prefix_sum + matrix * PLAIN + plain_column, mask=plain_column < PLAIN, other=0.0)
        if normalizer_query is None:
            divisor += denominators(rows, sums, eps)
    for tile in range(row_tile + 1):
        other_slot, others, there = other_tile(block_table, tile, stop, num_tokens, BLOCK_TOKENS)
        seen = other_slot[None, :] <= slot[:, None]
        keys = load_rows(key_rows, others, there, column, WIDTH)
        values = load_rows(value_rows, others, there, value_column, VALUE)
        scores = tl.where(seen, token_product(rows, tl.trans(keys), PRECISION) * weight, 0.0)
        result += score_product(scores, values, PRECISION)
        if prefix_sum is not None and normalizer_query is None:
            divisor += tl.sum(scores, axis=1)
    if prefix_sum is not None:
        if normalizer_query is not None:
            # Apart from the products above, which need the registers.
            plain_rows = load_rows(head_rows(normalizer_query, batch, head), tokens, present, plain_column, PLAIN)
            for tile in range(row_tile + 1):
                other_slot, others, there = other_tile(block_table, tile, stop, num_tokens, BLOCK_TOKENS)
                seen = other_slot[None, :] <= slot[:, None]
                plain_keys = load_rows(head_rows(normalizer_key, batch, key_head), others, there, plain_column, PLAIN)
                scores = tl.where(seen, token_product(plain_rows, tl.trans(plain_keys), PRECISION) * weight, 0.0)
                divisor += tl.sum(scores, axis=1)
            divisor += denominators(plain_rows, sums, eps)
        result = divide(result, divisor, present)
        if column_tile == 0:
            tl.store(denominator + (batch * num_tokens + tokens) * heads + head, divisor, mask=present)
    result = tl.where((slot >= stop)[:, None], float("nan"), result)
    outputs = dense_head_rows(output, batch, head, num_tokens, heads, VALUE)
    store_rows(outputs, tokens, present, value_column, result, VALUE)


@operator("mhla_hf::causal_attention")
def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, normalizer_query: Tensor | None, normalizer_key: Tensor | None,
    window: Tensor, carry: Tensor, own: Tensor, table: Tensor, starts: Tensor | None, divides: bool, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Causal MHLA in chunks.

    Args:
        query: `[B, T, H, K]`.
        key: `[B, T, G, K]`, of the same dtype.
        value: `[B, T, G, V]`, of the same dtype.
        normalizer_query: Queries of the normaliser where there is one and they differ, `[B, T, H, P]`.
        normalizer_key: Keys of the normaliser, given together with them, `[B, T, G, P]`.
        window: Weights of earlier chunks among M' = `row_count(M)`, float32; see
            [`mhla_hf.ops.band.StoredMixing.earlier_weights`].
        carry: Given together with them, float32.
        own: m_ii, float32 `[B or 1, H or 1, M]`.
        table: Token of each slot, int32 `[M, N]` or `[B, M, N]`, T where a slot is empty.
        starts: The first chunk of each chunk's document, LongTensor `[B, M]`; `None` for one document a row.
        divides: Whether to divide by the normaliser.
        eps: Added to the denominator.

    Returns:
        `[B, T, H, V]`; and for the backward pass denominators, float32 `[B, T, H]` (empty unless `divides`), and the
        slot of each chunk from which on outputs are NaN, int32 `[B, G, M]`.
    """
    (batch, _, heads, width), groups, columns = query.shape, key.shape[2], value.shape[-1]
    blocks, slots = table.shape[-2:]
    in_half = value.dtype == torch.bfloat16
    summaries = outer(
        key, value, table, groups,
        dtype=torch.float16 if in_half and not carry.numel() else torch.float32, total=divides, plain=normalizer_key,
        finite=True,
    )  # fmt: skip
    assert summaries.first_bad is not None
    limit = limits(summaries.first_bad.unflatten(0, (batch, groups)), starts, slots)
    prefix, scales, prefix_sum = mix_earlier(summaries, window, carry, batch, heads, value.dtype)
    output = token_tensor(query, table, columns)
    denominator = empty_denominators(query, table, divides)
    plain_width = width if normalizer_key is None else normalizer_key.shape[-1]
    # Kernels round a float32 prefix themselves.
    factor = torch.bfloat16 if in_half else torch.float32
    value_tile, tiles, options = chunk_options(query, factor, table, own, max(width, plain_width), columns)
    launch(
        causal_attend_kernel, batch * heads * blocks * tiles,
        as_rows(query), as_rows(key), as_rows(value), as_rows(normalizer_query), as_rows(normalizer_key),
        prefix, scales, prefix_sum, limit, own, table, output, denominator,
        lines=(0, batch * groups), eps=eps, REPEATS=heads // groups,
        PREFIX_REPEATS=1 if is_per_head(own) else heads // groups, WIDTH=width, VALUE=columns, PLAIN=plain_width,
        STORED=prefix.shape[-1], BLOCK_WIDTH=padded(width), BLOCK_VALUE=value_tile, BLOCK_PLAIN=padded(plain_width),
        BLOCK_INNER=inner_tile(width, prefix.dtype), **options,
    )  # fmt: skip
    return output, denominator, limit


@torch.library.register_fake("mhla_hf::causal_attention")
def _(query, key, value, normalizer_query, normalizer_key, window, carry, own, table, starts, divides, eps):
    return (
        query.new_empty(*query.shape[:-1], value.shape[-1]),
        query.new_empty(query.shape[:-1] if divides else (0,), dtype=torch.float32),
        query.new_empty(key.shape[0], key.shape[2], table.shape[-2], dtype=torch.int32),
    )


def _context(ctx, inputs, output):
    ctx.mark_non_differentiable(*output[1:])
    ctx.has_pair = inputs[3] is not None
    ctx.save_for_backward(*output, *inputs[:9])


def _backward(ctx, gradient, *_):
    gradients = list(causal_attention_backward(gradient, *ctx.saved_tensors))
    if not ctx.has_pair:
        gradients[3:5] = None, None
    return *gradients, None, None, None, None


causal_attention.register_autograd(_backward, setup_context=_context)


@register_flop_formula(torch.ops.mhla_hf.causal_attention)
def _forward_flops(query, key, value, _, __, window, carry, own, table, *args, **kwargs) -> int:
    return causal_flops(query, key, value, window, carry, table)
