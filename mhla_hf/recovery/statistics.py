# SPDX-License-Identifier: Apache-2.0
"""Sums from which linear maps are fitted, so that the rows they are fitted to need not be kept.

Shapes: C sets of rows (one for each channel, say), N rows, P columns.
"""

from __future__ import annotations

import torch


# The products of so many rows are added up in fp32 before they join the sums in float64.
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

    @staticmethod
    def nbytes(sets: int, columns: int) -> int:
        """Memory that the sums take."""
        return 8 * sets * columns * (columns + 2)

    @torch.no_grad()
    def add(self, rows: torch.Tensor, first: int = 0) -> None:
        """Adds rows.

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
    """Solves (G + λ s I) X = Y, s the mean of the diagonal of G.

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
