# SPDX-License-Identifier: Apache-2.0
"""The cross window over videos: the blocks around a token in its own frames, and its own place in all frames.

All queries of a place share the keys of that place, which need no copies, and the queries of a block those of the
eight blocks around it. One softmax goes over the scores of both. Copying what each block sees in one piece, as other
windows do, would copy every key once for each frame as well.

With L tokens in a window these are B T H L numbers of scores, which pass through memory eight times, and 8 copies of
keys and values: for Wan at 31,500 tokens (`docs/kernels.md`) and blocks of (1, 3, 3), 190 MB of scores and 1.5 GB of
copies in bfloat16.

Shape letters: B batch, T tokens, H heads, H_kv key/value heads, g = H / H_kv, K query/key width, V value width, F, P,
Q blocks along frames, height and width, N tokens of a block, X tokens before the grid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from ..layouts.tables import cached


def cross_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window_size: tuple[int, ...],
    grid: tuple[int, ...],
    prefix: tuple[torch.Tensor, torch.Tensor] | None,
    scale: float | None,
) -> torch.Tensor:
    """Softmax attention of the tokens of a video to those of their cross windows.

    Args:
        query: `[B, T, H, K]`, without tokens before the grid.
        key: `[B, T, H_kv, K]`.
        value: `[B, T, H_kv, V]`.
        window_size: Tokens of a block along frames, height and width.
        grid: Tokens along each of them.
        prefix: Keys `[B, X, H_kv, K]` and values `[B, X, H_kv, V]` that every token sees as well.
        scale: Scale of q·k; `None` for K^-1/2.

    Returns:
        `[B, T, H, V]` in the dtype of `value`.
    """
    batch, _, heads, _ = query.shape
    groups = heads // key.shape[2]
    scale = query.shape[3] ** -0.5 if scale is None else scale
    # Slots that a block has beyond the grid would be computed like tokens.
    window_size = tuple([min(side, length) for side, length in zip(window_size, grid)])
    # Query heads that share their keys stand side by side as tokens: [B · H_kv, P, Q, F, g · N, K].
    queries = _by_place(query * scale, grid, window_size)
    queries = queries.unflatten(0, (-1, groups)).movedim(1, 4).flatten(4, 5)
    keys, values = (_by_place(x, grid, window_size) for x in (key, value))
    rows = queries.flatten(3, 4)
    scores = [
        (rows @ keys.flatten(3, 4).transpose(-1, -2)).view(*queries.shape[:5], -1),
        queries @ _around(keys).transpose(-1, -2),
    ]
    if prefix is not None:
        before = [x.transpose(1, 2).flatten(0, 1)[:, None, None, None] for x in prefix]
        scores.append(queries @ before[0].transpose(-1, -2))
    widths = [part.shape[-1] for part in scores]
    mask = cached(_mask, grid, window_size, query.device)
    mask = F.pad(mask, (0, sum(widths) - mask.shape[-1]), value=True)
    logits = torch.cat(scores, dim=-1).masked_fill_(~mask, float("-inf"))
    # Sums of half precision run in float32 inside, and only what comes out is rounded.
    weights = logits.softmax(dim=-1).to(value.dtype).split(widths, dim=-1)
    output = (weights[0].flatten(3, 4) @ values.flatten(3, 4)).view(*queries.shape[:5], -1)
    output = output + weights[1] @ _around(values)
    if prefix is not None:
        output = output + weights[2] @ before[1]
    output = output.unflatten(4, (groups, -1)).movedim(4, 1).flatten(0, 1)
    return _from_places(output, batch, grid, window_size)


def _by_place(tokens: torch.Tensor, grid: Sequence[int], size: Sequence[int]) -> torch.Tensor:
    """Groups `[B, T, H, D]` by block, frames innermost: `[B · H, P, Q, F, N, D]`, zero where blocks leave the grid."""
    tokens = tokens.unflatten(1, tuple(grid))
    missing = [-length % side for length, side in zip(grid, size)]
    tokens = F.pad(tokens, (0, 0, 0, 0, 0, missing[2], 0, missing[1], 0, missing[0]))
    for axis, side in zip((1, 3, 5), size):
        tokens = tokens.unflatten(axis, (-1, side))
    return tokens.permute(0, 7, 3, 5, 1, 2, 4, 6, 8).flatten(5, 7).flatten(0, 1)


def _from_places(grouped: torch.Tensor, batch: int, grid: Sequence[int], size: Sequence[int]) -> torch.Tensor:
    """Undoes [`_by_place`]: `[B, T, H, D]`."""
    tokens = grouped.unflatten(0, (batch, -1)).unflatten(5, tuple(size)).permute(0, 4, 5, 2, 6, 3, 7, 1, 8)
    tokens = tokens.flatten(5, 6).flatten(3, 4).flatten(1, 2)
    return tokens[:, : grid[0], : grid[1], : grid[2]].flatten(1, 3)


def _around(blocks: torch.Tensor) -> torch.Tensor:
    """The eight blocks around each block in its frames: `[Z, P, Q, F, 8 · N, D]` from `[Z, P, Q, F, N, D]`."""
    height, width = blocks.shape[1:3]
    padded = F.pad(blocks, (0, 0, 0, 0, 0, 0, 1, 1, 1, 1))
    places = [(down, right) for down in range(3) for right in range(3) if (down, right) != (1, 1)]
    return torch.cat([padded[:, i : i + height, j : j + width] for i, j in places], dim=4)


def _mask(grid: tuple[int, ...], size: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Mask of the keys of a block: its own place in all frames, then the blocks around it."""
    there = _by_place(torch.ones(1, math.prod(grid), 1, 1, device=device), grid, size)
    place = there.flatten(3, 4).unsqueeze(3).expand(-1, -1, -1, there.shape[3], -1, -1)
    return torch.cat([place, _around(there)], dim=4).squeeze(-1).unsqueeze(4) > 0
