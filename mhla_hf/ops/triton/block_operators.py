# SPDX-License-Identifier: Apache-2.0
"""Custom operators of block-parallel MHLA: what torch.compile, autograd, FSDP and the FLOP counter see of the kernels.

`block_summary` and `block_attend` are the two halves of the operator; `mix_blocks` comes between them. Shape letters:
B batch, T tokens, H heads, G heads of the summaries, K and V widths, P width of the normaliser's pair, M blocks, N
slots of a block.
"""

# No postponed annotations here: torch.library reads schemas from them.

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from . import block_launch, outer_launch
from .launching import summary_dtype


@torch.library.custom_op("mhla_hf::block_summary", mutates_args=())
def block_summary(
    key: Tensor, value: Tensor, plain: Tensor | None, table: Tensor, factor: float, total: bool, half: bool
) -> tuple[Tensor, Tensor]:
    """factor · S_b = factor Σ φ(k) vᵀ, and z_b = Σ φ(k).

    Args:
        key: `[B, T, G, K]`.
        value: `[B, T, G, V]`.
        plain: Keys of the normaliser where they differ, `[B, T, G, P]`.
        table: Token of each slot, int32 `[M, N]` or `[B, M, N]`, T where a slot is empty.
        factor: A number.
        total: Whether z is wanted.
        half: See [`summary_dtype`].

    Returns:
        `[B, G, M, K, V]` in [`summary_dtype`], and float32 `[B, G, M, P]`, empty unless `total`.
    """
    dtype = summary_dtype(key.dtype, half)
    return outer_launch.outer(key, value, table, key.shape[2], factor=factor, total=total, plain=plain, dtype=dtype)


@block_summary.register_fake
def _(key, value, plain, table, factor, total, half):
    shape = key.shape[0], key.shape[2], table.shape[-2]
    width = key.shape[-1] if plain is None else plain.shape[-1]
    return (
        key.new_empty(*shape, key.shape[-1], value.shape[-1], dtype=summary_dtype(key.dtype, half)),
        key.new_empty((*shape, width) if total else (0,), dtype=torch.float32),
    )


@torch.library.custom_op("mhla_hf::block_summary_backward", mutates_args=())
def block_summary_backward(
    grad_summary: Tensor,
    grad_total: Tensor,
    key: Tensor,
    value: Tensor,
    plain: Tensor | None,
    table: Tensor,
    factor: float,
    total: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of key, value and plain (empty without one): each token's row times its block's gradient."""
    vectors = grad_total.contiguous() if total else None
    matrices = grad_summary.contiguous()
    grad_key, grad_plain, _ = block_launch.apply(
        value, matrices, table,
        transpose=True, factor=factor, vectors=vectors, vectors_dtype=None if plain is None else plain.dtype,
    )  # fmt: skip
    grad_value, _, _ = block_launch.apply(key, matrices, table, factor=factor)
    return grad_key, grad_value, grad_plain


@block_summary_backward.register_fake
def _(grad_summary, grad_total, key, value, plain, table, factor, total):
    grad_plain = key.new_empty(0) if plain is None or not total else _dense_like(plain)
    return _dense_like(key), _dense_like(value), grad_plain


def _dense_like(tensor):
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _summary_context(ctx, inputs, output):
    key, value, plain, table, ctx.factor, ctx.total, _ = inputs
    ctx.save_for_backward(key, value, plain, table)


def _summary_backward(ctx, grad_summary, grad_total):
    key, value, plain, table = ctx.saved_tensors
    grad_key, grad_value, grad_plain = torch.ops.mhla_hf.block_summary_backward(
        grad_summary, grad_total, key, value, plain, table, ctx.factor, ctx.total
    )
    return grad_key, grad_value, grad_plain if plain is not None and ctx.total else None, None, None, None, None


block_summary.register_autograd(_summary_backward, setup_context=_summary_context)


@torch.library.custom_op("mhla_hf::block_attend", mutates_args=())
def block_attend(
    query: Tensor,
    summary: Tensor,
    key_sum: Tensor | None,
    plain: Tensor | None,
    divisor: Tensor | None,
    table: Tensor,
    factor: float,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """factor · φ(q)ᵀ S̃ / (φ(q)ᵀ z̃ + eps).

    Args:
        query: `[B, T, H, K]`.
        summary: Mixed summaries `[B, G, M, K, V]`, G a divisor of H.
        key_sum: Mixed z, float32 `[B, G, M, P]`; with neither this nor `divisor` nothing is divided.
        plain: Queries of the normaliser where they differ, `[B, T, H, P]`.
        divisor: What to divide by instead, without eps, float32 `[B, T, H]`.
        table: See [`block_summary`].
        factor: A number.
        eps: Added to the denominator.

    Returns:
        `[B, T, H, V]` in the dtype of `query`, and the denominators, float32 `[B, T, H]`, for the backward pass; they
        are empty where nothing is divided or `divisor` is given.
    """
    return block_launch.attend(
        query,
        summary.contiguous(),
        table,
        factor=factor,
        eps=eps,
        key_sum=None if key_sum is None else key_sum.contiguous(),
        plain=plain,
        denominator=None if divisor is None else divisor.contiguous(),
    )


@block_attend.register_fake
def _(query, summary, key_sum, plain, divisor, table, factor, eps):
    output = query.new_empty(*query.shape[:-1], summary.shape[-1])
    return output, query.new_empty(query.shape[:-1] if key_sum is not None else (0,), dtype=torch.float32)


@torch.library.custom_op("mhla_hf::block_attend_backward", mutates_args=())
def block_attend_backward(
    grad_output: Tensor,
    output: Tensor,
    denominator: Tensor,
    query: Tensor,
    summary: Tensor,
    key_sum: Tensor | None,
    plain: Tensor | None,
    table: Tensor,
    factor: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, summary, key_sum and plain (the last two empty where there is none).

    With o = factor qᵀS̃ / d and d = p·z̃ + eps: g' = g / d, δ = -g'·o = -q·(factor S̃ g') / d, and the gradients are
    factor S̃ g' (plus δ z̃ where p is q), factor Σ q g'ᵀ, Σ δ p and δ z̃. `denominator` is d, empty where nothing is
    divided.
    """
    # Divisors that were given may lie in memory in any order.
    scale = denominator.reciprocal().contiguous() if denominator.numel() else None
    vectors = None if key_sum is None else key_sum.contiguous()
    divides = vectors is not None
    grad_query, grad_plain, weight = block_launch.apply(
        grad_output,
        summary.contiguous(),
        table,
        transpose=True,
        factor=factor,
        scale=scale,
        vectors=vectors,
        vectors_dtype=None if plain is None else plain.dtype,
        outputs=output if divides else None,
        queries=query,
    )
    grad_summary, grad_key_sum = outer_launch.outer(
        query,
        grad_output,
        table,
        summary.shape[1],
        factor=factor,
        scale=scale,
        total=divides,
        plain=plain,
        weight=weight if divides else None,
        dtype=summary.dtype,
    )
    return grad_query, grad_summary, grad_key_sum, grad_plain


@block_attend_backward.register_fake
def _(grad_output, output, denominator, query, summary, key_sum, plain, table, factor):
    nothing = query.new_empty(0)
    grad_key_sum = query.new_empty(0, dtype=torch.float32) if key_sum is None else _dense_like(key_sum)
    grad_plain = nothing if plain is None or key_sum is None else _dense_like(plain)
    return _dense_like(query), _dense_like(summary), grad_key_sum, grad_plain


def _attend_context(ctx, inputs, output):
    query, summary, key_sum, plain, divisor, table, ctx.factor, ctx.eps = inputs
    ctx.mark_non_differentiable(output[1])
    denominator = output[1] if divisor is None else divisor
    ctx.given = divisor is not None
    ctx.save_for_backward(output[0], denominator, query, summary, key_sum, plain, table)


def _attend_backward(ctx, grad_output, _):
    output, denominator, query, summary, key_sum, plain, table = ctx.saved_tensors
    grad_divisor = None
    if ctx.given:
        denominator = denominator + ctx.eps
        grad_divisor = -(grad_output.float() * output.float()).sum(-1) / denominator
    grad_query, grad_summary, grad_key_sum, grad_plain = torch.ops.mhla_hf.block_attend_backward(
        grad_output, output, denominator, query, summary, key_sum, plain, table, ctx.factor
    )
    has_sum = key_sum is not None
    return (
        grad_query,
        grad_summary,
        grad_key_sum if has_sum else None,
        grad_plain if has_sum and plain is not None else None,
        grad_divisor,
        None,
        None,
        None,
    )


block_attend.register_autograd(_attend_backward, setup_context=_attend_context)


def _products(tokens, matrix_shape) -> int:
    """Floating-point operations of one product of every token row with a matrix: 2 B T H K V."""
    return 2 * tokens[0] * tokens[1] * tokens[2] * matrix_shape[-2] * matrix_shape[-1]


@register_flop_formula(torch.ops.mhla_hf.block_summary)
def _summary_flops(key, value, *args, **kwargs) -> int:
    return _products(key, (key[-1], value[-1]))


@register_flop_formula(torch.ops.mhla_hf.block_summary_backward)
def _summary_backward_flops(grad_summary, grad_total, key, *args, **kwargs) -> int:
    return 2 * _products(key, grad_summary)


@register_flop_formula(torch.ops.mhla_hf.block_attend)
def _attend_flops(query, summary, *args, **kwargs) -> int:
    return _products(query, summary)


@register_flop_formula(torch.ops.mhla_hf.block_attend_backward)
def _attend_backward_flops(grad_output, output, denominator, query, summary, *args, **kwargs) -> int:
    return 2 * _products(query, summary)
