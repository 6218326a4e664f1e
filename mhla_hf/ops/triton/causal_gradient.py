# SPDX-License-Identifier: Apache-2.0
"""Causal MHLA in chunks, backward.

With n_t and d_t the numerator and denominator of token t as in `causal`, g'_t = g_t / d_t and δ_t = -g'_t · n_t / d_t,
the part of the gradients that the own chunk contributes is, with m = m_ii and sums over the chunk,

    dq_t = m Σ_{j≤t} (g'_t · v_j) k_j      dk_j = m Σ_{t≥j} (g'_t · v_j) q_t      dv_j = m Σ_{t≥j} (q_t · k_j) g'_t
    dp_t = m δ_t Σ_{j≤t} p_j               dp_j = m Σ_{t≥j} δ_t p_t

for the normaliser's pair p. One kernel computes dq, one dk and dv (with the roles of the tensors exchanged); dp is
added to them, or computed by torch where p is not query and key themselves. The prefix adds products with its
gradients, as in `block_gradient`. Rows from the `limit` of a chunk on are left out: what their outputs get is NaN, and
all others are finite but for queries. Programs and shape letters are those of the forward pass.
"""

# No postponed annotations here: torch.library and Triton read them from the functions themselves.

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..band import mixing_flops, run_mix_chunks, run_mix_chunks_backward
from ..sums import repeat_heads
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
    denominator_gradient,
    dense_head_rows,
    head_rows,
    load_rows,
    matrix_of_block,
    store_rows,
    token_product,
)
from .launching import as_rows, dense_like, launch, multiplied_for, or_empty, padded, token_tensor
from .mixing import mix
from .operators import operator
from .outer import Sums, outer


@triton.jit(do_not_specialize=COUNTS)
def query_gradient_kernel(
    gradient, output, query, key, value, prefix, prefix_sum, scale, limit, diagonal, table, result, weight, share,
    first_line, lines,
    mixing_stride_batch, mixing_stride_head, mixing_stride_diagonal,
    num_tokens, num_blocks, table_stride_batch, slots,
    heads, REPEATS: tl.constexpr, PREFIX_REPEATS: tl.constexpr, WIDTH: tl.constexpr, VALUE: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr, BLOCK_VALUE: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_INNER: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of queries, of their denominators (`weight`, δ), and of m_ii (`share`, to be summed over tokens).

    `scale` is one over the denominators, None where nothing is divided. `prefix_sum` is None, too, where the
    normaliser's pair is not query and key themselves. δ comes from the products made here where one tile holds all
    columns, free of the rounding of the outputs (dense `[B, T, heads, VALUE]`), otherwise from those.
    """
    (
        batch, head, line, block, row_tile, column_tile, column, block_table, slot, tokens, present, stop
    ) = tile_of_program(
        table, limit, num_tokens, num_blocks, table_stride_batch, slots, first_line, lines,
        heads, REPEATS, BLOCK_TOKENS, WIDTH, BLOCK_WIDTH,
    )  # fmt: skip
    key_head = head // REPEATS
    value_column = tl.arange(0, BLOCK_VALUE)
    used = present & (slot < stop)
    per_token = (batch * num_tokens + tokens) * heads + head
    key_rows, value_rows = head_rows(key, batch, key_head), head_rows(value, batch, key_head)
    gradients = head_rows(gradient, batch, head)
    rows = load_rows(gradients, tokens, used, value_column, VALUE)
    own = tl.zeros((BLOCK_TOKENS, BLOCK_WIDTH), tl.float32)
    for tile in range(row_tile + 1):
        other_slot, others, there = other_tile(block_table, tile, stop, num_tokens, BLOCK_TOKENS)
        seen = other_slot[None, :] <= slot[:, None]
        values = load_rows(value_rows, others, there, value_column, VALUE)
        keys = load_rows(key_rows, others, there, column, WIDTH)
        scores = tl.where(seen, token_product(rows, tl.trans(values), PRECISION), 0.0)
        own += score_product(scores, keys, PRECISION)
    own_weight = tl.load(
        diagonal + batch * mixing_stride_batch + head * mixing_stride_head + block * mixing_stride_diagonal
    )
    matrix = matrix_of_block(line // PREFIX_REPEATS, block, num_blocks)
    total = own * own_weight + matrix_product(
        rows, gradients, tokens, used, prefix, matrix, lines, num_blocks, column,
        VALUE, WIDTH, VALUE, BLOCK_INNER, True, PRECISION,
    )  # fmt: skip
    queries = load_rows(head_rows(query, batch, head), tokens, used, column, WIDTH).to(tl.float32)
    if scale is None:
        shares = tl.sum(queries * own, axis=1)
    else:
        row_scale = tl.load(scale + per_token, mask=used, other=0.0)
        total *= row_scale[:, None]
        shares = tl.sum(queries * own, axis=1) * row_scale
        if BLOCK_WIDTH >= WIDTH:
            row_weight = denominator_gradient(queries, total, row_scale)
        else:
            output_rows = dense_head_rows(output, batch, head, num_tokens, heads, VALUE)
            outputs = load_rows(output_rows, tokens, used, value_column, VALUE)
            row_weight = denominator_gradient(outputs, rows, row_scale)
        if column_tile == 0:
            tl.store(weight + per_token, row_weight, mask=present)
        if prefix_sum is not None:
            # Keys are read once more here, from the cache: sums kept along with the products above would not fit into
            # registers.
            key_sums = tl.zeros((BLOCK_TOKENS, BLOCK_WIDTH), tl.float32)
            for tile in range(row_tile + 1):
                other_slot, others, there = other_tile(block_table, tile, stop, num_tokens, BLOCK_TOKENS)
                keys = load_rows(key_rows, others, there, column, WIDTH)
                seen = tl.where(other_slot[None, :] <= slot[:, None], 1.0, 0.0).to(keys.dtype)
                key_sums += token_product(seen, keys, PRECISION)
            sums = tl.load(prefix_sum + matrix * WIDTH + column, mask=column < WIDTH, other=0.0)
            total += row_weight[:, None] * (sums[None, :] + own_weight * key_sums)
            shares += row_weight * tl.sum(queries * key_sums, axis=1)
    store_rows(dense_head_rows(result, batch, head, num_tokens, heads, WIDTH), tokens, present, column, total, WIDTH)
    # A share for each row of the tile: Triton 3.6 cannot sum up a vector that comes from products on capability 10.
    COLUMN_TILES: tl.constexpr = (WIDTH + BLOCK_WIDTH - 1) // BLOCK_WIDTH
    row_tiles = (slots + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    part = (((batch * heads + head) * num_blocks + block) * COLUMN_TILES + column_tile) * row_tiles + row_tile
    tl.store(share + part * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS), shares)


def query_gradient(
    gradient: Tensor, output: Tensor, query: Tensor, key: Tensor, value: Tensor, prefix: Tensor,
    prefix_sum: Tensor | None, scale: Tensor | None, own: Tensor, limit: Tensor, table: Tensor, weight: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of queries, `[B, T, H, K]`, and of m_ii, float32 `[B, H, M]`.

    From arguments of [`causal.causal_attention`] and its dense outputs, the float32 prefix of [`mix_earlier`] `[...,
    M', K, V]` and, where the normaliser's pair is query and key themselves, its sums `[..., M', K]`. `scale` is one
    over the denominators, float32 `[B, T, H]`, or None; `weight`, of the same shape, gets their gradients with it.
    """
    batch, _, heads, width = query.shape
    groups, blocks, columns = key.shape[2], table.shape[-2], value.shape[-1]
    tile, parts, options = chunk_options(query, prefix.dtype, table, own, columns, width)
    result = token_tensor(query, table, width)
    share = query.new_empty(batch, heads, blocks, parts * options["BLOCK_TOKENS"], dtype=torch.float32)
    launch(
        query_gradient_kernel, batch * heads * blocks * parts,
        as_rows(gradient), output, as_rows(query), as_rows(key), as_rows(value), prefix, prefix_sum, scale, limit, own,
        table, result, weight, share,
        lines=(0, batch * groups), REPEATS=heads // groups,
        PREFIX_REPEATS=1 if is_per_head(own) else heads // groups, WIDTH=width, VALUE=columns,
        BLOCK_WIDTH=tile, BLOCK_VALUE=padded(columns), BLOCK_INNER=inner_tile(columns, prefix.dtype), **options,
    )  # fmt: skip
    return result, share.sum(-1)


@triton.jit(do_not_specialize=COUNTS)
def key_gradient_kernel(
    rows, inner, other, matrices, vectors, scale, weight, limit, diagonal, table, result,
    first_line, lines,
    mixing_stride_batch, mixing_stride_head, mixing_stride_diagonal,
    num_tokens, num_blocks, table_stride_batch, slots,
    heads, REPEATS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, TRANSPOSE: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_INNER: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """result_j = rows_jᵀ matrix_i + m_ii Σ_{t ≥ j in i} (scale_t rows_j · inner_t + weight_t) other_t.

    The gradient of values for rows = keys, inner = queries, other = output gradients; that of keys for rows = values,
    inner = output gradients, other = queries, with δ for `weight` and the block's vector added to the result, if they
    are given. heads is the number of key heads; REPEATS heads of `inner` and `other` are summed for each.
    """
    (
        batch, head, line, block, row_tile, column_tile, column, block_table, slot, tokens, present, stop
    ) = tile_of_program(
        table, limit, num_tokens, num_blocks, table_stride_batch, slots, first_line, lines,
        heads, 1, BLOCK_TOKENS, COLUMNS, BLOCK_COLUMNS,
    )  # fmt: skip
    row_column = tl.arange(0, BLOCK_WIDTH)
    matrix = matrix_of_block(line, block, num_blocks)
    used = present & (slot < stop)
    own_rows = head_rows(rows, batch, head)
    own = load_rows(own_rows, tokens, used, row_column, WIDTH)
    total = tl.zeros((BLOCK_TOKENS, BLOCK_COLUMNS), tl.float32)
    for repeat in range(REPEATS):
        row_head = head * REPEATS + repeat
        inner_head, other_head = head_rows(inner, batch, row_head), head_rows(other, batch, row_head)
        own_weight = tl.load(
            diagonal + batch * mixing_stride_batch + row_head * mixing_stride_head + block * mixing_stride_diagonal
        )
        for tile in range(row_tile, (slots + BLOCK_TOKENS - 1) // BLOCK_TOKENS):
            later_slot, later, there = other_tile(block_table, tile, stop, num_tokens, BLOCK_TOKENS)
            per_token = (batch * num_tokens + later) * (heads * REPEATS) + row_head
            inner_rows = load_rows(inner_head, later, there, row_column, WIDTH)
            other_rows = load_rows(other_head, later, there, column, COLUMNS)
            scores = token_product(own, tl.trans(inner_rows), PRECISION)
            if scale is not None:
                scores *= tl.load(scale + per_token, mask=there, other=0.0)[None, :]
            if weight is not None:
                scores += tl.load(weight + per_token, mask=there, other=0.0)[None, :]
            scores = tl.where(later_slot[None, :] >= slot[:, None], scores * own_weight, 0.0)
            total += score_product(scores, other_rows, PRECISION)
    STORED: tl.constexpr = WIDTH if TRANSPOSE else COLUMNS
    total += matrix_product(
        own, own_rows, tokens, used, matrices, matrix, lines, num_blocks, column,
        WIDTH, COLUMNS, STORED, BLOCK_INNER, TRANSPOSE, PRECISION,
    )  # fmt: skip
    if vectors is not None:
        total += tl.load(vectors + matrix * COLUMNS + column, mask=column < COLUMNS, other=0.0)[None, :]
    results = dense_head_rows(result, batch, head, num_tokens, heads, COLUMNS)
    store_rows(results, tokens, present, column, total, COLUMNS)


def key_gradient(
    rows: Tensor, inner: Tensor, other: Tensor, matrices: Tensor, own: Tensor, limit: Tensor, table: Tensor, *,
    transpose: bool, scale: Tensor | None, weight: Tensor | None = None, vectors: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Results of the kernel above, `[B, T, G, E]` in the dtype of `rows`.

    From rows `[B, T, G, D]`, `inner` `[B, T, H, D]` and `other` `[B, T, H, E]`; gradients of the summaries, float32
    `[B, G, M', D, E]`, or with `transpose` `[B, G, M', E, D]`; `scale` and `weight`, float32 `[B, T, H]`, and with
    `weight` the gradients of sums of keys, float32 `[B, G, M', E]`.
    """
    batch, _, groups, width = rows.shape
    columns, blocks = other.shape[-1], table.shape[-2]
    tile, tiles, options = chunk_options(rows, matrices.dtype, table, own, width, columns)
    result = token_tensor(rows, table, columns)
    launch(
        key_gradient_kernel, batch * groups * blocks * tiles,
        as_rows(rows), as_rows(inner), as_rows(other), matrices, vectors, scale, weight, limit, own, table, result,
        lines=(0, batch * groups), REPEATS=inner.shape[2] // groups, WIDTH=width,
        COLUMNS=columns, TRANSPOSE=transpose, BLOCK_WIDTH=padded(width), BLOCK_COLUMNS=tile,
        BLOCK_INNER=inner_tile(width, matrices.dtype), **options,
    )  # fmt: skip
    return result


def _rows_of_slots(tokens: Tensor, table: Tensor) -> Tensor:
    """Rows `[B, T, H, P]` by slots, float32 `[B, H, M, N, P]`; zero where a slot is empty."""
    batch = torch.arange(len(tokens), device=tokens.device)[:, None, None]
    return F.pad(tokens.float(), (0, 0, 0, 0, 0, 1))[batch, table.long()].movedim(3, 1)


def _rows_of_tokens(rows: Tensor, tokens: Tensor, table: Tensor) -> Tensor:
    """The inverse of [`_rows_of_slots`], like `tokens`; zero where no slot has a token."""
    batch, num_tokens, *rest = tokens.shape
    result = tokens.new_zeros(batch, num_tokens + 1, *rest)
    first = torch.arange(batch, device=tokens.device)[:, None, None]
    result[first, table.long()] = rows.movedim(1, 3).to(tokens.dtype)
    return result[:, :num_tokens].contiguous()


def pair_gradients(
    query: Tensor, key: Tensor, mixed_sums: Tensor, grad_sums: Tensor, own: Tensor, limit: Tensor, table: Tensor,
    weight: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of a normaliser's pair other than query and key themselves, and its part of that of m_ii `[B, H, M]`.

    By operations of torch: no product of theirs is large, and few models have such a pair. From that pair `[B, T, H,
    P]` and `[B, T, G, P]`, its mixed sums `[B, H or G, M, P]`, gradients of the chunks' sums `[B, G, M, P]` and of the
    denominators `[B, T, H]`.
    """
    heads, groups = query.shape[2], key.shape[2]
    counted = torch.arange(table.shape[-1], device=table.device) < repeat_heads(limit, heads, 1)[..., None]
    weights = torch.where(counted[..., None], _rows_of_slots(weight[..., None], table), 0.0)
    queries = torch.where(counted[..., None], _rows_of_slots(query, table), 0.0)
    keys = _rows_of_slots(key, table)
    before = repeat_heads(torch.where(keys.isfinite(), keys, 0.0).cumsum(-2), heads, 1)
    own = own[..., None, None]
    grad_own = (weights * queries * before).sum((-2, -1))
    grad_queries = weights * (repeat_heads(mixed_sums, heads, 1).unsqueeze(-2) + own * before)
    weighted = (own * weights * queries).unflatten(1, (groups, -1)).sum(2)
    grad_keys = grad_sums.unsqueeze(-2) + weighted.flip(-2).cumsum(-2).flip(-2)
    return _rows_of_tokens(grad_queries, query, table), _rows_of_tokens(grad_keys, key, table), grad_own


def mix_earlier(
    summaries: Sums, window: Tensor, carry: Tensor, batch: int, heads: int, tokens: torch.dtype
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The prefix of every chunk, Σ_{b<i} m_ib S_b, and the same of z.

    Args:
        summaries: S and z of B · G lines; float16 only where there is nothing to carry.
        window: See [`mhla_hf.ops.band.StoredMixing.earlier_weights`], like `carry`.
        carry: Given together with it.
        batch: B.
        heads: H.
        tokens: Dtype of the tokens.

    Returns:
        As from [`mixing.mix`], for B · S lines.
    """
    if summaries.scales is not None:
        lines = summaries.scales.shape[1]
        return mix(summaries, window.squeeze(2), lines // batch, (0, lines))

    def mixed(summary: Tensor) -> Tensor:
        summary = summary.unflatten(0, (batch, -1))
        if window.shape[1] != 1:
            summary = repeat_heads(summary, heads, 1)
        return run_mix_chunks(summary.flatten(3), window, carry).view(-1, *summary.shape[2:])

    with multiplied_for(tokens, window.device):
        return mixed(summaries.products), None, None if summaries.sums is None else mixed(summaries.sums)


def mix_earlier_backward(
    gradient: Tensor, summary: Tensor, window: Tensor, carry: Tensor, batch: int, tokens: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of S or z `[B, G, M', ...]`, `window`, `carry`, from that of [`mix_earlier`] `[B · S, M', ...]`."""
    gradient, summary = gradient.unflatten(0, (batch, -1)), summary.unflatten(0, (batch, -1))
    groups, prefixes = summary.shape[1], gradient.shape[1]
    summary = repeat_heads(summary, prefixes, 1).flatten(3)
    with multiplied_for(tokens, summary.device):
        result, of_window, of_carry = run_mix_chunks_backward(gradient.flatten(3), summary, window, carry)
    result = result.view(gradient.shape)
    return result if groups == prefixes else result.unflatten(1, (groups, -1)).sum(2), of_window, of_carry


@operator("mhla_hf::causal_attention_backward", differentiable=False)
def causal_attention_backward(
    gradient: Tensor, output: Tensor, denominator: Tensor, limit: Tensor, query: Tensor, key: Tensor, value: Tensor,
    normalizer_query: Tensor | None, normalizer_key: Tensor | None, window: Tensor, carry: Tensor, own: Tensor,
    table: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key, value, the normaliser's pair (empty without one of its own), window, carry and own."""
    batch, heads, groups = query.shape[0], query.shape[2], key.shape[2]
    divides, has_pair = denominator.numel() > 0, normalizer_query is not None
    scale, weight = denominator.reciprocal() if divides else None, torch.empty_like(denominator)
    shared = {"own": own, "limit": limit, "table": table}
    # In float32, and not those of the forward pass: the terms of gradients cancel.
    summaries = outer(key, value, table, groups, dtype=torch.float32, total=divides, plain=normalizer_key, limit=limit)
    prefix, _, prefix_sum = mix_earlier(summaries, window, carry, batch, heads, value.dtype)
    grad_query, grad_own = query_gradient(
        gradient, output.contiguous(), query, key, value, prefix, None if has_pair else prefix_sum, scale,
        weight=weight, **shared,
    )  # fmt: skip
    del prefix
    grad_prefix, _, grad_prefix_sum, _ = outer(
        query, gradient, table, heads if is_per_head(own) else groups, dtype=torch.float32,
        scale=scale, total=divides, plain=normalizer_query, weight=weight if divides else None, limit=limit,
    )  # fmt: skip
    mixing = window, carry, batch, value.dtype
    grad_summary, grad_window, grad_carry = mix_earlier_backward(grad_prefix, summaries.products, *mixing)
    grad_sum = None
    if grad_prefix_sum is not None and summaries.sums is not None:
        grad_sum, *of_sums = mix_earlier_backward(grad_prefix_sum, summaries.sums, *mixing)
        grad_window, grad_carry = grad_window + of_sums[0], grad_carry + of_sums[1]
    del summaries, grad_prefix
    grad_key = key_gradient(
        value, gradient, query, grad_summary, transpose=True, scale=scale,
        weight=weight if divides and not has_pair else None, vectors=None if has_pair else grad_sum, **shared,
    )  # fmt: skip
    grad_value = key_gradient(key, query, gradient, grad_summary, transpose=False, scale=scale, **shared)
    pair = [query.new_empty(0), query.new_empty(0)]
    if normalizer_query is not None and normalizer_key is not None and prefix_sum is not None and grad_sum is not None:
        blocks, prefix_sum = table.shape[-2], prefix_sum.unflatten(0, (batch, -1))
        *pair, more = pair_gradients(
            normalizer_query, normalizer_key, prefix_sum[:, :, :blocks], grad_sum[:, :, :blocks],
            weight=weight, **shared,
        )  # fmt: skip
        grad_own += more
    grad_own = grad_own.sum_to_size(own.shape)
    return grad_query, grad_key, grad_value, pair[0], pair[1], grad_window, grad_carry, grad_own


@torch.library.register_fake("mhla_hf::causal_attention_backward")
def _(
    gradient, output, denominator, limit, query, key, value, normalizer_query, normalizer_key, window, carry, own,
    table,
):  # fmt: skip
    tensors = query, key, value, normalizer_query, normalizer_key, window, carry, own
    return or_empty(query, *(tensor if tensor is None else dense_like(tensor) for tensor in tensors))


def causal_flops(query, key, value, window, carry, table) -> int:
    """Products of causal MHLA: 2 B T K V (G + H) for summaries and prefix, those of the mixing, and B T H N (K + V)
    for the triangles of the chunks' own scores and their sums.

    All arguments are shapes.
    """
    return _summary_flops(query, key, value, window, carry, table) + (
        2 * query[0] * query[1] * query[2] * query[3] * value[-1]
        + query[0] * query[1] * query[2] * table[-1] * (query[3] + value[-1])
    )


def _summary_flops(query, key, value, window, carry, table) -> int:
    heads = key[2] if window[1] == 1 else query[2]
    # A matrix of all blocks has empty ones, too, which do not count.
    columns = window[-1] if len(carry) > 1 else table[-2]
    mixed = mixing_flops((query[0], heads, table[-2], query[3] * value[-1]), (columns,), carry)
    return 2 * query[0] * query[1] * key[2] * query[3] * value[-1] + mixed


@register_flop_formula(torch.ops.mhla_hf.causal_attention_backward)
def _backward_flops(*args, **kwargs) -> int:
    """Twice the forward pass; and once more summaries, their mixing, and the scores and their gradients."""
    query, key, value, _, _, window, carry, _, table = args[4:13]
    again = query[0] * query[1] * query[2] * table[-1] * (query[-1] + value[-1])
    again += _summary_flops(query, key, value, window, carry, table)
    return 2 * causal_flops(query, key, value, window, carry, table) + again
