# SPDX-License-Identifier: Apache-2.0
"""The custom operator of causal MHLA: what torch.compile, autograd, FSDP and the FLOP counter see of the kernels.

Forward and backward are one operator each, so that the gradients that keys and values get from summaries and from
their own chunk are written once. Shape letters: B batch, T tokens, H query heads, G key heads, S heads of the prefix
(H, or G where all heads share the mixing weights), K and V widths, P width of the normaliser's pair, M chunks, N slots
of a chunk.
"""

# No postponed annotations here: torch.library reads schemas from them.

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from . import causal_gradient_launch, causal_launch, outer_launch
from .launching import multiplies_exactly, summary_dtype
from .mixing import mix_blocks, mix_blocks_backward


@torch.library.custom_op("mhla_hf::causal_attention", mutates_args=())
def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plain_query: Tensor | None,
    plain_key: Tensor | None,
    mixing: Tensor,
    table: Tensor,
    starts: Tensor | None,
    divides: bool,
    half: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Causal MHLA in chunks, and what its backward pass needs.

    Args:
        query: `[B, T, H, K]`.
        key: `[B, T, G, K]`, of the same dtype.
        value: `[B, T, G, V]`, of the same dtype.
        plain_query: Queries of the normaliser where there is one and they differ, `[B, T, H, P]`.
        plain_key: Keys of the normaliser, given together with them, `[B, T, G, P]`.
        mixing: float32 `[M, M]`, `[1 or H, M, M]` or `[B, 1 or H, M, M]`; the lower triangle is read.
        table: Token of each slot, int32 `[M, N]` or `[B, M, N]`, T where a slot is empty.
        starts: The first chunk of each chunk's document, int32 `[B, M]`; `None` for one document a row.
        divides: Whether to divide by the normaliser.
        half: See [`summary_dtype`].
        eps: Added to the denominator.

    Returns:
        `[B, T, H, V]`; denominators, float32 `[B, T, H]`; S / N `[B, G, M, K, V]` and its mixed prefix
        `[B, S, M, K, V]` in [`summary_dtype`]; z and its mixed prefix, float32 `[B, G or S, M, P]`; the slot of each
        chunk from which on outputs are NaN, int32 `[B, G, M]`. Denominators and sums are empty unless `divides`.
    """
    output, denominator, summary, prefix, key_sum, prefix_sum, _, limit = causal_stages(
        query, key, value, plain_query, plain_key, mixing, table,
        starts=starts, divides=divides, total=divides, half=half, eps=eps,
    )  # fmt: skip
    if prefix_sum is None:
        prefix_sum = key_sum.new_empty(0)
    return output, denominator, summary, prefix, key_sum, prefix_sum, limit


def causal_stages(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plain_query: Tensor | None,
    plain_key: Tensor | None,
    mixing: Tensor,
    table: Tensor,
    *,
    starts: Tensor | None,
    divides: bool,
    total: bool,
    half: bool,
    eps: float,
    past: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    """The stages of [`causal_attention`], one launch each; prompts that go on from a state take them too.

    Args beyond those of [`causal_attention`]:
        total: Whether z is wanted; it has to be where `divides`.
        past: What earlier tokens add to the prefix, float32 `[B, S, M, K, V + 1]` with z in the last column.

    Returns:
        As [`causal_attention`], with the first bad slot of each chunk, int32 `[B, G, M]`, before the last tensor, and
        None for the prefix of z unless `divides`.
    """
    slots = table.shape[-1]
    exact = multiplies_exactly(value.dtype)
    summary, key_sum, first_bad = outer_launch.finite_outer(
        key, value, table, factor=1 / slots, total=total, plain=plain_key, dtype=summary_dtype(key.dtype, half)
    )
    limit = causal_launch.limits(first_bad, starts, slots)
    groups = _prefix_heads(query, key, mixing)
    prefix = mix_blocks(mixing, summary, groups, True, exact)
    prefix_sum = mix_blocks(mixing, key_sum.unsqueeze(-1), groups, True, True).squeeze(-1) if divides else None
    if past is not None:
        prefix = (past[..., :-1] / slots + prefix).to(prefix.dtype).contiguous()
        prefix_sum = None if prefix_sum is None else prefix_sum + past[..., -1]
    output, denominator = causal_launch.causal_attend(
        query, key, value, prefix, mixing, limit, table,
        factor=float(slots), eps=eps, prefix_sum=prefix_sum, plain=_pair(plain_query, plain_key),
    )  # fmt: skip
    return output, denominator, summary, prefix, key_sum, prefix_sum, first_bad, limit


def _prefix_heads(query, key, mixing) -> int:
    per_head = mixing.dim() > 2 and mixing.shape[-3] != 1
    return query.shape[2] if per_head else key.shape[2]


def _pair(plain_query, plain_key):
    return None if plain_query is None or plain_key is None else (plain_query, plain_key)


@causal_attention.register_fake
def _(query, key, value, plain_query, plain_key, mixing, table, starts, divides, half, eps):
    batch, tokens, heads, width = query.shape
    blocks, groups, prefix_heads = table.shape[-2], key.shape[2], _prefix_heads(query, key, mixing)
    plain = width if plain_key is None else plain_key.shape[-1]
    dtype = summary_dtype(key.dtype, half)
    nothing = (0,)
    return (
        query.new_empty(batch, tokens, heads, value.shape[-1]),
        query.new_empty((batch, tokens, heads) if divides else nothing, dtype=torch.float32),
        query.new_empty(batch, groups, blocks, width, value.shape[-1], dtype=dtype),
        query.new_empty(batch, prefix_heads, blocks, width, value.shape[-1], dtype=dtype),
        query.new_empty((batch, groups, blocks, plain) if divides else nothing, dtype=torch.float32),
        query.new_empty((batch, prefix_heads, blocks, plain) if divides else nothing, dtype=torch.float32),
        query.new_empty(batch, groups, blocks, dtype=torch.int32),
    )


@torch.library.custom_op("mhla_hf::causal_attention_backward", mutates_args=())
def causal_attention_backward(
    gradient: Tensor,
    output: Tensor,
    denominator: Tensor,
    summary: Tensor,
    prefix: Tensor,
    key_sum: Tensor,
    prefix_sum: Tensor,
    limit: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plain_query: Tensor | None,
    plain_key: Tensor | None,
    mixing: Tensor,
    table: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value, the normaliser's pair (empty without one of its own) and mixing."""
    slots = table.shape[-1]
    exact = multiplies_exactly(value.dtype)
    divides = denominator.numel() > 0
    pair = _pair(plain_query, plain_key)
    scale = denominator.reciprocal() if divides else None
    shared = {"mixing": mixing, "limit": limit, "table": table}
    grad_query, weight, share = causal_gradient_launch.query_gradient(
        gradient, output, query, key, value, prefix,
        factor=float(slots), scale=scale, prefix_sum=prefix_sum if divides and pair is None else None, **shared,
    )  # fmt: skip
    grad_prefix, grad_prefix_sum = outer_launch.outer(
        query, gradient, table, prefix.shape[1],
        factor=float(slots), scale=scale, total=divides, plain=None if pair is None else pair[0],
        weight=weight if divides else None, dtype=prefix.dtype, limit=limit,
    )  # fmt: skip
    grad_mixing, grad_summary = mix_blocks_backward(grad_prefix, mixing, summary, prefix.shape[1], True, exact)
    grad_sum = None
    if divides:
        more, grad_sum = mix_blocks_backward(
            grad_prefix_sum.unsqueeze(-1), mixing, key_sum.unsqueeze(-1), prefix.shape[1], True, True
        )
        grad_mixing, grad_sum = grad_mixing + more, grad_sum.squeeze(-1)
    grad_key = causal_gradient_launch.key_gradient(
        value, gradient, query, grad_summary, transpose=True, factor=1 / slots, scale=scale,
        weight=weight if divides and pair is None else None, vectors=grad_sum if pair is None else None, **shared,
    )  # fmt: skip
    grad_value = causal_gradient_launch.key_gradient(
        key, query, gradient, grad_summary, transpose=False, factor=1 / slots, scale=scale, **shared
    )
    grad_plain_query, grad_plain_key = query.new_empty(0), query.new_empty(0)
    if pair is not None:
        assert grad_sum is not None
        query_side, key_side = pair
        grad_plain_query, more = causal_gradient_launch.plain_gradient(
            query_side, key_side, prefix_sum, weight=weight, of_query=True, **shared
        )
        grad_plain_key, _ = causal_gradient_launch.plain_gradient(
            key_side, query_side, grad_sum, weight=weight, of_query=False, **shared
        )
        share = share + more
    diagonal = grad_mixing.diagonal(dim1=-2, dim2=-1)
    diagonal.add_(share.sum_to_size((*mixing.shape[:-2], mixing.shape[-1])))
    return grad_query, grad_key, grad_value, grad_plain_query, grad_plain_key, grad_mixing


@causal_attention_backward.register_fake
def _(
    gradient, output, denominator, summary, prefix, key_sum, prefix_sum, limit,
    query, key, value, plain_query, plain_key, mixing, table,
):  # fmt: skip
    def like(tensor):
        nothing = tensor is None
        return query.new_empty(0) if nothing else torch.empty_like(tensor, memory_format=torch.contiguous_format)

    return tuple(like(tensor) for tensor in (query, key, value, plain_query, plain_key, mixing))


def _context(ctx, inputs, output):
    query, key, value, plain_query, plain_key, mixing, table, *_ = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.has_pair = plain_query is not None
    ctx.save_for_backward(*output, query, key, value, plain_query, plain_key, mixing, table)


def _backward(ctx, gradient, *_):
    *gradients, grad_mixing = torch.ops.mhla_hf.causal_attention_backward(gradient, *ctx.saved_tensors)
    if not ctx.has_pair:
        gradients[3:] = None, None
    return *gradients, grad_mixing, None, None, None, None, None


causal_attention.register_autograd(_backward, setup_context=_context)


def causal_flops(query, key, value, mixing, table) -> int:
    """Products of causal MHLA: 2 B T K V (G + H) for summaries and prefix, B S M² K V for the mixing of a triangle,
    and B T H N (K + V) for the triangles of the chunks' own scores and their sums.

    The four arguments before `table` are shapes.
    """
    batch, tokens, heads, width = query
    groups, columns = key[2], value[-1]
    blocks, slots = table[-2:]
    per_head = len(mixing) > 2 and mixing[-3] != 1
    mixed = batch * (heads if per_head else groups) * blocks**2 * width * columns
    own = batch * tokens * heads * slots * (width + columns)
    return 2 * batch * tokens * (groups + heads) * width * columns + mixed + own


@register_flop_formula(torch.ops.mhla_hf.causal_attention)
def _forward_flops(query, key, value, plain_query, plain_key, mixing, table, *args, **kwargs) -> int:
    return causal_flops(query, key, value, mixing, table)


@register_flop_formula(torch.ops.mhla_hf.causal_attention_backward)
def _backward_flops(*args, **kwargs) -> int:
    """Twice the forward pass, and the scores and their gradients computed once more."""
    query, key, value, _, _, mixing, table = args[8:15]
    again = query[0] * query[1] * query[2] * table[-1] * (query[-1] + value[-1])
    return 2 * causal_flops(query, key, value, mixing, table) + again
