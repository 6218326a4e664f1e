# SPDX-License-Identifier: Apache-2.0
"""MHLA with hedgehog features, from projections to outputs, forward and backward.

    S_b = Σ_{t in b} φ(k_t) v_tᵀ,  z_b = Σ_{t in b} φ(k_t)
    o_t = φ(q_t)ᵀ S̃_{b(t)} / (φ(q_t)·z̃_{b(t)} + eps)

with φ of `hedgehog_map`, twice as wide as its rows, the kernels of `hedgehog_products`, and mixing as in `block`.
The output norm and the gate are left to the layer.

Forward, features pass through no memory. With s bytes a token's number and summaries of s' bytes (2 for bfloat16, 4
otherwise), it reads and writes

    summaries:  B T G (K + V) s + 2 B G M K V s'        mixing:  2 · 2 B H M K V s', 5 · 2 B H M K V s' in bfloat16
    outputs:    B T H (K + V) s + 2 B H M K V s'

bytes, and a norm of queries and keys across heads B T (H + G) K s more, which is read before. It computes 2 B T H K (K
+ 2V) operations in each of summaries and outputs, and 4 B H M² K V in mixing, twice where weights meet summaries in
bfloat16. At the shape of Wan (`docs/kernels.md`): 312 + 590 + 312 MB, and 37 + 18 (35) + 37 GFLOP, where ReLU has 253
+ 295 + 253 MB and 12 + 9 (18) + 12 GFLOP; 194 MB more with norms either way, for now. Each of q and k takes 97
million exponentials beside that.

Backward, features are computed again and written, 2 · 290 MB; the gradients of block attention are those of `block`
for features of width 2K, and `hedgehog_map` goes on from the gradients of features, 2 · 387 MB, to those of rows
and of W. Shape letters are those of `hedgehog_products`.
"""

# No postponed annotations here: torch.library reads schemas from them.

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ...layouts.blocks import BlockLayout
from ...layouts.sequences import SequenceLayout
from ..tables import NORMALIZERS
from .block_gradient import block_gradients, needs_output
from .fused_gradient import norm_gradient_
from .fused_products import inverse_norm, rotary_table
from .hedgehog_map import Projection, features, features_gradient
from .hedgehog_products import hedgehog_attend, hedgehog_summaries
from .launching import dense_like, line_groups, product_flops, repeated, summary_dtype, token_tensor
from .mixing import Mixing, count_mixed_heads


def hedgehog_mhla_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    mixing: Tensor,
    layout: BlockLayout | SequenceLayout,
    *,
    feature_map_eps: float,
    normalizer: str,
    eps: float,
    scaling: float,
    rotary: tuple[Tensor, Tensor] | None = None,
    query_norm: tuple[Tensor, float] | None = None,
    key_norm: tuple[Tensor, float] | None = None,
) -> Tensor:
    """Non-causal MHLA with hedgehog features, from projections on.

    Args:
        query: Projected queries `[B, T, H, K]`, before any norm.
        key: `[B, T, H_kv, K]`.
        value: `[B, T, H_kv, V]`.
        query_weight: W of queries, `[H, K, K]`.
        key_weight: W of keys, `[H_kv, K, K]`.
        mixing: `[M, M]`, `[H, M, M]` or `[B, 1 or H, M, M]`.
        layout: Blocks of the T tokens.
        feature_map_eps: Added to the features.
        normalizer: One of [`mhla_hf.ops.NORMALIZERS`] that has a kernel.
        eps: Added to the denominator.
        scaling: Factor of queries and keys before the feature map.
        rotary: Tables of cosines and sines for neighbouring pairs of channels, `[T, K / 2]`, that rotate queries and
            keys before the feature map; without gradients.
        query_norm: Weight `[H · K]` and eps of an RMSNorm of queries across heads.
        key_norm: Weight `[H_kv · K]` and eps of an RMSNorm of keys across heads.

    Returns:
        `[B, T, H, V]` in the dtype of `value`; zero for padding.
    """
    dtype = value.dtype
    weights = [None if norm is None else norm[0] for norm in (query_norm, key_norm)]
    query_eps, key_eps = (0.0 if norm is None else float(norm[1]) for norm in (query_norm, key_norm))
    with torch.autocast(query.device.type, enabled=False):
        output, *_ = hedgehog_attention(
            query.to(dtype), key.to(dtype), value, query_weight, key_weight, mixing.float(), *weights,
            None if rotary is None else rotary_table(*rotary, dtype), layout.token_table(query.device),
            NORMALIZERS[normalizer].divides, scaling, feature_map_eps, eps, query_eps, key_eps,
        )  # fmt: skip
        return output


def _projection(
    weight: Tensor,
    norm: Tensor | None,
    inverse: Tensor | None,
    rotary: Tensor | None,
    scaling: float,
    feature_eps: float,
) -> Projection:
    return Projection(
        weight.contiguous(), norm, None if norm is None else inverse, rotary, scaling, feature_eps or None
    )


@torch.library.custom_op("mhla_hf::hedgehog_attention", mutates_args=())
def hedgehog_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    mixing: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    rotary: Tensor | None,
    table: Tensor,
    divides: bool,
    scaling: float,
    feature_eps: float,
    eps: float,
    query_norm_eps: float,
    key_norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Outputs from projected queries and keys.

    Arguments are those of [`hedgehog_mhla_attention`], with norms as weights and eps, a table from `rotary_table`, the
    token of each slot, int32 `[M, N]` or `[B, M, N]`, for the layout, and whether to divide.

    Returns:
        `[B, T, H, V]` in the dtype of `value`; and for the backward pass, in float32, the denominators `[B, T, H]`,
        empty unless `divides`, and 1 / rms of queries and keys, `[B, T]`, empty without a norm.
    """
    groups, width, columns = key.shape[2], query.shape[3], value.shape[3]
    batch, (blocks, slots) = query.shape[0], table.shape[-2:]
    query_inverse = inverse_norm(query, None if query_norm is None else query_norm_eps)
    key_inverse = inverse_norm(key, None if key_norm is None else key_norm_eps)
    rest = rotary, scaling, feature_eps
    query_projection = _projection(query_weight, query_norm, query_inverse, *rest)
    key_projection = _projection(key_weight, key_norm, key_inverse, *rest)
    weights, dtype = Mixing(mixing, batch, groups), summary_dtype(key.dtype)
    repeats = weights.repeats
    output = token_tensor(query, table, columns)
    denominator = query.new_empty(query.shape[:3] if divides else (0,), dtype=torch.float32)
    for lines in line_groups(batch * groups, (1 + repeats) * blocks * 2 * width * columns * dtype.itemsize):
        # Summaries are means over the slots: their size does not grow with the blocks'.
        summaries = hedgehog_summaries(
            key, value, key_projection, table, lines, factor=1 / slots, dtype=dtype, total=divides
        )
        mixed, mixed_sums = weights(*summaries, lines)
        hedgehog_attend(
            query, query_projection, table, groups * repeats, repeated(lines, repeats), mixed, mixed_sums, output,
            denominator, factor=float(slots), eps=eps,
        )  # fmt: skip
    return output, denominator, query_inverse, key_inverse


@hedgehog_attention.register_fake
def _(query, key, value, query_weight, key_weight, mixing, query_norm, key_norm, rotary, table, divides, *numbers):
    inverses = [
        tokens.new_empty((0,) if norm is None else tokens.shape[:2], dtype=torch.float32)
        for tokens, norm in ((query, query_norm), (key, key_norm))
    ]
    denominator = query.new_empty(query.shape[:3] if divides else (0,), dtype=torch.float32)
    return query.new_empty(*query.shape[:3], value.shape[3]), denominator, *inverses


@torch.library.custom_op("mhla_hf::hedgehog_attention_backward", mutates_args=())
def hedgehog_attention_backward(
    grad_output: Tensor,
    output: Tensor | None,
    denominator: Tensor,
    query_inverse: Tensor,
    key_inverse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    mixing: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    rotary: Tensor | None,
    table: Tensor,
    divides: bool,
    scaling: float,
    feature_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value, both weights, mixing and both norms, which are empty where there is none."""
    rest = rotary, scaling, feature_eps
    query_projection = _projection(query_weight, query_norm, query_inverse, *rest)
    key_projection = _projection(key_weight, key_norm, key_inverse, *rest)
    query_features, key_features = features(query, query_projection), features(key, key_projection)
    grad_query, grad_key, grad_value, _, _, _, grad_mixing = block_gradients(
        grad_output, output, denominator, query_features, key_features, value, None, None, None, mixing, table,
        divides, 0.0,
    )  # fmt: skip
    grad_query, grad_query_weight = features_gradient(grad_query, query, query_projection)
    grad_query_norm = norm_gradient_(query, grad_query, query_norm, query_inverse)
    grad_key, grad_key_weight = features_gradient(grad_key, key, key_projection)
    grad_key_norm = norm_gradient_(key, grad_key, key_norm, key_inverse)
    query_part, key_part = (query.new_empty(0) if norm is None else norm for norm in (grad_query_norm, grad_key_norm))
    weights = grad_query_weight, grad_key_weight
    return grad_query, grad_key, grad_value, *weights, grad_mixing, query_part, key_part


@hedgehog_attention_backward.register_fake
def _(
    grad_output, output, denominator, query_inverse, key_inverse, query, key, value, query_weight, key_weight, mixing,
    query_norm, key_norm, *others,
):  # fmt: skip
    norms = (query.new_empty(0) if norm is None else dense_like(norm) for norm in (query_norm, key_norm))
    return *map(dense_like, (query, key, value, query_weight, key_weight, mixing)), *norms


def _context(ctx, inputs, output):
    tensors, (ctx.divides, ctx.scaling, ctx.feature_eps, *_) = inputs[:10], inputs[10:]
    ctx.mark_non_differentiable(*output[1:])
    query, value = inputs[0], inputs[2]
    kept = output[0] if ctx.divides and needs_output(2 * query.shape[-1], value.shape[-1], query.dtype) else None
    ctx.save_for_backward(kept, *output[1:], *tensors)


def _backward(ctx, grad_output, *_):
    # Checkpointing hands them out once.
    saved = ctx.saved_tensors
    *gradients, query_norm, key_norm = hedgehog_attention_backward(
        grad_output, *saved, ctx.divides, ctx.scaling, ctx.feature_eps
    )
    query_norm, key_norm = (None if norm is None else part for norm, part in zip(saved[10:12], (query_norm, key_norm)))
    return *gradients, query_norm, key_norm, *([None] * 8)


hedgehog_attention.register_autograd(_backward, setup_context=_context)


def _flops(query, key, value, mixing) -> tuple[int, int, int]:
    """Operations of both products with W, of summaries and outputs, and of mixing."""
    projections = product_flops(query, query[3]) + product_flops(key, key[3])
    products = 2 * (product_flops(query, value[3]) + product_flops(key, value[3]))
    mixed_heads = count_mixed_heads(mixing, query[2], key[2])
    return projections, products, 2 * query[0] * mixed_heads * mixing[-1] ** 2 * 2 * query[3] * value[3]


@register_flop_formula(torch.ops.mhla_hf.hedgehog_attention)
def _attention_flops(query, key, value, query_weight, key_weight, mixing, *args, **kwargs) -> int:
    return sum(_flops(query, key, value, mixing))


@register_flop_formula(torch.ops.mhla_hf.hedgehog_attention_backward)
def _attention_backward_flops(
    grad_output, output, denominator, query_inverse, key_inverse, query, key, value, query_weight, key_weight, mixing,
    *args, **kwargs,
) -> int:  # fmt: skip
    projections, products, mixed = _flops(query, key, value, mixing)
    # Features again and three products of their gradients, summaries again and four products, mixing three times.
    summaries = 2 * product_flops(key, value[3])
    return 4 * projections + 2 * products + summaries + 3 * mixed
