# SPDX-License-Identifier: Apache-2.0
"""From projected queries and keys to features: dtype, scaling, feature map and rotary embedding."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn as nn

from ..config import MHLAConfig
from ..ops.kernel_check import kernels_pass
from ..ops.operands import accumulation_dtype
from ..ops.tables import FEATURE_MAPS, NORMALIZERS


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
        """Return the identity for each head, float32 `[H, K, K]`."""
        num_heads, head_dim, _ = self.weight.shape
        return torch.eye(head_dim).repeat(num_heads, 1, 1)

    def forward(self, tokens: torch.Tensor, backend: str = "torch") -> torch.Tensor:
        if backend == "triton" and self.name == "hedgehog":
            from ..ops.triton import fits_hedgehog_kernels, hedgehog_features

            fits = fits_hedgehog_kernels(tokens.shape[-1], tokens.shape[-1], False, tokens.dtype)
            if fits and kernels_pass("hedgehog", tokens, tokens):
                return hedgehog_features(tokens, self.weight)
        return FEATURE_MAPS[self.name].forward(tokens, self.weight.to(tokens.dtype))


def rotate_features(
    features: torch.Tensor, rotary: Callable[[torch.Tensor], torch.Tensor], head_dim: int
) -> torch.Tensor:
    """Apply a rotary embedding made for width K to features of width K or a multiple of it.

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


def features_and_plain(
    config: MHLAConfig,
    tokens: torch.Tensor,
    learned: LearnedFeatureMap | None,
    rotary: Callable[[torch.Tensor], torch.Tensor] | None,
    scaling: float | None,
    backend: str = "torch",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return features of queries or keys for the numerator, and those of the normaliser where they differ.

    Args:
        config: The layer's options.
        tokens: `[B, T, H, K]`, in the dtype that features are computed in.
        learned: The feature map where it has a weight.
        rotary: Rotates `[B, T, H, K]`; `None` without rotary embeddings.
        scaling: Scale of q·k, of which the root goes to each side; `None` for 1.
        backend: `"torch"`, or `"triton"` to compute a learned map by a kernel where there is one.

    Returns:
        `[B, T, H, F]`, and the same without the rotation; `None` where there is none after the feature map.
    """
    head_dim = tokens.shape[-1]
    if scaling is not None:
        tokens = tokens * math.sqrt(scaling)
    if rotary is not None and config.rope == "before_feature_map":
        tokens = rotary(tokens)
    features = FEATURE_MAPS[config.feature_map].forward(tokens) if learned is None else learned(tokens, backend)
    if config.feature_map_eps:
        features = features + config.feature_map_eps
    if rotary is None or config.rope != "after_feature_map":
        return features, None
    return rotate_features(features, rotary, head_dim), features


def token_dtype(
    config: MHLAConfig,
    backend: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    changed: bool,
) -> torch.dtype:
    """Return the dtype that feature maps are computed in and the operator is given tokens in.

    The operator sums in float32 at least. Kernels take half precision as it is. So does plain
    torch, which converts tokens as it groups them, where nothing is rounded on the way that float32 would not round;
    elsewhere tokens go in as float32. So they do for float16 without a normaliser, with any backend: sums can leave
    its range, and the output norm brings them back before anything is rounded.

    Args:
        config: The layer's options.
        backend: `"torch"` or `"triton"`.
        query: Queries of any shape.
        key: Keys.
        value: Values.
        changed: Whether queries and keys are scaled or rotated beside the feature map.
    """
    dtype = value.dtype
    if dtype == torch.float16 and not NORMALIZERS[config.normalizer].divides:
        return accumulation_dtype(dtype)
    exact = (
        query.dtype == key.dtype == dtype
        and FEATURE_MAPS[config.feature_map].is_exact
        and not (changed or config.feature_map_eps or config.output_norm)
    )
    return dtype if backend == "triton" or exact else accumulation_dtype(dtype)
