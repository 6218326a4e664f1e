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
import torch.nn.functional as F
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


@triton.jit(do_not_specialize=COUNTS)
def weigh_kernel(
    mixing, scales, sums, weights, lower, mixed_scales, mixed_sums,
    first_line, lines, mixing_stride_batch, mixing_stride_head, num_blocks, shares, tiles, heads,
    REPEATS: tl.constexpr, PLAIN: tl.constexpr, BLOCK_PLAIN: tl.constexpr,
):  # fmt: skip
    """16 rows of the weights of a line that summaries are multiplied with, and of its mixed sums of keys.

    For a group of lines from `first_line` on, of which heads make a batch entry: `weights` `[tiles, lines, REPEATS,
    M', shares]` are m, or m_ib s_b / r_i for `scales` s `[tiles, lines, shares]` and `mixed_scales` r `[lines,
    REPEATS, M']`; what rounding takes from them goes to `lower`. `shares` are M' times the number of shares of a
    block's slots. `sums` are `[lines, shares, PLAIN]`, `mixed_sums` `[lines, REPEATS, M', PLAIN]`.
    """
    rows = (num_blocks + ROW_UNIT - 1) // ROW_UNIT * ROW_UNIT
    batch, head, start, _, _ = place_of_program(1, num_blocks, first_line, lines, heads, REPEATS)
    row_line = (tl.program_id(0) % (lines * REPEATS)).to(tl.int64)
    line = row_line // REPEATS
    mixing += batch * mixing_stride_batch + head * mixing_stride_head
    place, column = start.to(tl.int32) * 16 + tl.arange(0, 16), tl.arange(0, BLOCK_PLAIN)
    factor = tl.full((16,), 1.0, tl.float32)
    if scales is not None:
        largest = tl.zeros((16, 32), tl.float32)
        for tile in range(tiles):
            for first in range(0, shares, 32):
                share = first + tl.arange(0, 32)
                scaled = load_weights(mixing, place, share, num_blocks, rows, shares)
                scale = tl.load(scales + (tile * lines + line) * shares + share, mask=share < shares, other=0.0)
                size = tl.abs(scaled * scale[None, :])
                largest = tl.maximum(largest, tl.where(size < float("inf"), size, 0.0))
        power, factor = power_of_two(tl.max(largest, axis=1))
        tl.store(mixed_scales + row_line * rows + place, power, mask=place < rows)
    total = tl.zeros((16, BLOCK_PLAIN), tl.float32)
    for first in range(0, shares, 32):
        share = first + tl.arange(0, 32)
        loaded = load_weights(mixing, place, share, num_blocks, rows, shares)
        inside = (place < rows)[:, None] & (share < shares)[None, :]
        for tile in range(tiles):
            tile_line = tile * lines + line
            result = loaded
            if scales is not None:
                result *= tl.load(scales + tile_line * shares + share, mask=share < shares, other=0.0)[None, :]
                result *= factor[:, None]
            start_row = ((tile_line * REPEATS + row_line % REPEATS) * rows + place) * shares
            places = start_row[:, None] + share[None, :]
            rounded = result.to(weights.dtype.element_ty)
            tl.store(weights + places, rounded, mask=inside)
            if lower is not None:
                tl.store(lower + places, (result - rounded.to(tl.float32)).to(tl.float16), mask=inside)
        if sums is not None:
            part = load_matrix(sums + line * shares * PLAIN, share, column, PLAIN, 1, shares, PLAIN)
            total = tl.dot(loaded, part, total, input_precision="tf32x3")
    if sums is not None:
        pointers = mixed_sums + (row_line * rows + place)[:, None] * PLAIN + column[None, :]
        tl.store(pointers, total, mask=(place < rows)[:, None] & (column < PLAIN)[None, :])


@triton.jit
def load_weights(mixing, row, share, num_blocks, rows, shares):
    """Weights m of some rows and shares of blocks, zero for empty ones."""
    block = share % rows
    inside = (row < num_blocks)[:, None] & ((share < shares) & (block < num_blocks))[None, :]
    return tl.load(mixing + row[:, None] * num_blocks + block[None, :], mask=inside, other=0.0)


def mix(
    summaries: Sums, mixing: Tensor, groups: int, heads: int, lines: tuple[int, int], *, twice: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Mixed summaries and mixed sums of keys of a group of L lines.

    Args:
        summaries: Float16 with scales, or float32.
        mixing: float32 `[M, M]`, `[1 or H, M, M]` or `[B, 1 or H, M, M]`, dense.
        groups: G.
        heads: Mixed summaries of a batch entry, G · R; see [`count_mixed_heads`].
        lines: The first line of the group and its number of lines, L.
        twice: Multiply with weights of 22 bits, the sum of two float16 numbers: beside float16 tokens, where 11 would
            show in the outputs.

    Returns:
        Mixed summaries `[tiles · L · R, M', K, W]` in the dtype of the summaries, powers of two that float16 ones are
        to be multiplied with, float32 `[L · R, M']`, and mixed sums, float32 `[L · R, M', P]`.
    """
    products, scales, sums, _ = summaries
    repeats, rows, shares = heads // groups, row_count(mixing.shape[-1]), products.shape[1]
    tiles = len(products) // lines[1]
    row_lines = lines[1] * repeats
    weights = products.new_empty(len(products), repeats * rows, shares)
    lower = torch.empty_like(weights) if twice else None
    mixed_scales = None if scales is None else scales.new_empty(row_lines, rows)
    mixed_sums, plain = None, 16
    if sums is not None:
        plain = sums.shape[2]
        mixed_sums = sums.new_empty(row_lines, rows, plain)
    strides = [0 if size == 1 else stride for size, stride in zip(mixing.shape[:-2], mixing.stride())]
    batch_stride, head_stride = [0] * (2 - len(strides)) + strides
    launch(
        weigh_kernel, row_lines * ceil_divide(rows, 16), mixing, scales, sums, weights, lower, mixed_scales,
        mixed_sums, lines=lines, mixing_stride_batch=batch_stride, mixing_stride_head=head_stride,
        num_blocks=mixing.shape[-1], shares=shares, tiles=tiles, heads=groups, REPEATS=repeats, PLAIN=plain,
        BLOCK_PLAIN=padded(plain), num_warps=4,
    )  # fmt: skip
    mixed = products.new_empty(len(products), repeats * rows, products.shape[2] * products.shape[3])
    columns = products.flatten(2)
    # Autocast does not touch products that are told where to write.
    torch.bmm(weights if lower is None else lower, columns, out=mixed)
    if lower is not None:
        mixed.baddbmm_(weights, columns)
    return mixed.view(-1, rows, *products.shape[2:]), mixed_scales, mixed_sums


class Mixing:
    """Mixing of the summaries of a group of lines.

    Matrices have empty blocks after the M, up to a multiple of `ROW_UNIT`: cuBLAS multiplies by wgmma only where rows
    start at multiples of 16 bytes, three times as fast. For bfloat16 summaries the weights are the sum of two bfloat16
    numbers, which keep 16 bits of them. float32 ones are multiplied through TF32 beside bfloat16 tokens, otherwise as
    torch multiplies float32 matrices.

    Args:
        weights: float32 `[M, M]`, `[1 or H, M, M]` or `[B, 1 or H, M, M]`.
        batch: B.
        groups: G.
        tokens: Dtype of the tokens.
    """

    def __init__(self, weights: Tensor, batch: int, groups: int, tokens: torch.dtype) -> None:
        self.shape, self.lines, self.tokens = weights.shape, (batch, groups), tokens
        *leading, blocks, _ = weights.shape
        batches, heads = (1,) * (2 - len(leading)) + tuple(leading)
        # [B or 1, G or 1, R, M', M']
        weights = weights.reshape(batches, groups if heads > 1 else 1, -1, blocks, blocks)
        empty = row_count(blocks) - blocks
        self.weights = F.pad(weights, (0, empty, 0, empty)) if empty else weights
        self.repeats = weights.shape[2]
        self.is_shared = weights.shape[:2].numel() == 1
        self.gradients: list[Tensor] = []

    def __call__(self, summaries: Tensor, sums: Tensor | None, lines: tuple[int, int]) -> tuple[Tensor, Tensor | None]:
        """Mixed summaries and mixed sums of keys of a group of lines.

        Args:
            summaries: bfloat16 or float32 `[L, M', K, V]`, dense.
            sums: float32 `[L, M', P]`, dense, or None.
            lines: The first line of the group and its number of lines, L.

        Returns:
            `[L · R, M', K, V]` and `[L · R, M', P]` in their dtypes.
        """
        return self._product(summaries, lines), None if sums is None else self._product(sums, lines)

    def transposed(
        self, gradients: Tensor, grad_sums: Tensor | None, lines: tuple[int, int]
    ) -> tuple[Tensor, Tensor | None]:
        """Gradients of what [`Mixing.__call__`] takes from gradients of what it returns."""
        of_sums = None if grad_sums is None else self._product(grad_sums, lines, transpose=True)
        return self._product(gradients, lines, transpose=True), of_sums

    def _product(self, factors: Tensor, lines: tuple[int, int], *, transpose: bool = False) -> Tensor:
        parts = [self.weights]
        if factors.dtype == torch.bfloat16:
            high = self.weights.bfloat16()
            # The lower half first: rounded to bfloat16, its product loses nothing that shows in the sum.
            parts = [(self.weights - high).bfloat16(), high]
        weights = [self._of_lines(part, lines) for part in parts]
        if transpose:
            weights = [part.mT for part in weights]
        columns = factors.reshape(lines[1], weights[0].shape[2], -1)
        with multiplied_for(self.tokens, factors.device):
            result = torch.bmm(weights[0], columns)
            for part in weights[1:]:
                result.baddbmm_(part, columns)
        return result.view(-1, self.weights.shape[-1], *factors.shape[2:])

    def _of_lines(self, weights: Tensor, lines: tuple[int, int]) -> Tensor:
        """Weights of a group of lines, `[L, R · M', M']`; without a copy where all lines share them."""
        first, count = lines
        return weights.flatten(2, 3).expand(*self.lines, -1, -1).flatten(0, 1)[first : first + count]

    def add_gradient(
        self, gradients: Tensor, summaries: Tensor, grad_sums: Tensor | None = None, sums: Tensor | None = None
    ) -> None:
        """Adds the part of the next group of lines to the gradient of the weights.

        Args:
            gradients: Gradients of mixed summaries, float32 `[L · R, M', ...]`.
            summaries: float32 `[L, M', ...]`.
            grad_sums: Gradients of mixed sums of keys, float32 `[L · R, M', ...]`.
            sums: Sums of keys, float32 `[L, M', ...]`; given together with them.
        """
        with multiplied_for(self.tokens, summaries.device):
            total = torch.bmm(*_factors(gradients, summaries))
            if grad_sums is not None and sums is not None:
                total = total.baddbmm_(*_factors(grad_sums, sums))
        self.gradients.append(total.sum(0, keepdim=True) if self.is_shared else total)

    def gradient(self) -> Tensor:
        """The gradient of the weights over all groups, float32, in their shape."""
        blocks = self.shape[-1]
        total = torch.cat(self.gradients)
        total = total.unflatten(1, (self.repeats, -1))[..., :blocks, :blocks]
        if not self.is_shared:
            total = total.unflatten(0, self.lines).sum_to_size(*self.weights.shape[:3], blocks, blocks)
        elif len(total) > 1:
            total = total.sum(0)
        return total.reshape(self.shape)


def _factors(gradients: Tensor, summaries: Tensor) -> tuple[Tensor, Tensor]:
    """`[L, R · M', C]` and `[L, C, M']`, whose product is the gradient of weights `[L, R · M', M']`."""
    columns = summaries.flatten(2)
    return gradients.reshape(len(columns), -1, columns.shape[2]), columns.mT
