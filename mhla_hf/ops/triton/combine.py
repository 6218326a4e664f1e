# SPDX-License-Identifier: Apache-2.0
"""The sum of a layer's parts: MHLA and a softmax window times their gains, and the convolution of the values.

    o_t = g₀ a_t + g₁ w_t + p_t            da = g₀ do,  dw = g₁ do,  dp = do,  dg₀ = Σ_t do a,  dg₁ = Σ_t do w

in float32, rounded once. One pass reads and writes 4 B T H V numbers (3 without p), where operations of torch one
after the other, half of them in float32, move five times as many bytes. Gradients of gains are summed in float32 in an
order that depends on nothing but the shapes.

Shape letters: B batch, T tokens, H heads, V width.
"""

# No postponed annotations here: torch.library and Triton read them from the functions themselves.

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device_functions import COUNTS, dense_head_rows, head_rows, load_rows, store_rows
from .launching import FEW_PROGRAMS, as_rows, ceil_divide, dense_like, launch, padded


@triton.jit(do_not_specialize=COUNTS)
def combine_kernel(
    attended, window, positional, gains, result, num_tokens,
    HEADS: tl.constexpr, VALUE: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """The sum for a tile of tokens of one head. `gains` is `[2, HEADS, CHANNELS]`, with CHANNELS 1 or VALUE."""
    batch, head, tokens, present = _tile(num_tokens, HEADS, BLOCK_TOKENS)
    column = tl.arange(0, BLOCK_VALUE)
    first, second = _gains(gains, head, column, HEADS, VALUE, CHANNELS)
    total = load_rows(head_rows(attended, batch, head), tokens, present, column, VALUE).to(tl.float32) * first
    total += load_rows(head_rows(window, batch, head), tokens, present, column, VALUE).to(tl.float32) * second
    if positional is not None:
        total += load_rows(head_rows(positional, batch, head), tokens, present, column, VALUE).to(tl.float32)
    store_rows(dense_head_rows(result, batch, head, num_tokens, HEADS, VALUE), tokens, present, column, total, VALUE)


@triton.jit(do_not_specialize=COUNTS)
def combine_gradient_kernel(
    gradient, attended, window, gains, grad_attended, grad_window, grad_gains, num_tokens, share,
    HEADS: tl.constexpr, VALUE: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """Gradients of both parts, over `share` tokens of one head, and a part of those of the gains, `[2, VALUE]`."""
    program = tl.program_id(0)
    head, rest = (program % HEADS).to(tl.int64), program // HEADS
    shares = (num_tokens + share - 1) // share
    batch, part = (rest // shares).to(tl.int64), rest % shares
    column = tl.arange(0, BLOCK_VALUE)
    first, second = _gains(gains, head, column, HEADS, VALUE, CHANNELS)
    first_sum = tl.zeros((BLOCK_VALUE,), tl.float32)
    second_sum = tl.zeros((BLOCK_VALUE,), tl.float32)
    for offset in range(part * share, tl.minimum((part + 1) * share, num_tokens), BLOCK_TOKENS):
        tokens = (offset + tl.arange(0, BLOCK_TOKENS)).to(tl.int64)
        present = tokens < num_tokens
        rows = load_rows(head_rows(gradient, batch, head), tokens, present, column, VALUE).to(tl.float32)
        others = load_rows(head_rows(attended, batch, head), tokens, present, column, VALUE)
        first_sum += tl.sum(rows * others.to(tl.float32), axis=0)
        others = load_rows(head_rows(window, batch, head), tokens, present, column, VALUE)
        second_sum += tl.sum(rows * others.to(tl.float32), axis=0)
        results = dense_head_rows(grad_attended, batch, head, num_tokens, HEADS, VALUE)
        store_rows(results, tokens, present, column, rows * first, VALUE)
        results = dense_head_rows(grad_window, batch, head, num_tokens, HEADS, VALUE)
        store_rows(results, tokens, present, column, rows * second, VALUE)
    start = grad_gains + program.to(tl.int64) * (2 * VALUE) + column
    tl.store(start, first_sum, mask=column < VALUE)
    tl.store(start + VALUE, second_sum, mask=column < VALUE)


@triton.jit
def _tile(num_tokens, HEADS: tl.constexpr, BLOCK_TOKENS: tl.constexpr):
    head, rest = (tl.program_id(0) % HEADS).to(tl.int64), tl.program_id(0) // HEADS
    tiles = (num_tokens + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    tokens = (rest % tiles * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)).to(tl.int64)
    return (rest // tiles).to(tl.int64), head, tokens, tokens < num_tokens


@triton.jit
def _gains(gains, head, column, HEADS: tl.constexpr, VALUE: tl.constexpr, CHANNELS: tl.constexpr):
    """Gains of a head, rows of `[1, VALUE]`."""
    place = head * CHANNELS + (column if CHANNELS > 1 else column * 0)
    first = tl.load(gains + place, mask=column < VALUE, other=0.0).to(tl.float32)
    second = tl.load(gains + HEADS * CHANNELS + place, mask=column < VALUE, other=0.0).to(tl.float32)
    return first[None, :], second[None, :]


@torch.library.custom_op("mhla_hf::combine_parts", mutates_args=())
def combine_parts(
    attended: Tensor, window: Tensor, positional: Tensor | None, gains: Tensor, dtype: torch.dtype
) -> Tensor:
    """gains[0] · attended + gains[1] · window + positional.

    Args:
        attended: `[B, T, H, V]`.
        window: `[B, T, H, V]`.
        positional: `[B, T, H, V]`, or None.
        gains: `[2, H, 1]` or `[2, H, V]`, of any type.
        dtype: Of the result.

    Returns:
        `[B, T, H, V]`.
    """
    batch, num_tokens, heads, width = attended.shape
    result = attended.new_empty(attended.shape, dtype=dtype)
    tile = min(padded(num_tokens), 4096 // padded(width))
    launch(
        combine_kernel, ceil_divide(num_tokens, tile) * batch * heads,
        as_rows(attended), as_rows(window), as_rows(positional), gains.contiguous(), result,
        num_tokens=num_tokens, HEADS=heads, VALUE=width, CHANNELS=gains.shape[2], BLOCK_VALUE=padded(width),
        BLOCK_TOKENS=tile, num_warps=4,
    )  # fmt: skip
    return result


@combine_parts.register_fake
def _(attended, window, positional, gains, dtype):
    return attended.new_empty(attended.shape, dtype=dtype)


@torch.library.custom_op("mhla_hf::combine_parts_backward", mutates_args=())
def combine_parts_backward(
    gradient: Tensor, attended: Tensor, window: Tensor, gains: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of both parts and of the gains."""
    batch, num_tokens, heads, width = attended.shape
    tile = min(padded(num_tokens), 4096 // padded(width))
    shares = min(ceil_divide(num_tokens, tile), ceil_divide(4 * FEW_PROGRAMS, batch * heads))
    share = ceil_divide(num_tokens, shares * tile) * tile
    shares = ceil_divide(num_tokens, share)
    grad_attended, grad_window = dense_like(attended), dense_like(window)
    partial = attended.new_empty(batch * shares, heads, 2, width, dtype=torch.float32)
    launch(
        combine_gradient_kernel, batch * shares * heads,
        as_rows(gradient), as_rows(attended), as_rows(window), gains.contiguous(), grad_attended, grad_window, partial,
        num_tokens=num_tokens, share=share, HEADS=heads, VALUE=width, CHANNELS=gains.shape[2],
        BLOCK_VALUE=padded(width), BLOCK_TOKENS=tile, num_warps=4,
    )  # fmt: skip
    grad_gains = partial.sum(0).transpose(0, 1).sum_to_size(gains.shape)
    return grad_attended, grad_window, grad_gains.to(gains.dtype, memory_format=torch.contiguous_format)


@combine_parts_backward.register_fake
def _(gradient, attended, window, gains):
    return dense_like(attended), dense_like(window), dense_like(gains)


def _context(ctx, inputs, output):
    attended, window, positional, gains, _ = inputs
    ctx.positional_dtype = None if positional is None else positional.dtype
    ctx.save_for_backward(attended, window, gains)


def _backward(ctx, gradient):
    grad_attended, grad_window, grad_gains = combine_parts_backward(gradient, *ctx.saved_tensors)
    grad_positional = None if ctx.positional_dtype is None else gradient.to(ctx.positional_dtype)
    return grad_attended, grad_window, grad_positional, grad_gains, None


combine_parts.register_autograd(_backward, setup_context=_context)
