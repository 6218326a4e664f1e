# SPDX-License-Identifier: Apache-2.0
"""Launches of the kernel that sums outer products within blocks: no autograd, no custom operators.

Shape letters: B batch, T tokens, H heads, G heads of the summaries (H or a divisor), K and V widths, M blocks,
N slots of a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launching import (
    as_matrices,
    column_tile,
    dense_rows,
    is_padded,
    multiplies_from_shared_memory,
    on_device,
    padded,
    product_options,
    row_strides,
    split_slots,
    table_arguments,
    token_tile,
    warps,
)
from .outer_kernels import outer_kernel


def outer(
    left: torch.Tensor,
    right: torch.Tensor,
    table: torch.Tensor,
    num_heads: int,
    *,
    factor: float = 1.0,
    scale: torch.Tensor | None = None,
    total: bool = False,
    plain: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    limit: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """factor Σ_t left_t ⊗ (scale_t right_t) for each block, and Σ_t weight_t plain_t.

    Args:
        left: `[B, T, H, K]`.
        right: `[B, T, H, V]`.
        table: Token of each slot, int32 `[M, N]` or `[B, M, N]`; T where a slot is empty.
        num_heads: G; H / G heads in a row are summed.
        factor: A number.
        scale: float32 `[B, T, H]`; 1 if not given.
        total: Whether to sum `plain` too.
        plain: `[B, T, H, P]`; `left` if not given.
        weight: float32 `[B, T, H]`; 1 if not given.
        dtype: Of the products.
        limit: int32 `[B, H', M]`, H' a divisor of H: the slots of a block from there on are left out.

    Returns:
        The products `[B, G, M, K, V]`, and the sums, float32 `[B, G, M, P]` (empty if not `total`).
    """
    options = {"factor": factor, "scale": scale, "total": total, "plain": plain, "weight": weight, "dtype": dtype}
    product, sums, _ = _outer(left, right, table, num_heads, limit=limit, finite=False, **options)
    return product, sums


def finite_outer(
    left: torch.Tensor,
    right: torch.Tensor,
    table: torch.Tensor,
    *,
    factor: float,
    total: bool,
    plain: torch.Tensor | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[`outer`] for each head of the rows, with zero for numbers that are not finite.

    Returns:
        The products, the sums, and the first slot of each block whose rows were not all finite, int32 `[B, H, M]`; the
        number of slots where all were.
    """
    options = {"factor": factor, "total": total, "plain": plain, "dtype": dtype}
    return _outer(left, right, table, left.shape[2], scale=None, weight=None, limit=None, finite=True, **options)


def _outer(
    left: torch.Tensor,
    right: torch.Tensor,
    table: torch.Tensor,
    num_heads: int,
    *,
    factor: float,
    scale: torch.Tensor | None,
    total: bool,
    plain: torch.Tensor | None,
    weight: torch.Tensor | None,
    dtype: torch.dtype,
    limit: torch.Tensor | None,
    finite: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    left, right = dense_rows(left), dense_rows(right)
    batch, _, heads, width = left.shape
    value = right.shape[-1]
    blocks, slots = table.shape[-2:]
    rows = left if plain is None else dense_rows(plain)
    plain_width = rows.shape[-1]
    value_tile, tile = column_tile(width, value), token_tile(slots, max(width, value))
    # Without a scale the rows enter as they are, whatever the type of the products.
    types = product_options(left.dtype, left.dtype if scale is None else dtype, left.device)
    if scale is None and left.dtype == torch.float16:
        types["DOT_TYPE"] = tl.float16
    exact = types["PRECISION"] == "tf32x3" and types["DOT_TYPE"] == tl.float32
    few_registers = (exact or left.dtype == torch.float32) and not multiplies_from_shared_memory(left.device)
    crowded = few_registers, exact, is_padded(width)
    if any(crowded):
        tile = min(tile, 16 if sum(crowded) > 1 else 32)
    tiles = blocks * triton.cdiv(value, value_tile)
    splits, share = split_slots(slots, tile, tiles * batch * num_heads)
    product = left.new_empty(
        splits, batch, num_heads, blocks, width, value, dtype=dtype if splits == 1 else torch.float32
    )
    sums_shape = (splits, batch, num_heads, blocks, plain_width) if total else (0,)
    sums = left.new_empty(sums_shape, dtype=torch.float32)
    parts = splits * triton.cdiv(value, value_tile)
    bad = left.new_empty((parts, batch, num_heads, blocks) if finite else (0,), dtype=torch.int32)
    with on_device(left):
        outer_kernel[(batch * num_heads * tiles * splits,)](
            left,
            right,
            rows,
            left if scale is None else scale,
            left if weight is None else weight,
            table,
            product,
            sums,
            bad if limit is None else limit,
            *row_strides(left, right, rows),
            product.stride(0),
            sums.stride(0),
            bad.stride(0),
            factor,
            **table_arguments(table, left),
            splits=splits,
            split_slots=share,
            HEADS=num_heads,
            REPEATS=heads // num_heads,
            LEFT=width,
            RIGHT=value,
            PLAIN=plain_width,
            BLOCK_LEFT=padded(width),
            BLOCK_RIGHT=value_tile,
            BLOCK_PLAIN=padded(plain_width),
            BLOCK_TOKENS=tile,
            HAS_SCALE=scale is not None,
            HAS_WEIGHT=weight is not None,
            TOTAL=0 if not total else 1 if plain is None else 2,
            BAD=1 if finite else 0 if limit is None else 2,
            BAD_REPEATS=1 if limit is None else heads // limit.shape[1],
            num_warps=warps(width, value_tile),
            num_stages=2,
            **types,
        )
    if finite:
        bad = bad[0] if parts == 1 else bad.amin(0)
    if splits == 1:
        return product[0], sums[0] if total else sums, bad
    return as_matrices(product.sum(0), left.dtype, dtype), sums.sum(0) if total else sums, bad
