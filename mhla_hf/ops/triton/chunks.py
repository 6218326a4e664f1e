# SPDX-License-Identifier: Apache-2.0
"""Shared by the kernels of causal attention: their tiles of a chunk's rows, and products with scores and matrices."""

# No postponed annotations here: Triton reads `tl.constexpr` from the functions themselves.

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from .device_functions import (
    halves,
    load_matrix,
    load_rows,
    place_of_program,
    product,
    raw_product,
    to_tf32,
)
from .launching import (
    MAX_TILE,
    ceil_divide,
    is_padded,
    multiplies_exactly,
    multiplies_from_shared_memory,
    padded,
    product_precision,
    table_sizes,
    token_tile,
)


@triton.jit
def tile_of_program(
    num_blocks, slots, first_line, lines,
    heads, REPEATS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Place of this program, whose parts are tiles of a chunk.

    Lines are those of key heads, REPEATS of the heads heads of the rows share one.

    Returns:
        Batch entry; head of the rows; line of the rows, counted within the group; block; row tile; column tile.
    """
    COLUMN_TILES: tl.constexpr = (COLUMNS + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    parts = (slots + BLOCK_TOKENS - 1) // BLOCK_TOKENS * COLUMN_TILES
    batch, head, block, part, _ = place_of_program(parts, num_blocks, first_line, lines, heads // REPEATS, REPEATS)
    line = (tl.program_id(0) % (lines * REPEATS)).to(tl.int64)
    return batch, head, line, block, part // COLUMN_TILES, part % COLUMN_TILES


@triton.jit
def score_product(scores, rows, PRECISION: tl.constexpr):
    """scores @ rows of tokens, for scores that were computed here in float32.

    Beside bfloat16 rows, in place of one product through TF32, two through bfloat16, which take as long: the scores
    are split into two numbers, so that 16 bits of them count and the rows stay as they are.
    """
    if PRECISION == "tf32" and rows.dtype == tl.bfloat16:
        high, low = halves(scores)
        result = raw_product(high, rows, "bf16") + raw_product(low, rows, "bf16")
    else:
        result = product(scores, rows, PRECISION)
    return result


@triton.jit
def matrix_product(rows, matrix, PRECISION: tl.constexpr):
    """rows of tokens @ a matrix of float32 or bfloat16, split as in [`score_product`] or rounded for TF32."""
    if PRECISION == "tf32" and rows.dtype == tl.bfloat16:
        high, low = halves(matrix)
        result = raw_product(rows, high, "bf16") + raw_product(rows, low, "bf16")
    else:
        if PRECISION == "tf32":
            matrix = to_tf32(matrix)
        result = raw_product(rows, matrix, PRECISION)
    return result


@triton.jit
def row_matrix_product(
    head, tokens, present, matrix, column, stride_row, stride_column,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
    BLOCK_INNER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """[`matrix_product`] of rows of one head and some columns of a matrix, BLOCK_INNER of its rows at a time.

    For matrices that would take too many registers at once.
    """
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    for start in range(0, WIDTH, BLOCK_INNER):
        inner = start + tl.arange(0, BLOCK_INNER)
        rows = load_rows(head, tokens, present, inner, WIDTH)
        part = load_matrix(matrix, inner, column, stride_row, stride_column, WIDTH, COLUMNS)
        total += matrix_product(rows, part, PRECISION)
    return total


def diagonal_strides(own: torch.Tensor) -> dict[str, int]:
    """Kernel arguments for weights m_ii `[B or 1, H or 1, M]`."""
    batch, head = (0 if size == 1 else stride for size, stride in zip(own.shape[:2], own.stride()))
    return {"mixing_stride_batch": batch, "mixing_stride_head": head, "mixing_stride_diagonal": own.stride(2)}


def is_per_head(own: torch.Tensor) -> bool:
    """Whether every query head has weights of its own; see [`diagonal_strides`]."""
    return own.shape[1] != 1


def inner_tile(width: int, matrices: torch.dtype) -> int:
    """Rows of a matrix `[width, ...]` that a program multiplies with at a time, see [`row_matrix_product`]."""
    return padded(width) if padded(width) <= 64 else 128 // matrices.itemsize


def chunk_options(
    tokens: torch.Tensor, matrices: torch.Tensor, table: torch.Tensor, width: int, columns: int
) -> tuple[int, int, dict[str, Any]]:
    """Launch of a kernel of causal attention, whose programs take a tile of a chunk's rows each.

    Tiles are smaller than those of [`launching.matrix_tiles`] where rows of tokens or products are large: the scores
    of a chunk have to find room in the registers beside them. Chosen from what the compiler uses of them, so that
    nothing spills. Loops over the tiles of a chunk are not pipelined: most chunks are one tile.

    Args:
        tokens: `[B, T, H, D]`, H being the heads of the launch.
        matrices: Factors of the tokens.
        table: Token of each slot, `[M, N]` or `[B, M, N]`.
        width: Width of the rows that a program holds whole.
        columns: Columns of the result.

    Returns:
        Tile of columns, number of tiles of a chunk, and the arguments that such kernels share.
    """
    slots = table.shape[-1]
    columns_tile, tokens_tile, num_warps = _tiles(
        width, columns, slots, tokens.dtype, matrices.dtype, multiplies_exactly(tokens.dtype),
        multiplies_from_shared_memory(tokens.device),
    )  # fmt: skip
    options = {
        **table_sizes(table, tokens),
        "heads": tokens.shape[2],
        "BLOCK_TOKENS": tokens_tile,
        "PRECISION": product_precision(tokens.dtype, matrices.dtype),
        "num_warps": num_warps,
        "num_stages": 1,
    }
    return columns_tile, ceil_divide(columns, columns_tile) * ceil_divide(slots, tokens_tile), options


@cache
def _tiles(
    width: int,
    columns: int,
    slots: int,
    tokens: torch.dtype,
    matrices: torch.dtype,
    exact: bool,
    from_shared_memory: bool,
) -> tuple[int, int, int]:
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
    return (
        columns_tile,
        min(token_tile(slots, width), most_tokens),
        4 if row_bytes * columns_tile <= 128 * 64 and not exact else 8,
    )
