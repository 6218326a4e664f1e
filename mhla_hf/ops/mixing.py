# SPDX-License-Identifier: Apache-2.0
"""Mixing of block summaries over blocks and heads. Importing this module does not import torch.

Shape letters: B batch, H heads, H_kv key/value heads, K query/key width, V value width, M blocks, C tokens of a chunk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING


if TYPE_CHECKING:
    import torch


def repeat_heads(tensor: torch.Tensor, num_heads: int, dim: int) -> torch.Tensor:
    """Gives each query head its key/value head (grouped-query attention).

    Args:
        tensor: Has H_kv heads on axis `dim`.
        num_heads: H, a multiple of H_kv.
        dim: The axis of heads.

    Returns:
        The tensor with H heads on that axis, each of its heads H / H_kv times in a row; itself when H = H_kv.
    """
    repeats = num_heads // tensor.shape[dim]
    return tensor if repeats == 1 else tensor.repeat_interleave(repeats, dim=dim)


def mix_summaries(mixing: torch.Tensor, summary: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Σ_b m_ib S_b for every row i of `mixing` and every query head.

    Args:
        mixing: `[..., I, M]`; the axes before the last two are none, `[H]`, `[B, 1]` or `[B, H]`.
        summary: `[B, H_kv, M, K, V]`.
        num_heads: H.

    Returns:
        `[B, H, I, K, V]`. A mixing matrix that all heads share is applied before the heads are repeated.
    """
    per_head = mixing.dim() > 2 and mixing.shape[-3] != 1
    if per_head:
        summary = repeat_heads(summary, num_heads, 1)
    mixed = (mixing @ summary.flatten(-2)).unflatten(-1, summary.shape[-2:])
    return repeat_heads(mixed, num_heads, 1)


def diagonal_weights(mixing: torch.Tensor) -> torch.Tensor:
    """m_ii shaped to broadcast over `[B, H, M, C, D]`."""
    return mixing.diagonal(dim1=-2, dim2=-1)[..., None, None]


def prefix_and_own(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor | None,
    mixing: torch.Tensor,
    past: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """φ(q)ᵀ applied to the mixed earlier chunks plus the causal part of the own chunk.

    Args:
        query: `[B, H, M, C, K]`.
        key: `[B, H_kv, M, C, K]`.
        value: `[B, H_kv, M, C, V]`; `None` for a column of ones.
        mixing: `[..., M, M]`.
        past: Mixed summaries of tokens before these, added to the earlier chunks, `[B, H or H_kv, M, K, V]`.

    Returns:
        `[B, H, M, C, V]`, and the chunks' summaries `[B, H_kv, M, K, V]`.
    """
    num_heads = query.shape[1]
    if value is None:
        value = key.new_ones(*key.shape[:-1], 1)
    summaries = key.transpose(-1, -2) @ value
    prefix = mix_summaries(mixing.tril(-1), summaries, num_heads)
    if past is not None:
        prefix = prefix + repeat_heads(past, num_heads, 1)
    key, value = repeat_heads(key, num_heads, 1), repeat_heads(value, num_heads, 1)
    own = (query @ key.transpose(-1, -2)).tril() @ value
    return query @ prefix + diagonal_weights(mixing) * own, summaries
