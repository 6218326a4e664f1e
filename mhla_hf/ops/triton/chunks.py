# SPDX-License-Identifier: Apache-2.0
"""Shared by the kernels of causal attention: their tiles of a chunk's rows, and products with scores and matrices."""

# No postponed annotations here: Triton reads `tl.constexpr` from the functions themselves.

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from .device_functions import (
    factors,
    halves,
    load_rows,
    load_summary,
    place_of_program,
    product,
    raw_product,
    row_product,
    slot_tokens,
)
from .launching import (
    MAX_TILE,
    ceil_divide,
    is_padded,
    multiplies_exactly,
    multiplies_from_shared_memory,
    padded,
    row_precision,
    table_sizes,
    token_tile,
)


@triton.jit
def tile_of_program(
    table, limit, num_tokens, num_blocks, table_stride_batch, slots, first_line, lines,
    heads, REPEATS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Place of this program, whose parts are tiles of a chunk.

    Lines are those of key heads, REPEATS of the heads heads of the rows share one.

    Returns:
        Batch entry; head of the rows; line of the rows, counted within the group; block; row tile; column tile and its
        columns; table of the block; slots of the rows, their tokens and which hold one; and the block's `limit`.
    """
    COLUMN_TILES: tl.constexpr = (COLUMNS + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    parts = (slots + BLOCK_TOKENS - 1) // BLOCK_TOKENS * COLUMN_TILES
    batch, head, block, part, _ = place_of_program(parts, num_blocks, first_line, lines, heads // REPEATS, REPEATS)
    line = (tl.program_id(0) % (lines * REPEATS)).to(tl.int64)
    row_tile, column_tile = part // COLUMN_TILES, part % COLUMN_TILES
    column = column_tile * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    block_table = table + batch * table_stride_batch + block * slots
    slot = row_tile * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    tokens, present = slot_tokens(block_table, slot, slots, num_tokens)
    stop = tl.load(limit + (batch * (heads // REPEATS) + head // REPEATS) * num_blocks + block)
    return batch, head, line, block, row_tile, column_tile, column, block_table, slot, tokens, present, stop


@triton.jit
def other_tile(block_table, tile, stop, num_tokens, BLOCK_TOKENS: tl.constexpr):
    """Slots of a tile of the chunk, their tokens, and which hold one that is finite, in slots before `stop`."""
    slot = tile * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    tokens, present = slot_tokens(block_table, slot, stop, num_tokens)
    return slot, tokens, present


@triton.jit
def score_product(scores, rows, PRECISION: tl.constexpr):
    """scores @ rows of tokens, for scores that were computed here in float32, and may be split as matrices are."""
    if PRECISION == "bf16x2":
        high, low = halves(scores)
        result = raw_product(high, rows, "bf16") + raw_product(low, rows, "bf16")
    else:
        result = product(scores, rows, PRECISION)
    return result


@triton.jit
def matrix_product(
    rows, head, tokens, present, summaries, matrix, lines, num_blocks, column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STORED: tl.constexpr, BLOCK_INNER: tl.constexpr,
    TRANSPOSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows of tokens, of one head, @ some columns of a matrix of [`device_functions.load_summary`].

    BLOCK_INNER of the matrix's rows at a time where all would take too many registers; the tokens' rows are then read
    once more.
    """
    if BLOCK_INNER < rows.shape[1]:
        total = tl.zeros((rows.shape[0], column.shape[0]), tl.float32)
        for start in range(0, ROWS, BLOCK_INNER):
            inner = start + tl.arange(0, BLOCK_INNER)
            part = load_summary(
                summaries, matrix, lines, num_blocks, inner, column, ROWS, COLUMNS, STORED, TRANSPOSE
            )  # fmt: skip
            some = load_rows(head, tokens, present, inner, ROWS)
            total += row_product(some, factors(part, PRECISION), PRECISION)
    else:
        inner = tl.arange(0, rows.shape[1])
        whole = load_summary(summaries, matrix, lines, num_blocks, inner, column, ROWS, COLUMNS, STORED, TRANSPOSE)
        total = row_product(rows, factors(whole, PRECISION), PRECISION)
    return total


def is_per_head(own: torch.Tensor) -> bool:
    """Whether every query head has weights of its own, of m_ii `[B or 1, H or 1, M]`."""
    return own.shape[1] != 1


def inner_tile(width: int, matrices: torch.dtype) -> int:
    """Rows of a matrix `[width, ...]` that a program multiplies with at a time, see [`matrix_product`]."""
    return padded(width) if padded(width) <= 64 else 128 // matrices.itemsize


def chunk_options(
    tokens: torch.Tensor, matrices: torch.dtype, table: torch.Tensor, own: torch.Tensor, width: int, columns: int
) -> tuple[int, int, dict[str, Any]]:
    """Launch of a kernel of causal attention, whose programs take a tile of a chunk's rows each.

    Tiles are smaller than those of [`launching.matrix_tiles`] where rows of tokens or products are large: the scores
    of a chunk have to find room in the registers beside them. Chosen from what the compiler uses of them, so that
    nothing spills. Loops over the tiles of a chunk are not pipelined: most chunks are one tile.

    Args:
        tokens: `[B, T, H, D]`, H being the heads of the launch.
        matrices: Dtype of the factors of the tokens.
        table: Token of each slot, `[M, N]` or `[B, M, N]`.
        own: m_ii, float32 `[B or 1, H or 1, M]`.
        width: Width of the rows that a program holds whole.
        columns: Columns of the result.

    Returns:
        Tile of columns, number of tiles of a chunk, and the arguments that such kernels share.
    """
    slots = table.shape[-1]
    columns_tile, tokens_tile, num_warps = _tiles(
        width, columns, slots, tokens.dtype, matrices, multiplies_exactly(tokens.dtype),
        multiplies_from_shared_memory(tokens.device),
    )  # fmt: skip
    precision = row_precision(tokens.dtype, matrices, multiplies_exactly(tokens.dtype))
    batch, head = (0 if size == 1 else stride for size, stride in zip(own.shape[:2], own.stride()))
    options = {
        **table_sizes(table, tokens), "heads": tokens.shape[2], "mixing_stride_batch": batch,
        "mixing_stride_head": head, "mixing_stride_diagonal": own.stride(2), "BLOCK_TOKENS": tokens_tile,
        "PRECISION": precision, "num_warps": num_warps, "num_stages": 1,
    }  # fmt: skip
    return columns_tile, ceil_divide(columns, columns_tile) * ceil_divide(slots, tokens_tile), options


@cache
def _tiles(
    width: int, columns: int, slots: int, tokens: torch.dtype, matrices: torch.dtype, exact: bool,
    from_shared_memory: bool,
) -> tuple[int, int, int]:  # fmt: skip
    """Columns of the result and tokens that a program takes, and its warps."""
    row_bytes = padded(width) * tokens.itemsize
    wide = padded(width) > 128
    # Summaries in bfloat16 take half the room, and so does everything that they are multiplied with.
    full = matrices == torch.float32
    halved = full and (exact or tokens == torch.float32 or wide or not from_shared_memory)
    quartered = (is_padded(width) and exact) or ((is_padded(width) or wide) and tokens == torch.float32)
    largest = MAX_TILE // 4 if quartered else MAX_TILE // 2 if halved else MAX_TILE
    columns_tile = min(padded(columns), largest // padded(width))
    if wide or (is_padded(width) and not from_shared_memory) or exact:
        most_tokens = 16
    elif quartered or row_bytes > 128 or not from_shared_memory:
        most_tokens = 32
    else:
        most_tokens = 64
    num_warps = 4 if row_bytes * columns_tile <= 128 * 64 and not exact else 8
    return columns_tile, min(token_tile(slots, width), most_tokens), num_warps
