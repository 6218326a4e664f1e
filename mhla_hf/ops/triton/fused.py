# SPDX-License-Identifier: Apache-2.0
"""The fused path, forward: from projections to the input of the output projection.

    S_b = Σ_{t in b} ψ(k_t) v_tᵀ,  z_b = Σ_{t in b} φ(k_t)
    o_t = norm(ψ(q_t)ᵀ S̃_{b(t)} / (φ(q_t)·z̃_{b(t)} + eps)) · silu(gate_t)

with φ(x) the feature map of scaling · norm(x), and ψ(x) the same, rotated. Kernels and shape letters are those of
`fused_products`; mixing comes in between, and one custom operator does all of it, as in `block`.
"""

# No postponed annotations here: torch.library reads schemas from them.

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ...layouts.blocks import BlockLayout
from ..definitions import FEATURE_MAPS, NORMALIZERS
from .block_gradient import block_flops
from .fused_gradient import fused_attention_backward
from .fused_products import Features, fused_attend, fused_outer, inverse_norm, rotary_table
from .launching import line_groups, repeated, row_count, summary_dtype
from .mixing import count_mixed_heads, mix
from .operators import operator


def fused_mhla_attention(
    query: Tensor, key: Tensor, value: Tensor, mixing: Tensor, layout: BlockLayout, *, feature_map: str,
    feature_map_eps: float, normalizer: str, eps: float, scaling: float, rotary: tuple[Tensor, Tensor] | None = None,
    query_norm: tuple[Tensor, float] | None = None, key_norm: tuple[Tensor, float] | None = None,
    output_norm: tuple[Tensor, float] | None = None, gate: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Non-causal MHLA from projections on, with everything between them and the output inside of the kernels.

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
        rotary: Tables of cosines and sines for neighbouring pairs of channels, of T rows of K / 2; without gradients.
        query_norm: Weight `[H · K]` and eps of an RMSNorm of queries across heads.
        key_norm: Weight `[H_kv · K]` and eps of an RMSNorm of keys across heads.
        output_norm: Weight `[V]` and eps of an RMSNorm of each head's output.
        gate: Output of the gate's projection, `[B, T, H, V]`.

    Returns:
        `[B, T, H, V]` in the dtype of `value`, normed and gated.
    """
    dtype = value.dtype
    (query_weight, query_eps), (key_weight, key_eps), (output_weight, output_eps) = (
        (None, 0.0) if norm is None else norm for norm in (query_norm, key_norm, output_norm)
    )
    output, _, _ = fused_attention(
        query if query.dtype == dtype else query.to(dtype),
        key if key.dtype == dtype else key.to(dtype),
        value,
        gate if gate is None or gate.dtype == dtype else gate.to(dtype),
        mixing if mixing.dtype == torch.float32 else mixing.float(),
        query_weight,
        key_weight,
        output_weight,
        None if rotary is None else rotary_table(*rotary, dtype),
        layout.token_table(query.device),
        FEATURE_MAPS[feature_map].kernel,
        scaling,
        feature_map_eps,
        NORMALIZERS[normalizer].divides,
        eps,
        query_eps,
        key_eps,
        output_eps,
    )
    return output


@operator("mhla_hf::fused_attention")
def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, gate: Tensor | None, mixing: Tensor, query_norm: Tensor | None,
    key_norm: Tensor | None, output_norm: Tensor | None, rotary: Tensor | None, table: Tensor, feature_map: str,
    scaling: float, feature_eps: float, divides: bool, eps: float, query_eps: float, key_eps: float, output_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Block-parallel MHLA from projections on.

    Args:
        query: `[B, T, H, K]`.
        key: `[B, T, G, K]`, of the same dtype.
        value: `[B, T, G, V]`, of the same dtype.
        gate: Output of the gate's projection, `[B, T, H, V]`, of the same dtype; None for no gate.
        mixing: float32 `[M, M]` or `[H, M, M]`.
        query_norm: Weight of the queries' RMSNorm across heads, `[H · K]`; None for no norm.
        key_norm: Weight of the keys', `[G · K]`.
        output_norm: Weight of the RMSNorm of each head's output, `[V]`.
        rotary: See [`Features`]. It gets no gradient.
        table: Token of each slot, int32 `[M, N]`.
        feature_map: `kernel` of an entry of [`mhla_hf.ops.FEATURE_MAPS`].
        scaling: Factor of queries and keys before the feature map.
        feature_eps: Added to the features.
        divides: Whether to divide by φ(q)·z̃ + eps.
        eps: Added to the denominator.
        query_eps: Epsilon of the queries' norm.
        key_eps: Epsilon of the keys' norm.
        output_eps: Epsilon of the outputs' norm.

    Returns:
        `[B, T, H, V]` in the dtype of `query`; and for the backward pass 1 / rms of each token's queries and of its
        keys, see [`inverse_norm`].
    """
    batch, num_tokens, heads, width = query.shape
    groups, columns, blocks = key.shape[2], value.shape[3], len(table)
    dtype, mixing = summary_dtype(query.dtype), mixing.contiguous()
    repeats = count_mixed_heads(mixing.shape, heads, groups) // groups
    query_inverse = inverse_norm(query, None if query_norm is None else query_eps)
    key_inverse = inverse_norm(key, None if key_norm is None else key_eps)
    key_features = Features(key_norm, key_inverse, rotary, scaling, feature_eps)
    query_features = Features(query_norm, query_inverse, rotary, scaling, feature_eps)
    output = query.new_empty(batch, num_tokens, heads, columns)
    for lines in line_groups(batch * groups, (1 + repeats) * row_count(blocks) * width * columns * dtype.itemsize):
        summaries = fused_outer(
            key, value, key_features, feature_map, table, groups, lines, dtype=dtype, total=divides
        )
        mixed, scales, mixed_sums = mix(summaries, mixing, groups, lines, twice=query.dtype == torch.float16)
        fused_attend(
            query, mixed, scales, mixed_sums, query_features, feature_map, table, groups * repeats,
            repeated(lines, repeats), output, eps=eps, gate=gate, output_weight=output_norm, output_eps=output_eps,
        )  # fmt: skip
    return output, query_inverse, key_inverse


@torch.library.register_fake("mhla_hf::fused_attention")
def _(query, key, value, gate, mixing, query_norm, key_norm, *args):
    inverse = (
        query.new_empty((0,) if norm is None else query.shape[:2], dtype=torch.float32)
        for norm in (query_norm, key_norm)
    )
    return query.new_empty(*query.shape[:3], value.shape[3]), *inverse


def _context(ctx, inputs, output):
    ctx.mark_non_differentiable(*output[1:])
    feature_map, scaling, feature_eps, divides, eps, _, _, output_eps = inputs[10:]
    ctx.options = feature_map, scaling, feature_eps, divides, eps, output_eps
    ctx.save_for_backward(*output[1:], *inputs[:10])


def _backward(ctx, gradient, *_):
    # Checkpointing hands them out once.
    saved = ctx.saved_tensors
    gradients = fused_attention_backward(gradient, *saved, *ctx.options)
    given = saved[2:10]
    return *(None if tensor is None else part for part, tensor in zip(gradients, given)), *([None] * 10)


torch.library.register_autograd("mhla_hf::fused_attention", _backward, setup_context=_context)


@register_flop_formula(torch.ops.mhla_hf.fused_attention)
def _flops(query, key, value, gate, mixing, *args, **kwargs) -> int:
    return block_flops(query, key, value, mixing)
