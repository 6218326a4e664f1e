# SPDX-License-Identifier: Apache-2.0
"""Feature maps φ: what queries and keys pass through before linear attention."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F

from ..config import FEATURE_MAPS
from ..utils.messages import shorten_value


FIXED_FEATURE_MAPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.relu,
    "elu": lambda tokens: F.elu(tokens) + 1,
    "exp": torch.exp,
    "identity": lambda tokens: tokens,
}


class HedgehogFeatureMap(nn.Module):
    """Learnable feature map softmax([Wx, -Wx]) (Hedgehog, arXiv 2402.04347), one W for each feature head.

    W starts as the identity. `[B, T, H, K]` becomes `[B, T, H, 2K]`, in the dtype of the input.
    """

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads, head_dim, head_dim))

    def initial_weight(self) -> torch.Tensor:
        """The identity for each head, float32 `[H, K, K]`."""
        num_heads, head_dim, _ = self.weight.shape
        return torch.eye(head_dim).repeat(num_heads, 1, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        projected = torch.einsum("bthk,hfk->bthf", tokens, self.weight.to(tokens.dtype))
        return torch.cat([projected, -projected], dim=-1).softmax(dim=-1)


def fixed_feature_map(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a feature map without parameters by its name.

    Raises:
        ValueError: If there is none of that name.
    """
    if not isinstance(name, str) or name not in FIXED_FEATURE_MAPS:
        raise ValueError(f"feature_map={shorten_value(name)} is not one of {', '.join(map(repr, FEATURE_MAPS))}.")
    return FIXED_FEATURE_MAPS[name]


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
