# SPDX-License-Identifier: Apache-2.0
"""Gradients of the fused path, from the output projection's input back to projected queries, keys, values and gate.

With dψ_t the gradient of ψ(x_t), dφ_t that of φ(x_t) and R the rotation,

    dψ_t = factor · scale_t · matrix_{b(t)} output_t
    dφ_t = R⁻¹ dψ_t + weight_t vector_{b(t)}
    dx_t through the feature map, scaling, and norm(x) = w r x with r = 1 / rms(x):
           dx = w r g - x r³ mean(w g x)

for keys with values as outputs and gradients of the summaries as matrices, and for queries with gradients of outputs
and mixed summaries. Values and gradients of summaries come from `fused_products`.

Nothing between a projection and a summary is kept from the forward pass: it is computed again from the projections.
Gradients of normed rows pass through memory once, since an RMSNorm runs over all heads of a token and a program has
one head. Shape letters are those of `fused_products`.
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
    denominators,
    dense_head_rows,
    head_rows,
    load_matrix,
    load_rows,
    product,
    row_strides,
    store_rows,
)
from .feature_maps import feature_map_gradient
from .fused_products import (
    Features,
    channel_scales,
    entry_tokens,
    features_of,
    fused_options,
    fused_outer,
    fused_products,
    heads_together,
    normed_rows,
    place_of_line,
    reads_wide_tiles,
    rotary_rows,
    rotate,
    row_warps,
    slot_entries,
)
from .launching import (
    FEW_PROGRAMS,
    as_rows,
    dense_like,
    padded,
    product_flops,
    product_precision,
)


@triton.jit(do_not_specialize=COUNTS)
def fused_gradient_kernel(
    rows, outputs, features, table, matrices, vectors, result, scale, weight,
    factor, eps, num_tokens, num_blocks, slots, lines,
    HEADS: tl.constexpr, REPEATS: tl.constexpr, WIDTH: tl.constexpr, VALUE: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
    BLOCK_VALUE: tl.constexpr, BLOCK_TOKENS: tl.constexpr, FEATURE_MAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of norm(x_t) where that of ψ(x_t) is factor · scale_t · matrix_b(t) outputs_t.

    Without `scale`, scale_t and the weight of vector_b(t) are 1, and there may be no vectors. With it, rows are
    queries whose results are divided by d_t = φ(x_t)·vector_b(t) + eps: scale_t = 1 / d_t, and weight_t is the
    gradient of d_t; both are written, float32 `[B, T, HEADS · REPEATS]`.
    """
    block, batch, row_head = place_of_line(lines, HEADS * REPEATS)
    column, slot = tl.arange(0, BLOCK_WIDTH), tl.arange(0, BLOCK_TOKENS)
    value_column = tl.arange(0, BLOCK_VALUE)
    matrix = (batch * HEADS + row_head // REPEATS) * num_blocks + block
    block_table = table + block * slots
    entries = slot_entries(block_table, slot, slots, num_tokens)
    # Transposed as it is read.
    transposed = load_matrix(matrices + matrix * (WIDTH * VALUE), value_column, column, 1, VALUE, VALUE, WIDTH)
    scales = channel_scales(features, row_head, column, WIDTH, BLOCK_WIDTH)
    if vectors is not None:
        vector = tl.load(vectors + matrix * WIDTH + column, mask=column < WIDTH, other=0.0)
    head_of_rows, head_of_outputs = head_rows(rows, batch, row_head), head_rows(outputs, batch, row_head)
    results = dense_head_rows(result, batch, row_head, num_tokens, HEADS * REPEATS, WIDTH)
    for offset in range(0, slots, BLOCK_TOKENS):
        tokens, present = entry_tokens(entries, num_tokens)
        entries = slot_entries(block_table, offset + BLOCK_TOKENS + slot, slots, num_tokens)
        normed = normed_rows(head_of_rows, features, scales, batch, tokens, present, num_tokens, column, WIDTH)
        rotary = rotary_rows(features, tokens, present, column, WIDTH)
        row_factor = tl.full((BLOCK_TOKENS,), factor, tl.float32)
        if scale is not None:
            mapped = features_of(normed, features, present, column, WIDTH, FEATURE_MAP)
            inverse = 1.0 / tl.where(present, denominators(mapped, vector, eps), 1.0)
            row_factor *= inverse
        gradients = load_rows(head_of_outputs, tokens, present, value_column, VALUE)
        # The product of two rows is that of both turned back.
        gradient = rotate(product(gradients, transposed, PRECISION), rotary, -1, BLOCK_TOKENS, BLOCK_WIDTH)
        gradient *= row_factor[:, None]
        if scale is not None:
            row_weight = denominator_gradient(mapped, gradient, inverse)
            gradient += row_weight[:, None] * vector[None, :]
            per_token = (batch * num_tokens + tokens) * (HEADS * REPEATS) + row_head
            tl.store(scale + per_token, inverse, mask=present)
            tl.store(weight + per_token, row_weight, mask=present)
        elif vectors is not None:
            gradient += vector[None, :]
        gradient = feature_map_gradient(gradient, normed, FEATURE_MAP) * features.scaling
        store_rows(results, tokens, present, column, gradient, WIDTH)


def feature_gradient(
    rows: Tensor,
    outputs: Tensor,
    matrices: Tensor,
    vectors: Tensor | None,
    features: Features,
    map_name: str,
    table: Tensor,
    *,
    factor: float,
    eps: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of norm(x_t) where that of ψ(x_t) is factor · scale_t · matrix_b(t) outputs_t.

    Args:
        rows: Projected queries or keys x, `[B, T, H, K]`.
        outputs: Values, or gradients of outputs, `[B, T, H, V]`.
        matrices: Gradients of summaries, or mixed summaries, `[B, G, M, K, V]`, dense.
        vectors: float32 `[B, G, M, K]`, dense: added to the gradient of φ(x_t), or see `eps`.
        features: See [`Features`].
        map_name: `kernel` of an entry of [`mhla_hf.ops.FEATURE_MAPS`].
        table: Token of each slot, int32 `[M, N]`.
        factor: Factor of the products.
        eps: If given, rows are queries whose results are divided by φ(x_t)·vector_b(t) + eps, and scale_t is one over
            that. Otherwise it is 1.

    Returns:
        The gradient, `[B, T, H, K]` in the dtype of `rows`; scale, and the gradient of the denominators, float32
        `[B, T, H]` (both empty without `eps` or `vectors`).
    """
    rows = heads_together(rows)
    batch, num_tokens, heads, _ = rows.shape
    groups, blocks, columns = matrices.shape[1], matrices.shape[2], matrices.shape[-1]
    divides = vectors is not None and eps is not None
    # Features and their gradient are at hand together where there is a divisor.
    most_tokens = 32 if reads_wide_tiles(rows) and not divides else 16
    result = dense_like(rows)
    per_token = (batch, num_tokens, heads) if divides else (0,)
    scale, weight = (rows.new_empty(per_token, dtype=torch.float32) for _ in range(2))
    with torch.cuda.device_of(rows):
        fused_gradient_kernel[(blocks * batch * heads,)](
            as_rows(rows),
            as_rows(outputs),
            matrices=matrices,
            vectors=vectors,
            result=result,
            scale=scale if divides else None,
            weight=weight if divides else None,
            factor=factor,
            eps=0.0 if eps is None else eps,
            lines=batch * heads,
            FEATURE_MAP=map_name,
            PRECISION=product_precision(rows.dtype, matrices.dtype),
            **fused_options(rows, features, table, groups, columns, padded(columns), most_tokens),
        )
    return result, scale, weight


@triton.jit(do_not_specialize=COUNTS)
def norm_gradient_kernel(
    rows, norm, norm_weight, gradient, weight_gradient,
    num_tokens, count, share, stride_batch, stride_token,
    WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
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
        changed = ((gradients - values * mean) * inverse).to(gradient.dtype.element_ty)
        tl.store(gradient + row * WIDTH + column, changed, mask=inside)
    tl.store(weight_gradient + tl.program_id(0).to(tl.int64) * WIDTH + column, total, mask=inside)


def norm_gradient_(rows: Tensor, gradient: Tensor, norm_weight: Tensor | None, inverse_norm: Tensor) -> Tensor | None:
    """Turns the gradient of norm(x), dense `[B, T, H, K]`, into that of x, in place; nothing without a norm.

    Returns:
        The gradient of the norm's weight, `[H · K]` in its dtype; None without a norm.
    """
    if norm_weight is None:
        return None
    rows = heads_together(rows)
    batch, num_tokens, heads, width = rows.shape
    size, count = heads * width, batch * num_tokens
    share = triton.cdiv(count, FEW_PROGRAMS)
    partial = rows.new_empty(triton.cdiv(count, share), size, dtype=torch.float32)
    with torch.cuda.device_of(rows):
        norm_gradient_kernel[(partial.shape[0],)](
            rows,
            inverse_norm,
            norm_weight,
            gradient,
            partial,
            num_tokens,
            count,
            share,
            rows.stride(0),
            rows.stride(1),
            WIDTH=size,
            BLOCK_WIDTH=padded(size),
            num_warps=row_warps(size),
        )
    return partial.sum(0).to(norm_weight.dtype)


@triton.jit(do_not_specialize=COUNTS)
def output_gradient_kernel(
    output, gate, norm_weight, gradient, gate_gradient, weight_gradient,
    num_tokens, count, share, output_eps,
    HEADS: tl.constexpr, VALUE: tl.constexpr, BLOCK_VALUE: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """Through y = norm(x) · silu(g): overwrites `output` x with its gradient, and writes those of gate and weight.

    Norm and gate are left out where their tensors are None. `output`, `gradient` and `gate_gradient` are dense
    `[count, VALUE]`, with count = B · T · HEADS; a program takes `share` rows, a multiple of BLOCK_ROWS. The weight's
    gradient is `[programs, VALUE]`.
    """
    first = tl.program_id(0).to(tl.int64) * share
    column = tl.arange(0, BLOCK_VALUE)
    inside = column < VALUE
    if norm_weight is not None:
        norm_scale = tl.load(norm_weight + column, mask=inside, other=0.0).to(tl.float32)
        total = tl.zeros((BLOCK_VALUE,), tl.float32)
    for start in range(first, tl.minimum(first + share, count), BLOCK_ROWS):
        row = start + tl.arange(0, BLOCK_ROWS)
        present = row < count
        values = load_rows((output, VALUE), row, present, column, VALUE).to(tl.float32)
        gradients = load_rows((gradient, VALUE), row, present, column, VALUE).to(tl.float32)
        if norm_weight is not None:
            inverse = 1.0 / tl.sqrt(tl.sum(values * values, axis=1) / VALUE + output_eps)
            values *= inverse[:, None]
        if gate is not None:
            token, head = row // HEADS, row % HEADS
            stride_batch, stride_token, stride_head = row_strides(gate)
            places = (token // num_tokens) * stride_batch + (token % num_tokens) * stride_token
            places += head * stride_head
            gates = load_rows((gate.data, 1), places, present, column, VALUE).to(tl.float32)
            sigmoid = tl.sigmoid(gates)
            slope = gradients * values * (sigmoid * (1 + gates * (1 - sigmoid)))
            if norm_weight is not None:
                slope *= norm_scale[None, :]
            store_rows((gate_gradient, VALUE), row, present, column, slope, VALUE)
            gradients *= gates * sigmoid
        if norm_weight is not None:
            total += tl.sum(gradients * values, axis=0)
            gradients *= norm_scale[None, :]
            mean = tl.sum(gradients * values, axis=1) / VALUE
            gradients = (gradients - values * mean[:, None]) * inverse[:, None]
        store_rows((output, VALUE), row, present, column, gradients, VALUE)
    if norm_weight is not None:
        tl.store(weight_gradient + tl.program_id(0).to(tl.int64) * VALUE + column, total, mask=inside)


def output_gradient_(
    output: Tensor,
    gradient: Tensor,
    gate: Tensor | None,
    output_weight: Tensor | None,
    output_eps: float,
) -> tuple[Tensor | None, Tensor | None]:
    """Through norm(output) · silu(gate): overwrites the output, dense `[B, T, H, V]`, with its gradient.

    Args:
        output: What entered the norm.
        gradient: `[B, T, H, V]`.
        gate: `[B, T, H, V]` or None.
        output_weight: `[V]` or None.
        output_eps: Of the norm.

    Returns:
        The gradients of gate and weight in their dtypes; None for what is not there.
    """
    gradient = gradient.contiguous()
    batch, num_tokens, heads, columns = output.shape
    count, rows_tile = batch * num_tokens * heads, max(1, 4096 // padded(columns))
    share = triton.cdiv(triton.cdiv(count, rows_tile), 4 * FEW_PROGRAMS) * rows_tile
    grad_gate = None if gate is None else dense_like(gate)
    partial = output.new_empty(triton.cdiv(count, share), columns, dtype=torch.float32)
    with torch.cuda.device_of(output):
        output_gradient_kernel[(partial.shape[0],)](
            output,
            as_rows(gate),
            output_weight,
            gradient,
            grad_gate,
            partial,
            num_tokens,
            count,
            share,
            output_eps,
            HEADS=heads,
            VALUE=columns,
            BLOCK_VALUE=padded(columns),
            BLOCK_ROWS=rows_tile,
            num_warps=4,
        )
    return grad_gate, None if output_weight is None else partial.sum(0).to(output_weight.dtype)


@torch.library.custom_op("mhla_hf::fused_summary_backward", mutates_args=())
def fused_summary_backward(
    grad_summaries: Tensor,
    grad_sums: Tensor,
    key: Tensor,
    value: Tensor,
    inverse: Tensor,
    norm_weight: Tensor | None,
    rotary: Tensor | None,
    table: Tensor,
    feature_map: str,
    scaling: float,
    feature_eps: float,
    factor: float,
    total: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of key, value and norm_weight (empty without one)."""
    shared = Features(norm_weight, inverse, rotary, scaling, feature_eps), feature_map, table
    matrices, vectors = grad_summaries.contiguous(), grad_sums.contiguous() if total else None
    grad_value = fused_products(key, matrices, None, *shared, factor=factor)
    grad_key, _, _ = feature_gradient(key, value, matrices, vectors, *shared, factor=factor)
    grad_weight = norm_gradient_(key, grad_key, norm_weight, inverse)
    return grad_key, grad_value, key.new_empty(0) if grad_weight is None else grad_weight


@fused_summary_backward.register_fake
def _(grad_summaries, grad_sums, key, value, inverse, norm_weight, *args):
    grad_weight = key.new_empty(0) if norm_weight is None else dense_like(norm_weight)
    return dense_like(key), dense_like(value), grad_weight


@register_flop_formula(torch.ops.mhla_hf.fused_summary_backward)
def _summary_backward_flops(grad_summaries, grad_sums, key, *args, **kwargs) -> int:
    return 2 * product_flops(key, grad_summaries[-1])


@torch.library.custom_op("mhla_hf::fused_attend_backward", mutates_args=())
def fused_attend_backward(
    grad_output: Tensor,
    query: Tensor,
    summaries: Tensor,
    key_sums: Tensor | None,
    gate: Tensor | None,
    inverse: Tensor,
    norm_weight: Tensor | None,
    output_weight: Tensor | None,
    rotary: Tensor | None,
    table: Tensor,
    feature_map: str,
    scaling: float,
    feature_eps: float,
    factor: float,
    eps: float,
    output_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, summaries, key_sums, gate, norm_weight and output_weight; empty for what is not there."""
    shared = Features(norm_weight, inverse, rotary, scaling, feature_eps), feature_map, table
    summaries, groups = summaries.contiguous(), summaries.shape[1]
    vectors = None if key_sums is None else key_sums.contiguous()
    grad_gate = grad_output_weight = None
    if gate is not None or output_weight is not None:
        # Without a normaliser, what enters the norm can leave the range of float16.
        dtype = torch.float32 if query.dtype == torch.float16 else query.dtype
        output = fused_products(query, summaries, vectors, *shared, factor=factor, eps=eps, dtype=dtype)
        grad_gate, grad_output_weight = output_gradient_(output, grad_output, gate, output_weight, output_eps)
        grad_output = output
    grad_query, scale, weight = feature_gradient(
        query, grad_output, summaries, vectors, *shared, factor=factor, eps=eps
    )
    divides = key_sums is not None
    grad_summaries, grad_sums = fused_outer(
        query,
        grad_output,
        *shared,
        groups,
        factor=factor,
        total=divides,
        dtype=summaries.dtype,
        scale=scale if divides else None,
        weight=weight if divides else None,
    )
    grad_norm_weight = norm_gradient_(query, grad_query, norm_weight, inverse)
    found = grad_gate, grad_norm_weight, grad_output_weight
    gate_part, norm_part, output_part = (query.new_empty(0) if part is None else part for part in found)
    return grad_query, grad_summaries, grad_sums, gate_part, norm_part, output_part


@fused_attend_backward.register_fake
def _(grad_output, query, summaries, key_sums, gate, inverse, norm_weight, output_weight, *args):
    grad_sums = query.new_empty(0, dtype=torch.float32) if key_sums is None else dense_like(key_sums)
    others = gate, norm_weight, output_weight
    found = (query.new_empty(0) if part is None else dense_like(part) for part in others)
    return dense_like(query), dense_like(summaries), grad_sums, *found


@register_flop_formula(torch.ops.mhla_hf.fused_attend_backward)
def _attend_backward_flops(
    grad_output, query, summaries, key_sums, gate, inverse, norm_weight, output_weight, *args, **kwargs
) -> int:
    again = gate is not None or output_weight is not None
    return (3 if again else 2) * product_flops(query, summaries[-1])
