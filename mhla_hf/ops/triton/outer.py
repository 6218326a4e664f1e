# SPDX-License-Identifier: Apache-2.0
"""Sums of outer products of token rows within each block: summaries, and gradients of mixed summaries.

    products_b = Σ_{t in b} left_t ⊗ (scale_t right_t)      [K, V]
    sums_b     = Σ_{t in b} weight_t plain_t                       [P]

Products in float16 are below 2 and come with a power of two each, so that tokens of any size keep 11 bits, as float32
keeps through TF32.

Tokens are read where they lie: a table gives the token of every slot of every block, so blocks need neither be
contiguous nor of one size. Sums are in float32. Widths that are no power of two are padded with zeros inside the
kernel only.

Shape letters: B batch, T tokens, H heads, G heads of the products (H or a divisor), K and V widths, P width of the
plain rows, M blocks, M' of them with empty ones (`launching.row_count`), N slots of a block.
"""

# No postponed annotations here: Triton reads `tl.constexpr` from the functions themselves.

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device_functions import (
    COUNTS,
    add_product,
    all_finite,
    first_bad_slot,
    head_rows,
    load_rows,
    matrix_of_block,
    place_of_program,
    slot_tokens,
    tile_scale,
    to_tf32,
)
from .launching import (
    OVERTAKES_ROWS,
    as_rows,
    ceil_divide,
    column_tile,
    is_padded,
    launch,
    multiplies_exactly,
    multiplies_from_shared_memory,
    padded,
    row_count,
    row_precision,
    split_slots,
    stages,
    table_sizes,
    token_tile,
    warps,
)


@triton.jit
def add_sums(total, rows, weight, per_token, present, BLOCK_TOKENS: tl.constexpr):
    """total + Σ weight_t rows_t, in each of 16 columns: a product, by tensor cores and without barriers.

    Rows then enter it as they enter the product beside it. Were they read into registers there, Triton 3.6 would give
    them one buffer too few, and overwrite what wgmma still reads.
    """
    if weight is None:
        EXACT: tl.constexpr = rows.dtype == tl.float32
        factor = tl.full((BLOCK_TOKENS, 16), 1.0, tl.float32).to(rows.dtype)
        total = tl.dot(tl.trans(rows), factor, total, input_precision="tf32x3" if EXACT else "tf32")
    else:
        factor = tl.load(weight + per_token, mask=present, other=0.0)[:, None] + tl.zeros((1, 16), tl.float32)
        total = add_product(total, tl.trans(rows), factor, "bf16x2" if rows.dtype == tl.bfloat16 else "tf32x3")
    return total


@triton.jit(do_not_specialize=COUNTS)
def outer_kernel(
    left, right, plain, scale, weight, limit, table, products, scales, sums, first_bad,
    first_line, lines, num_tokens, num_blocks, table_stride_batch, slots, splits, split_slots,
    heads, REPEATS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, PLAIN: tl.constexpr,
    BLOCK_LEFT: tl.constexpr, BLOCK_RIGHT: tl.constexpr, BLOCK_PLAIN: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    LIMIT_REPEATS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The sums above over one share of a block's slots; zeros for empty blocks.

    heads is the number of heads of the products; each sums REPEATS heads of the rows. For a group of lines from
    `first_line` on, `products` are `[lines, splits, M', LEFT, RIGHT]`. With `scales` `[tiles, lines, splits, M']`, for
    each column tile, they are `[tiles, lines, splits, M', LEFT, BLOCK_RIGHT]` (RIGHT where that is less), and to be
    multiplied with these. `scale` and `weight` are `[B, T, heads · REPEATS]`. `plain` is `left` where it is None, and
    nothing is summed where `sums` is. Slots from `limit` `[B, heads, M]` on are left out, of which LIMIT_REPEATS heads
    of the rows share one. With `first_bad` `[tiles, lines, splits, M']`, the first slot whose rows are not finite is
    written there, or `slots`; sums are zero where there is one. REPEATS is 1 then.
    """
    COLUMN_TILES: tl.constexpr = (RIGHT + BLOCK_RIGHT - 1) // BLOCK_RIGHT
    batch, head, block, part, _ = place_of_program(splits * COLUMN_TILES, num_blocks, first_line, lines, heads, 1)
    split, column_tile = part // COLUMN_TILES, part % COLUMN_TILES
    line = (tl.program_id(0) % lines).to(tl.int64)
    matrix = matrix_of_block(line * splits + split, block, num_blocks)
    tile_matrix = matrix_of_block((column_tile * lines + line) * splits + split, block, num_blocks)
    left_column = tl.arange(0, BLOCK_LEFT)
    right_column = column_tile * BLOCK_RIGHT + tl.arange(0, BLOCK_RIGHT)
    plain_column = tl.arange(0, BLOCK_PLAIN)
    tile_slot = tl.arange(0, BLOCK_TOKENS)
    accumulator = tl.zeros((BLOCK_LEFT, BLOCK_RIGHT), tl.float32)
    total = tl.zeros((BLOCK_PLAIN, 16), tl.float32)
    block_table = table + batch * table_stride_batch + block * slots
    first = split * split_slots
    # Empty blocks after the others have no row in the table.
    end = tl.where(block < num_blocks, tl.minimum(first + split_slots, slots), 0)
    stop = end
    for repeat in range(REPEATS):
        row_head = head * REPEATS + repeat
        if limit is not None:
            limit_heads = heads * REPEATS // LIMIT_REPEATS
            limit_matrix = (batch * limit_heads + row_head // LIMIT_REPEATS) * num_blocks + block
            stop = tl.minimum(end, tl.load(limit + limit_matrix, mask=block < num_blocks, other=0))
        left_head, right_head = head_rows(left, batch, row_head), head_rows(right, batch, row_head)
        for offset in range(first, stop, BLOCK_TOKENS):
            slot = offset + tile_slot
            tokens, present = slot_tokens(block_table, slot, stop, num_tokens)
            per_token = (batch * num_tokens + tokens) * (heads * REPEATS) + row_head
            left_rows = load_rows(left_head, tokens, present, left_column, LEFT)
            right_rows = load_rows(right_head, tokens, present, right_column, RIGHT)
            if scale is not None:
                row_scale = tl.load(scale + per_token, mask=present, other=0.0)
                right_rows = right_rows.to(tl.float32) * row_scale[:, None]
                if PRECISION == "tf32":
                    right_rows = to_tf32(right_rows)
            accumulator = add_product(accumulator, tl.trans(left_rows), right_rows, PRECISION)
            if sums is not None:
                if plain is not None:
                    plain_rows = load_rows(head_rows(plain, batch, row_head), tokens, present, plain_column, PLAIN)
                else:
                    plain_rows = left_rows
                total = add_sums(total, plain_rows, weight, per_token, present, BLOCK_TOKENS)
    if first_bad is not None:
        # A number that is not finite leaves no sum finite that it is part of, even times zero.
        finite = all_finite(accumulator)
        if plain is not None:
            finite = finite & all_finite(total)
        found_bad = tl.full((), slots, tl.int32)
        if finite == 0:
            for offset in tl.range(first, end, BLOCK_TOKENS, num_stages=1):
                slot = offset + tile_slot
                tokens, present = slot_tokens(block_table, slot, end, num_tokens)
                rows = head_rows(left, batch, head)
                found_bad = first_bad_slot(rows, tokens, present, left_column, LEFT, slot, found_bad)
                rows = head_rows(right, batch, head)
                found_bad = first_bad_slot(rows, tokens, present, right_column, RIGHT, slot, found_bad)
                if plain is not None:
                    rows = head_rows(plain, batch, head)
                    found_bad = first_bad_slot(rows, tokens, present, plain_column, PLAIN, slot, found_bad)
        tl.store(first_bad + tile_matrix, found_bad)
        # Outputs that would need these sums are NaN. For others their weight is zero, and zero times NaN is not zero.
        accumulator = tl.where(found_bad < slots, 0.0, accumulator)
        total = tl.where(found_bad < slots, 0.0, total)
    STORED: tl.constexpr = BLOCK_RIGHT if scales is not None and BLOCK_RIGHT < RIGHT else RIGHT
    column, place = right_column, matrix
    if scales is not None:
        # The last tile of columns has zeros beyond them: gradients of mixing weights are sums over all.
        column, place = tl.arange(0, BLOCK_RIGHT), tile_matrix
        power, inverse = tile_scale(accumulator)
        tl.store(scales + tile_matrix, power)
        accumulator *= inverse
    pointers = products + place * (LEFT * STORED) + left_column[:, None] * STORED + column[None, :]
    inside = (left_column < LEFT)[:, None] & (column < STORED)[None, :]
    tl.store(pointers, accumulator.to(products.dtype.element_ty), mask=inside)
    if sums is not None:
        if column_tile == 0:
            # The 16 columns are the same.
            tl.store(sums + matrix * PLAIN + plain_column, tl.max(total, axis=1), mask=plain_column < PLAIN)


class Sums(NamedTuple):
    """Sums over the tokens of each block of a group of L lines, zero for empty blocks.

    Attributes:
        products: `[L, M', K, V]`; float16 ones `[tiles · L, splits · M', K, W]`, for tiles of W columns and shares of
            the blocks' slots, to be multiplied with the scales.
        scales: Powers of two, float32 `[tiles, L, splits · M']`; None except for float16.
        sums: float32 `[L, M', P]`, beside float16 products `[L, splits · M', P]`; None if they are not wanted.
        first_bad: The first slot of each block whose rows are not all finite, int32 `[L, M]`, N where all are; None
            if it is not wanted.
    """

    products: Tensor
    scales: Tensor | None
    sums: Tensor | None
    first_bad: Tensor | None


def outer(
    left: Tensor, right: Tensor, table: Tensor, num_heads: int, lines: tuple[int, int] | None = None, *,
    dtype: torch.dtype, scale: Tensor | None = None, total: bool = False,
    plain: Tensor | None = None, weight: Tensor | None = None, limit: Tensor | None = None, finite: bool = False,
) -> Sums:  # fmt: skip
    """Σ_t left_t ⊗ (scale_t right_t) for each block, and Σ_t weight_t plain_t.

    Args:
        left: `[B, T, H, K]`.
        right: `[B, T, H, V]`.
        table: Token of each slot, int32 `[M, N]` or `[B, M, N]`; T where a slot is empty.
        num_heads: G; H / G heads in a row are summed.
        lines: The first line of a group and its number of lines, of B · G; all of them if not given.
        dtype: Dtype of the products.
        scale: float32 `[B, T, H]`; 1 if not given.
        total: Whether to sum `plain` too.
        plain: `[B, T, H, P]`; `left` if not given.
        weight: float32 `[B, T, H]`; 1 if not given.
        limit: int32 `[B, H', M]`, H' a divisor of H: the slots of a block from there on are left out.
        finite: Find the first slot of each block that has a number that is not finite. Sums of a share of the slots,
            and for a tile of columns, are zero where it has one.

    Returns:
        See [`Sums`].
    """
    batch, num_tokens, heads, width = left.shape
    value, blocks = right.shape[-1], table.shape[-2]
    plain_width = width if plain is None else plain.shape[-1]
    all_lines = batch * num_heads
    lines = lines or (0, all_lines)
    from_shared_memory = multiplies_from_shared_memory(left.device)
    # Without a scale the rows enter unchanged for every type of the products.
    precision = row_precision(
        left.dtype, left.dtype if scale is None else torch.float32, multiplies_exactly(left.dtype)
    )
    exact, halves = precision == "tf32x3", precision == "bf16x2"
    sizes = table_sizes(table, left)
    value_tile, tile = column_tile(width, value), token_tile(sizes["slots"], max(width, value))
    few_registers = (exact or halves or left.dtype == torch.float32) and not from_shared_memory
    wide = padded(width) > (64 if plain is not None else 128)
    narrowed = is_padded(width) or (halves and padded(width) > 128)
    limits = few_registers, exact or halves, narrowed, few_registers and wide
    if any(limits):
        tile = min(tile, 16 if sum(limits) > 1 else 32)
    num_stages = 3 if halves and from_shared_memory and narrowed else stages(precision, from_shared_memory, width)
    if OVERTAKES_ROWS and total and plain is None:
        num_stages = 1
    takes_four_warps = from_shared_memory and precision in ("bf16", "fp16", "bf16x2")
    tiles = ceil_divide(value, value_tile)
    # The slots of a block are shared out only where there is one group.
    splits, share = 1, sizes["slots"]
    if lines[1] == all_lines:
        splits, share = split_slots(sizes["slots"], tile, tiles * all_lines * blocks)
    rows, shares, scaled = row_count(blocks), splits * row_count(blocks), dtype == torch.float16
    width_stored = (
        (tiles * lines[1], shares, width, min(value_tile, value)) if scaled else (lines[1], shares, width, value)
    )
    # The same type avoids a recompilation: bfloat16 shares together err less than a rounded sum.
    products = left.new_empty(width_stored, dtype=dtype)
    scales = left.new_empty(tiles, lines[1], shares, dtype=torch.float32) if scaled else None
    sums = left.new_empty(lines[1], shares, plain_width, dtype=torch.float32) if total else None
    first_bad = left.new_empty(tiles, lines[1], splits, rows, dtype=torch.int32) if finite else None
    launch(
        outer_kernel, lines[1] * rows * splits * tiles,
        as_rows(left), as_rows(right), as_rows(plain), scale, weight, limit, table, products, scales, sums, first_bad,
        lines=lines, **sizes, splits=splits, split_slots=share, heads=num_heads,
        REPEATS=heads // num_heads, LEFT=width, RIGHT=value, PLAIN=plain_width, BLOCK_LEFT=padded(width),
        BLOCK_RIGHT=value_tile, BLOCK_PLAIN=padded(plain_width), BLOCK_TOKENS=tile,
        LIMIT_REPEATS=1 if limit is None else heads // limit.shape[1], PRECISION=precision,
        num_warps=4 if takes_four_warps else warps(width, value_tile),
        num_stages=num_stages,
    )  # fmt: skip
    if splits > 1 and not scaled:
        products = products.unflatten(1, (splits, -1)).sum(1)
        sums = None if sums is None else sums.unflatten(1, (splits, -1)).sum(1)
    return Sums(products, scales, sums, None if first_bad is None else first_bad[..., :blocks].amin((0, 2)))
