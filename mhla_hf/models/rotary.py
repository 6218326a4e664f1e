# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings as Wan and SANA-Video apply them: to neighbouring pairs of channels."""

from __future__ import annotations

from collections.abc import Callable

import torch


def pairwise_rotary(tables: tuple[torch.Tensor, torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a function that rotates `[B, T, H, K]` and keeps its dtype.

    Args:
        tables: Cosines and sines `[1, T, 1, K]`, each value twice.
    """
    cosine, sine = tables[0][..., 0::2], tables[1][..., 1::2]

    def rotary(tokens: torch.Tensor) -> torch.Tensor:
        even, odd = tokens.unflatten(-1, (-1, 2)).unbind(-1)
        rotated = torch.stack((even * cosine - odd * sine, even * sine + odd * cosine), dim=-1)
        return rotated.flatten(-2).type_as(tokens)

    return rotary
