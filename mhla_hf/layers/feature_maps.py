# SPDX-License-Identifier: Apache-2.0
"""Feature maps φ as modules and functions, and the rotation of features."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn as nn

from ..ops import FEATURE_MAPS
from ..utils.messages import check_choice


class LearnedFeatureMap(nn.Module):
    """Feature map with a weight for each feature head, which starts as the identity; by default Hedgehog's.

    Hedgehog (arXiv 2402.04347) is softmax([Wx, -Wx]): `[B, T, H, K]` becomes `[B, T, H, 2K]`, in the dtype of the
    input.

    Args:
        num_heads: H.
        head_dim: K.
        name: Name of a learned map in [`mhla_hf.ops.FEATURE_MAPS`].
    """

    def __init__(self, num_heads: int, head_dim: int, name: str = "hedgehog") -> None:
        super().__init__()
        self.name = name
        self.weight = nn.Parameter(torch.empty(num_heads, head_dim, head_dim))

    def initial_weight(self) -> torch.Tensor:
        """The identity for each head, float32 `[H, K, K]`."""
        num_heads, head_dim, _ = self.weight.shape
        return torch.eye(head_dim).repeat(num_heads, 1, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return FEATURE_MAPS[self.name].forward(tokens, self.weight.to(tokens.dtype))


HedgehogFeatureMap = LearnedFeatureMap


def fixed_feature_map(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a feature map without parameters by its name.

    Raises:
        ValueError: If there is none of that name.
    """
    check_choice("feature_map", name, [entry.name for entry in FEATURE_MAPS.values() if not entry.is_learned])
    return FEATURE_MAPS[name].forward


def rotate_features(
    features: torch.Tensor, rotary: Callable[[torch.Tensor], torch.Tensor], head_dim: int
) -> torch.Tensor:
    """Applies a rotary embedding made for width K to features of width K or a multiple of it.

    Args:
        features: `[B, T, H, F]`, F a multiple of `head_dim`.
        rotary: Rotates `[B, T, H, K]`.
        head_dim: K.

    Returns:
        `[B, T, H, F]`; each run of K features is rotated alike.
    """
    if features.shape[-1] == head_dim:
        return rotary(features)
    return torch.cat([rotary(part) for part in features.split(head_dim, dim=-1)], dim=-1)
