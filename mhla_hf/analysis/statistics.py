# SPDX-License-Identifier: Apache-2.0
"""Numbers that describe an attention matrix: rank, effective rank, entropy, concentration.

Shape letters: R query tokens, T tokens; `...` any further axes.
"""

from __future__ import annotations

import math

import torch

from ..layouts.blocks import BlockLayout
from ..utils.messages import shorten_value


TOLERANCE = 1e-4
"""Singular values below this share of the largest one do not count towards the numerical rank."""
TOP_SHARE = 0.1
"""Share of the tokens whose weights `top_share` adds up."""
# Singular values from products of rows are exact down to the root of float64's precision.
_LEAST_TOLERANCE = 1e-7
# Matrices so many times as wide as high are reduced to products of their rows first.
_WIDE = 2


def singular_values(matrix: torch.Tensor) -> torch.Tensor:
    """Singular values in descending order, computed in float64.

    Those of a matrix with far more columns than rows are roots of eigenvalues of its R × R products of rows, which are
    exact to about 1e-8 of the largest one.

    Args:
        matrix: `[..., R, T]`.

    Returns:
        `[..., min(R, T)]`, float64.
    """
    matrix = matrix.double()
    if matrix.shape[-1] < _WIDE * matrix.shape[-2]:
        return torch.linalg.svdvals(matrix)
    squares = torch.linalg.eigvalsh(matrix @ matrix.mT)
    return squares.clamp_min(0.0).sqrt().flip(-1)


def numerical_rank(singular: torch.Tensor, tolerance: float = TOLERANCE) -> torch.Tensor:
    """Number of singular values above `tolerance` times the largest one.

    Args:
        singular: Singular values in descending order, `[..., N]`.
        tolerance: From 1e-7 to less than 1.

    Returns:
        LongTensor `[...]`; 0 for a matrix of zeros.

    Raises:
        ValueError: If the tolerance is out of range.

    Examples:
        >>> import torch
        >>> from mhla_hf.analysis import numerical_rank, singular_values
        >>> numerical_rank(singular_values(torch.ones(8, 8)))
        tensor(1)
    """
    return (singular > check_tolerance(tolerance) * singular[..., :1]).sum(-1)


def check_tolerance(tolerance: float) -> float:
    """Returns `tolerance`.

    Raises:
        ValueError: Unless it is one that a numerical rank can have.
    """
    if isinstance(tolerance, bool) or not isinstance(tolerance, float) or not _LEAST_TOLERANCE <= tolerance < 1:
        raise ValueError(f"tolerance={shorten_value(tolerance)} must be from {_LEAST_TOLERANCE:g} to less than 1.")
    return tolerance


def effective_rank(singular: torch.Tensor) -> torch.Tensor:
    """Exponential of the entropy of the singular values, scaled to sum to one (Roy and Vetterli, 2007).

    It is 1 for a matrix of rank one, N where all N singular values are equal, and needs no tolerance.

    Args:
        singular: Singular values, `[..., N]`.

    Returns:
        `[...]`; 0 for a matrix of zeros.

    Examples:
        >>> import torch
        >>> from mhla_hf.analysis import effective_rank, singular_values
        >>> effective_rank(singular_values(torch.eye(8)))
        tensor(8.0000, dtype=torch.float64)
    """
    total = singular.sum(-1, keepdim=True)
    shares = singular / torch.where(total > 0, total, 1.0)
    return torch.where(total[..., 0] > 0, torch.special.entr(shares).sum(-1).exp(), 0.0)


def row_entropy(matrix: torch.Tensor) -> torch.Tensor:
    """Entropy of each row in nats; weights count by their absolute value and are scaled to sum to one.

    Args:
        matrix: `[..., R, T]`.

    Returns:
        `[..., R]`, from 0 (one token gets everything) to log T (all get the same).
    """
    return torch.special.entr(_shares(matrix)).sum(-1)


def top_share(matrix: torch.Tensor, share: float = TOP_SHARE, visible: torch.Tensor | None = None) -> torch.Tensor:
    """Part of each row's absolute weights on its largest ones: how sparse attention is.

    Args:
        matrix: `[..., R, T]`.
        share: Share of the tokens that count, rounded up: from above 0 to 1.
        visible: Number of tokens that each row can see, `[R]`; `None` for all T.

    Returns:
        `[..., R]`, from `share` (all equal) to 1.

    Raises:
        ValueError: If `share` is out of range.
    """
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
        raise ValueError(f"share={shorten_value(share)} must be above 0 and at most 1.")
    visible = _visible(matrix, visible)
    descending = _shares(matrix).sort(dim=-1, descending=True).values.cumsum(-1)
    last = (share * visible).ceil().long().clamp(min=1) - 1
    return descending.gather(-1, last.expand(matrix.shape[:-1]).unsqueeze(-1)).squeeze(-1)


def attention_statistics(
    matrix: torch.Tensor,
    *,
    tolerance: float = TOLERANCE,
    share: float = TOP_SHARE,
    visible: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """All statistics of attention matrices, those of rows averaged over the rows.

    Args:
        matrix: `[..., R, T]`: R of T query tokens, or all.
        tolerance: See [`numerical_rank`][mhla_hf.analysis.numerical_rank].
        share: See [`top_share`][mhla_hf.analysis.top_share].
        visible: Number of tokens that each row can see, `[R]`, for causal attention; `None` for all T.

    Returns:
        Values of shape `[...]` by name: `rank` and `effective_rank` (at most R), `entropy` in nats,
        `relative_entropy` (over the logarithm of the tokens that a row sees; rows that see one are left out),
        `top_share`, and `negative_share` (part of the absolute weights that is negative).

    Raises:
        ValueError: If an argument is out of range, or the matrix holds numbers that are not finite.

    Examples:
        >>> import torch
        >>> from mhla_hf.analysis import attention_statistics
        >>> uniform = attention_statistics(torch.full((16, 16), 1 / 16))
        >>> round(uniform["effective_rank"].item(), 3), round(uniform["relative_entropy"].item(), 3)
        (1.0, 1.0)
    """
    if not isinstance(matrix, torch.Tensor) or matrix.dim() < 2 or not all(matrix.shape[-2:]):
        raise ValueError(f"matrix must be a tensor [..., rows, tokens], got {shorten_value(matrix)}.")
    if not torch.isfinite(matrix).all():
        raise ValueError("matrix holds numbers that are not finite.")
    matrix = matrix.double()
    visible = _visible(matrix, visible)
    singular, entropy = singular_values(matrix), row_entropy(matrix)
    chosen = visible > 1
    relative = entropy[..., chosen] / visible[chosen].log() if chosen.any() else torch.ones_like(entropy)
    total = matrix.abs().sum((-1, -2))
    negative = matrix.clamp(max=0.0).abs().sum((-1, -2))
    return {
        "rank": numerical_rank(singular, tolerance).double(),
        "effective_rank": effective_rank(singular),
        "entropy": entropy.mean(-1),
        "relative_entropy": relative.mean(-1),
        "top_share": top_share(matrix, share, visible).mean(-1),
        "negative_share": negative / torch.where(total > 0, total, 1.0),
    }


def rank_bound(layout: BlockLayout, features: int) -> int:
    """Upper bound of the rank of an MHLA matrix that looks in both directions: min(N, Σ_b min(n_b, d)).

    The columns of block b are a product with the d features of its n_b keys, so their rank is at most min(n_b, d).
    One block gives the bound min(N, d) of linear attention.

    Args:
        layout: The blocks.
        features: d, width of the feature-mapped keys of a head.

    Examples:
        >>> from mhla_hf import BlockLayout
        >>> from mhla_hf.analysis import rank_bound
        >>> rank_bound(BlockLayout(grid=(64,), blocks=(1,)), 8), rank_bound(BlockLayout(grid=(64,), blocks=(4,)), 8)
        (8, 32)
    """
    return min(layout.num_tokens, int(layout.block_tokens.clamp(max=features).sum()))


def _shares(matrix: torch.Tensor) -> torch.Tensor:
    weights = matrix.abs().double()
    total = weights.sum(-1, keepdim=True)
    return weights / torch.where(total > 0, total, 1.0)


def _visible(matrix: torch.Tensor, visible: torch.Tensor | None) -> torch.Tensor:
    if visible is None:
        return torch.full(matrix.shape[-2:-1], float(matrix.shape[-1]), dtype=torch.double, device=matrix.device)
    if visible.shape != matrix.shape[-2:-1]:
        raise ValueError(f"visible has shape {tuple(visible.shape)}, but matrix has {matrix.shape[-2]} rows.")
    return visible.to(matrix.device, torch.double)


def spread(values: torch.Tensor) -> dict[str, float]:
    """Mean and standard deviation (0 for one value) of values of any shape."""
    flat = values.double().flatten()
    deviation = flat.std().item() if flat.numel() > 1 else 0.0
    return {"mean": flat.mean().item(), "std": 0.0 if math.isnan(deviation) else deviation}
