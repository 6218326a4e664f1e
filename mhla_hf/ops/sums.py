# SPDX-License-Identifier: Apache-2.0
"""Block summaries repeated over heads and mixed over blocks.

Shape letters: B batch, H heads, H_kv key/value heads, K query/key width, V value width, M blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

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


@dataclass(frozen=True)
class HeadGroups:
    """Some of a layer's groups of heads, each a key/value head with its query heads.

    Attributes:
        own: The groups, sorted.
        count: Number of all groups, H_kv.
    """

    own: tuple[int, ...]
    count: int

    @property
    def others(self) -> tuple[int, ...]:
        """The other groups."""
        return tuple(group for group in range(self.count) if group not in self.own)

    def split(self, heads: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Divide heads, of queries or of keys, on an axis: those of the own groups, and of the others."""
        parts = heads.unflatten(dim, (self.count, -1)).split(1, dim)
        own, others = (_joined([parts[group] for group in groups], dim) for groups in (self.own, self.others))
        return own, others

    def join(self, own: torch.Tensor, others: torch.Tensor, dim: int = 2) -> torch.Tensor:
        """Undo [`HeadGroups.split`]."""
        parts: dict[int, torch.Tensor] = {}
        for groups, heads in ((self.own, own), (self.others, others)):
            parts |= zip(groups, heads.unflatten(dim, (len(groups), -1)).split(1, dim))
        return _joined([parts[group] for group in range(self.count)], dim)


def _joined(parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    return torch.cat(parts, dim).flatten(dim, dim + 1)


class BlockMixing(Protocol):
    """Block mixing without an M × M matrix, for many blocks or structured weights."""

    def mix(self, summary: torch.Tensor, num_heads: int) -> torch.Tensor:
        """Return Σ_b m_ib S_b, `[B, H, M, K, V]` from `[B, H_kv, M, K, V]`."""

    def matrix(self) -> torch.Tensor:
        """Return the weights of all pairs, `[..., M, M]`."""


def mix_summaries(mixing: torch.Tensor | BlockMixing, summary: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Σ_b m_ib S_b for every row i of `mixing` and every query head.

    Args:
        mixing: `[..., I, M]`; the axes before the last two are none, `[H]`, `[B, 1]` or `[B, H]`. Or a
            [`BlockMixing`].
        summary: `[B, H_kv, M, K, V]`.
        num_heads: H.

    Returns:
        `[B, H, I, K, V]`. A mixing matrix that all heads share is applied before the heads are repeated.
    """
    if not isinstance(mixing, torch.Tensor):
        return mixing.mix(summary, num_heads)
    per_head = mixing.dim() > 2 and mixing.shape[-3] != 1
    if per_head:
        summary = repeat_heads(summary, num_heads, 1)
    # Expanded, as matmul would make one matrix of all summaries and copy them for that, and gradients once more.
    mixing = mixing.expand(*summary.shape[:2], *mixing.shape[-2:])
    mixed = (mixing @ summary.flatten(-2)).unflatten(-1, summary.shape[-2:])
    return repeat_heads(mixed, num_heads, 1)
