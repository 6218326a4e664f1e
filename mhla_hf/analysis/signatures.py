# SPDX-License-Identifier: Apache-2.0
"""Failure signatures: what goes wrong with MHLA layers, told by their weights and by their attention on a probe."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..layers.mhla import MHLA
from ..layers.mixing import effective_mixing
from ..layouts.blocks import BlockLayout
from ..layouts.sequences import extend_mixing
from ..ops import FEATURE_MAPS
from ..training.sharding import full_tensor
from .mixing import mean_distance, reference_layout
from .statistics import rank_bound
from .tokens import LayerTokens


logger = logging.getLogger(__name__)

SIGNATURES = {
    "uniform-mixing": "every block has the same mixing weight: the layer is plain linear attention",
    "lost-locality": "blocks attend farther away than equal mixing weights would, although they started local",
    "cancelling-mixing": "positive and negative mixing weights cancel, so that divisors come close to zero",
    "dead-mixing": "rows of mixing weights are zero: their blocks attend to nothing",
    "exploding-mixing": "rows of mixing weights have grown to a multiple of their start",
    "too-few-blocks": "the bound of the rank, Σ min(n_b, d), is far below the number of tokens",
    "unstable-normalizer": "the normaliser divides by almost nothing, or outputs grow with the number of tokens",
    "dead-features": "feature maps are zero for many tokens or channels",
    "non-finite-attention": "attention weights are NaN or infinite",
}
"""The failure signatures by name, and what they mean."""

# Relative deviation of a row's weights from equal ones, below which nothing tells them apart.
EVEN = 0.02
# Mean distance of the blocks attended to, over that of equal weights.
FAR = 1.1
# Sum of a row's weights over that of their absolute values, and the share of such rows.
CANCELLED, CANCELLED_ROWS = 0.05, 0.2
# Absolute sum of a row's weights; it starts at 1.
DEAD, EXPLODED = 1e-3, 100.0
# Bound of the rank over the number of tokens: too low whatever the layer has learned, and where the rank is at it.
LOW_BOUND, LOW_BOUND_REACHED, REACHED = 0.25, 0.5, 0.95
# Absolute weights over their divisor, divisors in units of eps, and the share of rows that have either.
AMPLIFIED, TINY, UNSTABLE_ROWS = 20.0, 10.0, 0.02
# Growth of outputs that nothing divides: from early to late tokens, and over texts so many times as long.
GROWTH, LONGER = 4.0, 8
# Share of queries, of keys, and of channels that are zero in some head.
DEAD_QUERIES, DEAD_KEYS, DEAD_CHANNELS = 0.1, 0.5, 0.5
# Tokens of a probe from which on such shares mean something.
FEW_TOKENS = 32


@dataclass(frozen=True)
class FailureSignature:
    """A sign of failure in one layer.

    Attributes:
        name: Name of the signature, a key of `SIGNATURES`.
        layer: Name of the attention module.
        figure: What was measured; `None` where it is not finite.
        message: One line that says what was measured, and what to do.
    """

    name: str
    layer: str
    figure: float | None
    message: str

    def __str__(self) -> str:
        return f"{self.layer}: {self.name}: {self.message}"

    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON types."""
        return asdict(self)


@torch.no_grad()
def weight_signatures(
    mhla: MHLA,
    layer: str,
    *,
    mixing: torch.Tensor | None = None,
    linear: bool = False,
    settled: bool | None = None,
) -> list[FailureSignature]:
    """Failure signatures that a layer's options and mixing weights show, without running it.

    Args:
        mhla: The layer; on the meta device, if `mixing` is given.
        layer: Its name.
        mixing: The stored mixing weights, if not the layer's own.
        linear: Whether the host model's own attention is linear, as SANA's: equal weights are no failure then.
        settled: Whether weights that started equal should have left that by now; `None` for whether they have moved
            at all, since weights that never trained are no failure.
    """
    config, layout = mhla.config, reference_layout(mhla)
    found: list[FailureSignature] = []

    def add(name: str, figure: float, message: str) -> None:
        found.append(FailureSignature(name, layer, figure if math.isfinite(figure) else None, message))

    stored = full_tensor(mhla.mixing if mixing is None else mixing)
    first = mhla.initial_tensor("mixing")
    moved = not torch.equal(stored, first.to(stored.dtype))
    weights, initial = (_on_grid(mhla, tensor) for tensor in (stored.double(), first.double()))
    if not torch.isfinite(weights).all():
        add("non-finite-attention", math.nan, "its mixing weights are not finite; take weights from before that")
        return found
    found += _block_signatures(mhla, layer, layout, linear)
    if config.is_sequence and config.normalizer == "none" and not config.output_norm:
        growth = _growth(weights, config.causal)
        if growth > GROWTH:
            add(
                "unstable-normalizer",
                growth,
                f"nothing divides its outputs, which are {growth:.1f} times as large for texts {LONGER} times as long "
                "as its mixing weights are for; use normalizer='query' or output_norm=True",
            )
    uneven, uneven_at_first = _unevenness(weights, config.causal), _unevenness(initial, config.causal)
    judged = uneven_at_first >= EVEN or (moved if settled is None else settled)
    if uneven < EVEN and judged and not linear:
        add(
            "uniform-mixing",
            uneven,
            f"its mixing weights differ from equal ones by {uneven:.2%}, so it is plain linear attention; start from "
            "mixing_init='linear', and let the mixing weights train at a higher rate",
        )
    elif EVEN <= uneven_at_first < math.inf:
        ahead = _distance_over_equal(weights, layout, config.causal)
        if ahead > FAR and _distance_over_equal(initial, layout, config.causal) < 1:
            add(
                "lost-locality",
                ahead,
                f"its blocks attend {ahead:.2f} times as far as under equal weights; lower the learning rate of the "
                "mixing weights, or start them anew",
            )
    rows = weights.abs().sum(-1)
    if config.normalizer != "none":
        even = (weights.sum(-1).abs() < CANCELLED * rows).double().mean().item()
        if even > CANCELLED_ROWS:
            add(
                "cancelling-mixing",
                even,
                f"in {even:.0%} of its rows positive and negative mixing weights cancel, and the normaliser divides "
                "by what is left; use mixing_constraint='nonnegative' or normalizer='none' with output_norm=True",
            )
    if rows.min() < DEAD:
        dead = (rows < DEAD).double().mean().item()
        add("dead-mixing", dead, f"{dead:.0%} of its rows of mixing weights are zero; start them anew")
    if rows.max() > EXPLODED:
        largest = rows.max().item()
        add(
            "exploding-mixing",
            largest,
            f"a row of its mixing weights adds up to {largest:.3g}, from 1 at the start; lower the learning rate of "
            "the mixing weights, or clip gradients",
        )
    return found


def _block_signatures(mhla: MHLA, layer: str, layout: BlockLayout, linear: bool) -> list[FailureSignature]:
    """Too few blocks for the token grid that the layer was made for; it may name none."""
    blocks, tokens = layout.num_blocks, layout.num_tokens
    if mhla.config.causal or mhla.window_gain is not None or tokens == blocks or (linear and blocks == 1):
        return []
    features = mhla.head_dim * FEATURE_MAPS[mhla.config.feature_map].width_factor
    bound = rank_bound(layout, features)
    if bound >= LOW_BOUND * tokens:
        return []
    return [_too_few_blocks(layer, bound, tokens, blocks)]


def _too_few_blocks(layer: str, bound: float, tokens: float, blocks: float) -> FailureSignature:
    share = LOW_BOUND if bound < LOW_BOUND * tokens else LOW_BOUND_REACHED
    # The root of the number of tokens, unless narrow heads need more to leave the limit behind.
    wanted = max(math.isqrt(round(tokens)), math.floor(share * tokens * blocks / bound) + 1)
    message = (
        f"the rank of its attention is at most {bound:.0f} for {tokens:.0f} tokens in {blocks:.0f} "
        f"block{'s' * (blocks != 1)}; take more blocks, about {wanted}"
    )
    return FailureSignature("too-few-blocks", layer, bound, message)


@torch.no_grad()
def probe_figures(sample: LayerTokens, heads: Iterable[int], rows: torch.Tensor | None) -> dict[str, float]:
    """Figures of a sample of an MHLA layer that tell failures: shares of rows, queries, keys and channels.

    Args:
        sample: The sample.
        heads: The heads to look at.
        rows: Query tokens, LongTensor `[R]`; `None` for all T.
    """
    config = sample.mhla.config
    query, key = (_plain(sample, name)[0].abs() <= config.feature_map_eps for name in ("query", "key"))
    figures = {
        "dead_queries": query.all(-1).double().mean(0).max().item(),
        "dead_keys": key.all(-1).double().mean(0).max().item(),
        "dead_channels": (query.all(0) | key.all(0)).double().mean(-1).max().item(),
        "blocks": float(sample.layout.num_blocks),
    }
    alive = ~query.all(-1) if rows is None else ~query.all(-1)[rows.to(query.device)]
    unstable, growth = [], []
    for head in heads:
        total, divisor = sample.normalizer_terms(head=head, rows=rows)
        if divisor is not None:
            bad = (total > AMPLIFIED * divisor.abs()) | (divisor.abs() < TINY * config.eps) | ~divisor.isfinite()
            unstable.append((bad & alive[:, head]).double().mean())
        elif sample.causal and sample.mhla.output_norm is None and sample.layout.num_blocks >= 4:
            # A quarter is at least a block; inside of one, outputs grow in any case.
            quarter = max(1, len(total) // 4)
            growth.append(total[-quarter:].mean() / total[:quarter].mean().clamp_min(1e-30))
    if unstable:
        figures["unstable_rows"] = torch.stack(unstable).mean().item()
    if growth:
        figures["growth"] = torch.stack(growth).mean().item()
    return figures


def probe_signatures(
    layer: str, facts: Mapping[str, Any], bound: int | None = None, linear: bool = False
) -> list[FailureSignature]:
    """Failure signatures that a layer's attention on a probe shows.

    Args:
        layer: Name of the layer.
        facts: Its entry in a row of [`AttentionTracker`][mhla_hf.analysis.AttentionTracker], with `probe_figures`.
        bound: Bound of the rank for all rows of the longest sample; `None` for none.
        linear: Whether the host model's own attention is linear, as SANA's.
    """
    if facts["rank"] is None:
        text = "its attention on the probe is not finite; lower the learning rate, and take weights from before that"
        return [FailureSignature("non-finite-attention", layer, None, text)]
    found = []

    def add(name: str, figure: float, message: str) -> None:
        found.append(FailureSignature(name, layer, figure, message))

    if bound is not None and not (linear and facts["blocks"] == 1):
        # The rank of some rows says nothing of a bound above their number.
        reached = bound <= LOW_BOUND_REACHED * facts["rows"] and facts["rank"] >= REACHED * bound
        if bound < LOW_BOUND * facts["tokens"] or reached:
            found.append(_too_few_blocks(layer, bound, facts["tokens"], facts["blocks"]))
    if facts.get("unstable_rows", 0.0) > UNSTABLE_ROWS:
        share = facts["unstable_rows"]
        add(
            "unstable-normalizer",
            share,
            f"in {share:.1%} of its rows the normaliser divides by almost nothing; use "
            "mixing_constraint='nonnegative', a positive feature map, or normalizer='none' with output_norm=True",
        )
    elif (facts.get("growth") or 0.0) > GROWTH:
        figure = facts["growth"]
        add(
            "unstable-normalizer",
            figure,
            f"nothing divides its outputs, which are {figure:.1f} times as large for late tokens as for early ones; "
            "use normalizer='query' or output_norm=True",
        )
    limits = {"dead_queries": DEAD_QUERIES, "dead_keys": DEAD_KEYS, "dead_channels": DEAD_CHANNELS}
    dead = [f"{facts[name]:.0%} of the {name[5:]}" for name, limit in limits.items() if facts[name] > limit]
    if dead and facts["tokens"] >= FEW_TOKENS:
        figure = max(facts[name] for name in limits)
        text = (
            f"the features of {' and '.join(dead)} of a head are zero; use feature_map='elu' or another without zeros"
        )
        add("dead-features", figure, text)
    return found


def _plain(sample: LayerTokens, name: str) -> torch.Tensor:
    """Features before rotary embedding."""
    plain = sample.features[f"normalizer_{name}"]
    features = sample.features[name] if plain is None else plain
    assert features is not None
    return features


def _on_grid(mhla: MHLA, stored: torch.Tensor) -> torch.Tensor:
    """Effective weights among the blocks of the grid, `[M, M]` or `[H, M, M]`; tokens before it have none."""
    weights = effective_mixing(mhla.config, stored)
    if mhla.num_prefix_tokens:
        weights = weights[..., 1:, 1:]
    return weights.tril() if mhla.config.causal else weights


def _unevenness(weights: torch.Tensor, causal: bool) -> float:
    """How far the weights of a row are from equal ones, relative to their size: the most of any head.

    One block has none, and counts as infinitely uneven, as do rows of zeros.
    """
    count = weights.shape[-1]
    if count == 1:
        return math.inf
    visible = torch.ones(count, count, dtype=torch.double)
    visible = visible.tril() if causal else visible
    several = visible.sum(-1) > 1
    mean = weights.sum(-1, keepdim=True) / visible.sum(-1, keepdim=True)
    size = weights.norm(dim=-1)
    deviation = ((weights - mean) * visible).norm(dim=-1)
    shares = torch.where(size > 0, deviation / size, math.inf)[..., several]
    return shares.square().mean(-1).sqrt().max().item()


def _growth(weights: torch.Tensor, causal: bool) -> float:
    """Sum of a row's absolute weights for longer texts over that at the length that the weights are for."""
    count = weights.shape[-1]
    longer = extend_mixing(weights, LONGER * count, causal=causal)
    return (longer[..., -1, :].abs().sum(-1) / weights[..., -1, :].abs().sum(-1)).max().item()


def _distance_over_equal(weights: torch.Tensor, layout: BlockLayout, causal: bool) -> float:
    """Mean distance of the blocks attended to, over that under equal weights; of heads, all together."""
    if layout.num_prefix_blocks:
        layout = BlockLayout(layout.grid, blocks=layout.blocks)
    total = weights.abs().sum(-1, keepdim=True)
    shares = weights.abs() / torch.where(total > 0, total, 1.0)
    equal = torch.ones(weights.shape[-2:], dtype=torch.double)
    equal = equal.tril() if causal else equal
    return mean_distance(shares, layout) / mean_distance(equal / equal.sum(-1, keepdim=True), layout)
