# SPDX-License-Identifier: Apache-2.0
"""Closed-form fits of an MHLA layer to the heads of the original attention.

Each fit sees the layer's calls one by one and keeps sums only. Of the samples some are held out: a fit is made on the
others; strengths, temperatures and whether to change anything are chosen by the error on those held out.

Shapes: B batch, T tokens, H heads, H_kv key/value heads, V value width, C = H·V channels, D width of the output,
L weights of the convolution for each channel. Of sums: C sets of rows (one for each channel, say), N rows, P columns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..layers import AttentionParts
from ..matching.ridge import Moments, solve_ridge, sums_device
from ..ops.sums import HeadGroups, repeat_heads
from ..training.layers import AttentionLayer, Changes, swapped_parameters, valid_tokens


TEMPERATURES = (1.0, 0.63, 1.6, 2.5, 4.0, 6.3, 10.0)
"""Factors on the weights of a hedgehog feature map that are tried; the first is what it is."""
HEADS_STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1)
# Rows with their neighbours take many times the memory of the values: this many numbers are made at a time.
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

    def of_own_heads(self, groups: HeadGroups | None) -> HeadsCall:
        """The call without the heads of a layer that are softmax in any case."""
        if groups is None:
            return self
        kwargs = {name: value for name, value in self.kwargs.items() if name != "exact"}
        return dataclasses.replace(self, kwargs=kwargs, heads=groups.split(self.heads, 2)[0])

    @property
    def valid(self) -> torch.Tensor | None:
        """BoolTensor `[B, T]`, False for padding; `None` for no padding."""
        valid, _ = valid_tokens(self.args, self.kwargs)
        # Heads of joint attention are those of the grid, but for text that is a block of MHLA.
        return None if valid is None else valid[:, -self.heads.shape[1] :]

    @property
    def value(self) -> torch.Tensor:
        """`[B, T, H_kv, V]`."""
        return self.args[2] if len(self.args) > 2 else self.kwargs["value"]

    @property
    def fitted(self) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Queries and keys of the samples that are not held out, and the keyword arguments."""
        query, key = (tokens[~self.held_out] for tokens in self.args[:2])
        return query, key, self.kwargs

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

    Query heads that share keys share the factor. The error is that of MHLA's own heads, with the text if there is any.
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
        text = self.mhla.text_parts(*call.args, **call.kwargs)
        for index, temperature in enumerate(TEMPERATURES):
            with swapped_parameters({weight: weight * temperature for weight in weights}):
                attended = self.mhla.attention_parts(*call.args, **call.kwargs, attended_alone=True).attended
            attended = self.mhla.join(AttentionParts(attended, None, None, text=text))
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


class HeadsFit:
    """The convolution of the values by ridge regression towards zero, for each channel.

    The columns of a channel are the neighbours of the token, and what MHLA and window leave of the original's heads.

    Args:
        layer: A layer with a convolution.
        own: Other values for parameters of `mhla`.
    """

    def __init__(self, layer: AttentionLayer, own: Changes) -> None:
        lepe = layer.mhla.lepe
        assert lepe is not None and lepe.bias is not None
        self.mhla, self.lepe, self.own = layer.mhla, lepe, own
        columns, device = lepe.weight[0].numel() + 1, sums_device(lepe.weight.device)
        self._moments = [Moments(len(lepe.weight), columns, device) for _ in range(2)]

    def observe(self, call: HeadsCall) -> None:
        """Add the rows of one call."""
        with swapped_parameters(self.own):
            parts = self.mhla.attention_parts(*call.args, **call.kwargs)
            left = call.heads - self.mhla.join(dataclasses.replace(parts, positional=None))
        # The convolution leaves tokens before the grid alone.
        start = self.mhla.num_prefix_tokens
        for held_out, moments in zip((False, True), self._moments):
            if not (call.held_out == held_out).any():
                continue
            target = call.rows(left.flatten(2), held_out, start).T
            value = repeat_heads(call.value, self.mhla.num_heads, 2)[call.held_out == held_out, start:]
            image = value.flatten(2).transpose(1, 2).unflatten(2, tuple(call.kwargs["grid"]))
            patches = _patches(image, self.lepe.weight.shape[-1])
            axes = len(patches.shape) // 2 - 1
            dtype = torch.promote_types(target.dtype, torch.float32)
            step = max(1, _ROW_NUMBERS // (target.shape[1] * moments.mean.shape[1]))
            for channel in range(0, len(target), step):
                chosen = slice(channel, channel + step)
                near = patches[chosen].flatten(2 + axes).flatten(1, 1 + axes)
                moments.add(torch.cat([near.to(dtype), target[chosen, :, None].to(dtype)], dim=-1), channel)

    def solve(self) -> tuple[Changes, float | None]:
        """New parameters and the strength of their ridge; none where the held-out error does not fall."""
        least, chosen = self._error(self.lepe.weight.detach(), self.lepe.bias.detach()), None
        changes: Changes = {}
        products, mean = self._moments[0].products(centred=True), self._moments[0].mean
        for strength in HEADS_STRENGTHS:
            solved = solve_ridge(products[:, :-1, :-1], products[:, :-1, -1:], strength)[..., 0]
            weight = solved.reshape(self.lepe.weight.shape).to(self.lepe.weight)
            bias = (mean[:, -1] - (weight.flatten(1).to(mean) * mean[:, :-1]).sum(-1)).to(self.lepe.bias)
            error = self._error(weight, bias)
            if error < least:
                least, chosen, changes = error, strength, {self.lepe.weight: weight, self.lepe.bias: bias}
        return changes, chosen

    def _error(self, weight: torch.Tensor, bias: torch.Tensor) -> float:
        """Squared held-out error with a weight and a bias of the convolution."""
        moments = self._moments[1]
        columns = -weight.flatten(1).to(moments.mean)
        coefficients = torch.cat([columns, torch.ones_like(columns[:, :1])], dim=-1)
        return float(moments.squared_sums(coefficients[:, None], -bias.to(columns)[:, None]).sum())


@torch.no_grad()
def fit_heads(layer: AttentionLayer, calls: Sequence[HeadsCall], own: Changes) -> Changes:
    """New values for the convolution of a layer, where it has one and the held-out error falls.

    Not beside text, by whose share its part of the output varies from token to token.

    Args:
        layer: The layer.
        calls: Its calls.
        own: Other values for parameters of `mhla`.
    """
    if layer.mhla.lepe is None or layer.mhla.streams:
        return {}
    fit = HeadsFit(layer, own)
    for call in calls:
        fit.observe(call)
    with swapped_parameters(own):
        return fit.solve()[0]


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
