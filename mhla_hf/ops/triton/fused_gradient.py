# SPDX-License-Identifier: Apache-2.0
"""Gradients of the fused path, from the output projection's input back to projected queries, keys, values and gate.

With dψ_t the gradient of ψ(x_t), dφ_t that of φ(x_t) and R the rotation,

    dψ_t = scale_t · matrix_{b(t)} output_t
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

from . import launching
from .block_gradient import block_flops
from .device_functions import (
    COUNTS,
    denominator_gradient,
    denominators,
    dense_head_rows,
    factors,
    head_rows,
    inverse_rms,
    load_matrix,
    load_rows,
    place_of_program,
    row_product,
    row_strides,
    store_rows,
)
from .feature_maps import feature_map_gradient
from .fused_products import (
    Features,
    channel_scales,
    entry_tokens,
    features_of,
    fused_attend,
    fused_options,
    fused_outer,
    normed_rows,
    rotary_rows,
    rotate,
    row_warps,
    slot_entries,
)
from .launching import (
    as_rows,
    ceil_divide,
    dense_like,
    launch,
    line_groups,
    or_empty,
    padded,
    repeated,
    row_count,
    summary_dtype,
)
from .mixing import count_mixed_heads, mix, mixing_gradient, sum_gradients
from .operators import operator


@triton.jit(do_not_specialize=COUNTS)
def fused_gradient_kernel(
    rows, outputs, features, table, matrices, matrix_scales, vectors, result, scale, weight,
    first_line, lines, eps, num_tokens, num_blocks, slots,
    heads, REPEATS: tl.constexpr, WIDTH: tl.constexpr, VALUE: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
    BLOCK_VALUE: tl.constexpr, BLOCK_TOKENS: tl.constexpr, FEATURE_MAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of norm(x_t) where that of ψ(x_t) is scale_t · matrix_b(t) outputs_t.

    For a group of lines from `first_line` on, `matrices` are `[lines, M', WIDTH, VALUE]`, to be multiplied with
    `matrix_scales` `[lines, M']` if these are given, and `vectors` `[lines, M', WIDTH]`; REPEATS heads of the rows
    share one.

    Without `scale`, scale_t and the weight of vector_b(t) are 1, and there may be no vectors. With it, rows are
    queries whose results are divided by d_t = φ(x_t)·vector_b(t) + eps: scale_t = 1 / d_t, and weight_t is the
    gradient of d_t; both are written, float32 `[B, T, heads · REPEATS]`.
    """
    batch, row_head, block, _, matrix = place_of_program(1, num_blocks, first_line, lines, heads, REPEATS)
    column, slot = tl.arange(0, BLOCK_WIDTH), tl.arange(0, BLOCK_TOKENS)
    value_column = tl.arange(0, BLOCK_VALUE)
    block_table = table + block * slots
    entries = slot_entries(block_table, slot, slots, num_tokens)
    # Transposed as it is read.
    transposed = load_matrix(matrices + matrix * (WIDTH * VALUE), value_column, column, 1, VALUE, VALUE, WIDTH)
    transposed = factors(transposed, PRECISION)
    scales = channel_scales(features, row_head, column, WIDTH, BLOCK_WIDTH)
    factor = 1.0
    if matrix_scales is not None:
        factor = tl.load(matrix_scales + matrix)
    if vectors is not None:
        vector = tl.load(vectors + matrix * WIDTH + column, mask=column < WIDTH, other=0.0)
    head_of_rows, head_of_outputs = head_rows(rows, batch, row_head), head_rows(outputs, batch, row_head)
    results = dense_head_rows(result, batch, row_head, num_tokens, heads * REPEATS, WIDTH)
    for offset in range(0, slots, BLOCK_TOKENS):
        tokens, present = entry_tokens(entries, num_tokens)
        entries = slot_entries(block_table, offset + BLOCK_TOKENS + slot, slots, num_tokens)
        normed = normed_rows(head_of_rows, features, scales, batch, tokens, present, num_tokens, column, WIDTH)
        rotary = rotary_rows(features, tokens, present, column, WIDTH)
        row_factor = tl.full((BLOCK_TOKENS,), 1.0, tl.float32) * factor
        if scale is not None:
            mapped = features_of(normed, features, present, column, WIDTH, FEATURE_MAP)
            inverse = 1.0 / tl.where(present, denominators(mapped, vector, eps), 1.0)
            row_factor *= inverse
        gradients = load_rows(head_of_outputs, tokens, present, value_column, VALUE)
        # The product of two rows is that of both turned back.
        gradient = rotate(row_product(gradients, transposed, PRECISION), rotary, -1, BLOCK_TOKENS, BLOCK_WIDTH)
        gradient *= row_factor[:, None]
        if scale is not None:
            row_weight = denominator_gradient(mapped, gradient, inverse)
            gradient += row_weight[:, None] * vector[None, :]
            per_token = (batch * num_tokens + tokens) * (heads * REPEATS) + row_head
            tl.store(scale + per_token, inverse, mask=present)
            tl.store(weight + per_token, row_weight, mask=present)
        elif vectors is not None:
            gradient += vector[None, :]
        gradient = feature_map_gradient(gradient, normed, FEATURE_MAP) * features.scaling
        store_rows(results, tokens, present, column, gradient, WIDTH)


def feature_gradient(
    rows: Tensor, outputs: Tensor, matrices: Tensor, scales: Tensor | None, vectors: Tensor | None, features: Features,
    map_name: str, table: Tensor, heads: int, lines: tuple[int, int], result: Tensor, scale: Tensor | None = None,
    weight: Tensor | None = None, *, eps: float = 0.0,
) -> None:  # fmt: skip
    """The gradient of norm(x_t) for a group of lines, see [`fused_gradient_kernel`].

    Args:
        rows: Projected queries or keys x, `[B, T, H, K]`.
        outputs: Values, or gradients of outputs, `[B, T, H, V]`.
        matrices: Gradients of summaries, or mixed summaries, `[L, M', K, V]`, dense.
        scales: What float16 matrices are to be multiplied with, float32 `[L, M']`.
        vectors: float32 `[L, M', K]`, dense: added to the gradient of φ(x_t), or see `scale`.
        features: See [`Features`].
        map_name: `kernel` of an entry of [`mhla_hf.ops.FEATURE_MAPS`].
        table: Token of each slot, int32 `[M, N]`.
        heads: Heads of the matrices; H / heads of the rows share one.
        lines: The first line of the group and its number of lines, L.
        result: To be written, `[B, T, H, K]`, dense.
        scale: To be written where rows are queries whose results are divided by φ(x_t)·vector_b(t) + eps, of which it
            is one over, float32 `[B, T, H]`, dense. Otherwise scale_t is 1.
        weight: To be written together with it: the gradient of the divisors, float32 `[B, T, H]`, dense.
        eps: Added to the divisors.
    """
    columns = matrices.shape[3]
    launch(
        fused_gradient_kernel, lines[1] * table.shape[0] * rows.shape[2] // heads,
        as_rows(rows), as_rows(outputs), features, table, matrices, scales, vectors, result, scale, weight,
        lines=lines, eps=eps, **fused_options(rows, columns, table, map_name, heads, padded(columns), torch.float32),
    )  # fmt: skip


@triton.jit(do_not_specialize=COUNTS)
def norm_gradient_kernel(
    rows, norm, norm_weight, gradient, weight_gradient,
    num_tokens, count, share,
    WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    """Turns gradients of norm(x) `[count, WIDTH]` into those of x, in place, `share` rows a program.

    With r = 1 / rms(x) from `norm`: dx = r w g - x r³ mean(w g x). Each program writes its share of the weight's
    gradient, Σ g x r, to its row of `weight_gradient`.
    """
    first = tl.program_id(0).to(tl.int64) * share
    column = tl.arange(0, BLOCK_WIDTH)
    inside = column < WIDTH
    stride_batch, stride_token, _ = row_strides(rows)
    weight = tl.load(norm_weight + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK_WIDTH,), tl.float32)
    for row in range(first, tl.minimum(first + share, count)):
        start = rows.data + (row // num_tokens) * stride_batch + (row % num_tokens) * stride_token
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
    batch, num_tokens, heads, width = rows.shape
    if rows.stride(-1) != 1 or rows.stride(2) != width:
        # The kernel reads the heads of a token side by side.
        rows = rows.contiguous()
    size, count = heads * width, batch * num_tokens
    share = ceil_divide(count, launching.FEW_PROGRAMS)
    programs = ceil_divide(count, share)
    shares = rows.new_empty(programs, size, dtype=torch.float32)
    launch(
        norm_gradient_kernel, programs, as_rows(rows), inverse_norm, norm_weight, gradient, shares,
        num_tokens=num_tokens, count=count, share=share, WIDTH=size, BLOCK_WIDTH=padded(size),
        num_warps=row_warps(size),
    )  # fmt: skip
    return shares.sum(0).to(norm_weight.dtype)


@triton.jit(do_not_specialize=COUNTS)
def output_gradient_kernel(
    query, gradients, gate, output_weight, features, table, matrices, matrix_scales, vectors, result, gate_gradient,
    weight_gradient, first_line, lines, eps, output_eps, num_tokens, num_blocks, slots,
    heads, REPEATS: tl.constexpr, WIDTH: tl.constexpr, VALUE: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
    BLOCK_VALUE: tl.constexpr, BLOCK_TOKENS: tl.constexpr, FEATURE_MAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients through norm(x) · silu(gate) of x, which are written to `result`, and of gate and norm's weight.

    x is ψ(q)ᵀ matrix / (φ(q)·vector + eps), recomputed as in [`fused_attend_kernel`]. Norm, gate or
    divisor are left out where their tensors are None. `gradients` are those of the output; the weight's are
    `[B · heads · REPEATS, M, VALUE]`, one row a program.
    """
    batch, row_head, block, _, matrix = place_of_program(1, num_blocks, first_line, lines, heads, REPEATS)
    column, slot = tl.arange(0, BLOCK_WIDTH), tl.arange(0, BLOCK_TOKENS)
    value_column = tl.arange(0, BLOCK_VALUE)
    block_table = table + block * slots
    entries = slot_entries(block_table, slot, slots, num_tokens)
    weights = load_matrix(matrices + matrix * (WIDTH * VALUE), column, value_column, VALUE, 1, WIDTH, VALUE)
    weights = factors(weights, PRECISION)
    scales = channel_scales(features, row_head, column, WIDTH, BLOCK_WIDTH)
    factor = 1.0
    if matrix_scales is not None:
        factor = tl.load(matrix_scales + matrix)
    if vectors is not None:
        sums = tl.load(vectors + matrix * WIDTH + column, mask=column < WIDTH, other=0.0)
    if output_weight is not None:
        norm_scale = tl.load(output_weight + value_column, mask=value_column < VALUE, other=0.0).to(tl.float32)
        total = tl.zeros((BLOCK_VALUE,), tl.float32)
    queries, gradient_rows = head_rows(query, batch, row_head), head_rows(gradients, batch, row_head)
    results = dense_head_rows(result, batch, row_head, num_tokens, heads * REPEATS, VALUE)
    for offset in range(0, slots, BLOCK_TOKENS):
        tokens, present = entry_tokens(entries, num_tokens)
        entries = slot_entries(block_table, offset + BLOCK_TOKENS + slot, slots, num_tokens)
        gradient = load_rows(gradient_rows, tokens, present, value_column, VALUE).to(tl.float32)
        if gate is not None:
            gates = load_rows(head_rows(gate, batch, row_head), tokens, present, value_column, VALUE).to(tl.float32)
        normed = normed_rows(queries, features, scales, batch, tokens, present, num_tokens, column, WIDTH)
        rotary = rotary_rows(features, tokens, present, column, WIDTH)
        mapped = features_of(normed, features, present, column, WIDTH, FEATURE_MAP)
        values = row_product(rotate(mapped, rotary, 1, BLOCK_TOKENS, BLOCK_WIDTH), weights, PRECISION)
        row_factor = tl.full((BLOCK_TOKENS,), 1.0, tl.float32) * factor
        if vectors is not None:
            row_factor /= tl.where(present, denominators(mapped, sums, eps), 1.0)
        if output_weight is not None:
            mean_square = tl.sum(values * values, axis=1) / VALUE * row_factor * row_factor
            inverse = inverse_rms(mean_square, output_eps, present)
            row_factor *= inverse
        values *= row_factor[:, None]
        if gate is not None:
            sigmoid = tl.sigmoid(gates)
            slope = gradient * values * (sigmoid * (1 + gates * (1 - sigmoid)))
            if output_weight is not None:
                slope *= norm_scale[None, :]
            gate_rows = dense_head_rows(gate_gradient, batch, row_head, num_tokens, heads * REPEATS, VALUE)
            store_rows(gate_rows, tokens, present, value_column, slope, VALUE)
            gradient *= gates * sigmoid
        if output_weight is not None:
            total += tl.sum(gradient * values, axis=0)
            gradient *= norm_scale[None, :]
            mean = tl.sum(gradient * values, axis=1) / VALUE
            gradient = (gradient - values * mean[:, None]) * inverse[:, None]
        store_rows(results, tokens, present, value_column, gradient, VALUE)
    if output_weight is not None:
        row = (batch * (heads * REPEATS) + row_head) * num_blocks + block
        tl.store(weight_gradient + row * VALUE + value_column, total, mask=value_column < VALUE)


@operator("mhla_hf::fused_attention_backward", differentiable=False)
def fused_attention_backward(
    gradient: Tensor, query_inverse: Tensor, key_inverse: Tensor, query: Tensor, key: Tensor, value: Tensor,
    gate: Tensor | None, mixing: Tensor, query_norm: Tensor | None, key_norm: Tensor | None,
    output_norm: Tensor | None, rotary: Tensor | None, table: Tensor, feature_map: str, scaling: float,
    feature_eps: float, divides: bool, eps: float, output_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key, value, gate, mixing and the weights of the norms; empty for what is not there.

    Args beyond those of `fused.fused_attention`:
        gradient: Gradient of the output.
        query_inverse: From [`fused_products.inverse_norm`].
        key_inverse: The same.
    """
    batch, num_tokens, heads, width = query.shape
    groups, columns, blocks = key.shape[2], value.shape[3], len(table)
    mixed_heads, mixing = count_mixed_heads(mixing.shape, heads, groups), mixing.contiguous()
    repeats, summary_type = mixed_heads // groups, summary_dtype(query.dtype, in_backward=True)
    grad_mixing = []
    query_features = Features(query_norm, query_inverse, rotary, scaling, feature_eps)
    key_features = Features(key_norm, key_inverse, rotary, scaling, feature_eps)
    grad_query, grad_key, grad_value = (dense_like(tokens) for tokens in (query, key, value))
    scale = weight = grad_gate = shares = None
    if divides:
        scale, weight = (query.new_empty(query.shape[:3], dtype=torch.float32) for _ in range(2))
    inner_gradient = gradient
    if gate is not None or output_norm is not None:
        # Without a normaliser, what enters the norm can leave the range of float16.
        dtype = torch.float32 if query.dtype == torch.float16 else query.dtype
        inner_gradient = query.new_empty(batch, num_tokens, heads, columns, dtype=dtype)
        grad_gate = None if gate is None else dense_like(gate)
        if output_norm is not None:
            shares = query.new_empty(batch * heads * blocks, columns, dtype=torch.float32)
    line_bytes = (1 + repeats) * row_count(blocks) * width * columns * summary_type.itemsize
    for lines in line_groups(batch * groups, line_bytes):
        row_lines = repeated(lines, repeats)
        summaries = fused_outer(
            key, value, key_features, feature_map, table, groups, lines, dtype=summary_type, total=divides
        )
        mixed, scales, mixed_sums = mix(summaries, mixing, groups, lines)
        if inner_gradient is not gradient:
            launch(
                output_gradient_kernel, row_lines[1] * blocks * heads // mixed_heads,
                as_rows(query), as_rows(gradient), as_rows(gate), output_norm, query_features, table, mixed, scales,
                mixed_sums, inner_gradient, grad_gate, shares, lines=row_lines, eps=eps, output_eps=output_eps,
                **fused_options(query, columns, table, feature_map, mixed_heads, padded(columns), torch.float32),
            )  # fmt: skip
        feature_gradient(
            query, inner_gradient, mixed, scales, mixed_sums, query_features, feature_map, table, mixed_heads,
            row_lines, grad_query, scale, weight, eps=eps,
        )  # fmt: skip
        del mixed
        grad_mixed = fused_outer(
            query, inner_gradient, query_features, feature_map, table, mixed_heads, row_lines, dtype=summary_type,
            total=divides, scale=scale, weight=weight,
        )  # fmt: skip
        grad_mixing.append(mixing_gradient(grad_mixed, summaries, mixing, lines, query.dtype))
        del summaries
        grad_summaries, scales, grad_sums = mix(grad_mixed, mixing, groups, lines, transpose=True)
        del grad_mixed
        feature_gradient(
            key, value, grad_summaries, scales, grad_sums, key_features, feature_map, table, groups, lines, grad_key
        )
        fused_attend(
            key, grad_summaries, scales, None, key_features, feature_map, table, groups, lines, grad_value,
            is_gradient=True,
        )  # fmt: skip
    grad_gate, *grad_norms = or_empty(
        query,
        grad_gate,
        norm_gradient_(query, grad_query, query_norm, query_inverse),
        norm_gradient_(key, grad_key, key_norm, key_inverse),
        None if output_norm is None or shares is None else shares.sum(0).to(output_norm.dtype),
    )
    return grad_query, grad_key, grad_value, grad_gate, sum_gradients(grad_mixing, mixing, batch), *grad_norms


@torch.library.register_fake("mhla_hf::fused_attention_backward")
def _(gradient, query_inverse, key_inverse, query, key, value, gate, mixing, query_norm, key_norm, output_norm, *args):
    tensors = query, key, value, gate, mixing, query_norm, key_norm, output_norm
    return or_empty(query, *(tensor if tensor is None else dense_like(tensor) for tensor in tensors))


@register_flop_formula(torch.ops.mhla_hf.fused_attention_backward)
def _flops(gradient, query_inverse, key_inverse, query, key, value, gate, mixing, *args, **kwargs) -> int:
    return 2 * block_flops(query, key, value, mixing)
