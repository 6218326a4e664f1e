# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings as Wan and SANA-Video apply them: to neighbouring pairs of channels."""

from __future__ import annotations

import torch

from ..layers import PairwiseRotary


def pairwise_rotary(tables: tuple[torch.Tensor, torch.Tensor]) -> PairwiseRotary:
    """Returns a function that rotates `[B, T, H, K]` and keeps its dtype.

    Args:
        tables: Cosines and sines `[1, T, 1, K]`, each value twice.
    """
    return PairwiseRotary(tables[0][..., 0::2], tables[1][..., 1::2])
