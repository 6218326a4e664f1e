# SPDX-License-Identifier: Apache-2.0
"""The table of feature maps φ: configuration, command line, layers and kernels take them from here.

A new feature map is an entry of [`FEATURE_MAPS`], and a branch of `feature_map` and of `feature_map_gradient` in
`ops/triton/feature_maps.py` where the fused kernels shall compute it. Importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class FeatureMap:
    """One feature map.

    Attributes:
        name: Value of the option `feature_map`.
        formula: φ(x) as text.
        forward: φ of tokens `[B, T, H, K]`. Learned maps take their weight `[H, K, K]` as a second argument.
        gradient: Gradient with respect to x, from the gradient with respect to φ(x) and x; `None` for autograd alone.
            Together with `forward` the definition that the kernels are tested against.
        kernel: The constant by which the fused kernels know the map; `None` where they do not.
        is_learned: Whether it has a weight for each feature head, which starts as the identity.
        width_factor: Features for each of the K channels.
        is_exact: Whether it rounds nothing: every result is an input or zero.
    """

    name: str
    formula: str
    forward: Callable[..., torch.Tensor]
    gradient: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    kernel: str | None = None
    is_learned: bool = False
    width_factor: int = 1
    is_exact: bool = False


def _elu(tokens: torch.Tensor) -> torch.Tensor:
    from torch.nn.functional import elu

    return elu(tokens) + 1


def _hedgehog(tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    import torch

    projected = torch.einsum("bthk,hfk->bthf", tokens, weight)
    return torch.cat([projected, -projected], dim=-1).softmax(dim=-1)


_ENTRIES: tuple[FeatureMap, ...] = (
    FeatureMap(
        name="relu",
        formula="max(x, 0)",
        forward=lambda tokens: tokens.relu(),
        gradient=lambda gradient, tokens: gradient.masked_fill(tokens <= 0, 0),
        kernel="relu",
        is_exact=True,
    ),
    FeatureMap(
        name="elu",
        formula="elu(x) + 1",
        forward=_elu,
        gradient=lambda gradient, tokens: gradient * tokens.clamp(max=0).exp(),
        kernel="elu",
    ),
    FeatureMap(
        name="exp",
        formula="exp(x)",
        forward=lambda tokens: tokens.exp(),
        gradient=lambda gradient, tokens: gradient * tokens.exp(),
        kernel="exp",
    ),
    FeatureMap(
        name="hedgehog",
        formula="softmax([Wx, -Wx]) with a learned W a head, twice as many features",
        forward=_hedgehog,
        is_learned=True,
        width_factor=2,
    ),
    FeatureMap(
        name="identity",
        formula="x",
        forward=lambda tokens: tokens,
        gradient=lambda gradient, tokens: gradient,
        kernel="identity",
        is_exact=True,
    ),
)

FEATURE_MAPS: dict[str, FeatureMap] = {entry.name: entry for entry in _ENTRIES}
"""All feature maps by name."""
