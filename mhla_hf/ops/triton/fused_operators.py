# SPDX-License-Identifier: Apache-2.0
"""Operators of the fused path, from projections to what the output projection reads, and their gradients.

Shape letters: B batch, T tokens, H heads, G key/value heads (H or a divisor), K and V widths, M blocks. ψ and φ are as
in `fused_kernels`.
"""

# No postponed annotations here: torch.library reads schemas from them.

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from . import fused_gradient_launch, fused_launch
from .fused_launch import Features
from .launching import summary_dtype


def _dense_like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _inverse_norm(tokens: Tensor, norm_weight: Tensor | None, eps: float) -> Tensor:
    return tokens.new_empty(0, dtype=torch.float32) if norm_weight is None else fused_launch.inverse_norm(tokens, eps)


def _fake_inverse_norm(tokens: Tensor, norm_weight: Tensor | None) -> Tensor:
    return tokens.new_empty((0,) if norm_weight is None else tokens.shape[:2], dtype=torch.float32)


@torch.library.custom_op("mhla_hf::fused_summary", mutates_args=())
def fused_summary(
    key: Tensor,
    value: Tensor,
    norm_weight: Tensor | None,
    cosine: Tensor | None,
    sine: Tensor | None,
    table: Tensor,
    feature_map: str,
    norm_eps: float,
    scaling: float,
    feature_eps: float,
    factor: float,
    total: bool,
    half: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """factor Σ ψ(k) vᵀ and Σ φ(k) of each block, from projected keys.

    Args:
        key: `[B, T, G, K]`.
        value: `[B, T, G, V]`.
        norm_weight: Weight of an RMSNorm across heads, `[G · K]`; None for no norm.
        cosine: Table of rotary embeddings for neighbouring pairs of channels, float32 `[T, K / 2]`, dense; or None.
            It gets no gradient.
        sine: The same.
        table: Token of each slot, int32 `[M, N]`.
        feature_map: `kernel` of an entry of [`mhla_hf.ops.FEATURE_MAPS`].
        norm_eps: Of the norm.
        scaling: Keys are multiplied with it before the feature map.
        feature_eps: Added to the features.
        factor: A number.
        total: Whether the sums are wanted.
        half: Keep summaries in bfloat16 for bfloat16 tokens, see [`summary_dtype`].

    Returns:
        `[B, G, M, K, V]`, with even channels before odd ones where rotated; float32 `[B, G, M, K]`, empty unless
        `total`; and 1 / rms of each token's keys for the backward pass, float32 `[B, T]`, empty without a norm.
    """
    inverse = _inverse_norm(key, norm_weight, norm_eps)
    features = Features(norm_weight, inverse, cosine, sine, table, feature_map, scaling, feature_eps)
    dtype = summary_dtype(key.dtype, half)
    summaries, sums = fused_launch.outer(key, value, features, key.shape[2], factor=factor, total=total, dtype=dtype)
    return summaries, sums, inverse


@fused_summary.register_fake
def _(key, value, norm_weight, cosine, sine, table, feature_map, norm_eps, scaling, feature_eps, factor, total, half):
    shape = key.shape[0], key.shape[2], table.shape[0], key.shape[3]
    return (
        key.new_empty(*shape, value.shape[-1], dtype=summary_dtype(key.dtype, half)),
        key.new_empty(shape if total else (0,), dtype=torch.float32),
        _fake_inverse_norm(key, norm_weight),
    )


@torch.library.custom_op("mhla_hf::fused_summary_backward", mutates_args=())
def fused_summary_backward(
    grad_summaries: Tensor,
    grad_sums: Tensor,
    key: Tensor,
    value: Tensor,
    inverse: Tensor,
    norm_weight: Tensor | None,
    cosine: Tensor | None,
    sine: Tensor | None,
    table: Tensor,
    feature_map: str,
    scaling: float,
    feature_eps: float,
    factor: float,
    total: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of key, value and norm_weight (empty without one)."""
    features = Features(norm_weight, inverse, cosine, sine, table, feature_map, scaling, feature_eps)
    matrices, vectors = grad_summaries.contiguous(), grad_sums.contiguous() if total else None
    grad_value = fused_launch.attend(key, matrices, None, features, factor=factor)
    grad_key, _, _ = fused_gradient_launch.gradient(key, value, matrices, vectors, features, factor=factor)
    grad_weight = fused_gradient_launch.norm_gradient_(key, grad_key, features)
    return grad_key, grad_value, key.new_empty(0) if grad_weight is None else grad_weight


@fused_summary_backward.register_fake
def _(grad_summaries, grad_sums, key, value, inverse, norm_weight, *args):
    grad_weight = key.new_empty(0) if norm_weight is None else _dense_like(norm_weight)
    return _dense_like(key), _dense_like(value), grad_weight


def _summary_context(ctx, inputs, output):
    key, value, norm_weight, cosine, sine, table, feature_map, _, scaling, feature_eps, factor, total, _ = inputs
    ctx.mark_non_differentiable(output[2])
    ctx.options = feature_map, scaling, feature_eps, factor, total
    ctx.save_for_backward(key, value, output[2], norm_weight, cosine, sine, table)


def _summary_backward(ctx, grad_summaries, grad_sums, _):
    # Checkpointing hands them out once.
    saved = ctx.saved_tensors
    grad_key, grad_value, grad_weight = torch.ops.mhla_hf.fused_summary_backward(
        grad_summaries, grad_sums, *saved, *ctx.options
    )
    return grad_key, grad_value, None if saved[3] is None else grad_weight, *([None] * 10)


fused_summary.register_autograd(_summary_backward, setup_context=_summary_context)


@torch.library.custom_op("mhla_hf::fused_attend", mutates_args=())
def fused_attend(
    query: Tensor,
    summaries: Tensor,
    key_sums: Tensor | None,
    gate: Tensor | None,
    norm_weight: Tensor | None,
    output_weight: Tensor | None,
    cosine: Tensor | None,
    sine: Tensor | None,
    table: Tensor,
    feature_map: str,
    norm_eps: float,
    scaling: float,
    feature_eps: float,
    factor: float,
    eps: float,
    output_eps: float,
) -> tuple[Tensor, Tensor]:
    """norm(factor · ψ(q)ᵀ S̃ / (φ(q)·z̃ + eps)) · silu(gate), from projected queries.

    Args:
        query: `[B, T, H, K]`.
        summaries: Mixed summaries of [`fused_summary`], `[B, G, M, K, V]`.
        key_sums: Mixed sums, float32 `[B, G, M, K]`; None does not divide.
        gate: What the gate's projection put out, `[B, T, H, V]`; None for no gate.
        norm_weight: Weight of the queries' RMSNorm across heads, `[H · K]`; None for no norm.
        output_weight: Weight of the RMSNorm of each head's output, `[V]`; None for no norm.
        cosine: See [`fused_summary`].
        sine: See [`fused_summary`].
        table: See [`fused_summary`].
        feature_map: See [`fused_summary`].
        norm_eps: Of the queries' norm.
        scaling: Queries are multiplied with it before the feature map.
        feature_eps: Added to the features.
        factor: A number.
        eps: Added to the denominator.
        output_eps: Of the outputs' norm.

    Returns:
        `[B, T, H, V]` in the dtype of `query`; and 1 / rms of each token's queries for the backward pass, float32
        `[B, T]`, empty without a norm.
    """
    inverse = _inverse_norm(query, norm_weight, norm_eps)
    features = Features(norm_weight, inverse, cosine, sine, table, feature_map, scaling, feature_eps)
    output = fused_launch.attend(
        query,
        summaries.contiguous(),
        None if key_sums is None else key_sums.contiguous(),
        features,
        factor=factor,
        eps=eps,
        gate=gate,
        output_weight=output_weight,
        output_eps=output_eps,
    )
    return output, inverse


@fused_attend.register_fake
def _(query, summaries, key_sums, gate, norm_weight, *args):
    return query.new_empty(*query.shape[:-1], summaries.shape[-1]), _fake_inverse_norm(query, norm_weight)


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
    cosine: Tensor | None,
    sine: Tensor | None,
    table: Tensor,
    feature_map: str,
    scaling: float,
    feature_eps: float,
    factor: float,
    eps: float,
    output_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, summaries, key_sums, gate, norm_weight and output_weight; empty for what is not there."""
    features = Features(norm_weight, inverse, cosine, sine, table, feature_map, scaling, feature_eps)
    summaries, groups = summaries.contiguous(), summaries.shape[1]
    vectors = None if key_sums is None else key_sums.contiguous()
    grad_gate = grad_output_weight = None
    if gate is not None or output_weight is not None:
        # Without a normaliser, what enters the norm can leave the range of float16.
        dtype = torch.float32 if query.dtype == torch.float16 else query.dtype
        output = fused_launch.attend(query, summaries, vectors, features, factor=factor, eps=eps, dtype=dtype)
        grad_gate, grad_output_weight = fused_gradient_launch.output_gradient_(
            output, grad_output, gate, output_weight, output_eps
        )
        grad_output = output
    grad_query, scale, weight = fused_gradient_launch.gradient(
        query, grad_output, summaries, vectors, features, factor=factor, eps=eps
    )
    divides = key_sums is not None
    grad_summaries, grad_sums = fused_launch.outer(
        query,
        grad_output,
        features,
        groups,
        factor=factor,
        total=divides,
        dtype=summaries.dtype,
        scale=scale if divides else None,
        weight=weight if divides else None,
    )
    grad_norm_weight = fused_gradient_launch.norm_gradient_(query, grad_query, features)
    found = grad_gate, grad_norm_weight, grad_output_weight
    gate_part, norm_part, output_part = (query.new_empty(0) if part is None else part for part in found)
    return grad_query, grad_summaries, grad_sums, gate_part, norm_part, output_part


@fused_attend_backward.register_fake
def _(grad_output, query, summaries, key_sums, gate, inverse, norm_weight, output_weight, *args):
    grad_sums = query.new_empty(0, dtype=torch.float32) if key_sums is None else _dense_like(key_sums)
    others = gate, norm_weight, output_weight
    found = (query.new_empty(0) if part is None else _dense_like(part) for part in others)
    return _dense_like(query), _dense_like(summaries), grad_sums, *found


def _attend_context(ctx, inputs, output):
    tensors, (feature_map, _, *numbers) = inputs[:9], inputs[9:]
    ctx.mark_non_differentiable(output[1])
    ctx.options = feature_map, *numbers
    ctx.save_for_backward(*tensors[:4], output[1], *tensors[4:])


def _attend_backward(ctx, grad_output, _):
    saved = ctx.saved_tensors
    grad_query, grad_summaries, *others = torch.ops.mhla_hf.fused_attend_backward(grad_output, *saved, *ctx.options)
    _, _, key_sums, gate, _, norm_weight, output_weight, *_ = saved
    there = key_sums, gate, norm_weight, output_weight
    others = [gradient if tensor is not None else None for gradient, tensor in zip(others, there)]
    return grad_query, grad_summaries, *others, *([None] * 10)


fused_attend.register_autograd(_attend_backward, setup_context=_attend_context)


def _products(tokens, value: int) -> int:
    """Floating-point operations of one product of every token row with a matrix: 2 B T H K V."""
    return 2 * tokens[0] * tokens[1] * tokens[2] * tokens[3] * value


@register_flop_formula(torch.ops.mhla_hf.fused_summary)
def _summary_flops(key, value, *args, **kwargs) -> int:
    return _products(key, value[-1])


@register_flop_formula(torch.ops.mhla_hf.fused_summary_backward)
def _summary_backward_flops(grad_summaries, grad_sums, key, *args, **kwargs) -> int:
    return 2 * _products(key, grad_summaries[-1])


@register_flop_formula(torch.ops.mhla_hf.fused_attend)
def _attend_flops(query, summaries, *args, **kwargs) -> int:
    return _products(query, summaries[-1])


@register_flop_formula(torch.ops.mhla_hf.fused_attend_backward)
def _attend_backward_flops(
    grad_output, query, summaries, key_sums, gate, inverse, norm_weight, output_weight, *args, **kwargs
) -> int:
    again = gate is not None or output_weight is not None
    return (3 if again else 2) * _products(query, summaries[-1])
