# SPDX-License-Identifier: Apache-2.0
"""The fused path, forward: from projections to the input of the output projection.

    S_b = Σ_{t in b} ψ(k_t) v_tᵀ,  z_b = Σ_{t in b} φ(k_t)
    o_t = norm(ψ(q_t)ᵀ S̃_{b(t)} / (φ(q_t)·z̃_{b(t)} + eps)) · silu(gate_t)

with φ(x) the feature map of scaling · norm(x), and ψ(x) the same, rotated. Kernels and shape letters are those of
`fused_products`; mixing comes in between, as in `block`.
"""

# No postponed annotations here: torch.library reads schemas from them.

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ...layouts.blocks import BlockLayout
from ..feature_maps import FEATURE_MAPS
from ..normalizers import NORMALIZERS
from ..numerics import records_gradients
from .fused_gradient import fused_attend_backward, fused_summary_backward
from .fused_products import Features, fused_outer, fused_products, inverse_norm, rotary_table
from .launching import multiplies_exactly, product_flops, summary_dtype
from .mixing import mix_summaries_and_sums


def fused_mhla_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixing: Tensor,
    layout: BlockLayout,
    *,
    feature_map: str,
    feature_map_eps: float,
    normalizer: str,
    eps: float,
    scaling: float,
    rotary: tuple[Tensor, Tensor] | None = None,
    query_norm: tuple[Tensor, float] | None = None,
    key_norm: tuple[Tensor, float] | None = None,
    output_norm: tuple[Tensor, float] | None = None,
    gate: Tensor | None = None,
) -> Tensor:
    """Non-causal MHLA from projections on, with everything between them and the output inside of the kernels.

    Summaries are float32, but bfloat16 for bfloat16 tokens where no gradient is recorded; sums always run in float32.

    Args:
        query: Projected queries `[B, T, H, K]`, before any norm.
        key: `[B, T, H_kv, K]`.
        value: `[B, T, H_kv, V]`.
        mixing: `[M, M]` or `[H, M, M]`.
        layout: Blocks of the T tokens.
        feature_map: One of [`mhla_hf.ops.FEATURE_MAPS`] that has a kernel.
        feature_map_eps: Added to the features.
        normalizer: One of [`mhla_hf.ops.NORMALIZERS`] that has a kernel.
        eps: Added to the denominator.
        scaling: Factor of queries and keys before the feature map.
        rotary: Tables of cosines and sines for neighbouring pairs of channels, `[T, K / 2]`; without gradients.
        query_norm: Weight `[H · K]` and eps of an RMSNorm of queries across heads.
        key_norm: Weight `[H_kv · K]` and eps of an RMSNorm of keys across heads.
        output_norm: Weight `[V]` and eps of an RMSNorm of each head's output.
        gate: Output of the gate's projection, `[B, T, H, V]`.

    Returns:
        `[B, T, H, V]` in the dtype of `value`, normed and gated.
    """
    dtype = value.dtype
    divides, map_name = NORMALIZERS[normalizer].divides, FEATURE_MAPS[feature_map].kernel
    weights = [None if norm is None else norm[0] for norm in (query_norm, key_norm, output_norm)]
    query_eps, key_eps, output_eps = (0.0 if norm is None else norm[1] for norm in (query_norm, key_norm, output_norm))
    half = not records_gradients(query, key, value, mixing, gate, *weights)
    with torch.autocast(query.device.type, enabled=False):
        table = layout.token_table(query.device)
        slots = float(table.shape[-1])
        turns = None if rotary is None else rotary_table(*rotary, dtype)
        summary, key_sum, _ = fused_summary(
            key.to(dtype), value, weights[1], turns, table,
            map_name, key_eps, scaling, feature_map_eps, 1 / slots, divides, half,
        )  # fmt: skip
        summary, sums = mix_summaries_and_sums(
            mixing, summary, key_sum if divides else None, query.shape[2], exact=multiplies_exactly(dtype)
        )
        output, _ = fused_attend(
            query.to(dtype), summary, sums, None if gate is None else gate.to(dtype), weights[0], weights[2], turns,
            table, map_name, query_eps, scaling, feature_map_eps, slots, eps, output_eps,
        )  # fmt: skip
        return output


def _inverse_norm(tokens: Tensor, norm_weight: Tensor | None, eps: float) -> Tensor:
    return tokens.new_empty(0, dtype=torch.float32) if norm_weight is None else inverse_norm(tokens, eps)


def _fake_inverse_norm(tokens: Tensor, norm_weight: Tensor | None) -> Tensor:
    return tokens.new_empty((0,) if norm_weight is None else tokens.shape[:2], dtype=torch.float32)


@torch.library.custom_op("mhla_hf::fused_summary", mutates_args=())
def fused_summary(
    key: Tensor,
    value: Tensor,
    norm_weight: Tensor | None,
    rotary: Tensor | None,
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
        rotary: See [`Features`]. It gets no gradient.
        table: Token of each slot, int32 `[M, N]`.
        feature_map: `kernel` of an entry of [`mhla_hf.ops.FEATURE_MAPS`].
        norm_eps: Of the norm.
        scaling: Factor of the keys before the feature map.
        feature_eps: Added to the features.
        factor: Factor of the summaries.
        total: Whether the sums are wanted.
        half: Keep summaries in bfloat16 for bfloat16 tokens, see [`summary_dtype`].

    Returns:
        `[B, G, M, K, V]`; float32 `[B, G, M, K]`, empty unless
        `total`; and 1 / rms of each token's keys for the backward pass, float32 `[B, T]`, empty without a norm.
    """
    inverse = _inverse_norm(key, norm_weight, norm_eps)
    features = Features(norm_weight, inverse, rotary, scaling, feature_eps)
    dtype = summary_dtype(key.dtype, half)
    summaries, sums = fused_outer(
        key, value, features, feature_map, table, key.shape[2], factor=factor, total=total, dtype=dtype
    )
    return summaries, sums, inverse


@fused_summary.register_fake
def _(key, value, norm_weight, rotary, table, feature_map, norm_eps, scaling, feature_eps, factor, total, half):
    shape = key.shape[0], key.shape[2], table.shape[0], key.shape[3]
    return (
        key.new_empty(*shape, value.shape[-1], dtype=summary_dtype(key.dtype, half)),
        key.new_empty(shape if total else (0,), dtype=torch.float32),
        _fake_inverse_norm(key, norm_weight),
    )


def _summary_context(ctx, inputs, output):
    key, value, norm_weight, rotary, table, feature_map, _, scaling, feature_eps, factor, total, _ = inputs
    ctx.mark_non_differentiable(output[2])
    ctx.options = feature_map, scaling, feature_eps, factor, total
    ctx.save_for_backward(key, value, output[2], norm_weight, rotary, table)


def _summary_backward(ctx, grad_summaries, grad_sums, _):
    # Checkpointing hands them out once.
    saved = ctx.saved_tensors
    grad_key, grad_value, grad_weight = fused_summary_backward(grad_summaries, grad_sums, *saved, *ctx.options)
    return grad_key, grad_value, None if saved[3] is None else grad_weight, *([None] * 9)


fused_summary.register_autograd(_summary_backward, setup_context=_summary_context)


@register_flop_formula(torch.ops.mhla_hf.fused_summary)
def _summary_flops(key, value, *args, **kwargs) -> int:
    return product_flops(key, value[-1])


@torch.library.custom_op("mhla_hf::fused_attend", mutates_args=())
def fused_attend(
    query: Tensor,
    summaries: Tensor,
    key_sums: Tensor | None,
    gate: Tensor | None,
    norm_weight: Tensor | None,
    output_weight: Tensor | None,
    rotary: Tensor | None,
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
        gate: Output of the gate's projection, `[B, T, H, V]`; None for no gate.
        norm_weight: Weight of the queries' RMSNorm across heads, `[H · K]`; None for no norm.
        output_weight: Weight of the RMSNorm of each head's output, `[V]`; None for no norm.
        rotary: See [`fused_summary`].
        table: See [`fused_summary`].
        feature_map: See [`fused_summary`].
        norm_eps: Of the queries' norm.
        scaling: Factor of the queries before the feature map.
        feature_eps: Added to the features.
        factor: Factor of the products.
        eps: Added to the denominator.
        output_eps: Of the outputs' norm.

    Returns:
        `[B, T, H, V]` in the dtype of `query`; and 1 / rms of each token's queries for the backward pass, float32
        `[B, T]`, empty without a norm.
    """
    inverse = _inverse_norm(query, norm_weight, norm_eps)
    features = Features(norm_weight, inverse, rotary, scaling, feature_eps)
    output = fused_products(
        query,
        summaries.contiguous(),
        None if key_sums is None else key_sums.contiguous(),
        features,
        feature_map,
        table,
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


def _attend_context(ctx, inputs, output):
    tensors, (feature_map, _, *numbers) = inputs[:8], inputs[8:]
    ctx.mark_non_differentiable(output[1])
    ctx.options = feature_map, *numbers
    ctx.save_for_backward(*tensors[:4], output[1], *tensors[4:])


def _attend_backward(ctx, grad_output, _):
    saved = ctx.saved_tensors
    grad_query, grad_summaries, *others = fused_attend_backward(grad_output, *saved, *ctx.options)
    _, _, key_sums, gate, _, norm_weight, output_weight, *_ = saved
    there = key_sums, gate, norm_weight, output_weight
    others = [gradient if tensor is not None else None for gradient, tensor in zip(others, there)]
    return grad_query, grad_summaries, *others, *([None] * 9)


fused_attend.register_autograd(_attend_backward, setup_context=_attend_context)


@register_flop_formula(torch.ops.mhla_hf.fused_attend)
def _attend_flops(query, summaries, *args, **kwargs) -> int:
    return product_flops(query, summaries[-1])
