# SPDX-License-Identifier: Apache-2.0
"""Closed-form fits of an MHLA layer to the heads of the original attention.

Each fit sees the layer's calls one by one and keeps sums only. Of the samples some are held out: a fit is made on the
others; strengths, temperatures and whether to change anything are chosen by the error on those held out.

Shapes: B batch, T tokens, H heads, H_kv key/value heads, V value width, C = H·V channels, D width of the output,
L weights of the convolution for each channel. Of sums: C sets of rows (one for each channel, say), N rows, P columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..layers.mhla import MHLA
from ..ops.tables import repeat_heads
from ..training.matching.layers import AttentionLayer, Changes, swapped_parameters
from ..training.matching.ridge import Moments, solve_ridge, sums_device


TEMPERATURES = (1.0, 0.63, 1.6, 2.5, 4.0, 6.3, 10.0)
"""Factors on the weights of a hedgehog feature map that are tried; the first is what it is."""
HEADS_STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1)
# Rows with their neighbours are many times what the values are: so many numbers are made at a time.
_ROW_NUMBERS = 2**23


@dataclass(frozen=True)
class HeadsCall:
    """One call of an `mhla` module.

    Attributes:
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        heads: Heads of the original attention `[B, T, H, V]`.
        held_out: Which samples are held out, BoolTensor `[B]`.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
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
                attended = self.mhla.attention_parts(*call.args, **call.kwargs, attended_alone=True).attended
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
        self._moments = [Moments(channels, columns, sums_device(self.mhla.mixing.device)) for _ in range(2)]

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
            alone = self.mhla.window_gain is None
            parts = self.mhla.attention_parts(*call.args, **call.kwargs, attended_alone=alone)
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


@torch.no_grad()
def fit_heads(layer: AttentionLayer, calls: Sequence[HeadsCall], own: Changes) -> Changes:
    """New values for the convolution and the gains of a layer, where it has such and the held-out error falls.

    Args:
        layer: The layer.
        calls: Its calls.
        own: Other values for parameters of `mhla`.
    """
    if not HeadsFit.applies(layer):
        return {}
    fit = HeadsFit(layer, own)
    for call in calls:
        fit.observe(call)
    with swapped_parameters(own):
        return fit.solve().changes


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
