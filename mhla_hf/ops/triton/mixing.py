# SPDX-License-Identifier: Apache-2.0
"""Mixing of block summaries, and its gradients, with weights that are not rounded to the summaries' type.

    S̃_i = Σ_b m_ib S_b          dS_b = Σ_i m_ib dS̃_i          dm_ib = Σ dS̃_i · S_b

A summary is a row of `columns` numbers (K · V of them). float32 weights meet bfloat16 summaries as the sum of two
bfloat16 numbers, which costs one more product and keeps 16 bits of them; cuBLAS would need the weights rounded.

An operator takes three steps, each of which works on groups of lines (see [`launching.lines_of_group`]):

1. [`prepare_weights`] writes the weights once, split or rounded as products need them and padded with zeros, so that
   the kernels load them wide and without masks. Transposed weights become plain matrices here.
2. [`prepare_mixing`] gives a stage, `stage(first_line, lines)`, that mixes the summaries of a group into another
   buffer. The sums of keys z go the same way, exactly: they are summaries with one column for each channel.
   With transposed weights it computes dS from dS̃.
3. [`MixingGradient`] is a stage that adds the part of a group to the gradient of the weights, which its `total`
   returns at the end.

Shape letters: B batch, H heads, G heads of the summaries (H or a divisor), S heads of the mixed summaries (H where
each has weights of its own, else G), M blocks, K and V widths, L lines of a group.
"""

# No postponed annotations here: torch.library and Triton read them from the functions themselves.

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device_functions import COUNTS, raw_product, to_matrix, to_tf32
from .launching import (
    MAX_SETUPS,
    Setup,
    Stage,
    ceil_divide,
    multiplies_from_shared_memory,
    padded,
    prepare,
    product_precision,
    split_slots,
)


# Lines whose share of the gradient of common weights is kept apart before they are summed.
SHARES = 64


@triton.jit(do_not_specialize=(*COUNTS, "stride_row", "stride_column"))
def weights_kernel(
    mixing, rounded, exact,
    mixing_stride_batch, mixing_stride_head, stride_row, stride_column, heads, blocks,
    TILE: tl.constexpr,
):  # fmt: skip
    """Weights for [`mix_kernel`], `[batch, heads, ..., size, size]`, padded with zeros to a multiple of TILE.

    `rounded` are two halves in bfloat16, whose sum they are, or the nearest numbers of TF32 in float32; `exact` are
    they themselves in float32. Either may be None.
    """
    tiles = (blocks + TILE - 1) // TILE
    column_tile, rest = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    row_tile, matrix = rest % tiles, (rest // tiles).to(tl.int64)
    row = (row_tile * TILE + tl.arange(0, TILE))[:, None]
    column = (column_tile * TILE + tl.arange(0, TILE))[None, :]
    used = (row < blocks) & (column < blocks)
    start = mixing + matrix // heads * mixing_stride_batch + matrix % heads * mixing_stride_head
    weights = tl.load(start + row * stride_row + column * stride_column, mask=used, other=0.0).to(tl.float32)
    size = tiles * TILE
    place = row * size + column
    if rounded is not None:
        if rounded.dtype.element_ty == tl.bfloat16:
            high = weights.to(tl.bfloat16)
            halves = rounded + matrix * 2 * size * size + place
            tl.store(halves, high)
            tl.store(halves + size * size, (weights - high.to(tl.float32)).to(tl.bfloat16))
        else:
            tl.store(rounded + matrix * size * size + place, to_tf32(weights))
    if exact is not None:
        tl.store(exact + matrix * size * size + place, weights)


@triton.jit(do_not_specialize=COUNTS)
def mix_kernel(
    weights, summaries, mixed,
    first_line, lines, mixing_stride_batch, mixing_stride_head, blocks,
    COLUMNS: tl.constexpr, HEADS: tl.constexpr, REPEATS: tl.constexpr, SUM_REPEATS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_INNER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """mixed_i = Σ_b m_ib summary_b, `[lines, blocks, COLUMNS]`, for a group of lines from `first_line` on.

    HEADS are those of `mixed`. Without SUM_REPEATS, REPEATS lines in a row share one of `summaries`; with it, REPEATS
    of them are mixed and summed for each (the gradient of the former). `weights` are those of [`weights_kernel`], and
    strides say which of these matrices a line has.
    """
    row_tiles = (blocks + BLOCK_ROWS - 1) // BLOCK_ROWS
    row_tile, rest = tl.program_id(0) % row_tiles, tl.program_id(0) // row_tiles
    line, column_tile = (rest % lines).to(tl.int64), rest // lines
    batch, head = (first_line + line) // HEADS, (first_line + line) % HEADS
    row = row_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = column_tile * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    size = row_tiles * BLOCK_ROWS
    HALVES: tl.constexpr = 2 if PRECISION == "bf16" else 1
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    for repeat in range(REPEATS if SUM_REPEATS else 1):
        weight_head = head * REPEATS + repeat if SUM_REPEATS else head
        summary_line = line * REPEATS + repeat if SUM_REPEATS else line // REPEATS
        matrix = batch * mixing_stride_batch + weight_head * mixing_stride_head
        weight_rows = weights + matrix * HALVES * size * size + row[:, None] * size
        summary_rows = summaries + summary_line * blocks * COLUMNS + column[None, :]
        for offset in range(0, blocks, BLOCK_INNER):
            inner = offset + tl.arange(0, BLOCK_INNER)
            inside = (inner < blocks)[:, None] & (column < COLUMNS)[None, :]
            rows = tl.load(summary_rows + inner.to(tl.int64)[:, None] * COLUMNS, mask=inside, other=0.0)
            total += raw_product(tl.load(weight_rows + inner[None, :]), rows, PRECISION)
            if HALVES == 2:
                total += raw_product(tl.load(weight_rows + size * size + inner[None, :]), rows, PRECISION)
    pointers = mixed + line * blocks * COLUMNS + row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
    inside = (row < blocks)[:, None] & (column < COLUMNS)[None, :]
    tl.store(pointers, to_matrix(total, mixed.dtype.element_ty, PRECISION), mask=inside)


@triton.jit(do_not_specialize=COUNTS)
def mixing_gradient_kernel(
    gradients, summaries, result,
    first_slot, lines, adds, blocks, line_share, column_share_tiles, column_shares,
    slot_matrices,
    COLUMNS: tl.constexpr, REPEATS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """result_ib = Σ gradient_i · summary_b over a share of the lines of a group, and a share of the columns.

    `gradients` is `[lines, M, COLUMNS]`, `summaries` `[lines / REPEATS, M, COLUMNS]` and `result` float32
    `[slots, slot_matrices, M, M]`, a slot for each `line_share` lines of the group, from `first_slot` on, and a matrix
    for each of the `column_shares`; what is there is added to where `adds` is 1, not 0. Programs run over tiles of it
    first.
    """
    tiles = (blocks + BLOCK_ROWS - 1) // BLOCK_ROWS
    other_tile, rest = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    row_tile, part = rest % tiles, rest // tiles
    row = row_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    other = other_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    slot, column_part = part // column_shares, part % column_shares
    # Counted in tiles, so that the compiler knows where they start, and loads are wide.
    first = column_part * column_share_tiles * BLOCK_COLUMNS
    stop = tl.minimum(first + column_share_tiles * BLOCK_COLUMNS, COLUMNS)
    total = tl.zeros((BLOCK_ROWS, BLOCK_ROWS), tl.float32)
    for line in range(slot * line_share, tl.minimum((slot + 1) * line_share, lines)):
        gradient_start = gradients + tl.cast(line, tl.int64) * blocks * COLUMNS
        summary_start = summaries + tl.cast(line // REPEATS, tl.int64) * blocks * COLUMNS
        for offset in range(first, stop, BLOCK_COLUMNS):
            column = offset + tl.arange(0, BLOCK_COLUMNS)
            inside = (column < COLUMNS)[None, :]
            pointers = row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
            left = tl.load(gradient_start + pointers, mask=(row < blocks)[:, None] & inside, other=0.0)
            pointers = other.to(tl.int64)[:, None] * COLUMNS + column[None, :]
            right = tl.load(summary_start + pointers, mask=(other < blocks)[:, None] & inside, other=0.0)
            total += raw_product(left, tl.trans(right), PRECISION)
    used = (row < blocks)[:, None] & (other < blocks)[None, :]
    place = ((first_slot + slot).to(tl.int64) * slot_matrices + column_part) * blocks * blocks
    pointers = result + place + row[:, None] * blocks + other[None, :]
    total += tl.load(pointers, mask=used & (row < blocks * adds)[:, None], other=0.0)
    tl.store(pointers, total, mask=used)


class Weights(NamedTuple):
    """Mixing weights as [`mix_kernel`] takes them, padded; see [`weights_kernel`].

    Attributes:
        rounded: For summaries; None where these are multiplied exactly.
        exact: For sums of keys, and for such summaries; None where neither is asked for.
        stride_batch: Matrices from one batch entry's to the next; 0 where all share them.
        stride_head: The same of heads.
    """

    rounded: Tensor | None
    exact: Tensor | None
    stride_batch: int
    stride_head: int


def mixing_strides(mixing: Tensor) -> tuple[int, ...]:
    """Strides of batch, head, row and column of `[M, M]`, `[H, M, M]` or `[B, 1 or H, M, M]`; 0 where shared."""
    *leading, row, column = mixing.stride()
    leading = [0 if size == 1 else stride for size, stride in zip(mixing.shape, leading)]
    return *([0] * (2 - len(leading))), *leading, row, column


def count_mixed_heads(mixing: Sequence[int], heads: int, groups: int) -> int:
    """Heads of the mixed summaries: H where the weights differ from query head to query head, otherwise G.

    Args:
        mixing: Shape of the weights, `[M, M]`, `[1 or H, M, M]` or `[B, 1 or H, M, M]`.
        heads: H.
        groups: G.
    """
    return heads if len(mixing) > 2 and mixing[-3] != 1 else groups


def _row_tile(blocks: int) -> int:
    return min(64, padded(blocks))


@lru_cache(MAX_SETUPS)
def _padding(
    stride_batch: int, stride_head: int, stride_row: int, stride_column: int, heads: int, blocks: int, tile: int
) -> Setup:  # fmt: skip
    return Setup(
        weights_kernel, mixing_stride_batch=stride_batch, mixing_stride_head=stride_head, stride_row=stride_row,
        stride_column=stride_column, heads=heads, blocks=blocks, TILE=tile, num_warps=4,
    )  # fmt: skip


def prepare_weights(
    mixing: Tensor, dtype: torch.dtype, *, exact: bool, sums: bool, transpose: bool = False
) -> Weights:
    """Mixing weights, made ready by one launch.

    Args:
        mixing: float32 `[M, M]`, `[1 or H, M, M]` or `[B, 1 or H, M, M]`.
        dtype: Type of the summaries.
        exact: Multiply float32 summaries exactly, see [`launching.multiplies_exactly`]; otherwise through TF32.
        sums: Whether sums of keys will be mixed, too.
        transpose: Transpose them, for gradients.
    """
    blocks = mixing.shape[-1]
    batch_stride, head_stride, row, column = mixing_strides(mixing)
    batch, heads = (1,) * (4 - mixing.dim()) + mixing.shape[:-2]
    tile = _row_tile(blocks)
    tiles = ceil_divide(blocks, tile)
    size = tiles * tile
    halves = dtype == torch.bfloat16
    rounded = full = None
    if halves or not exact:
        shape = (batch, heads, 2, size, size) if halves else (batch, heads, size, size)
        rounded = mixing.new_empty(shape, dtype=dtype)
    if sums or rounded is None:
        full = mixing.new_empty(batch, heads, size, size, dtype=torch.float32)
    if transpose:
        row, column = column, row
    setup = _padding(batch_stride, head_stride, row, column, heads, blocks, tile)
    setup.prepare(mixing, rounded, full)(batch * heads * tiles**2)
    return Weights(rounded, full, 0 if batch == 1 else heads, 0 if heads == 1 else 1)


def prepare_mixing(
    weights: Weights, summaries: Tensor, mixed: Tensor, *, heads: int, repeats: int = 1, sum_repeats: bool = False
) -> Stage:
    """The stage that mixes summaries, or sums of keys, of a group of lines.

    Args:
        weights: Made ready for them.
        summaries: `[L, M, ...]` of the group's lines, dense. Sums of keys are `[L, M, P]` in float32.
        mixed: To be written, `[L · repeats, M, ...]` of the same type, dense.
        heads: Heads of `mixed` in a batch entry: S.
        repeats: S / G, lines of `mixed` for each of `summaries`.
        sum_repeats: The gradient: `summaries` are those of `mixed` above, `[L · repeats, M, ...]`, of which `repeats`
            are mixed with transposed weights and summed for each line of `mixed` `[L, M, ...]`; heads is then G.

    Returns:
        The stage, whose lines are those of a group, with G heads to a batch entry.
    """
    exact = summaries.dim() == 3 or weights.rounded is None
    programs, setup = _mixing(
        summaries.shape[1], summaries.shape[2:].numel(), heads, repeats, sum_repeats, weights.stride_batch,
        weights.stride_head,
        "tf32x3" if exact else product_precision(torch.bfloat16, summaries.dtype),
    )  # fmt: skip
    run = setup.prepare(weights.exact if exact else weights.rounded, summaries, mixed)
    return Stage(run, programs, 1 if sum_repeats else repeats)


def mixing_stages(
    weights: Weights, sources: tuple[Tensor, Tensor | None], results: tuple[Tensor, Tensor | None], **options: Any
) -> list[Stage]:
    """Stages that mix summaries and, where there are any, sums; see [`prepare_mixing`]."""
    return [
        prepare_mixing(weights, source, result, **options)
        for source, result in zip(sources, results)
        if source is not None and result is not None
    ]


@lru_cache(MAX_SETUPS)
def _mixing(
    blocks: int,
    columns: int,
    heads: int,
    repeats: int,
    sum_repeats: bool,
    stride_batch: int,
    stride_head: int,
    precision: str,
) -> tuple[int, Setup]:
    """Programs of a line, and the launch of the kernel."""
    rows_tile = _row_tile(blocks)
    # Exact products hold both halves of their factors.
    columns_tile = min(64 if precision == "tf32x3" else 128, padded(columns))
    setup = Setup(
        mix_kernel, mixing_stride_batch=stride_batch, mixing_stride_head=stride_head, blocks=blocks,
        COLUMNS=columns,
        HEADS=heads, REPEATS=repeats, SUM_REPEATS=sum_repeats, BLOCK_ROWS=rows_tile,
        BLOCK_COLUMNS=columns_tile, BLOCK_INNER=min(32, padded(blocks)), PRECISION=precision, num_warps=4,
        num_stages=3,
    )  # fmt: skip
    return ceil_divide(blocks, rows_tile) * ceil_divide(columns, columns_tile), setup


class MixingGradient:
    """Gradient of the mixing weights, added up over groups of lines.

    Args:
        mixing: The weights; see [`prepare_weights`].
        gradients: Gradients of the group's mixed summaries, `[L · repeats, M, K, V]`, dense.
        summaries: Its summaries, `[L, M, K, V]`, dense.
        batch: B.
        heads: S.
        repeats: S / G.
        exact: As in [`prepare_weights`].
        sums: Gradients of the group's mixed sums of keys, `[L · repeats, M, P]`, and its sums, `[L, M, P]`; float32.
    """

    def __init__(
        self,
        mixing: Tensor,
        gradients: Tensor,
        summaries: Tensor,
        *,
        batch: int,
        heads: int,
        repeats: int,
        exact: bool,
        sums: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self.shape, self.batch, self.heads, self.repeats = mixing.shape, batch, heads, repeats
        blocks, lines = mixing.shape[-1], gradients.shape[0]
        self.is_shared = mixing.shape[:-2].numel() == 1
        self.line_share = ceil_divide(lines, SHARES) if self.is_shared else 1
        tile = _row_tile(blocks)
        self.tiles = ceil_divide(blocks, tile) ** 2
        shares = ceil_divide(lines, self.line_share)
        columns = summaries[0, 0].numel()
        columns_tile = min(32, padded(columns))
        # Sums over all columns are long, and few programs would wait for memory most of the time.
        column_shares, share = split_slots(columns, columns_tile, self.tiles * shares)
        slots = shares if self.is_shared else batch * heads
        self.partial = gradients.new_empty(slots, column_shares, blocks, blocks, dtype=torch.float32)
        tasks = [(gradients, summaries, exact, column_shares, share // columns_tile)]
        if sums is not None:
            tasks.append((*sums, True, 1, ceil_divide(sums[1].shape[-1], columns_tile)))
        self.launches = []
        from_shared_memory = multiplies_from_shared_memory(mixing.device)
        for left, right, is_exact, shares, share_tiles in tasks:
            run = prepare(
                mixing_gradient_kernel, left, right, self.partial,
                COLUMNS=right[0, 0].numel(), blocks=blocks, line_share=self.line_share,
                column_share_tiles=share_tiles, column_shares=shares, slot_matrices=column_shares,
                REPEATS=repeats, BLOCK_ROWS=tile, BLOCK_COLUMNS=columns_tile,
                PRECISION="tf32x3" if is_exact else "tf32",
                # Exact products hold both halves of their factors, of which one goes through registers on other GPUs.
                num_warps=8 if is_exact and not from_shared_memory else 4, num_stages=4,
            )  # fmt: skip
            self.launches.append((run, shares))

    def __call__(self, first_line: int, lines: int) -> None:
        """Adds the part of a group, whose lines have G heads to a batch entry. The first group has the most lines."""
        lines, first = lines * self.repeats, first_line * self.repeats
        programs = self.tiles * ceil_divide(lines, self.line_share)
        for index, (run, shares) in enumerate(self.launches):
            # Lines with weights of their own have slots of their own, too.
            slot, adds = (0, first_line > 0) if self.is_shared else (first, False)
            run(programs * shares, slot, lines, int(adds or index > 0))

    def total(self) -> Tensor:
        """The gradient of the weights, float32, over all groups."""
        return sum_shares(self.partial, self.shape, self.batch, self.heads)


def sum_shares(partial: Tensor, shape: torch.Size, batch: int, heads: int) -> Tensor:
    """Gradient of mixing weights of a shape, from the shares that [`MixingGradient`] keeps apart."""
    if shape[:-2].numel() == 1:
        return partial.sum((0, 1)).reshape(shape)
    return partial.sum(1).unflatten(0, (batch, heads)).sum_to_size(shape)
