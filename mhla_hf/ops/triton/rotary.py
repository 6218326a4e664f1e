# SPDX-License-Identifier: Apache-2.0
"""Norm and rotary embedding of projected queries or keys by themselves, for what attends outside of fused kernels.

    y_t = R(x_t r_t w)                              r = 1 / rms(x_t) over all heads; without a norm r = w = 1
    dx_t = w r n - x r³ mean(w n x)  with  n_t = R⁻¹(dy_t),  dw = Σ_t n x r

One pass each way: 2 B T H K numbers forward and 3 B T H K backward. Operations of torch one after the other, many of
them in float32, move about 10 times as many bytes.

Shape letters: B batch, T tokens, H heads, K width.
"""

# No postponed annotations here: torch.library and Triton read them from the functions themselves.

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device_functions import COUNTS, row_strides
from .fused_products import heads_together, rotary_table, row_warps
from .launching import FEW_PROGRAMS, as_rows, ceil_divide, dense_like, launch, padded


@triton.jit
def _rotated(values, factors, SIGN: tl.constexpr, SIZE: tl.constexpr):
    """A row rotated by one of the rotary table, backwards for a SIGN of -1."""
    even, odd = tl.split(tl.reshape(values, (SIZE // 2, 2)))
    cosine, sine = tl.split(tl.reshape(factors.to(tl.float32), (SIZE // 2, 2)))
    sine *= SIGN
    return tl.reshape(tl.join(even * cosine - odd * sine, even * sine + odd * cosine), (SIZE,))


@triton.jit(do_not_specialize=COUNTS)
def rotary_kernel(
    tokens, norm_weight, rotary, result, inverse_norm, num_tokens, eps,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """All heads of one token, SIZE channels."""
    row = tl.program_id(0).to(tl.int64)
    batch, token = row // num_tokens, row % num_tokens
    column = tl.arange(0, BLOCK_SIZE)
    inside = column < SIZE
    stride_batch, stride_token, _ = row_strides(tokens)
    values = tl.load(tokens.data + batch * stride_batch + token * stride_token + column, mask=inside, other=0.0)
    values = values.to(tl.float32)
    if norm_weight is not None:
        inverse = 1.0 / tl.sqrt(tl.sum(values * values, axis=0) / SIZE + eps)
        tl.store(inverse_norm + row, inverse)
        values *= inverse * tl.load(norm_weight + column, mask=inside, other=0.0).to(tl.float32)
    factors = tl.load(rotary + token * WIDTH + column % WIDTH, mask=inside, other=0.0)
    rotated = _rotated(values, factors, 1, BLOCK_SIZE)
    tl.store(result + row * SIZE + column, rotated.to(result.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=COUNTS)
def rotary_gradient_kernel(
    gradient, tokens, norm_weight, rotary, inverse_norm, result, weight_gradient, num_tokens, count, share,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Gradients of `share` of the `count` = B · T rows, and a part of that of the norm's weight, `[..., SIZE]`."""
    first = tl.program_id(0).to(tl.int64) * share
    column = tl.arange(0, BLOCK_SIZE)
    inside = column < SIZE
    total = tl.zeros((BLOCK_SIZE,), tl.float32)
    stride_batch, stride_token, _ = row_strides(tokens)
    gradient_batch, gradient_token, _ = row_strides(gradient)
    for row in range(first, tl.minimum(first + share, count)):
        batch, token = row // num_tokens, row % num_tokens
        start = gradient.data + batch * gradient_batch + token * gradient_token
        factors = tl.load(rotary + token * WIDTH + column % WIDTH, mask=inside, other=0.0)
        changed = _rotated(tl.load(start + column, mask=inside, other=0.0).to(tl.float32), factors, -1, BLOCK_SIZE)
        if norm_weight is not None:
            weight = tl.load(norm_weight + column, mask=inside, other=0.0).to(tl.float32)
            inverse = tl.load(inverse_norm + row)
            start = tokens.data + batch * stride_batch + token * stride_token
            values = tl.load(start + column, mask=inside, other=0.0).to(tl.float32) * inverse
            total += changed * values
            changed *= weight
            changed = (changed - values * (tl.sum(changed * values, axis=0) / SIZE)) * inverse
        tl.store(result + row * SIZE + column, changed.to(result.dtype.element_ty), mask=inside)
    if norm_weight is not None:
        tl.store(weight_gradient + tl.program_id(0).to(tl.int64) * SIZE + column, total, mask=inside)


def rotated_tokens(
    tokens: Tensor, rotary: tuple[Tensor, Tensor], norm: tuple[Tensor, float] | None, dtype: torch.dtype
) -> Tensor:
    """Queries or keys after their norm, rotated.

    Args:
        tokens: `[B, T, H, K]`.
        rotary: Tables of cosines and sines for neighbouring pairs of channels, `[T, K / 2]`; without gradients.
        norm: Weight `[H · K]` and eps of an RMSNorm across heads; None for no norm.
        dtype: Of the result.

    Returns:
        `[B, T, H, K]`.
    """
    weight, eps = (None, 0.0) if norm is None else (norm[0], float(norm[1]))
    result, _ = norm_and_rotate(tokens.to(dtype), weight, rotary_table(*rotary, dtype), eps)
    return result


@torch.library.custom_op("mhla_hf::norm_and_rotate", mutates_args=())
def norm_and_rotate(tokens: Tensor, norm_weight: Tensor | None, rotary: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Rows after an RMSNorm across heads, where there is a weight, rotated by a table from `rotary_table`.

    Returns:
        `[B, T, H, K]` in the dtype of `tokens`, and 1 / rms of each token, float32 `[B, T]`, empty without a norm.
    """
    tokens = heads_together(tokens)
    batch, num_tokens, heads, width = tokens.shape
    size = heads * width
    result = dense_like(tokens)
    inverse = tokens.new_empty((batch, num_tokens) if norm_weight is not None else (0,), dtype=torch.float32)
    launch(
        rotary_kernel, batch * num_tokens, as_rows(tokens), norm_weight, rotary, result, inverse,
        num_tokens=num_tokens, eps=eps, SIZE=size, WIDTH=width, BLOCK_SIZE=padded(size), num_warps=row_warps(size),
    )  # fmt: skip
    return result, inverse


@norm_and_rotate.register_fake
def _(tokens, norm_weight, rotary, eps):
    inverse = tokens.new_empty((0,) if norm_weight is None else tokens.shape[:2], dtype=torch.float32)
    return dense_like(tokens), inverse


@torch.library.custom_op("mhla_hf::norm_and_rotate_backward", mutates_args=())
def norm_and_rotate_backward(
    gradient: Tensor, inverse: Tensor, tokens: Tensor, norm_weight: Tensor | None, rotary: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of tokens and norm_weight; the latter is empty without one."""
    gradient, tokens = heads_together(gradient), heads_together(tokens)
    batch, num_tokens, heads, width = tokens.shape
    size, count = heads * width, batch * num_tokens
    share = ceil_divide(count, 4 * FEW_PROGRAMS)
    programs = ceil_divide(count, share)
    result = dense_like(tokens)
    partial = tokens.new_empty((programs, size) if norm_weight is not None else (0,), dtype=torch.float32)
    launch(
        rotary_gradient_kernel, programs,
        as_rows(gradient), as_rows(tokens), norm_weight, rotary, inverse, result, partial,
        num_tokens=num_tokens, count=count, share=share, SIZE=size, WIDTH=width, BLOCK_SIZE=padded(size),
        num_warps=row_warps(size),
    )  # fmt: skip
    return result, tokens.new_empty(0) if norm_weight is None else partial.sum(0).to(norm_weight.dtype)


@norm_and_rotate_backward.register_fake
def _(gradient, inverse, tokens, norm_weight, rotary):
    return dense_like(tokens), tokens.new_empty(0) if norm_weight is None else dense_like(norm_weight)


def _context(ctx, inputs, output):
    tokens, norm_weight, rotary, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1], tokens, norm_weight, rotary)


def _backward(ctx, gradient, _):
    # Checkpointing hands them out once.
    saved = ctx.saved_tensors
    grad_tokens, grad_weight = norm_and_rotate_backward(gradient, *saved)
    return grad_tokens, None if saved[2] is None else grad_weight, None, None


norm_and_rotate.register_autograd(_backward, setup_context=_context)
