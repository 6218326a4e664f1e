# SPDX-License-Identifier: Apache-2.0
"""Triton kernels that take projections as they come and do everything between them and the output.

They hold what `block_kernels` leaves to torch: RMSNorm of queries and keys across heads, scaling, feature map, rotary
embedding; output norm and gate. Nothing but q, k, v, the gate and the output passes through memory, once each. Below,
ψ(x) stands for rotated(φ(scaling · norm(x)) + feature_eps), and φ(x) for the same without the rotation.

Rotary embeddings turn neighbouring pairs of channels. The kernels keep even channels and odd ones apart: as rows of a
summary they may stand in any order, as long as keys and queries agree.

Programs run over (block, column tile, line), a line being a head of a batch entry, with lines next to each other:
those that run at the same time read the same rows of the rotary tables, and neighbouring bytes of q, k and v.
"""

# No postponed annotations here: Triton reads `tl.constexpr` from the functions themselves.
import triton
import triton.language as tl

from .feature_maps import feature_map
from .rows import COUNTS, load_rows, product, slot_tokens, store_rows, to_matrix, to_tf32


@triton.jit(do_not_specialize=COUNTS)
def inverse_root_mean_square_kernel(
    tokens, result, num_tokens, stride_batch, stride_token, eps, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr
):
    """1 / sqrt(mean of squares + eps) of each row of `[B, T, WIDTH]`, float32 `[B, T]`; one program a row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_WIDTH)
    start = tokens + (row // num_tokens) * stride_batch + (row % num_tokens) * stride_token
    values = tl.load(start + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    tl.store(result + row, 1.0 / tl.sqrt(tl.sum(values * values, axis=0) / WIDTH + eps))


@triton.jit
def normed_rows(
    start,
    norm,
    norm_weight,
    tokens,
    present,
    stride_token,
    column,
    scaling,
    WIDTH: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """scaling · norm(x) of some rows, float32."""
    values = load_rows(start, tokens, present, stride_token, column, WIDTH).to(tl.float32)
    if HAS_NORM:
        inverse = tl.load(norm + tokens, mask=present, other=0.0)
        weight = tl.load(norm_weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        values = values * inverse[:, None] * weight[None, :]
    return values * scaling


@triton.jit
def features_of(values, present, column, feature_eps, WIDTH: tl.constexpr, FEATURE_MAP: tl.constexpr):
    """The feature map of normed rows plus feature_eps, zero where there is no token or no column."""
    values = feature_map(values, FEATURE_MAP)
    return tl.where(present[:, None] & (column < WIDTH)[None, :], values + feature_eps, 0.0)


@triton.jit
def rotary_rows(table, tokens, present, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr):
    """Rows of a table of cosines or sines `[T, HALF]`."""
    pair = tl.arange(0, BLOCK_HALF)
    pointers = table + tokens[:, None] * HALF + pair[None, :]
    return tl.load(pointers, mask=present[:, None] & (pair < HALF)[None, :], other=0.0)


@triton.jit
def rotate(values, cosine, sine, TOKENS: tl.constexpr, BLOCK_HALF: tl.constexpr):
    """Even and odd channels of rows, rotated."""
    even, odd = tl.split(tl.reshape(values, (TOKENS, BLOCK_HALF, 2)))
    return even * cosine - odd * sine, even * sine + odd * cosine


@triton.jit(do_not_specialize=COUNTS)
def fused_outer_kernel(
    rows,
    value,
    norm,
    norm_weight,
    cosine,
    sine,
    scale,
    weight,
    table,
    products,
    sums,
    num_tokens,
    lines,
    rows_stride_batch,
    rows_stride_token,
    rows_stride_head,
    value_stride_batch,
    value_stride_token,
    value_stride_head,
    scaling,
    feature_eps,
    factor,
    num_blocks,
    slots,
    HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_ROTARY: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SUM: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    FEATURE_MAP: tl.constexpr,
    DOT_TYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """products_b = factor Σ ψ(x_t) (scale_t value_t)ᵀ and sums_b = Σ weight_t φ(x_t) over the tokens of block b.

    Even channels of ψ come first if they are rotated. HEADS is the number of heads of `products`; each sums REPEATS
    heads of the rows. `scale` and `weight` are `[B, T, HEADS · REPEATS]`.
    """
    program, line = tl.program_id(0).to(tl.int64) // lines, tl.program_id(0).to(tl.int64) % lines
    batch, head = line // HEADS, line % HEADS
    COLUMN_TILES: tl.constexpr = (VALUE + BLOCK_VALUE - 1) // BLOCK_VALUE
    block, column_tile = program // COLUMN_TILES, program % COLUMN_TILES
    HALF: tl.constexpr = WIDTH // 2
    BLOCK_HALF: tl.constexpr = BLOCK_WIDTH // 2
    column = tl.arange(0, BLOCK_WIDTH)
    pair = tl.arange(0, BLOCK_HALF)
    value_column = column_tile * BLOCK_VALUE + tl.arange(0, BLOCK_VALUE)
    total = tl.zeros((BLOCK_WIDTH,), tl.float32)
    if HAS_ROTARY:
        even_sum = tl.zeros((BLOCK_HALF, BLOCK_VALUE), tl.float32)
        odd_sum = tl.zeros((BLOCK_HALF, BLOCK_VALUE), tl.float32)
    else:
        whole_sum = tl.zeros((BLOCK_WIDTH, BLOCK_VALUE), tl.float32)
    for repeat in range(REPEATS):
        row_head = head * REPEATS + repeat
        rows_start = rows + batch * rows_stride_batch + row_head * rows_stride_head
        value_start = value + batch * value_stride_batch + row_head * value_stride_head
        for offset in range(0, slots, BLOCK_TOKENS):
            slot = offset + tl.arange(0, BLOCK_TOKENS)
            tokens, present = slot_tokens(table, batch, block, slot, slots, num_tokens, 0, slots)
            per_token = (batch * num_tokens + tokens) * (HEADS * REPEATS) + row_head
            normed = normed_rows(
                rows_start,
                norm + batch * num_tokens,
                norm_weight + row_head * WIDTH,
                tokens,
                present,
                rows_stride_token,
                column,
                scaling,
                WIDTH,
                HAS_NORM,
            )
            features = features_of(normed, present, column, feature_eps, WIDTH, FEATURE_MAP)
            if HAS_SUM:
                if HAS_WEIGHT:
                    token_weight = tl.load(weight + per_token, mask=present, other=0.0)
                    total += tl.sum(features * token_weight[:, None], axis=0)
                else:
                    total += tl.sum(features, axis=0)
            values = load_rows(value_start, tokens, present, value_stride_token, value_column, VALUE)
            if HAS_SCALE:
                token_scale = tl.load(scale + per_token, mask=present, other=0.0)
                values = values.to(tl.float32) * token_scale[:, None]
                if PRECISION == "tf32":
                    values = to_tf32(values)
            if HAS_ROTARY:
                cosines = rotary_rows(cosine, tokens, present, HALF, BLOCK_HALF)
                sines = rotary_rows(sine, tokens, present, HALF, BLOCK_HALF)
                even, odd = rotate(features, cosines, sines, BLOCK_TOKENS, BLOCK_HALF)
                even_sum += product(tl.trans(even), values, DOT_TYPE, PRECISION, INTERPRETED)
                odd_sum += product(tl.trans(odd), values, DOT_TYPE, PRECISION, INTERPRETED)
            else:
                whole_sum += product(tl.trans(features), values, DOT_TYPE, PRECISION, INTERPRETED)
    matrix = (batch * HEADS + head) * num_blocks + block
    start = products + matrix * (WIDTH * VALUE)
    in_value = (value_column < VALUE)[None, :]
    if HAS_ROTARY:
        mask = (pair < HALF)[:, None] & in_value
        pointers = start + pair[:, None] * VALUE + value_column[None, :]
        tl.store(pointers, to_matrix(even_sum * factor, products.dtype.element_ty, PRECISION, INTERPRETED), mask=mask)
        odd = to_matrix(odd_sum * factor, products.dtype.element_ty, PRECISION, INTERPRETED)
        tl.store(pointers + HALF * VALUE, odd, mask=mask)
    else:
        pointers = start + column[:, None] * VALUE + value_column[None, :]
        whole = to_matrix(whole_sum * factor, products.dtype.element_ty, PRECISION, INTERPRETED)
        tl.store(pointers, whole, mask=(column < WIDTH)[:, None] & in_value)
    if HAS_SUM:
        if column_tile == 0:
            tl.store(sums + matrix * WIDTH + column, total, mask=column < WIDTH)


@triton.jit(do_not_specialize=COUNTS)
def fused_attend_kernel(
    query,
    gate,
    output_weight,
    norm,
    norm_weight,
    cosine,
    sine,
    table,
    summaries,
    key_sums,
    output,
    num_tokens,
    lines,
    query_stride_batch,
    query_stride_token,
    query_stride_head,
    gate_stride_batch,
    gate_stride_token,
    gate_stride_head,
    scaling,
    feature_eps,
    factor,
    eps,
    output_eps,
    num_blocks,
    slots,
    HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_ROTARY: tl.constexpr,
    NORMALIZE: tl.constexpr,
    OUTPUT_NORM: tl.constexpr,
    HAS_GATE: tl.constexpr,
    FEATURE_MAP: tl.constexpr,
    DOT_TYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """output_t = norm(factor · ψ(q_t)ᵀ summary_b(t) / (φ(q_t)·key_sum_b(t) + eps)) · silu(gate_t).

    Each step is there or not by its flag. One program holds all columns of a head's output, for its norm.
    """
    block, line = tl.program_id(0).to(tl.int64) // lines, tl.program_id(0).to(tl.int64) % lines
    row_head = line % (HEADS * REPEATS)
    batch, head = line // (HEADS * REPEATS), row_head // REPEATS
    HALF: tl.constexpr = WIDTH // 2
    BLOCK_HALF: tl.constexpr = BLOCK_WIDTH // 2
    column = tl.arange(0, BLOCK_WIDTH)
    pair = tl.arange(0, BLOCK_HALF)
    value_column = tl.arange(0, BLOCK_VALUE)
    in_value = (value_column < VALUE)[None, :]
    matrix = (batch * HEADS + head) * num_blocks + block
    start = summaries + matrix * (WIDTH * VALUE)
    if HAS_ROTARY:
        mask = (pair < HALF)[:, None] & in_value
        pointers = start + pair[:, None] * VALUE + value_column[None, :]
        even_weights = tl.load(pointers, mask=mask, other=0.0)
        odd_weights = tl.load(pointers + HALF * VALUE, mask=mask, other=0.0)
    else:
        pointers = start + column[:, None] * VALUE + value_column[None, :]
        weights = tl.load(pointers, mask=(column < WIDTH)[:, None] & in_value, other=0.0)
    if NORMALIZE:
        sums = tl.load(key_sums + matrix * WIDTH + column, mask=column < WIDTH, other=0.0)
    if OUTPUT_NORM:
        norm_scale = tl.load(output_weight + value_column, mask=value_column < VALUE, other=0.0).to(tl.float32)
    query_start = query + batch * query_stride_batch + row_head * query_stride_head
    gate_start = gate + batch * gate_stride_batch + row_head * gate_stride_head
    output_start = output + (batch * num_tokens * (HEADS * REPEATS) + row_head) * VALUE
    for offset in range(0, slots, BLOCK_TOKENS):
        slot = offset + tl.arange(0, BLOCK_TOKENS)
        tokens, present = slot_tokens(table, batch, block, slot, slots, num_tokens, 0, slots)
        normed = normed_rows(
            query_start,
            norm + batch * num_tokens,
            norm_weight + row_head * WIDTH,
            tokens,
            present,
            query_stride_token,
            column,
            scaling,
            WIDTH,
            HAS_NORM,
        )
        features = features_of(normed, present, column, feature_eps, WIDTH, FEATURE_MAP)
        if HAS_ROTARY:
            cosines = rotary_rows(cosine, tokens, present, HALF, BLOCK_HALF)
            sines = rotary_rows(sine, tokens, present, HALF, BLOCK_HALF)
            even, odd = rotate(features, cosines, sines, BLOCK_TOKENS, BLOCK_HALF)
            result = product(even, even_weights, DOT_TYPE, PRECISION, INTERPRETED)
            result += product(odd, odd_weights, DOT_TYPE, PRECISION, INTERPRETED)
        else:
            result = product(features, weights, DOT_TYPE, PRECISION, INTERPRETED)
        result = result * factor
        if NORMALIZE:
            divisor = tl.sum(features * sums[None, :], axis=1) + eps
            result = result / tl.where(present, divisor, 1.0)[:, None]
        if OUTPUT_NORM:
            mean_square = tl.sum(result * result, axis=1) / VALUE
            result = result * (1.0 / tl.sqrt(mean_square + output_eps))[:, None] * norm_scale[None, :]
        if HAS_GATE:
            gates = load_rows(gate_start, tokens, present, gate_stride_token, value_column, VALUE).to(tl.float32)
            result = result * gates * tl.sigmoid(gates)
        store_rows(output_start, tokens, present, HEADS * REPEATS * VALUE, value_column, result, VALUE, INTERPRETED)
