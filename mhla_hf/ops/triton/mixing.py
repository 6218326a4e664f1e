# SPDX-License-Identifier: Apache-2.0
"""Mixing of block summaries, and its gradients, by products of torch.

    S̃_i = Σ_b m_ib S_b          dS_b = Σ_i m_ib dS̃_i          dm_ib = Σ dS̃_i · S_b

A line is a head of a batch entry. Where the weights differ from query head to query head and R of these share the
summaries of a line, their weights are rows of one matrix below each other, `[R · M', M']`: one product mixes for all
of them.

Shape letters: B batch, H heads, G heads of the summaries (H or a divisor), R mixed summaries for each of them (H / G,
or 1 where the heads share the weights), M blocks, M' of them with empty ones, K and V widths, L lines of a group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .launching import multiplied_for, row_count


def count_mixed_heads(mixing: Sequence[int], heads: int, groups: int) -> int:
    """Heads of the mixed summaries, R · G: H where the weights differ from query head to query head, otherwise G.

    Args:
        mixing: Shape of the weights, `[M, M]`, `[1 or H, M, M]` or `[B, 1 or H, M, M]`.
        heads: H.
        groups: G.
    """
    return heads if len(mixing) > 2 and mixing[-3] != 1 else groups


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
