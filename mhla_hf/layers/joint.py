# SPDX-License-Identifier: Apache-2.0
"""MHLA over a grid with text beside it: joint attention, where text and grid see each other and themselves.

Text tokens have no place on the grid. With `text="softmax"` they stay exact: their queries attend to all tokens by
softmax, and a query of the grid is answered by softmax over the text and by MHLA over the grid,

    o_t = a_t · softmax over text + (1 - a_t) · MHLA over the grid,    a_t = Z_text / (Z_text + Z_grid)

where Z is the sum of exp(scale · q·k) over the keys of each part. With softmax over the grid in place of MHLA, this is
softmax attention over all tokens. Z_grid is estimated by landmarks, the means of the keys of MHLA's blocks, as
exp(b) Σ_m N_m exp(scale · q·mean_m) with a learned b for each head, like the share of a softmax window (`window.py`).
Text and landmarks are the keys of one softmax, which costs 2 B T H (X + M) (K + V) operations. Tokens are widened by
channels, as many as make all widths equal and a multiple of 8. Two of them carry log N_m, in two parts since half
precision would round it too much in one, and hide padding, so that no mask keeps PyTorch from FlashAttention:

    query (1, 1, ..., q)    key of text (0 or -3e4, 0, ..., k)          value of text (1, 0, ..., v)
                            landmark    (high, low, ..., mean_m)        landmark      (0, 1, ..., 0)

With `text="block"` the text is a block of its own in MHLA.

Shape letters: B batch, X text tokens, T tokens of the grid, H heads, K query/key width, V value width, M blocks, W
width of widened tokens.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from ..config import MHLAConfig
from ..layouts.blocks import BlockLayout, cached, positive_axes
from ..ops.definitions import FEATURE_MAPS, NORMALIZERS
from ..ops.operands import autocast_type, check_layout, head_blocks
from ..ops.sharded import TokenShard
from .fused import AttentionParts, PairwiseRotary
from .mhla import MHLA
from .mixing import features_and_normalizer, layout_at
from .window import join_window


# In a channel of the key: small enough that the weight of the token is 0, and within the range of float16.
_HIDDEN = -3e4
# Queries of a sample that the bias of the text is fitted on; each meets all keys.
_BIAS_QUERIES = 64


@dataclass(frozen=True)
class TextTokens:
    """The text beside a grid.

    Attributes:
        query: `[B, X, H, K]`, normed as the model's own attention has it.
        key: `[B, X, H, K]`.
        value: `[B, X, H, V]`.
        hidden_states: The layer's input `[B, X, hidden]`, read by the output gate with `text="block"`.
        valid: BoolTensor `[B, X]`, False for padding; `None` for no padding.
        rotary: Rotates the text; `None` where the model rotates the grid alone.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    hidden_states: torch.Tensor | None = None
    valid: torch.Tensor | None = None
    rotary: PairwiseRotary | None = None

    def without_padding(self) -> TextTokens:
        """Zero the keys and values of padded tokens."""
        if self.valid is None:
            return self
        padding = ~self.valid[:, :, None, None]
        key, value = self.key.masked_fill(padding, 0), self.value.masked_fill(padding, 0)
        return dataclasses.replace(self, key=key, value=value)

    def attend(
        self, key: torch.Tensor, value: torch.Tensor, rotary: Any, query: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Softmax attention to text and grid.

        Args:
            key: Keys of the grid, `[B, T, H, K]`.
            value: Values of the grid, `[B, T, H, V]`.
            rotary: Rotates the grid; `None` for none.
            query: Queries of the grid, `[B, T, H, K]`; `None` for those of the text.

        Returns:
            `[B, T, H, V]` or `[B, X, H, V]` in the dtype of `value`. Padding attends like other text.
        """
        mask = None
        if self.valid is not None:
            mask = F.pad(self.valid, (0, key.shape[1]), value=True)[:, None, None]
        query = _rotated(self.rotary, self.query, value) if query is None else _rotated(rotary, query, value)
        keys = torch.cat([_rotated(self.rotary, self.key, value), _rotated(rotary, key, value)], dim=1)
        return _attend(query, keys, torch.cat([self.value.to(value.dtype), value], dim=1), mask)


class JointMHLA(MHLA):
    """[`MHLA`][mhla_hf.MHLA] over the grid of a joint sequence, with its text: see [`attend_jointly`].

    A call takes the tokens of the grid and `text`, and returns `[B, T, H, V]` for the grid; with `text="block"`
    `[B, X + T, H, V]`, text first.

    Parameters beside those of [`MHLA`][mhla_hf.MHLA]: with `text="softmax"`, `text_bias` `[H]`, added to the logarithm
    of what softmax over the grid is estimated to be. With `text="block"` the first row and column of `mixing` are
    those of the text. `normalizer_scale` `[H]`, or `[1]` for shared mixing weights, multiplies the mixing weights, and
    with them numerator and normaliser alike: calibration sets it such that the mean normaliser is 1, and `eps` a floor
    relative to that. It takes no gradient, or training would remove the floor.

    Args:
        config: The options.
        **widths: The other arguments of [`MHLA`][mhla_hf.MHLA], without `num_prefix_tokens`.
    """

    streams = ("hidden_states", "encoder_hidden_states")

    def __init__(self, config: MHLAConfig, **widths: Any) -> None:
        super().__init__(config, num_prefix_tokens=int(config.text == "block"), **widths)
        self.text_bias = nn.Parameter(torch.zeros(self.num_heads)) if config.text == "softmax" else None
        self.normalizer_scale = nn.Parameter(torch.ones(self.mixing.shape[0] if self.mixing.dim() > 2 else 1))

    def initial_tensor(self, name: str) -> torch.Tensor:
        """As in [`MHLA`][mhla_hf.MHLA]; `normalizer_scale` starts at one."""
        initial = super().initial_tensor(name)
        return torch.ones_like(initial) if name == "normalizer_scale" else initial

    def mixing_matrix(self, layout: BlockLayout | None = None, causal: bool | None = None) -> torch.Tensor:
        """Mixing weights of [`MHLA`][mhla_hf.MHLA], multiplied by the scale of the normaliser."""
        weights, scale = super().mixing_matrix(layout, causal), self.normalizer_scale.to(self.mixing)
        # A gradient of zero, not none: distributed training waits for those of all parameters.
        scale = scale.detach() + 0 * scale
        return weights * (scale[:, None, None] if weights.dim() > 2 else scale)

    def attention_parts(  # type: ignore[override]
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, text: TextTokens, **options: Any
    ) -> AttentionParts:
        """Attend, and return the parts of the output.

        Args:
            query: Queries of the grid, `[B, T, H, K]`.
            key: Keys `[B, T, H, K]`.
            value: Values `[B, T, H, V]`.
            text: The text.
            **options: As for [`MHLA`][mhla_hf.MHLA]: `grid`, `block_order`, `hidden_states`, `rotary` (a
                [`PairwiseRotary`] or `None`), `identity` and `attended_alone`.

        Returns:
            The parts of the grid's output; with `text="block"` those of text and grid, text first.

        Raises:
            ValueError: As for [`MHLA`][mhla_hf.MHLA], and for padded text with `text="block"` and options under which
                zeros count.
        """
        text = text.without_padding()
        if self.text_bias is None:
            if text.valid is not None:
                _check_takes_padding(self.config)
            tokens = (torch.cat(pair, dim=1) for pair in zip((text.query, text.key, text.value), (query, key, value)))
            return super().attention_parts(*tokens, **of_all_tokens(text, **options))
        parts = super().attention_parts(query, key, value, **options)
        if options.get("identity") or options.get("attended_alone"):
            return parts
        return dataclasses.replace(parts, text=self.text_parts(query, key, value, text=text, **options))

    def join(self, parts: AttentionParts) -> torch.Tensor:
        """The parts by their shares: window and convolution are of the grid, beside the text."""
        output = super().join(parts)
        if parts.text is None:
            return output
        assert self.text_bias is not None
        return join_window(output, parts.text, self.text_bias)

    def text_parts(  # type: ignore[override]
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        text: TextTokens,
        grid: Sequence[int],
        block_order: bool = False,
        rotary: PairwiseRotary | None = None,
        **unused: Any,
    ) -> torch.Tensor | None:
        """Softmax attention of the grid's queries to the text and to landmarks of the grid.

        Returns:
            `[B, T, H, W]` in the dtype of `value`: first the weights of the text and of the landmarks together, last
            the sum `[B, T, H, V]` of the text's values by their weights. `None` with `text="block"`.
        """
        if self.text_bias is None:
            return None
        scale = query.shape[3] ** -0.5
        width = -(-(2 + max(query.shape[3], value.shape[3])) // 8) * 8
        query = F.pad(_rotated(rotary, query, value), (width - query.shape[3], 0), value=1.0)
        means, counts = self._landmarks(_rotated(rotary, key, value), grid, block_order)
        logarithm = counts.log() / scale
        high = logarithm.to(value.dtype)
        low = (logarithm - high).to(value.dtype)
        batch, count, missing = value.shape[0], text.key.shape[1], width - key.shape[3]
        hidden = value.new_zeros(batch, count)
        if text.valid is not None:
            hidden = hidden.masked_fill(~text.valid, _HIDDEN)
        channels = [torch.cat([hidden, high.expand(batch, -1)], 1), F.pad(low.expand(batch, -1), (count, 0))]
        keys = torch.cat([_rotated(text.rotary, text.key, value), means.transpose(1, 2).to(value.dtype)], dim=1)
        added = F.pad(torch.stack(channels, dim=-1), (0, missing - 2))[:, :, None]
        keys = torch.cat([added.expand(*keys.shape[:3], missing), keys], dim=-1)
        is_text = torch.arange(keys.shape[1], device=value.device) < count
        missing = width - value.shape[3]
        shares = F.pad(torch.stack([is_text, ~is_text], dim=-1).to(value.dtype), (0, missing - 2))[None, :, None]
        values = F.pad(text.value.to(value.dtype), (0, 0, 0, 0, 0, len(counts)))
        values = torch.cat([shares.expand(*keys.shape[:3], missing), values], dim=-1)
        return _attend(query, keys, values, scale=scale)

    @torch.no_grad()
    def landmark_error(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        *,
        grid: Sequence[int],
        block_order: bool = False,
        rotary: PairwiseRotary | None = None,
        **unused: Any,
    ) -> torch.Tensor:
        """Compute by how much landmarks without a bias underestimate the grid's part of softmax attention.

        The mean over queries is the `text_bias` that fits them.

        Args:
            query: Some queries of the grid as they are rotated, `[B, N, H, K]`.
            key: Keys of the grid, `[B, T, H, K]`.
            grid: Number of tokens along each axis.
            block_order: Whether the tokens come block by block.
            rotary: Rotates the keys.

        Returns:
            log Z_grid less the logarithm of its estimate for each query, `[B, N, H]` in float32 or wider.
        """
        dtype = torch.promote_types(key.dtype, torch.float32)
        keys = (key if rotary is None else rotary(key)).to(dtype)
        means, counts = self._landmarks(keys, grid, block_order)
        query = query.to(dtype).transpose(1, 2) * query.shape[3] ** -0.5
        exact = (query @ keys.permute(0, 2, 3, 1)).logsumexp(-1)
        return (exact - (query @ means.mT + counts.log()).logsumexp(-1)).transpose(1, 2)

    @torch.no_grad()
    def mean_normalizer(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        *,
        grid: Sequence[int],
        block_order: bool = False,
        rotary: PairwiseRotary | None = None,
        **unused: Any,
    ) -> torch.Tensor:
        """Compute φ(q)·z̃, the divisor of MHLA, without `eps`.

        Args:
            query: Queries of the grid, `[B, T, H, K]`.
            key: Keys `[B, T, H, K]`.
            grid: Number of tokens along each axis.
            block_order: Whether the tokens come block by block.
            rotary: Rotates both.

        Returns:
            The mean over tokens, `[B, H]` in float32 or wider.
        """
        layout, dtype = self.layout_for(grid, block_order), torch.promote_types(key.dtype, torch.float32)
        sums = (
            head_blocks(features_and_normalizer(self.config, x.to(dtype), learned, rotary, None)[1], layout).sum(3)
            for x, learned in zip((query, key), self._feature_maps)
        )
        mixing = self.mixing_matrix(layout).to(dtype)
        of_queries, of_keys = sums
        return (of_queries * (mixing @ of_keys)).sum((2, 3)) / query.shape[1]

    @torch.no_grad()
    def fit_text(self, calls: Iterable[tuple[torch.Tensor, torch.Tensor, dict[str, Any]]]) -> dict[Any, torch.Tensor]:
        """New values for the bias of the text and the scale of the normaliser; none with `text="block"`.

        The bias is the mean over queries spread over the grid. The scale makes the mean normaliser 1.

        Args:
            calls: Queries, keys and keyword arguments of each call.
        """
        if self.text_bias is None:
            return {}
        errors, means = [], []
        for query, key, options in calls:
            means.append(self.mean_normalizer(query, key, **options))
            places = torch.linspace(0, query.shape[1] - 1, min(query.shape[1], _BIAS_QUERIES)).round().long()
            rotary = options["rotary"]
            query = (query if rotary is None else rotary(query))[:, places.to(query.device)]
            errors.append(self.landmark_error(query, key, **options).flatten(0, 1))
        changes: dict[Any, torch.Tensor] = {self.text_bias: torch.cat(errors).mean(0).to(self.text_bias)}
        if NORMALIZERS[self.config.normalizer].divides:
            mean = torch.cat(means).mean(0)
            scale = self.normalizer_scale / (mean if len(self.normalizer_scale) > 1 else mean.mean())
            # A head whose normaliser is 0 or below keeps its scale.
            is_sound = scale.isfinite() & (scale > 0)
            changes[self.normalizer_scale] = scale.to(self.normalizer_scale).where(is_sound, self.normalizer_scale)
        return changes

    def _landmarks(
        self, key: torch.Tensor, grid: Sequence[int], block_order: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Means of rotated keys by block `[B, H, M, K]`, and numbers of tokens `[M]`, in float32 or wider."""
        layout, dtype = self.layout_for(grid, block_order), torch.promote_types(key.dtype, torch.float32)
        counts = cached(_block_tokens, layout, dtype, key.device)
        with torch.autocast(autocast_type(key.device), enabled=False):
            return head_blocks(key, layout).sum(3, dtype=dtype) / counts[:, None], counts

    def _grid_layout(
        self, grid: Sequence[int] | None, num_tokens: int, shard: TokenShard | None, block_order: bool
    ) -> BlockLayout:
        if not self.num_prefix_tokens:
            return super()._grid_layout(grid, num_tokens, shard, block_order)
        # As many tokens of text as there are in this call.
        grid = positive_axes("grid", grid)
        count = num_tokens - math.prod(grid)
        if count < 1:
            raise ValueError(f"grid={grid} has {math.prod(grid)} tokens, but there are {num_tokens}, text included.")
        layout = layout_at(self.config, self.blocks, grid, count, block_order)
        check_layout(layout, self.config.normalizer, self.config.causal)
        return layout


def attend_jointly(
    layer: JointMHLA, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, text: TextTokens, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from grid and text to grid and text.

    Args:
        layer: The layer.
        query: Queries of the grid, `[B, T, H, K]`.
        key: Keys `[B, T, H, K]`.
        value: Values `[B, T, H, V]`.
        text: The text.
        **options: Further arguments of [`JointMHLA.attention_parts`].

    Returns:
        `[B, T, H, V]` for the grid and `[B, X, H, V]` for the text.
    """
    output = layer(query, key, value, text=text, **options)
    if layer.config.text == "block":
        of_text, output = output.split([text.key.shape[1], query.shape[1]], dim=1)
        return output, of_text
    if options.get("identity"):
        return output, text.value
    return output, text.without_padding().attend(key, value, options.get("rotary"))


def _rotated(rotary: PairwiseRotary | None, tokens: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Rotated tokens in the dtype of the values, as fused attention takes them."""
    return (tokens if rotary is None else rotary(tokens)).to(value.dtype)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Softmax attention of tokens `[B, T, H, K]`."""
    query, key, value = (tokens.transpose(1, 2) for tokens in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value, mask, scale=scale).transpose(1, 2)


def _block_tokens(layout: BlockLayout, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Number of tokens of each block, `[M]`."""
    return layout.block_tokens.to(device, dtype)


def of_all_tokens(
    text: TextTokens, rotary: PairwiseRotary | None = None, hidden_states: torch.Tensor | None = None, **options: Any
) -> dict[str, Any]:
    """Return options of a call for the tokens of the grid as those for the text and them."""
    if rotary is not None:
        cosine = text.rotary.cosine if text.rotary else rotary.cosine.new_ones(1, text.key.shape[1], 1, 1)
        sine = text.rotary.sine if text.rotary else rotary.sine.new_zeros(1, text.key.shape[1], 1, 1)
        pairs = ((cosine, rotary.cosine), (sine, rotary.sine))
        rotary = PairwiseRotary(*(torch.cat([x.expand(-1, -1, -1, y.shape[3]), y], dim=1) for x, y in pairs))
    if hidden_states is not None and text.hidden_states is not None:
        hidden_states = torch.cat([text.hidden_states, hidden_states], dim=1)
    return {"rotary": rotary, "hidden_states": hidden_states, **options}


def _check_takes_padding(config: MHLAConfig) -> None:
    """Check that zero keys and values of padding add nothing to any sum."""
    if not FEATURE_MAPS[config.feature_map].keeps_zero or config.feature_map_eps or config.window is not None:
        raise ValueError(
            "text='block' takes padded text with feature_map='relu', feature_map_eps=0 and no window only: convert "
            "with text='softmax'."
        )
