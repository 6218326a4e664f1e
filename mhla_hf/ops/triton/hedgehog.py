# SPDX-License-Identifier: Apache-2.0
"""Hedgehog features (arXiv 2402.04347) from projected queries or keys on, and their gradients.

    y_t = R(norm(x_t)),  p_t = scaling · W y_t            W is [K, K] for each head, R a rotary embedding
    φ(x_t) = softmax([p_t, -p_t]) + feature_eps           [2K]

    dp_t = φ⁺ (dφ⁺ - c) - φ⁻ (dφ⁻ - c)  with  c = Σ φ dφ over all 2K, both without feature_eps
    dy_t = scaling · Wᵀ dp_t,  dW = scaling Σ_t dp_t y_tᵀ

Norm and rotation are optional. The softmax is safe for any p: exponents are p - max |p| and -p - max |p|.

An RMSNorm x r w, with r = 1 / rms(x) of the token and w a weight of each channel, commutes with R but for w: kernels
multiply W with R(x w), which needs no number of other heads, and scale the product by r.

Gradients of W are summed in float32, first over the tokens of a program, then over programs, in an order that depends
on nothing but the shapes.

Features pass through memory, and the block kernels read them at twice the width. With s bytes a number, features take
3 B T H K s bytes and 2 B T H K² operations, and their gradients 4 B T H K s bytes and 6 B T H K² operations: at the
shape of Wan (`docs/kernels.md`), 290 MB and 12.4 GFLOP for each of q and k, and 387 MB and 37 GFLOP.

Shape letters: B batch, T tokens, H heads, K width.
"""

# No postponed annotations here: torch.library and Triton read them from the functions themselves.

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from . import launching
from .device_functions import COUNTS, dense_head_rows, head_rows, load_matrix, load_rows, product, store_rows, to_tf32
from .fused_gradient import norm_gradient_
from .fused_products import inverse_norm, rotary_rows, rotary_table, rotate
from .launching import (
    as_rows,
    ceil_divide,
    dense_like,
    launch,
    multiplies_exactly,
    multiplies_from_shared_memory,
    padded,
    product_flops,
    product_precision,
)
from .operators import operator


LOG2_E = 1 / math.log(2)
# Tokens of a program of the gradient: its sum for W, as large as W in float32, is written once for all of them.
GRADIENT_TOKENS = 1024


class Projection(NamedTuple):
    """The way from rows x to features, as all kernels take it.

    Attributes:
        weight: W, `[H, K, K]`, dense.
        norm_weight: Weight of an RMSNorm across heads, `[H · K]`; None for no norm.
        inverse_norm: 1 / rms of each token, float32 `[B, T]`; None without a norm.
        rotary: Table of rotary embeddings from `fused_products.rotary_table`, `[T, K]`, dense; None for no rotation.
        scaling: Factor of p.
        feature_eps: Added to the features; None for nothing.
    """

    weight: torch.Tensor
    norm_weight: torch.Tensor | None
    inverse_norm: torch.Tensor | None
    rotary: torch.Tensor | None
    scaling: float
    feature_eps: float | None


def fits_hedgehog_kernels(width: int, rotary: bool, dtype: torch.dtype) -> bool:
    """Whether heads of this width fit the kernels: W, and in the gradient a sum as large, beside the tokens."""
    return width <= (128 if dtype == torch.bfloat16 else 64) and not (rotary and width % 2)


def projection_precision(tokens: torch.dtype) -> str:
    """PRECISION of products with W, see `device_functions`."""
    return product_precision(tokens, tokens)


@triton.jit
def load_weight(projection, head, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr, PRECISION: tl.constexpr):
    """W of a head, as its products want it."""
    column = tl.arange(0, BLOCK_WIDTH)
    weight = load_matrix(projection.weight + head * (WIDTH * WIDTH), column, column, WIDTH, 1, WIDTH, WIDTH)
    return _to_factor(weight, PRECISION)


@triton.jit
def _to_factor(values, PRECISION: tl.constexpr):
    if PRECISION == "bf16":
        values = values.to(tl.bfloat16)
    elif PRECISION == "tf32":
        values = to_tf32(values.to(tl.float32))
    else:
        values = values.to(tl.float32)
    return values


@triton.jit
def turned_rows(
    rows, projection, head, tokens, present,
    TOKENS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """R(x w) of some rows of one head, as its products want them."""
    column = tl.arange(0, BLOCK_WIDTH)
    values = load_rows(rows, tokens, present, column, WIDTH)
    if projection.norm_weight is not None:
        weight = tl.load(projection.norm_weight + head * WIDTH + column, mask=column < WIDTH, other=0.0)
        values = values.to(tl.float32) * weight.to(tl.float32)[None, :]
    turns = rotary_rows(projection, tokens, present, column, WIDTH)
    if turns is not None:
        values = rotate(values.to(tl.float32), turns, 1, TOKENS, BLOCK_WIDTH)
    return _to_factor(values, PRECISION)


@triton.jit
def projection_scale(projection, batch, tokens, present, num_tokens, TOKENS: tl.constexpr):
    """Factors of W R(x w) that make it p, for some tokens."""
    scale = tl.full((TOKENS,), 1.0, tl.float32) * projection.scaling
    if projection.inverse_norm is not None:
        scale *= tl.load(projection.inverse_norm + batch * num_tokens + tokens, mask=present, other=0.0)
    return scale


@triton.jit
def exponentials(exponents, inside, AXIS: tl.constexpr, PADDED: tl.constexpr):
    """exp p and exp -p over a common factor, which cancels, from p · log2(e); and the sum of both.

    AXIS is that of the features, of which those not `inside` are zero where PADDED.
    """
    # Exponents of both signs have the same maximum, so that neither overflows.
    largest = tl.expand_dims(tl.max(tl.abs(exponents), AXIS), AXIS)
    plus, minus = tl.exp2(exponents - largest), tl.exp2(-exponents - largest)
    if PADDED:
        plus, minus = tl.where(inside, plus, 0.0), tl.where(inside, minus, 0.0)
    return plus, minus, tl.sum(plus + minus, AXIS)


@triton.jit
def add_feature_eps(plus, minus, total, feature_eps, inside, AXIS: tl.constexpr, PADDED: tl.constexpr):
    """Exponentials such that features, their quotients with `total`, have `feature_eps` added."""
    if feature_eps is not None:
        added = tl.expand_dims(feature_eps * total, AXIS)
        plus, minus = plus + added, minus + added
        if PADDED:
            plus, minus = tl.where(inside, plus, 0.0), tl.where(inside, minus, 0.0)
    return plus, minus


@triton.jit(do_not_specialize=COUNTS)
def hedgehog_features_kernel(
    rows, projection, features, num_tokens,
    heads, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    LOG2_E: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """φ of a tile of tokens of one head, `[B, T, heads, 2 · WIDTH]`."""
    program = tl.program_id(0)
    head, rest = (program % heads).to(tl.int64), program // heads
    tiles = (num_tokens + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    batch, tile = (rest // tiles).to(tl.int64), rest % tiles
    feature = tl.arange(0, BLOCK_WIDTH)
    inside = (feature < WIDTH)[None, :]
    PADDED: tl.constexpr = WIDTH < BLOCK_WIDTH
    tokens = (tile * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)).to(tl.int64)
    present = tokens < num_tokens
    weight = load_weight(projection, head, WIDTH, BLOCK_WIDTH, PRECISION)
    turned = turned_rows(
        head_rows(rows, batch, head), projection, head, tokens, present, BLOCK_TOKENS, WIDTH, BLOCK_WIDTH, PRECISION
    )
    scale = projection_scale(projection, batch, tokens, present, num_tokens, BLOCK_TOKENS) * LOG2_E
    exponents = product(turned, tl.trans(weight), PRECISION) * scale[:, None]
    plus, minus, total = exponentials(exponents, inside, 1, PADDED)
    plus, minus = add_feature_eps(plus, minus, total, projection.feature_eps, inside, 1, PADDED)
    inverse = 1.0 / total
    results = dense_head_rows(features, batch, head, num_tokens, heads, 2 * WIDTH)
    store_rows(results, tokens, present, feature, plus * inverse[:, None], WIDTH)
    store_rows((results[0] + WIDTH, results[1]), tokens, present, feature, minus * inverse[:, None], WIDTH)


def token_options(rows: torch.Tensor, most_tokens: int) -> dict[str, Any]:
    """Arguments that these kernels share, for rows `[B, T, H, K]` in tiles of at most `most_tokens` tokens."""
    _, num_tokens, heads, width = rows.shape
    return {
        "num_tokens": num_tokens,
        "heads": heads,
        "WIDTH": width,
        "BLOCK_WIDTH": padded(width),
        "BLOCK_TOKENS": min(most_tokens, padded(num_tokens)),
        "LOG2_E": LOG2_E,
        "PRECISION": projection_precision(rows.dtype),
    }


def features(rows: torch.Tensor, projection: Projection) -> torch.Tensor:
    """φ of rows `[B, T, H, K]`: `[B, T, H, 2K]` in their dtype."""
    batch, num_tokens, heads, width = rows.shape
    result = rows.new_empty(batch, num_tokens, heads, 2 * width)
    few_registers = rows.dtype != torch.bfloat16 or not multiplies_from_shared_memory(rows.device)
    options = token_options(rows, 32 if few_registers else 64)
    tiles = ceil_divide(num_tokens, options["BLOCK_TOKENS"])
    launch(
        hedgehog_features_kernel, tiles * batch * heads, as_rows(rows), projection, result,
        num_warps=4 if padded(width) <= 64 else 8, num_stages=1, **options,
    )  # fmt: skip
    return result


@triton.jit(do_not_specialize=COUNTS)
def hedgehog_gradient_kernel(
    rows, gradient, projection, result, weight_gradient, num_tokens, share,
    heads, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    LOG2_E: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of norm(x) and of W from those of φ(x), `gradient`, over `share` tokens of one head.

    `result` is `[B, T, heads, WIDTH]`, and `weight_gradient` has a part `[WIDTH, WIDTH]` for each program.
    """
    program = tl.program_id(0)
    head, rest = (program % heads).to(tl.int64), program // heads
    shares = (num_tokens + share - 1) // share
    batch, part = (rest // shares).to(tl.int64), rest % shares
    feature = tl.arange(0, BLOCK_WIDTH)
    inside = feature < WIDTH
    PADDED: tl.constexpr = WIDTH < BLOCK_WIDTH
    weight = load_weight(projection, head, WIDTH, BLOCK_WIDTH, PRECISION)
    head_of_rows = head_rows(rows, batch, head)
    plus_gradients, stride = head_rows(gradient, batch, head)
    results = dense_head_rows(result, batch, head, num_tokens, heads, WIDTH)
    total_gradient = tl.zeros((BLOCK_WIDTH, BLOCK_WIDTH), tl.float32)
    for offset in range(part * share, tl.minimum((part + 1) * share, num_tokens), BLOCK_TOKENS):
        tokens = (offset + tl.arange(0, BLOCK_TOKENS)).to(tl.int64)
        present = tokens < num_tokens
        turned = turned_rows(
            head_of_rows, projection, head, tokens, present, BLOCK_TOKENS, WIDTH, BLOCK_WIDTH, PRECISION
        )
        scale = projection_scale(projection, batch, tokens, present, num_tokens, BLOCK_TOKENS)
        exponents = product(weight, tl.trans(turned), PRECISION) * (scale * LOG2_E)[None, :]
        plus, minus, total = exponentials(exponents, inside[:, None], 0, PADDED)
        inverse = 1.0 / total
        plus_gradient = tl.trans(load_rows((plus_gradients, stride), tokens, present, feature, WIDTH)).to(tl.float32)
        minus_gradient = load_rows((plus_gradients + WIDTH, stride), tokens, present, feature, WIDTH)
        minus_gradient = tl.trans(minus_gradient).to(tl.float32)
        mean = tl.sum(plus * plus_gradient + minus * minus_gradient, axis=0) * inverse
        slope = plus * (plus_gradient - mean[None, :]) - minus * (minus_gradient - mean[None, :])
        slope = slope * (scale * inverse)[None, :]
        total_gradient += product(slope, turned, PRECISION)
        changed = tl.trans(product(tl.trans(weight), _to_factor(slope, PRECISION), PRECISION))
        if projection.inverse_norm is not None:
            changed = changed * (projection.scaling / tl.where(present, scale, 1.0))[:, None]
        turns = rotary_rows(projection, tokens, present, feature, WIDTH)
        changed = rotate(changed, turns, -1, BLOCK_TOKENS, BLOCK_WIDTH)
        store_rows(results, tokens, present, feature, changed, WIDTH)
    start = weight_gradient + program.to(tl.int64) * (WIDTH * WIDTH)
    pointers = start + feature[:, None] * WIDTH + feature[None, :]
    tl.store(pointers, total_gradient, mask=inside[:, None] & inside[None, :])


def features_gradient(
    gradient: torch.Tensor, rows: torch.Tensor, projection: Projection
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of norm(x) and of W.

    Args:
        gradient: Gradient of φ(x), `[B, T, H, 2K]`.
        rows: x, `[B, T, H, K]`.
        projection: See [`Projection`].

    Returns:
        `[B, T, H, K]` in the dtype of `rows`, dense, and `[H, K, K]` in that of the weight.
    """
    batch, num_tokens, heads, width = rows.shape
    most_tokens = 32 if rows.dtype == torch.bfloat16 and multiplies_from_shared_memory(rows.device) else 16
    options = token_options(rows, 64 if padded(width) <= 32 else most_tokens)
    tile = options["BLOCK_TOKENS"]
    shares = max(1, min(ceil_divide(num_tokens, GRADIENT_TOKENS), ceil_divide(launching.FEW_PROGRAMS, batch * heads)))
    share = ceil_divide(num_tokens, shares * tile) * tile
    shares = ceil_divide(num_tokens, share)
    result = dense_like(rows)
    partial = rows.new_empty(batch * shares, heads, width, width, dtype=torch.float32)
    launch(
        hedgehog_gradient_kernel, batch * shares * heads,
        as_rows(rows), as_rows(gradient), projection, result, partial,
        share=share, num_warps=4 if padded(width) <= 64 and not multiplies_exactly(rows.dtype) else 8, num_stages=1,
        **options,
    )  # fmt: skip
    return result, partial.sum(0).to(projection.weight.dtype)


def hedgehog_features(
    tokens: Tensor,
    weight: Tensor,
    *,
    scaling: float = 1.0,
    feature_eps: float = 0.0,
    rotary: tuple[Tensor, Tensor] | None = None,
    norm: tuple[Tensor, float] | None = None,
) -> Tensor:
    """Features of projected queries or keys.

    Args:
        tokens: `[B, T, H, K]`, before any norm.
        weight: W, `[H, K, K]`.
        scaling: Factor of the tokens.
        feature_eps: Added to the features.
        rotary: Tables of cosines and sines for neighbouring pairs of channels, of T rows of K / 2, which rotate the
            tokens before the map; without gradients.
        norm: Weight `[H · K]` and eps of an RMSNorm across heads.

    Returns:
        `[B, T, H, 2K]` in the dtype of the tokens.
    """
    norm_weight, norm_eps = (None, 0.0) if norm is None else norm
    table = None if rotary is None else rotary_table(*rotary, tokens.dtype)
    return compute_features(tokens, weight, norm_weight, table, scaling, feature_eps, norm_eps)[0]


def _projection(
    weight: Tensor, norm: Tensor | None, inverse: Tensor, rotary: Tensor | None, scaling: float, feature_eps: float
) -> Projection:
    inverse_norm = None if norm is None else inverse
    return Projection(weight.contiguous(), norm, inverse_norm, rotary, scaling, feature_eps or None)


@operator("mhla_hf::hedgehog_features")
def compute_features(
    tokens: Tensor,
    weight: Tensor,
    norm: Tensor | None,
    rotary: Tensor | None,
    scaling: float,
    feature_eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor]:
    """Features, and 1 / rms of each token in float32, `[B, T]`, empty without a norm.

    Arguments are those of [`hedgehog_features`], with the norm as its weight and eps, and a table from `rotary_table`.
    """
    inverse = inverse_norm(tokens, None if norm is None else norm_eps)
    return features(tokens, _projection(weight, norm, inverse, rotary, scaling, feature_eps)), inverse


@torch.library.register_fake("mhla_hf::hedgehog_features")
def _(tokens, weight, norm, *others):
    inverse = tokens.new_empty((0,) if norm is None else tokens.shape[:2], dtype=torch.float32)
    return tokens.new_empty(*tokens.shape[:-1], 2 * tokens.shape[-1]), inverse


@operator("mhla_hf::hedgehog_features_backward", differentiable=False)
def hedgehog_features_backward(
    gradient: Tensor, inverse: Tensor, tokens: Tensor, weight: Tensor, norm: Tensor | None, rotary: Tensor | None,
    scaling: float, feature_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of tokens, W and the norm's weight, which is empty without a norm."""
    projection = _projection(weight, norm, inverse, rotary, scaling, feature_eps)
    grad_tokens, grad_weight = features_gradient(gradient, tokens, projection)
    grad_norm = norm_gradient_(tokens, grad_tokens, norm, inverse)
    return grad_tokens, grad_weight, tokens.new_empty(0) if grad_norm is None else grad_norm


@torch.library.register_fake("mhla_hf::hedgehog_features_backward")
def _(gradient, inverse, tokens, weight, norm, *others):
    return dense_like(tokens), dense_like(weight), tokens.new_empty(0) if norm is None else dense_like(norm)


def _context(ctx, inputs, output):
    ctx.mark_non_differentiable(output[1])
    *tensors, ctx.scaling, ctx.feature_eps, _ = inputs
    ctx.save_for_backward(output[1], *tensors)


def _backward(ctx, gradient, _):
    # Checkpointing hands them out once.
    saved = ctx.saved_tensors
    *gradients, norm = hedgehog_features_backward(gradient, *saved, ctx.scaling, ctx.feature_eps)
    return *gradients, None if saved[3] is None else norm, *([None] * 4)


compute_features.register_autograd(_backward, setup_context=_context)


@register_flop_formula(torch.ops.mhla_hf.hedgehog_features)
def _features_flops(tokens, weight, *args, **kwargs) -> int:
    return product_flops(tokens, weight[-1])


@register_flop_formula(torch.ops.mhla_hf.hedgehog_features_backward)
def _features_backward_flops(gradient, inverse, tokens, weight, *args, **kwargs) -> int:
    return 3 * product_flops(tokens, weight[-1])
