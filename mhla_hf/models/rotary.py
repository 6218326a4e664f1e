# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings as Wan and SANA-Video apply them, to neighbouring pairs of channels: tables that carry a grid."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def tables_with_grid(tables: tuple[torch.Tensor, torch.Tensor], grid: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Rotary tables for every layer of a model, made once: upstream's, and what MHLA layers read of them.

    Args:
        tables: Cosines and sines `[1, T, 1, K]`, each value twice in a row.
        grid: Number of tokens along each axis.

    Returns:
        Cosines and sines `(1, *grid, 1, K)`; cosines and sines `[1, T, 1, K / 2]`, each value once, dense.
    """
    cosine, sine = tables
    pairs = cosine[..., 0::2].contiguous(), sine[..., 1::2].contiguous()
    return cosine.unflatten(1, grid), sine.unflatten(1, grid), *pairs


def tables_of_layer(
    tables: tuple[torch.Tensor, ...], is_mhla: bool
) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...] | None]:
    """The tables that one layer is handed, and the token grid if they carry one.

    Args:
        tables: What [`tables_with_grid`] returns; anything else is returned as it is, without a grid.
        is_mhla: Whether the layer is MHLA, and gets tables `[1, T, 1, K / 2]`; others get upstream's.
    """
    if tables[0].ndim != 6:
        return tables, None
    flat = tables[2:] if is_mhla else tuple(table.flatten(1, 3) for table in tables[:2])
    return flat, tuple(tables[0].shape[1:4])
