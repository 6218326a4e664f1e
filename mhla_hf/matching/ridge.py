# SPDX-License-Identifier: Apache-2.0
"""Ridge regression from sums over rows that come in parts, and the fit of output projections by it.

Shapes: C sets of rows (one for each channel, say), N rows, P columns, D targets.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from ..training.layers import AttentionLayer, Changes


PROJECTION_STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
# Products of this many rows are summed in fp32 before they join the sums in float64.
_CHUNK_ROWS = 4096


class Moments:
    """Means and products of the columns of rows that come in parts, in float64.

    The rows are shifted by the mean of the first part: products of numbers far from zero would lose digits in fp32.

    Args:
        sets: C.
        columns: P.
        device: Where the sums are kept.
    """

    def __init__(self, sets: int, columns: int, device: torch.device | str = "cpu") -> None:
        self._counts = torch.zeros(sets, 1, dtype=torch.float64, device=device)
        self._shift = torch.zeros(sets, columns, dtype=torch.float64, device=device)
        self._total = torch.zeros_like(self._shift)
        self._products = torch.zeros(sets, columns, columns, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, rows: torch.Tensor, first: int = 0) -> None:
        """Add rows.

        Args:
            rows: `[C, N, P]`, or those of some sets only.
            first: The set that they begin with.
        """
        if not rows.shape[1]:
            return
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        sets = slice(first, first + len(rows))
        with torch.autocast(rows.device.type, enabled=False):
            if not self._counts[first]:
                self._shift[sets] = rows.mean(1).to(self._shift)
            shift = self._shift[sets].to(rows)[:, None]
            for part in rows.split(_CHUNK_ROWS, dim=1):
                shifted = part - shift
                self._total[sets] += shifted.sum(1).to(self._total)
                self._products[sets] += (shifted.mT @ shifted).to(self._products)
        self._counts[sets] += rows.shape[1]

    @property
    def count(self) -> int:
        """N of all parts together."""
        return int(self._counts[0])

    @property
    def mean(self) -> torch.Tensor:
        """`[C, P]`."""
        return self._shift + self._total / self._counts.clamp_min(1)

    def products(self, centred: bool) -> torch.Tensor:
        """Sums of products of two columns `[C, P, P]`, of their distances to the means if `centred`."""
        offset = self._total / self._counts.clamp_min(1)
        mean, counts = self.mean, self._counts[:, :, None]
        products = self._products - counts * offset[:, :, None] * offset[:, None, :]
        return products if centred else products + counts * mean[:, :, None] * mean[:, None, :]

    def squared_sums(
        self, coefficients: torch.Tensor, intercept: torch.Tensor, products: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Sums over the rows of (row · coefficients + intercept)².

        Args:
            coefficients: `[C, D, P]`, D linear maps of the rows of each set.
            intercept: `[C, D]`.
            products: `products(centred=True)`, where it has been computed.

        Returns:
            `[C, D]`.
        """
        products = self.products(centred=True) if products is None else products
        spread = ((coefficients @ products) * coefficients).sum(-1)
        mean = (coefficients @ self.mean[:, :, None])[..., 0] + intercept
        # Rounding may leave a little less than nothing.
        return (spread + self._counts * mean.square()).clamp_min(0.0)


def solve_ridge(products: torch.Tensor, targets: torch.Tensor, strength: float) -> torch.Tensor:
    """Solve (G + λ s I) X = Y, s the mean of the diagonal of G.

    Args:
        products: G `[..., P, P]`, symmetric and positive semidefinite.
        targets: Y `[..., P, D]`.
        strength: λ.

    Returns:
        X `[..., P, D]`.
    """
    scale = products.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None]
    # Columns that are zero throughout have no scale, and a coefficient of zero.
    ridge = (strength * scale).clamp_min(torch.finfo(products.dtype).tiny ** 0.5)
    matrix = products + torch.diag_embed(ridge.expand(products.shape[:-1]))
    return torch.linalg.solve(matrix, targets)


@dataclass(frozen=True)
class ProjectionSolution:
    """Solution for an output projection.

    Attributes:
        error: The smallest squared held-out error of the layer's output, with the solution.
        scale: Squared distance of the original's held-out output to its mean, what errors are relative to.
        strength: Strength of the ridge with the smallest error; `None` for the projection as it is.
        changes: Weight and bias for it; empty for `None`.
    """

    error: float
    scale: float
    strength: float | None
    changes: Changes = field(repr=False)


class ProjectionFit:
    """The output projection, by ridge regression of what the original puts out, shrunk towards what it is.

    A projection without bias is fitted without means; a layer without a projection is only measured.

    Args:
        layer: The layer.
    """

    def __init__(self, layer: AttentionLayer) -> None:
        self.projection = layer.projection
        self.channels = layer.mhla.all_heads * layer.mhla.value_head_dim
        width = self.channels if self.projection is None else len(as_matrix(self.projection))
        device = sums_device(layer.mhla.mixing.device)
        self._moments = [Moments(1, self.channels + width, device) for _ in range(2)]

    def add(self, heads: torch.Tensor, output: torch.Tensor, held_out: bool) -> None:
        """Add rows.

        Args:
            heads: What goes into the projection, `[N, H·V]`.
            output: What the original's gives, `[N, D]`.
            held_out: Whether they are held out.
        """
        self._moments[held_out].add(torch.cat([heads.float(), output.float()], -1)[None])

    @property
    def counts(self) -> tuple[int, int]:
        """Tokens fitted and held out."""
        return self._moments[0].count, self._moments[1].count

    def solve(self) -> ProjectionSolution:
        """The best strength by held-out error, and the projection for it."""
        projection, channels, (fitted, held) = self.projection, self.channels, self._moments
        mean = fitted.mean[0]
        weight = torch.eye(channels).to(mean) if projection is None else as_matrix(projection).detach().to(mean)
        bias = getattr(projection, "bias", None)
        offset = weight.new_zeros(len(weight)) if bias is None else bias.detach().to(mean)
        held_products, unit = held.products(centred=True), torch.eye(len(weight)).to(mean)
        scale = float(held_products[0, channels:, channels:].diagonal().sum())

        def error(new: torch.Tensor, shift: torch.Tensor) -> float:
            coefficients = torch.cat([-new, unit], -1)[None]
            return float(held.squared_sums(coefficients, -shift[None], held_products).sum())

        best = ProjectionSolution(error(weight, offset), scale, None, {})
        if projection is None:
            return best
        products = fitted.products(centred=bias is not None)[0]
        own = products[:channels, :channels]
        left = products[:channels, channels:] - own @ weight.T
        parameter = projection.weight
        assert isinstance(parameter, nn.Parameter)
        for strength in PROJECTION_STRENGTHS:
            new = weight + solve_ridge(own, left, strength).T
            stored = (new if isinstance(projection, nn.Linear) else new.T).to(parameter)
            changes: Changes = {parameter: stored}
            new = (stored if isinstance(projection, nn.Linear) else stored.T).to(mean)
            shift = offset
            if bias is not None:
                changes[bias] = (mean[channels:] - new @ mean[:channels]).to(bias)
                shift = changes[bias].to(mean)
            found = error(new, shift)
            if found < best.error:
                best = ProjectionSolution(found, scale, strength, changes)
        return best


def as_matrix(projection: nn.Module) -> torch.Tensor:
    """The weight of a linear map as `[D, C]`; the `Conv1D` of transformers stores its transpose."""
    weight = projection.weight
    assert isinstance(weight, torch.Tensor)
    return weight if isinstance(projection, nn.Linear) else weight.T


def sums_device(device: torch.device) -> torch.device:
    """Device of sums in float64, a type that Apple's GPUs do not have."""
    return torch.device("cpu") if device.type == "mps" else device
