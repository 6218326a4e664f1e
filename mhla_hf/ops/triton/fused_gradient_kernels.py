# SPDX-License-Identifier: Apache-2.0
"""Triton kernels for the gradients of the fused path, beside `fused_outer_kernel`, which is its own counterpart.

Nothing between a projection and a summary is kept from the forward pass: it is computed again from the projections.
Gradients of normed rows pass through memory once, since an RMSNorm runs over all heads of a token and a program has
one head.
"""

# No postponed annotations here: Triton reads `tl.constexpr` from the functions themselves.
import triton
import triton.language as tl

from .feature_maps import feature_map_gradient
from .fused_kernels import features_of, normed_rows, rotary_rows
from .rows import COUNTS, load_rows, product, slot_tokens, store_rows, to_type


@triton.jit
def _rotate_back(even, odd, cosine, sine, TOKENS: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """Rows whose rotation has these even and odd channels."""
    values = tl.join(even * cosine + odd * sine, odd * cosine - even * sine)
    return tl.reshape(values, (TOKENS, BLOCK_WIDTH))


@triton.jit(do_not_specialize=COUNTS)
def fused_gradient_kernel(
    rows,
    outputs,
    norm,
    norm_weight,
    cosine,
    sine,
    table,
    matrices,
    vectors,
    result,
    scale,
    weight,
    num_tokens,
    lines,
    rows_stride_batch,
    rows_stride_token,
    rows_stride_head,
    outputs_stride_batch,
    outputs_stride_token,
    outputs_stride_head,
    scaling,
    feature_eps,
    factor,
    eps,
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
    VECTORS: tl.constexpr,
    FEATURE_MAP: tl.constexpr,
    DOT_TYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """The gradient of norm(x_t) where that of ψ(x_t) is factor · scale_t · matrix_b(t) outputs_t.

    VECTORS: 0 for no more than that, with scale_t = 1. 1 adds vector_b(t) to the gradient of φ(x_t). 2 is for queries
    that are divided by d_t = φ(x_t)·vector_b(t) + eps: scale_t = 1 / d_t, the gradient of d_t is
    weight_t = -scale_t ψ(x_t)·(factor · scale_t · matrix outputs_t), and weight_t vector_b(t) is added; scale and
    weight are written, float32 `[B, T, HEADS · REPEATS]`.
    """
    block, line = tl.program_id(0).to(tl.int64) // lines, tl.program_id(0).to(tl.int64) % lines
    row_head = line % (HEADS * REPEATS)
    batch, head = line // (HEADS * REPEATS), row_head // REPEATS
    HALF: tl.constexpr = WIDTH // 2
    BLOCK_HALF: tl.constexpr = BLOCK_WIDTH // 2
    column = tl.arange(0, BLOCK_WIDTH)
    pair = tl.arange(0, BLOCK_HALF)
    value_column = tl.arange(0, BLOCK_VALUE)
    in_value = (value_column < VALUE)[:, None]
    matrix = (batch * HEADS + head) * num_blocks + block
    start = matrices + matrix * (WIDTH * VALUE)
    # Transposed as they are read.
    if HAS_ROTARY:
        mask = in_value & (pair < HALF)[None, :]
        pointers = start + pair[None, :] * VALUE + value_column[:, None]
        even_matrix = tl.load(pointers, mask=mask, other=0.0)
        odd_matrix = tl.load(pointers + HALF * VALUE, mask=mask, other=0.0)
    else:
        pointers = start + column[None, :] * VALUE + value_column[:, None]
        whole_matrix = tl.load(pointers, mask=in_value & (column < WIDTH)[None, :], other=0.0)
    if VECTORS != 0:
        vector = tl.load(vectors + matrix * WIDTH + column, mask=column < WIDTH, other=0.0)
    rows_start = rows + batch * rows_stride_batch + row_head * rows_stride_head
    outputs_start = outputs + batch * outputs_stride_batch + row_head * outputs_stride_head
    result_start = result + (batch * num_tokens * (HEADS * REPEATS) + row_head) * WIDTH
    for offset in range(0, slots, BLOCK_TOKENS):
        slot = offset + tl.arange(0, BLOCK_TOKENS)
        tokens, present = slot_tokens(table, batch, block, slot, slots, num_tokens, 0, slots)
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
        token_scale = tl.full((BLOCK_TOKENS,), factor, tl.float32)
        if VECTORS == 2:
            features = features_of(normed, present, column, feature_eps, WIDTH, FEATURE_MAP)
            divisor = tl.sum(features * vector[None, :], axis=1) + eps
            inverse = 1.0 / tl.where(present, divisor, 1.0)
            token_scale *= inverse
        gradients = load_rows(outputs_start, tokens, present, outputs_stride_token, value_column, VALUE)
        if HAS_ROTARY:
            cosines = rotary_rows(cosine, tokens, present, HALF, BLOCK_HALF)
            sines = rotary_rows(sine, tokens, present, HALF, BLOCK_HALF)
            even = product(gradients, even_matrix, DOT_TYPE, PRECISION, INTERPRETED) * token_scale[:, None]
            odd = product(gradients, odd_matrix, DOT_TYPE, PRECISION, INTERPRETED) * token_scale[:, None]
            # The product of two rows is that of both turned back.
            gradient = _rotate_back(even, odd, cosines, sines, BLOCK_TOKENS, BLOCK_WIDTH)
        else:
            gradient = product(gradients, whole_matrix, DOT_TYPE, PRECISION, INTERPRETED) * token_scale[:, None]
        if VECTORS == 2:
            token_weight = -tl.sum(features * gradient, axis=1) * inverse
            gradient += token_weight[:, None] * vector[None, :]
            per_token = (batch * num_tokens + tokens) * (HEADS * REPEATS) + row_head
            tl.store(scale + per_token, inverse, mask=present)
            tl.store(weight + per_token, token_weight, mask=present)
        if VECTORS == 1:
            gradient += vector[None, :]
        gradient = feature_map_gradient(gradient, normed, FEATURE_MAP) * scaling
        store_rows(result_start, tokens, present, HEADS * REPEATS * WIDTH, column, gradient, WIDTH, INTERPRETED)


@triton.jit(do_not_specialize=COUNTS)
def norm_gradient_kernel(
    rows,
    norm,
    norm_weight,
    gradient,
    weight_gradient,
    num_tokens,
    count,
    share,
    stride_batch,
    stride_token,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Turns gradients of norm(x) `[count, WIDTH]` into those of x, in place, `share` rows a program.

    With r = 1 / rms(x) from `norm`: dx = r w g - x r³ mean(w g x). Each program writes its share of the weight's
    gradient, Σ g x r, to its row of `weight_gradient`.
    """
    first = tl.program_id(0).to(tl.int64) * share
    column = tl.arange(0, BLOCK_WIDTH)
    inside = column < WIDTH
    weight = tl.load(norm_weight + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK_WIDTH,), tl.float32)
    for row in range(first, tl.minimum(first + share, count)):
        start = rows + (row // num_tokens) * stride_batch + (row % num_tokens) * stride_token
        values = tl.load(start + column, mask=inside, other=0.0).to(tl.float32)
        gradients = tl.load(gradient + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.load(norm + row)
        values *= inverse
        total += gradients * values
        gradients *= weight
        mean = tl.sum(gradients * values, axis=0) / WIDTH
        changed = to_type((gradients - values * mean) * inverse, gradient.dtype.element_ty, INTERPRETED)
        tl.store(gradient + row * WIDTH + column, changed, mask=inside)
    tl.store(weight_gradient + tl.program_id(0).to(tl.int64) * WIDTH + column, total, mask=inside)


@triton.jit(do_not_specialize=COUNTS)
def output_gradient_kernel(
    output,
    gate,
    norm_weight,
    gradient,
    gate_gradient,
    weight_gradient,
    num_tokens,
    count,
    share,
    gate_stride_batch,
    gate_stride_token,
    gate_stride_head,
    output_eps,
    HEADS: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    OUTPUT_NORM: tl.constexpr,
    HAS_GATE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Through y = norm(x) · silu(g): overwrites `output` x with its gradient, and writes those of gate and weight.

    `output`, `gradient` and `gate_gradient` are dense `[count, VALUE]`, with count = B · T · HEADS; a program takes
    `share` rows, a multiple of BLOCK_ROWS. The weight's gradient is `[programs, VALUE]`.
    """
    first = tl.program_id(0).to(tl.int64) * share
    column = tl.arange(0, BLOCK_VALUE)
    inside = column < VALUE
    if OUTPUT_NORM:
        norm_scale = tl.load(norm_weight + column, mask=inside, other=0.0).to(tl.float32)
        total = tl.zeros((BLOCK_VALUE,), tl.float32)
    for start in range(first, tl.minimum(first + share, count), BLOCK_ROWS):
        row = start + tl.arange(0, BLOCK_ROWS)
        present = row < count
        values = load_rows(output, row, present, VALUE, column, VALUE).to(tl.float32)
        gradients = load_rows(gradient, row, present, VALUE, column, VALUE).to(tl.float32)
        if OUTPUT_NORM:
            inverse = 1.0 / tl.sqrt(tl.sum(values * values, axis=1) / VALUE + output_eps)
            values *= inverse[:, None]
        if HAS_GATE:
            token, head = row // HEADS, row % HEADS
            places = (token // num_tokens) * gate_stride_batch + (token % num_tokens) * gate_stride_token
            places += head * gate_stride_head
            gates = load_rows(gate, places, present, 1, column, VALUE).to(tl.float32)
            sigmoid = tl.sigmoid(gates)
            slope = gradients * values * (sigmoid * (1 + gates * (1 - sigmoid)))
            if OUTPUT_NORM:
                slope *= norm_scale[None, :]
            store_rows(gate_gradient, row, present, VALUE, column, slope, VALUE, INTERPRETED)
            gradients *= gates * sigmoid
        if OUTPUT_NORM:
            total += tl.sum(gradients * values, axis=0)
            gradients *= norm_scale[None, :]
            mean = tl.sum(gradients * values, axis=1) / VALUE
            gradients = (gradients - values * mean[:, None]) * inverse[:, None]
        store_rows(output, row, present, VALUE, column, gradients, VALUE, INTERPRETED)
    if OUTPUT_NORM:
        tl.store(weight_gradient + tl.program_id(0).to(tl.int64) * VALUE + column, total, mask=inside)
