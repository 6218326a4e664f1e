# SPDX-License-Identifier: Apache-2.0
"""Closed-form fits of an MHLA layer to the heads of the original attention.

Each fit sees the layer's calls one by one and keeps sums only. Of the samples some are held out: a fit is made on the
others; strengths, temperatures and whether to change anything are chosen by the error on those held out.

Shapes: B batch, T tokens, H heads, H_kv key/value heads, V value width, C = H·V channels, D width of the output,
L weights of the convolution for each channel. Of sums: C sets of rows (one for each channel, say), N rows, P columns.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..layers.mhla import MHLA
from ..ops.tables import repeat_heads
from ..training.matching.layers import AttentionLayer, Changes, swapped_parameters


TEMPERATURES = (1.0, 0.63, 1.6, 2.5, 4.0, 6.3, 10.0)
"""Factors on the weights of a hedgehog feature map that are tried; the first is what it is."""
HEADS_STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1)
PROJECTION_STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
# Rows with their neighbours are many times what the values are: so many numbers are made at a time.
_ROW_NUMBERS = 2**23
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
class HeadsCall:
    """One call of an `mhla` module.

    Attributes:
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        output: Its result `[B, T, H, V]`.
        heads: Heads of the original attention, same shape.
        held_out: Which samples are held out, BoolTensor `[B]`.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: torch.Tensor
    heads: torch.Tensor
    held_out: torch.Tensor

    @property
    def valid(self) -> torch.Tensor | None:
        """BoolTensor `[B, T]`, False for padding; `None` for no padding."""
        sequence = self.kwargs.get("sequence")
        return None if sequence is None else sequence.valid

    @property
    def value(self) -> torch.Tensor:
        """`[B, T, H_kv, V]`."""
        return self.args[2] if len(self.args) > 2 else self.kwargs["value"]

    def rows(self, tokens: torch.Tensor, held_out: bool, start: int = 0) -> torch.Tensor:
        """The tokens of one part of the samples as rows `[N, ...]`, from `[B, T, ...]`, without padding.

        Args:
            tokens: `[B, T, ...]`.
            held_out: Which part.
            start: Tokens at the start of each sample to leave out.
        """
        chosen = self.held_out == held_out
        tokens, valid = tokens[chosen, start:], self.valid
        return tokens.flatten(0, 1) if valid is None else tokens[valid[chosen, start:]]


class TemperatureFit:
    """A factor for the weights of each head's hedgehog feature map, chosen from [`TEMPERATURES`].

    Query heads that share keys share the factor. The error is that of MHLA's own heads.
    """

    def __init__(self, layer: AttentionLayer) -> None:
        self.mhla = layer.mhla
        heads = self.mhla.num_key_value_heads
        self._errors = torch.zeros(len(TEMPERATURES), 2, heads, dtype=torch.float64)

    @staticmethod
    def applies(layer: AttentionLayer) -> bool:
        """True for a layer with such a feature map."""
        return layer.mhla.feature_map_query is not None

    def observe(self, call: HeadsCall) -> None:
        """Add the errors of one call at each temperature."""
        weights = self._weights()
        for index, temperature in enumerate(TEMPERATURES):
            with swapped_parameters({weight: weight * temperature for weight in weights}):
                attended = self.mhla.attention_parts(*call.args, **call.kwargs).attended
            error = (attended - call.heads).float().square().sum(-1)
            for part in (0, 1):
                rows = call.rows(error, bool(part)).unflatten(-1, (self.mhla.num_key_value_heads, -1))
                self._errors[index, part] += rows.sum((0, 2), dtype=torch.float32).double().cpu()

    def solve(self) -> Changes:
        """New weights; none where no other temperature lowers the held-out error of any head."""
        fitted, held = self._errors[:, 0], self._errors[:, 1]
        best = fitted.argmin(0)
        best = torch.where(held.gather(0, best[None])[0] < held[0], best, 0)
        if not best.any():
            return {}
        temperatures = torch.tensor(TEMPERATURES)[best]
        changes: Changes = {}
        for weight in self._weights():
            factors = temperatures.repeat_interleave(len(weight) // len(temperatures))[:, None, None]
            changes[weight] = (weight.detach().float() * factors.to(weight.device)).to(weight)
        return changes

    def _weights(self) -> list[nn.Parameter]:
        query, key = self.mhla.feature_map_query, self.mhla.feature_map_key
        assert query is not None and key is not None
        return [query.weight, key.weight]


@dataclass(frozen=True)
class HeadsSolution:
    """Solution for the convolution and the gains.

    Attributes:
        error: Squared held-out error of the heads.
        strength: Strength of the ridge; `None` for the parameters as they are.
        changes: The parameters; empty for `None`.
    """

    error: float
    strength: float | None
    changes: Changes = field(repr=False)


class HeadsFit:
    """The convolution of the values, and the gains of the window, by ridge regression for each channel.

    The columns of a channel are MHLA, the window, the neighbours of the token and the original's heads, in this
    order. Weights are shrunk towards zero and gains towards (1, 0). Gains of whole heads are fitted to all their
    channels at once, each with a convolution of its own.

    Args:
        layer: The layer.
        own: Other values for parameters of `mhla`.
    """

    def __init__(self, layer: AttentionLayer, own: Changes) -> None:
        self.mhla, self.own = layer.mhla, own
        columns, channels = self._columns(self.mhla), self._channels(self.mhla)
        self._moments = [Moments(channels, columns, _sums_device(self.mhla.mixing.device)) for _ in range(2)]

    @staticmethod
    def applies(layer: AttentionLayer) -> bool:
        """True for a layer with a convolution or a window."""
        return layer.mhla.lepe is not None or layer.mhla.window_gain is not None

    @staticmethod
    def _channels(mhla: MHLA) -> int:
        return mhla.num_heads * mhla.value_head_dim

    @staticmethod
    def _columns(mhla: MHLA) -> int:
        return (2 if mhla.window_gain is None else 3) + (0 if mhla.lepe is None else mhla.lepe.weight[0].numel())

    def observe(self, call: HeadsCall) -> None:
        """Add the rows of one call."""
        with swapped_parameters(self.own):
            parts = self.mhla.attention_parts(*call.args, **call.kwargs)
        # The convolution leaves tokens before the grid alone.
        start = self.mhla.num_prefix_tokens if self.mhla.lepe is not None else 0
        grid = call.kwargs.get("grid")
        first = [parts.attended] if parts.window is None else [parts.attended, parts.window]
        for held_out, moments in zip((False, True), self._moments):
            if not (call.held_out == held_out).any():
                continue
            outer = [call.rows(tokens.flatten(2), held_out, start).T for tokens in (*first, call.heads)]
            patches = None
            if self.mhla.lepe is not None:
                value = repeat_heads(call.value, self.mhla.num_heads, 2)[call.held_out == held_out, start:]
                assert grid is not None
                image = value.flatten(2).transpose(1, 2).unflatten(2, tuple(grid))
                patches = _patches(image, self.mhla.lepe.weight.shape[-1])
            step = max(1, _ROW_NUMBERS // (outer[0].shape[1] * moments.mean.shape[1]))
            for channel in range(0, len(outer[0]), step):
                chosen = slice(channel, channel + step)
                columns = [tokens[chosen, :, None] for tokens in outer]
                if patches is not None:
                    axes = len(patches.shape) // 2 - 1
                    columns.insert(-1, patches[chosen].flatten(2 + axes).flatten(1, 1 + axes))
                dtype = torch.promote_types(outer[0].dtype, torch.float32)
                moments.add(torch.cat([column.to(dtype) for column in columns], dim=-1), channel)

    def solve(self) -> HeadsSolution:
        """New parameters, or none where the held-out error does not fall."""
        best = HeadsSolution(self._error(self._current()), None, {})
        for strength in HEADS_STRENGTHS:
            candidate = self._candidate(strength)
            error = self._error({**self._current(), **candidate})
            if error < best.error:
                best = HeadsSolution(error, strength, candidate)
        return best

    def _candidate(self, strength: float) -> Changes:
        mhla, moments = self.mhla, self._moments[0]
        gain, lepe = mhla.window_gain, mhla.lepe
        gains = 0 if gain is None else 2
        products = moments.products(centred=lepe is not None)
        # What is left after MHLA with a gain of one is what the other columns have to make up for.
        residual = products[:, :, -1:] - products[:, :, :1]
        first = 1 if gain is None else 2
        near, outer = products[:, first:-1, first:-1], products[:, :gains, :gains]
        across = products[:, first:-1, :gains]
        solved = solve_ridge(near, torch.cat([across, residual[:, first:-1]], -1), strength)
        change = torch.zeros_like(residual[:, :gains])
        if gain is not None:
            outer = outer + strength * torch.diag_embed(outer.diagonal(dim1=1, dim2=2))
            matrix = outer - across.mT @ solved[..., :gains]
            target = residual[:, :gains] - across.mT @ solved[..., gains:]
            if gain.shape[-1] == 1:
                matrix, target = (x.unflatten(0, (mhla.num_heads, -1)).sum(1) for x in (matrix, target))
            change = solve_ridge(matrix, target, 1e-9)
        changes: Changes = {}
        shared = change if len(change) == len(solved) else change.repeat_interleave(mhla.value_head_dim, 0)
        if gain is not None:
            values = change[..., 0].T + change.new_tensor([1.0, 0.0])[:, None]
            changes[gain] = values.reshape(gain.shape).to(gain)
        if lepe is not None:
            weight = (solved[..., gains:] - solved[..., :gains] @ shared)[..., 0]
            changes[lepe.weight] = weight.reshape(lepe.weight.shape).to(lepe.weight)
            coefficients, _ = self._coefficients({**self._current(), **changes})
            bias = (coefficients * moments.mean).sum(-1)
            assert lepe.bias is not None
            changes[lepe.bias] = bias.to(lepe.bias)
        return changes

    def _current(self) -> Changes:
        gain, lepe = self.mhla.window_gain, self.mhla.lepe
        parameters: list[torch.Tensor] = [] if gain is None else [gain]
        if lepe is not None:
            assert lepe.bias is not None
            parameters += [lepe.weight, lepe.bias]
        return {parameter: parameter.detach() for parameter in parameters}

    def _coefficients(self, values: Changes) -> tuple[torch.Tensor, torch.Tensor]:
        """Coefficients of the error's columns `[C, P]`, and its intercept `[C]`, for values of the parameters."""
        mhla, gain, sums = self.mhla, self.mhla.window_gain, self._moments[0].mean
        channels = len(sums)
        columns, intercept = [], sums.new_zeros(channels)
        if gain is None:
            columns.append(sums.new_ones(channels, 1))
        else:
            wide = values[gain].expand(2, mhla.num_heads, mhla.value_head_dim)
            columns.append(wide.reshape(2, channels).T.to(sums))
        if mhla.lepe is not None:
            assert mhla.lepe.bias is not None
            columns.append(values[mhla.lepe.weight].reshape(channels, -1).to(sums))
            intercept = -values[mhla.lepe.bias].to(sums)
        return torch.cat([*(-column for column in columns), sums.new_ones(channels, 1)], -1), intercept

    def _error(self, values: Changes) -> float:
        coefficients, intercept = self._coefficients(values)
        return float(self._moments[1].squared_sums(coefficients[:, None], intercept[:, None]).sum())


@dataclass(frozen=True)
class ProjectionSolution:
    """Solution for an output projection.

    Attributes:
        error_before: Squared held-out error of the layer's output, with the projection as it is.
        error: The smallest error, with the solution.
        scale: Squared distance of the original's held-out output to its mean, what errors are relative to.
        strength: Strength of the ridge with the smallest error; `None` for the projection as it is.
        changes: Weight and bias for it; empty for `None`.
    """

    error_before: float
    error: float
    scale: float
    strength: float | None
    changes: Changes = field(repr=False)


class ProjectionFit:
    """The output projection, by ridge regression of what the original puts out, shrunk towards what it is.

    The target is linear in the original's heads, so sums of products of MHLA's and the original's heads are all that
    the fit and its errors need. A projection without bias is fitted without means.

    Args:
        layer: The layer.
        own: Other values for parameters of `mhla`.
    """

    def __init__(self, layer: AttentionLayer, own: Changes) -> None:
        self.layer, self.own = layer, own
        channels = layer.mhla.num_heads * layer.mhla.value_head_dim
        self._moments = [Moments(1, 2 * channels, _sums_device(layer.mhla.mixing.device)) for _ in range(2)]

    @staticmethod
    def nbytes(layer: AttentionLayer) -> int:
        """Memory of the sums."""
        columns = 2 * layer.mhla.num_heads * layer.mhla.value_head_dim
        return 2 * 8 * columns * (columns + 2)

    def observe(self, call: HeadsCall) -> None:
        """Add the rows of one call."""
        output = call.output
        if self.own:
            with swapped_parameters(self.own):
                output = self.layer.mhla.forward(*call.args, **call.kwargs)
        for held_out, moments in zip((False, True), self._moments):
            pair = [call.rows(tokens.flatten(2), held_out) for tokens in (output, call.heads)]
            moments.add(torch.cat(pair, -1)[None])

    @property
    def counts(self) -> tuple[int, int]:
        """Tokens fitted and held out."""
        return self._moments[0].count, self._moments[1].count

    def solve(self) -> ProjectionSolution:
        """The best strength by held-out error, and the projection for it."""
        projection, (fitted, held) = self.layer.projection, self._moments
        channels = fitted.mean.shape[1] // 2
        mean = fitted.mean[0]
        if projection is None:
            weight = torch.eye(channels).to(mean)
        else:
            weight = as_matrix(projection).detach().to(mean)
        zero = weight.new_zeros(1, len(weight))
        held_products = held.products(centred=True)
        target = torch.cat([torch.zeros_like(weight), weight], -1)
        scale = float(((target @ held_products[0]) * target).sum())

        def error(new: torch.Tensor, shift: torch.Tensor) -> float:
            coefficients = torch.cat([-new, weight], -1)[None]
            return float(held.squared_sums(coefficients, -shift, held_products).sum())

        before = error(weight, zero)
        best = ProjectionSolution(before, before, scale, None, {})
        if projection is None:
            return best
        bias = getattr(projection, "bias", None)
        products = fitted.products(centred=bias is not None)[0]
        own = products[:channels, :channels]
        left = products[:channels, channels:] - own
        parameter = projection.weight
        assert isinstance(parameter, nn.Parameter)
        for strength in PROJECTION_STRENGTHS:
            new = weight + weight @ solve_ridge(own, left, strength).T
            stored = (new if isinstance(projection, nn.Linear) else new.T).to(parameter)
            changes: Changes = {parameter: stored}
            new = (stored if isinstance(projection, nn.Linear) else stored.T).to(mean)
            shift = zero
            if bias is not None:
                wanted = weight @ mean[channels:] - new @ mean[:channels]
                changes[bias] = (bias.detach().to(mean) + wanted).to(bias)
                shift = (changes[bias].to(mean) - bias.detach().to(mean))[None]
            found = error(new, shift)
            if found < best.error:
                best = ProjectionSolution(before, found, scale, strength, changes)
        return best


def as_matrix(projection: nn.Module) -> torch.Tensor:
    """The weight of a linear map as `[D, C]`; the `Conv1D` of transformers stores its transpose."""
    weight = projection.weight
    assert isinstance(weight, torch.Tensor)
    return weight if isinstance(projection, nn.Linear) else weight.T


def _patches(image: torch.Tensor, kernel: int) -> torch.Tensor:
    """The values around each token, zero beyond the grid, as a convolution sees them.

    Args:
        image: Values `[B, C, ...]` over a grid of any number of axes.
        kernel: Width of the convolution along each axis.

    Returns:
        A view `[C, B, ..., K, ...]`, as many axes K as the grid has, in the order of the convolution's weights.
    """
    axes = image.dim() - 2
    patches = F.pad(image, [kernel // 2] * (2 * axes))
    for axis in range(2, 2 + axes):
        patches = patches.unfold(axis, kernel, 1)
    return patches.transpose(0, 1)


def _sums_device(device: torch.device) -> torch.device:
    """Device of sums in float64, a type that Apple's GPUs do not have."""
    return torch.device("cpu") if device.type == "mps" else device
