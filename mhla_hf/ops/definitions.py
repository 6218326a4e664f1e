# SPDX-License-Identifier: Apache-2.0
"""Feature maps φ and normalisers: what they are called, what they compute, and which kernels know them.

Configuration, command line, layers and kernels take names and definitions from here. A new feature map is an entry of
[`FEATURE_MAPS`], and a branch of `feature_map` and of `feature_map_gradient` in `ops/triton/feature_maps.py` where
the fused kernels shall compute it. A normaliser divides o_t by a function of a product of queries and key sums
z_b = Σ φ(k_j); a new one is an entry of [`NORMALIZERS`], with its products in `ops/normalizers.py`: kernels divide by
it where it has a `kernel`, plain torch elsewhere. Importing this module does not import torch.

Shape letters: B batch, T tokens, H heads, K query/key width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    import torch


BACKENDS = ("auto", "torch", "triton")
OPERATOR_BACKENDS = (*BACKENDS, "naive")
"""Backends of [`mhla_hf.ops.mhla_attention`]; `"naive"`, the dense oracle, is chosen by name only."""


@dataclass(frozen=True, kw_only=True)
class FeatureMap:
    """One feature map.

    Attributes:
        forward: φ of tokens `[B, T, H, K]`. Learned maps take their weight `[H, K, K]` as a second argument.
        gradient: Gradient with respect to x, from the gradient with respect to φ(x) and x; `None` for autograd alone.
            Together with `forward` the definition that the kernels are tested against.
        kernel: The constant by which the fused kernels know the map; `None` where they do not.
        is_learned: Whether it has a weight for each feature head, which starts as the identity.
        width_factor: Features for each of the K channels.
        is_exact: Whether it rounds nothing: every result is an input or zero.
        keeps_zero: Whether it leaves the zeros of padding zero.
    """

    forward: Callable[..., torch.Tensor]
    gradient: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    kernel: str | None = None
    is_learned: bool = False
    width_factor: int = 1
    is_exact: bool = False
    keeps_zero: bool = False


def _elu(tokens: torch.Tensor) -> torch.Tensor:
    from torch.nn.functional import elu

    return elu(tokens) + 1


def _hedgehog(tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    import torch

    projected = torch.einsum("bthk,hfk->bthf", tokens, weight)
    return torch.cat([projected, -projected], dim=-1).softmax(dim=-1)


FEATURE_MAPS: dict[str, FeatureMap] = {
    # φ(x) = max(x, 0)
    "relu": FeatureMap(
        forward=lambda tokens: tokens.relu(),
        gradient=lambda gradient, tokens: gradient.masked_fill(tokens <= 0, 0),
        kernel="relu",
        is_exact=True,
        keeps_zero=True,
    ),
    # φ(x) = elu(x) + 1
    "elu": FeatureMap(
        forward=_elu, gradient=lambda gradient, tokens: gradient * tokens.clamp(max=0).exp(), kernel="elu"
    ),
    # φ(x) = exp(x)
    "exp": FeatureMap(
        forward=lambda tokens: tokens.exp(), gradient=lambda gradient, tokens: gradient * tokens.exp(), kernel="exp"
    ),
    # φ(x) = softmax([Wx, -Wx]) with a learned W a head, twice as many features
    "hedgehog": FeatureMap(forward=_hedgehog, is_learned=True, width_factor=2),
    # φ(x) = x
    "identity": FeatureMap(
        forward=lambda tokens: tokens,
        gradient=lambda gradient, tokens: gradient,
        kernel="identity",
        is_exact=True,
        keeps_zero=True,
    ),
}
"""All feature maps, by value of the option `feature_map`."""


@dataclass(frozen=True, kw_only=True)
class Normalizer:
    """One normaliser: o_t / divisor(product_t, eps).

    Attributes:
        divisor: From the product and eps.
        gradient: Derivative of the divisor with respect to the product; with `divisor` the definition that the
            kernels are tested against.
        kernel: Division in the kernels: 0 for none, 1 by φ(q)·z̃ + eps; `None` for a divisor that torch computes.
        mixes_sums: Whether the product is φ(q_t)·z̃ with z̃_i = Σ_b m_ib z_b, so that z is one more column of the
            summaries. Decoding needs that; without it blocks must have equal shapes unless attention is causal.
    """

    divisor: Callable[[Any, float], Any] = lambda product, eps: product + eps
    gradient: Callable[[Any, float], Any] = lambda product, eps: 1.0
    kernel: int | None = None
    mixes_sums: bool = True

    @property
    def divides(self) -> bool:
        """`True` if there is a divisor at all."""
        return self.kernel != 0


NORMALIZERS: dict[str, Normalizer] = {
    # Divides by φ(q_t)·Σ_b m_ib z_b + eps
    "query": Normalizer(kernel=1),
    # Divides by Σ_b m_ib φ(q_bw)·z_b + eps for the token at position w of block i
    "block_query": Normalizer(mixes_sums=False),
    "none": Normalizer(kernel=0),
}
"""All normalisers, by value of the option `normalizer`."""

SEQUENCE_NORMALIZERS = tuple(name for name, entry in NORMALIZERS.items() if entry.mixes_sums)
"""Names of those that serve decoding, and sequences that look both ways."""
