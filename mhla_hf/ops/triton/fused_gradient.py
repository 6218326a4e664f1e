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

from collections.abc import Callable
from dataclasses import replace
from typing import Any

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
    head_rows,
    load_matrix,
    load_rows,
    place_of_program,
    product,
    row_strides,
    store_rows,
)
from .feature_maps import feature_map_gradient
from .fused_products import (
    Features,
    channel_scales,
    dense_rows,
    entry_tokens,
    features_of,
    fused_options,
    heads_together,
    normed_rows,
    prepare_fused_outer,
    prepare_fused_products,
    reads_wide_tiles,
    rotary_rows,
    rotate,
    row_warps,
    slot_entries,
)
from .launching import (
    FEW_PROGRAMS,
    Stage,
    as_rows,
    ceil_divide,
    dense_like,
    launch,
    lines_of_group,
    multiplies_exactly,
    padded,
    prepare,
    product_precision,
    run_groups,
)
from .mixing import MixingGradient, count_mixed_heads, mixing_stages, prepare_weights, sum_shares
from .replay import replayed


@triton.jit(do_not_specialize=COUNTS)
def fused_gradient_kernel(
    rows, outputs, features, table, matrices, vectors, result, scale, weight,
    first_line, lines, factor, eps, num_tokens, num_blocks, slots,
    HEADS: tl.constexpr, REPEATS: tl.constexpr, WIDTH: tl.constexpr, VALUE: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
    BLOCK_VALUE: tl.constexpr, BLOCK_TOKENS: tl.constexpr, FEATURE_MAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of norm(x_t) where that of ψ(x_t) is factor · scale_t · matrix_b(t) outputs_t.

    For a group of lines from `first_line` on, `matrices` are `[lines, M, WIDTH, VALUE]` and `vectors` `[lines, M,
    WIDTH]`; REPEATS heads of the rows share one.

    Without `scale`, scale_t and the weight of vector_b(t) are 1, and there may be no vectors. With it, rows are
    queries whose results are divided by d_t = φ(x_t)·vector_b(t) + eps: scale_t = 1 / d_t, and weight_t is the
    gradient of d_t; both are written, float32 `[B, T, HEADS · REPEATS]`.
    """
    batch, row_head, block, _, matrix = place_of_program(1, num_blocks, first_line, lines, HEADS, REPEATS)
    column, slot = tl.arange(0, BLOCK_WIDTH), tl.arange(0, BLOCK_TOKENS)
    value_column = tl.arange(0, BLOCK_VALUE)
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


def prepare_feature_gradient(
    rows: Tensor,
    outputs: Tensor,
    matrices: Tensor,
    vectors: Tensor | None,
    features: Features,
    map_name: str,
    table: Tensor,
    heads: int,
    *,
    factor: float,
    eps: float | None = None,
) -> tuple[Stage, Tensor, Tensor | None, Tensor | None]:
    """The gradient of norm(x_t) where that of ψ(x_t) is factor · scale_t · matrix_b(t) outputs_t, by groups of lines.

    Args:
        rows: Projected queries or keys x, `[B, T, H, K]`.
        outputs: Values, or gradients of outputs, `[B, T, H, V]`.
        matrices: Gradients of summaries, or mixed summaries, `[L, M, K, V]`, dense.
        vectors: float32 `[L, M, K]`, dense: added to the gradient of φ(x_t), or see `eps`.
        features: See [`Features`].
        map_name: `kernel` of an entry of [`mhla_hf.ops.FEATURE_MAPS`].
        table: Token of each slot, int32 `[M, N]`.
        heads: Heads of the matrices; H / heads of the rows share one.
        factor: Factor of the products.
        eps: If given, rows are queries whose results are divided by φ(x_t)·vector_b(t) + eps, and scale_t is one over
            that. Otherwise it is 1.

    Returns:
        The stage; the gradient, `[B, T, H, K]` in the dtype of `rows`; scale, and the gradient of the denominators,
        float32 `[B, T, H]` (both None without `eps` or `vectors`).
    """
    divides = vectors is not None and eps is not None
    # Features and their gradient are at hand together where there is a divisor.
    most_tokens = 32 if reads_wide_tiles(rows) and not divides else 16
    result, scale, weight = dense_like(rows), None, None
    if divides:
        scale, weight = (rows.new_empty(rows.shape[:3], dtype=torch.float32) for _ in range(2))
    options = fused_options(rows, matrices, table, map_name, heads, padded(matrices.shape[3]), most_tokens)
    run = prepare(
        fused_gradient_kernel, as_rows(rows), as_rows(outputs), features, table, matrices, vectors, result, scale,
        weight, **options, factor=factor, eps=eps or 0.0, PRECISION=product_precision(rows.dtype, matrices.dtype),
    )  # fmt: skip
    return Stage(run, table.shape[0] * rows.shape[2] // heads), result, scale, weight


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
    shares = _norm_gradient_shares_(rows, gradient, norm_weight, inverse_norm)
    return None if norm_weight is None else shares.sum(0).to(norm_weight.dtype)


def _norm_gradient_shares_(rows: Tensor, gradient: Tensor, norm_weight: Tensor | None, inverse_norm: Tensor) -> Tensor:
    """[`norm_gradient_`] with shares of the weight's gradient, float32 `[shares, H · K]`; empty without a norm."""
    if norm_weight is None:
        return rows.new_empty(0)
    batch, num_tokens, heads, width = rows.shape
    size, count = heads * width, batch * num_tokens
    share = ceil_divide(count, FEW_PROGRAMS)
    programs = ceil_divide(count, share)
    shares = rows.new_empty(programs, size, dtype=torch.float32)
    launch(
        norm_gradient_kernel, programs, as_rows(rows), inverse_norm, norm_weight, gradient, shares,
        num_tokens=num_tokens, count=count, share=share, WIDTH=size, BLOCK_WIDTH=padded(size),
        num_warps=row_warps(size),
    )  # fmt: skip
    return shares


@triton.jit(do_not_specialize=COUNTS)
def output_gradient_kernel(
    query, gradients, gate, output_weight, features, table, matrices, vectors, result, gate_gradient, weight_gradient,
    first_line, lines, factor, eps, output_eps, num_tokens, num_blocks, slots,
    HEADS: tl.constexpr, REPEATS: tl.constexpr, WIDTH: tl.constexpr, VALUE: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
    BLOCK_VALUE: tl.constexpr, BLOCK_TOKENS: tl.constexpr, FEATURE_MAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients through norm(x) · silu(gate) of x, which are written to `result`, and of gate and norm's weight.

    x is factor · ψ(q)ᵀ matrix / (φ(q)·vector + eps), recomputed as in [`fused_attend_kernel`]. Norm, gate or
    divisor are left out where their tensors are None. `gradients` are those of the output; the weight's are
    `[B · HEADS · REPEATS, M, VALUE]`, one row a program.
    """
    batch, row_head, block, _, matrix = place_of_program(1, num_blocks, first_line, lines, HEADS, REPEATS)
    column, slot = tl.arange(0, BLOCK_WIDTH), tl.arange(0, BLOCK_TOKENS)
    value_column = tl.arange(0, BLOCK_VALUE)
    block_table = table + block * slots
    entries = slot_entries(block_table, slot, slots, num_tokens)
    weights = load_matrix(matrices + matrix * (WIDTH * VALUE), column, value_column, VALUE, 1, WIDTH, VALUE)
    scales = channel_scales(features, row_head, column, WIDTH, BLOCK_WIDTH)
    if vectors is not None:
        sums = tl.load(vectors + matrix * WIDTH + column, mask=column < WIDTH, other=0.0)
    if output_weight is not None:
        norm_scale = tl.load(output_weight + value_column, mask=value_column < VALUE, other=0.0).to(tl.float32)
        total = tl.zeros((BLOCK_VALUE,), tl.float32)
    queries, gradient_rows = head_rows(query, batch, row_head), head_rows(gradients, batch, row_head)
    results = dense_head_rows(result, batch, row_head, num_tokens, HEADS * REPEATS, VALUE)
    for offset in range(0, slots, BLOCK_TOKENS):
        tokens, present = entry_tokens(entries, num_tokens)
        entries = slot_entries(block_table, offset + BLOCK_TOKENS + slot, slots, num_tokens)
        gradient = load_rows(gradient_rows, tokens, present, value_column, VALUE).to(tl.float32)
        if gate is not None:
            gates = load_rows(head_rows(gate, batch, row_head), tokens, present, value_column, VALUE).to(tl.float32)
        normed = normed_rows(queries, features, scales, batch, tokens, present, num_tokens, column, WIDTH)
        rotary = rotary_rows(features, tokens, present, column, WIDTH)
        mapped = features_of(normed, features, present, column, WIDTH, FEATURE_MAP)
        values = product(rotate(mapped, rotary, 1, BLOCK_TOKENS, BLOCK_WIDTH), weights, PRECISION)
        row_factor = tl.full((BLOCK_TOKENS,), factor, tl.float32)
        if vectors is not None:
            row_factor /= tl.where(present, denominators(mapped, sums, eps), 1.0)
        if output_weight is not None:
            mean_square = tl.sum(values * values, axis=1) / VALUE * row_factor * row_factor
            inverse = 1.0 / tl.sqrt(mean_square + output_eps)
            row_factor *= inverse
        values *= row_factor[:, None]
        if gate is not None:
            sigmoid = tl.sigmoid(gates)
            slope = gradient * values * (sigmoid * (1 + gates * (1 - sigmoid)))
            if output_weight is not None:
                slope *= norm_scale[None, :]
            gate_rows = dense_head_rows(gate_gradient, batch, row_head, num_tokens, HEADS * REPEATS, VALUE)
            store_rows(gate_rows, tokens, present, value_column, slope, VALUE)
            gradient *= gates * sigmoid
        if output_weight is not None:
            total += tl.sum(gradient * values, axis=0)
            gradient *= norm_scale[None, :]
            mean = tl.sum(gradient * values, axis=1) / VALUE
            gradient = (gradient - values * mean[:, None]) * inverse[:, None]
        store_rows(results, tokens, present, value_column, gradient, VALUE)
    if output_weight is not None:
        row = (batch * (HEADS * REPEATS) + row_head) * num_blocks + block
        tl.store(weight_gradient + row * VALUE + value_column, total, mask=value_column < VALUE)


def prepare_output_gradient(
    query: Tensor,
    gradient: Tensor,
    matrices: Tensor,
    vectors: Tensor | None,
    features: Features,
    map_name: str,
    table: Tensor,
    heads: int,
    *,
    factor: float,
    eps: float,
    gate: Tensor | None,
    output_weight: Tensor | None,
    output_eps: float,
) -> tuple[Stage, Tensor, Tensor | None, Tensor | None]:
    """Gradients through norm(x) · silu(gate) for groups of lines.

    Arguments that are not listed are those of [`fused_products.prepare_fused_products`], whose output without norm and
    gate is x.

    Args:
        gradient: Of the output, `[B, T, H, V]`.

    Returns:
        The stage; the gradient of x, `[B, T, H, V]`; that of the gate, in its dtype; and shares of that of the norm's
        weight, float32 `[B · H, M, V]`; None for what is not there.
    """
    batch, num_tokens, query_heads, _ = query.shape
    columns = matrices.shape[3]
    # Without a normaliser, what enters the norm can leave the range of float16.
    dtype = torch.float32 if query.dtype == torch.float16 else query.dtype
    result = query.new_empty(batch, num_tokens, query_heads, columns, dtype=dtype)
    grad_gate = None if gate is None else dense_like(gate)
    partial = None
    if output_weight is not None:
        partial = query.new_empty(batch * query_heads, table.shape[0], columns, dtype=torch.float32)
    run = prepare(
        output_gradient_kernel, as_rows(query), as_rows(gradient), as_rows(gate), output_weight, features, table,
        matrices, vectors, result, grad_gate, partial,
        **fused_options(query, matrices, table, map_name, heads, padded(columns), 16),
        factor=factor, eps=eps, output_eps=output_eps, PRECISION=product_precision(query.dtype, matrices.dtype),
    )  # fmt: skip
    return Stage(run, table.shape[0] * query_heads // heads), result, grad_gate, partial


def run_fused_backward(
    gradient: Tensor,
    query_inverse: Tensor,
    key_inverse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor | None,
    mixing: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    output_norm: Tensor | None,
    rotary: Tensor | None,
    table: Tensor,
    feature_map: str,
    scaling: float,
    feature_eps: float,
    divides: bool,
    eps: float,
    output_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value, gate, mixing and the weights of the norms; empty for what is not there.

    Args beyond those of `fused.fused_attention`:
        gradient: Of the output.
        query_inverse: From [`fused_products.inverse_norms`].
        key_inverse: The same.
    """
    inputs = (
        dense_rows(gradient), query_inverse, key_inverse, heads_together(query), heads_together(key),
        dense_rows(value), dense_rows(gate), mixing, query_norm, key_norm, output_norm, rotary, table,
    )  # fmt: skip
    options = (
        feature_map, scaling, feature_eps, divides, eps, output_eps, multiplies_exactly(query.dtype),
        launching.GROUP_LINES, FEW_PROGRAMS,
    )  # fmt: skip
    grad_query, grad_key, grad_value, grad_gate, *shares = replayed(_launch_all, inputs, options)
    mixed_heads = count_mixed_heads(mixing.shape, query.shape[2], key.shape[2])
    grad_mixing = sum_shares(shares[0], mixing.shape, query.shape[0], mixed_heads)

    def total(norm: Tensor | None, share: Tensor) -> Tensor:
        return query.new_empty(0) if norm is None else share.flatten(0, -2).sum(0).to(norm.dtype)

    grad_norms = total(query_norm, shares[1]), total(key_norm, shares[2]), total(output_norm, shares[3])
    return grad_query, grad_key, grad_value, grad_gate, grad_mixing, *grad_norms


# In place of `torch.library.custom_op`, which takes several times longer for a call.
torch.library.define(
    "mhla_hf::fused_attention_backward", torch.library.infer_schema(run_fused_backward, mutates_args=())
)
torch.library.impl("mhla_hf::fused_attention_backward", ("cpu", "cuda"))(run_fused_backward)
fused_attention_backward = torch.ops.mhla_hf.fused_attention_backward.default


def _second_derivative(ctx, *gradients):
    raise RuntimeError("The fused kernels of MHLA have no second derivatives; backend='torch' has.")


# Operators by `torch.library.define` have second derivatives of zero otherwise.
torch.library.register_autograd("mhla_hf::fused_attention_backward", _second_derivative)


def _launch_all(
    gradient: Tensor,
    query_inverse: Tensor,
    key_inverse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor | None,
    mixing: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    output_norm: Tensor | None,
    rotary: Tensor | None,
    table: Tensor,
    feature_map: str,
    scaling: float,
    feature_eps: float,
    divides: bool,
    eps: float,
    output_eps: float,
    exact: bool,
    *others: int | None,
) -> tuple[Tensor, ...]:
    """Gradients of query, key, value and gate, and shares of those of mixing and of the weights of the norms."""
    batch, _, heads, width = query.shape
    groups, columns, (blocks, slots) = key.shape[2], value.shape[3], table.shape
    mixed_heads = count_mixed_heads(mixing.shape, heads, groups)
    repeats, lines = mixed_heads // groups, batch * groups
    group = lines_of_group(lines, (1 + repeats) * blocks * width * columns * 4, blocks, query.device)
    query_features = Features(query_norm, query_inverse, rotary, scaling, feature_eps)
    key_features = Features(key_norm, key_inverse, rotary, scaling, feature_eps)
    summaries = query.new_empty(group, blocks, width, columns, dtype=torch.float32)
    mixed = query.new_empty(group * repeats, blocks, width, columns, dtype=torch.float32)
    sums = mixed_sums = None
    if divides:
        sums, mixed_sums = (query.new_empty(part.shape[:3], dtype=torch.float32) for part in (summaries, mixed))
    weights, transposed = (
        prepare_weights(mixing, torch.float32, exact=exact, sums=divides, transpose=transpose)
        for transpose in (False, True)
    )
    pairs = (summaries, sums), (mixed, mixed_sums)
    stages: list[Callable[[int, int], Any]] = [
        prepare_fused_outer(key, value, key_features, feature_map, table, groups, summaries, sums, factor=1 / slots),
        *mixing_stages(weights, *pairs, heads=mixed_heads, repeats=repeats),
    ]
    grad_gate = grad_output_norm = None
    many = float(slots)
    if gate is not None or output_norm is not None:
        stage, gradient, grad_gate, grad_output_norm = prepare_output_gradient(
            query, gradient, mixed, mixed_sums, query_features, feature_map, table, mixed_heads,
            factor=many, eps=eps, gate=gate, output_weight=output_norm, output_eps=output_eps,
        )  # fmt: skip
        stages.append(replace(stage, repeats=repeats))
    stage, grad_query, scale, weight = prepare_feature_gradient(
        query, gradient, mixed, mixed_sums, query_features, feature_map, table, mixed_heads, factor=many, eps=eps
    )
    stages.append(replace(stage, repeats=repeats))
    # Gradients of summaries take the place of summaries that are needed no more.
    stage = prepare_fused_outer(
        query, gradient, query_features, feature_map, table, mixed_heads, mixed, mixed_sums,
        factor=many, scale=scale, weight=weight,
    )  # fmt: skip
    stages.append(replace(stage, repeats=repeats))
    grad_mixing = MixingGradient(
        mixing, mixed, summaries, batch=batch, heads=mixed_heads, repeats=repeats, exact=exact,
        sums=(mixed_sums, sums) if mixed_sums is not None and sums is not None else None,
    )  # fmt: skip
    stages.append(grad_mixing)
    stages += mixing_stages(transposed, *pairs[::-1], heads=groups, repeats=repeats, sum_repeats=True)
    stage, grad_key, _, _ = prepare_feature_gradient(
        key, value, summaries, sums, key_features, feature_map, table, groups, factor=1 / slots
    )
    grad_value = dense_like(value)
    stages += [
        stage,
        prepare_fused_products(
            key, summaries, None, key_features, feature_map, table, groups, grad_value, factor=1 / slots
        ),
    ]
    run_groups(stages, lines, group)
    return (
        grad_query,
        grad_key,
        grad_value,
        query.new_empty(0) if grad_gate is None else grad_gate,
        grad_mixing.partial,
        _norm_gradient_shares_(query, grad_query, query_norm, query_inverse),
        _norm_gradient_shares_(key, grad_key, key_norm, key_inverse),
        query.new_empty(0) if grad_output_norm is None else grad_output_norm,
    )


@torch.library.register_fake("mhla_hf::fused_attention_backward")
def _(gradient, query_inverse, key_inverse, query, key, value, gate, mixing, query_norm, key_norm, output_norm, *args):
    tensors = query, key, value, gate, mixing, query_norm, key_norm, output_norm
    return tuple(query.new_empty(0) if tensor is None else dense_like(tensor) for tensor in tensors)


@register_flop_formula(torch.ops.mhla_hf.fused_attention_backward)
def _flops(gradient, query_inverse, key_inverse, query, key, value, gate, mixing, *args, **kwargs) -> int:
    return 2 * block_flops(query, key, value, mixing)
