# SPDX-License-Identifier: Apache-2.0
"""Mixing of block summaries, and its gradients, by products of torch.

    S̃_i = Σ_b m_ib S_b          dS_b = Σ_i m_ib dS̃_i          dm_ib = Σ dS̃_i · S_b

Summaries in float16 have a power of two each, s_b. It goes into the weights that they meet, of which each row is over
a power of two of its own, r_i: S̃_i = r_i Σ_b (m_ib s_b / r_i) (S_b / s_b), one product of float16 by cuBLAS, which
takes a quarter of the time of a kernel of Triton's. A small kernel makes these weights, and mixes sums of keys.

A line is a head of a batch entry. Where the weights differ from query head to query head and R of these share the
summaries of a line, their weights are rows of one matrix below each other, `[R · M', M']`: one product mixes for all
of them.

Shape letters: B batch, H heads, G heads of the summaries (H or a divisor), R mixed summaries for each of them (H / G,
or 1 where the heads share the weights), M blocks, M' of them with empty ones, K and V widths, L lines of a group.
"""

# No postponed annotations here: Triton reads `tl.constexpr` from the functions themselves.

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device_functions import COUNTS, ROW_UNIT, load_matrix, place_of_program, power_of_two
from .launching import ceil_divide, launch, multiplied_for, padded, row_count
from .outer import Sums


def count_mixed_heads(mixing: Sequence[int], heads: int, groups: int) -> int:
    """Heads of the mixed summaries, R · G: H where the weights differ from query head to query head, otherwise G.

    Args:
        mixing: Shape of the weights, `[M, M]`, `[1 or H, M, M]` or `[B, 1 or H, M, M]`.
        heads: H.
        groups: G.
    """
    return heads if len(mixing) > 2 and mixing[-3] != 1 else groups


@triton.jit
def load_weights(own, place, places, rows, num_blocks, share, shares, stride_repeat, stride_column):
    """Weights of some rows, to which `own` points, and shares of blocks; zero outside and for empty blocks."""
    block = stride_repeat * (places // share) + stride_column * (places % rows)
    inside = (place < num_blocks)[:, None] & ((places < shares) & (places % rows < num_blocks))[None, :]
    return tl.load(own[:, None] + block[None, :], mask=inside, other=0.0)


@triton.jit(do_not_specialize=COUNTS)
def weigh_kernel(
    mixing, scales, sums, weights, lower, mixed_scales, mixed_sums,
    first_line, lines, mixing_stride_batch, mixing_stride_head, mixing_stride_repeat, mixing_stride_row,
    mixing_stride_column, num_blocks, share, shares, tiles, heads,
    REPEATS: tl.constexpr, PLAIN: tl.constexpr, BLOCK_PLAIN: tl.constexpr,
):  # fmt: skip
    """16 rows of the weights of a line that summaries are multiplied with, and of its mixed sums of keys.

    For a group of lines from `first_line` on, of which heads make a batch entry: `weights` `[tiles, lines, REPEATS,
    M', shares]` are m, or m_ib s_b / r_i for `scales` s `[tiles, lines, shares]` and `mixed_scales` r `[lines,
    REPEATS, M']`; what rounding takes from them goes to `lower`. `shares` are the blocks M' as often as their slots
    are shared out, and every `share` of them for another head of the weights. `sums` are `[lines, shares, PLAIN]`,
    `mixed_sums` `[lines, REPEATS, M', PLAIN]`.
    """
    rows = (num_blocks + ROW_UNIT - 1) // ROW_UNIT * ROW_UNIT
    batch, head, start, _, _ = place_of_program(1, num_blocks, first_line, lines, heads, REPEATS)
    row_line = (tl.program_id(0) % (lines * REPEATS)).to(tl.int64)
    line = row_line // REPEATS
    place, column = start.to(tl.int32) * 16 + tl.arange(0, 16), tl.arange(0, BLOCK_PLAIN)
    own = mixing + batch * mixing_stride_batch + head * mixing_stride_head + place * mixing_stride_row
    factor = tl.full((16,), 1.0, tl.float32)
    if scales is not None:
        largest = tl.zeros((16, 32), tl.float32)
        for tile in range(tiles):
            for first in range(0, shares, 32):
                places = first + tl.arange(0, 32)
                loaded = load_weights(
                    own, place, places, rows, num_blocks, share, shares, mixing_stride_repeat, mixing_stride_column
                )
                scale = tl.load(scales + (tile * lines + line) * shares + places, mask=places < shares, other=0.0)
                size = tl.abs(loaded * scale[None, :])
                largest = tl.maximum(largest, tl.where(size < float("inf"), size, 0.0))
        power, factor = power_of_two(tl.max(largest, axis=1))
        tl.store(mixed_scales + row_line * rows + place, power, mask=place < rows)
    total = tl.zeros((16, BLOCK_PLAIN), tl.float32)
    for first in range(0, shares, 32):
        places = first + tl.arange(0, 32)
        loaded = load_weights(
            own, place, places, rows, num_blocks, share, shares, mixing_stride_repeat, mixing_stride_column
        )
        for tile in range(tiles):
            tile_line = tile * lines + line
            result = loaded
            if scales is not None:
                scale = tl.load(scales + tile_line * shares + places, mask=places < shares, other=0.0)
                result *= scale[None, :] * factor[:, None]
            rounded = result.to(weights.dtype.element_ty)
            targets = ((tile_line * REPEATS + row_line % REPEATS) * rows + place)[:, None] * shares + places[None, :]
            written = (place < rows)[:, None] & (places < shares)[None, :]
            tl.store(weights + targets, rounded, mask=written)
            if lower is not None:
                tl.store(lower + targets, (result - rounded.to(tl.float32)).to(tl.float16), mask=written)
        if sums is not None:
            part = load_matrix(sums + line * shares * PLAIN, places, column, PLAIN, 1, shares, PLAIN)
            total = tl.dot(loaded, part, total, input_precision="tf32x3")
    if sums is not None:
        pointers = mixed_sums + (row_line * rows + place)[:, None] * PLAIN + column[None, :]
        tl.store(pointers, total, mask=(place < rows)[:, None] & (column < PLAIN)[None, :])


def mix(
    summaries: Sums, mixing: Tensor, groups: int, lines: tuple[int, int], *, transpose: bool = False,
    twice: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Mixed summaries and mixed sums of keys of a group of L lines; gradients of both are mixed by mᵀ.

    Args:
        summaries: Float16 with scales, or float32, of the group's L lines, or L · R for gradients.
        mixing: float32 `[M, M]`, `[1 or H, M, M]` or `[B, 1 or H, M, M]`, dense.
        groups: G.
        lines: The first line of the group and its number of lines, L.
        transpose: Mix gradients of mixed summaries.
        twice: Multiply with weights of 22 bits, the sum of two float16 numbers: beside float16 tokens, where 11 would
            show in the outputs.

    Returns:
        Mixed summaries `[tiles · L · R, M', K, W]` in the dtype of the summaries; powers of two that float16 ones are
        to be multiplied with, float32 `[L · R, M']`; and mixed sums, float32 `[L · R, M', P]`. Without R for
        gradients.
    """
    products, scales, sums, _ = summaries
    batches, heads = (1,) * (4 - mixing.dim()) + tuple(mixing.shape[:-2])
    repeats, blocks, share = max(1, heads // groups), mixing.shape[-1], products.shape[1]
    mixed_repeats, shares = (1, repeats * share) if transpose else (repeats, share)
    tiles, rows = 1 if scales is None else len(scales), row_count(blocks)
    columns = products.view(tiles * lines[1], shares, -1)
    weights = products.new_empty(len(columns), mixed_repeats * rows, shares)
    lower = torch.empty_like(weights) if twice else None
    mixed_scales = None if scales is None else scales.new_empty(lines[1] * mixed_repeats, rows)
    plain = 16 if sums is None else sums.shape[-1]
    mixed_sums = None if sums is None else sums.new_empty(lines[1] * mixed_repeats, rows, plain)
    head_stride = 0 if heads == 1 else blocks**2
    launch(
        weigh_kernel, lines[1] * mixed_repeats * ceil_divide(rows, 16), mixing, scales, sums, weights, lower,
        mixed_scales, mixed_sums, lines=lines, mixing_stride_batch=0 if batches == 1 else heads * blocks**2,
        mixing_stride_head=head_stride * repeats // mixed_repeats, mixing_stride_repeat=head_stride,
        mixing_stride_row=1 if transpose else blocks, mixing_stride_column=blocks if transpose else 1,
        num_blocks=blocks, share=share, shares=shares, tiles=tiles, heads=groups, REPEATS=mixed_repeats, PLAIN=plain,
        BLOCK_PLAIN=padded(plain), num_warps=4,
    )  # fmt: skip
    mixed = products.new_empty(len(columns), mixed_repeats * rows, columns.shape[2])
    # Autocast does not touch products that are told where to write.
    torch.bmm(weights if lower is None else lower, columns, out=mixed)
    if lower is not None:
        mixed.baddbmm_(weights, columns)
    return mixed.view(-1, rows, *products.shape[2:]), mixed_scales, mixed_sums


def mixing_gradient(
    gradients: Sums, summaries: Sums, mixing: Tensor, lines: tuple[int, int], tokens: torch.dtype
) -> Tensor:
    """The gradient of the weights from a group of L lines, float32 `[L, R, M, M]`, summed over L if they share them.

    Args:
        gradients: Gradients of mixed summaries and mixed sums of keys, of L · R lines.
        summaries: Summaries and sums of keys, of L lines.
        mixing: The weights, see [`mix`].
        lines: The first line of the group and its number of lines, L.
        tokens: Dtype of the tokens.
    """
    blocks, tiles = mixing.shape[-1], 1 if summaries.scales is None else len(summaries.scales)
    left, right = (
        part.products.reshape(tiles * lines[1], -1, part.products[0, 0].numel()) for part in (gradients, summaries)
    )
    with multiplied_for(tokens, left.device):
        if summaries.scales is None or gradients.scales is None:
            total = torch.bmm(left, right.mT)
        elif left.is_cuda:
            total = torch.bmm(left, right.mT, out_dtype=torch.float32)
        else:
            total = torch.bmm(left.float(), right.float().mT)
        if summaries.scales is not None and gradients.scales is not None:
            total *= gradients.scales.view(len(total), -1, 1) * summaries.scales.view(len(total), 1, -1)
            total = total.unflatten(0, (tiles, -1)).sum(0)
        if gradients.sums is not None and summaries.sums is not None:
            total.baddbmm_(gradients.sums.view(lines[1], -1, summaries.sums.shape[2]), summaries.sums.mT)
    rows, repeats = row_count(blocks), len(gradients.products) // len(summaries.products)
    total = total.view(lines[1], repeats, -1, rows, right.shape[1] // rows, rows).sum((2, 4))[..., :blocks, :blocks]
    return total.sum(0, keepdim=True) if mixing.numel() == blocks**2 else total


def sum_gradients(parts: list[Tensor], mixing: Tensor, batch: int) -> Tensor:
    """The gradient of the weights, of their shape, from those of all groups of lines by [`mixing_gradient`]."""
    total, heads = torch.cat(parts), mixing.shape[-3] if mixing.dim() > 2 else 1
    if mixing.numel() == total[0, 0].numel():
        return total.sum((0, 1)).view_as(mixing)
    total = total.unflatten(0, (batch, -1)).flatten(1, 2)
    return total.sum_to_size(mixing.numel() // (heads * total[0, 0].numel()), heads, *mixing.shape[-2:]).view_as(
        mixing
    )
