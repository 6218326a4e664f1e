# SPDX-License-Identifier: Apache-2.0
"""Failure signatures: what goes wrong with MHLA layers, seen in their weights and in their attention on a probe."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..conversion.transformers_planning import StoredNames
from ..integrations.transformers.configuration import max_positions
from ..layers.mhla import MHLA
from ..layers.mixing import effective_mixing
from ..layouts.blocks import BlockLayout
from ..models.directory import ModelDirectory
from ..ops import FEATURE_MAPS
from ..ops.band import extend_mixing
from ..training.layers import mhla_layers
from ..training.processes import full_tensor
from .matrices import LayerTokens
from .statistics import mean_distance, normalized, rank_bound, reference_layout


SIGNATURES = {
    "uniform-mixing": "its mixing weights differ from equal ones by {figure:.2%}, so it is plain linear attention; "
    "start from mixing_init='linear', and train the mixing weights at a higher rate",
    "lost-locality": "its blocks attend {figure:.2f} times as far as under equal weights; lower the learning rate of "
    "the mixing weights, or reinitialise them",
    "cancelling-mixing": "in {figure:.0%} of its rows positive and negative mixing weights cancel, and the normaliser "
    "divides by what is left; use mixing_constraint='nonnegative' or normalizer='none' with output_norm=True",
    "dead-mixing": "{figure:.0%} of its rows of mixing weights are zero; reinitialise them",
    "exploding-mixing": "a row of its mixing weights adds up to {figure:.3g}, from 1 at the start; lower the learning "
    "rate of the mixing weights, or clip gradients",
    "heavy-tail": "blocks beyond those of its mixing weights get {figure:.1f} times as much weight as all of these at "
    "{tokens} tokens; take mixing_tail='decay' or 'none', or train on longer texts",
    "too-few-blocks": "the rank of its attention is at most {figure:.0f} for {tokens:.0f} tokens in {blocks}; take "
    "more blocks, about {wanted}",
    "unstable-normalizer": "in {figure:.1%} of its rows the normaliser divides by almost nothing; use "
    "mixing_constraint='nonnegative', a positive feature map, or normalizer='none' with output_norm=True",
    "dead-features": "the features of {dead} of a head are zero; use feature_map='elu' or another without zeros",
    "non-finite-attention": "its {part} not finite; lower the learning rate, and go back to earlier weights",
}
"""The failure signatures by name: what was measured, and what to do."""
_GROWING = (
    "nothing divides its outputs, which are {figure:.1f} times as large for {longer}; use normalizer='query' or "
    "output_norm=True"
)

# Relative deviation of a row's weights from equal ones, below which nothing tells them apart.
EVEN = 0.02
# Mean distance of the blocks attended to, over that of equal weights.
FAR = 1.1
# Sum of a row's weights over that of their absolute values, and the share of such rows.
CANCELLED, CANCELLED_ROWS = 0.05, 0.2
# Absolute sum of a row's weights; it starts at 1.
DEAD, EXPLODED = 1e-3, 100.0
# Bound of the rank over the number of tokens: too low for anything a layer could learn, and where the rank is at it.
LOW_BOUND, LOW_BOUND_REACHED, REACHED = 0.25, 0.5, 0.95
# Absolute weights over their divisor, divisors in units of eps, and the share of rows that have either.
AMPLIFIED, TINY, UNSTABLE_ROWS = 20.0, 10.0, 0.02
# Growth of outputs that nothing divides: from early to late tokens, and over texts this many times as long.
GROWTH, LONGER = 4.0, 8
# Share of queries, of keys, and of channels that are zero in some head.
DEAD_QUERIES, DEAD_KEYS, DEAD_CHANNELS = 0.1, 0.5, 0.5
# Weight of the blocks beyond the stored ones over that of these; harm was seen between 3 and 5.
HEAVY = 4.0
# Tokens of a probe from which on such shares mean something.
FEW_TOKENS = 32


@dataclass(frozen=True)
class FailureSignature:
    """A sign of failure in one layer.

    Attributes:
        name: Name of the signature, such as `"uniform-mixing"`.
        layer: Name of the attention module.
        figure: What was measured; `None` if it is not finite.
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


def _signature(name: str, layer: str, figure: float, text: str = "", **words: Any) -> FailureSignature:
    message = (text or SIGNATURES[name]).format(figure=figure, **words)
    return FailureSignature(name, layer, figure if math.isfinite(figure) else None, message)


@torch.no_grad()
def weight_signatures(
    mhla: MHLA,
    layer: str,
    *,
    mixing: torch.Tensor | None = None,
    decay: torch.Tensor | None = None,
    settled: bool | None = None,
    tokens: int | None = None,
) -> list[FailureSignature]:
    """Find failure signatures in a layer's options and mixing weights, without running it.

    Args:
        mhla: The layer; on the meta device, if `mixing` is given.
        layer: Its name.
        mixing: The stored mixing weights, if not the layer's own.
        decay: Its stored `mixing_decay` beside them, if it has one.
        settled: Whether weights that were initialised as equal should differ by now; `None` for whether they have
            changed, since untrained weights are no failure.
        tokens: Number of tokens of the longest text; `None` for what the mixing weights reach.
    """
    config, layout, linear = mhla.config, reference_layout(mhla), mhla.replaces_linear
    stored, first = full_tensor(mhla.mixing if mixing is None else mixing), mhla.initial_tensor("mixing")
    moved = not torch.equal(stored, first.to(stored.dtype))
    weights, initial = (_on_grid(mhla, tensor) for tensor in (stored.double(), first.double()))
    if not torch.isfinite(weights).all():
        return [_signature("non-finite-attention", layer, math.nan, part="mixing weights are")]
    decay = mhla.mixing_decay if decay is None else decay
    # A file may lack it, which is another one's to say.
    tail = None if decay is None or decay.is_meta else full_tensor(decay).double().sigmoid()
    if tail is not None and not torch.isfinite(tail).all():
        return [_signature("non-finite-attention", layer, math.nan, part="decays of mixing weights are")]
    tail = torch.zeros(1, dtype=torch.double) if config.mixing_tail == "none" else tail
    blocks, size = layout.num_blocks, layout.num_tokens
    is_bounded = not (config.causal or mhla.window_bias is not None or size == blocks or (linear and blocks == 1))
    bound = rank_bound(layout, mhla.head_dim * FEATURE_MAPS[config.feature_map].width_factor)
    is_low = is_bounded and bound < LOW_BOUND * size
    found = [_too_few_blocks(layer, bound, size, blocks)] if is_low else []

    def add(name: str, figure: float, text: str = "", **words: Any) -> None:
        found.append(_signature(name, layer, figure, text, **words))

    if config.is_sequence and config.normalizer == "none" and not config.output_norm:
        growth = _growth(weights, config.causal, tail)
        if growth > GROWTH:
            longer = f"texts {LONGER} times as long as its mixing weights are for"
            add("unstable-normalizer", growth, _GROWING, longer=longer)
    uneven, uneven_at_first = _unevenness(weights, config.causal), _unevenness(initial, config.causal)
    judged = uneven_at_first >= EVEN or (moved if settled is None else settled)
    # Equal weights are what replaces linear attention exactly.
    if uneven < EVEN and judged and not linear:
        add("uniform-mixing", uneven)
    elif EVEN <= uneven_at_first < math.inf:
        ahead = _distance_over_equal(weights, layout, config.causal)
        if ahead > FAR and _distance_over_equal(initial, layout, config.causal) < 1:
            add("lost-locality", ahead)
    rows = weights.abs().sum(-1)
    cancelled = (weights.sum(-1).abs() < CANCELLED * rows).double().mean().item()
    if config.normalizer != "none" and cancelled > CANCELLED_ROWS:
        add("cancelling-mixing", cancelled)
    # The first rows of weights by distance are as small as their few weights.
    rows = rows[..., -1:] if config.mixing_storage == "distance" else rows
    if rows.min() < DEAD:
        add("dead-mixing", (rows < DEAD).double().mean().item())
    if rows.max() > EXPLODED:
        add("exploding-mixing", rows.max().item())
    if config.causal and config.mixing_tail != "none" and config.block_size is not None and tokens is not None:
        share = _tail_share(weights, tail, -(-tokens // config.block_size[0]))
        if share > HEAVY:
            add("heavy-tail", share, tokens=f"{tokens:,}")
    return found


def _too_few_blocks(layer: str, bound: float, tokens: float, blocks: float) -> FailureSignature:
    share = LOW_BOUND if bound < LOW_BOUND * tokens else LOW_BOUND_REACHED
    # The root of the number of tokens, unless narrow heads need more to leave the limit behind.
    wanted = max(math.isqrt(round(tokens)), math.floor(share * tokens * blocks / bound) + 1)
    words = f"{blocks:.0f} block{'s' * (blocks != 1)}"
    return _signature("too-few-blocks", layer, bound, tokens=tokens, blocks=words, wanted=wanted)


@torch.no_grad()
def probe_figures(sample: LayerTokens, rows: torch.Tensor | None) -> dict[str, float]:
    """Measure what reveals failures in a sample of an MHLA layer: shares of rows, queries, keys and channels.

    Args:
        sample: The sample.
        rows: Query tokens, LongTensor `[R]`; `None` for all T.
    """
    config = sample.mhla.config
    query, key = (_unrotated(sample, name)[0].abs() <= config.feature_map_eps for name in ("query", "key"))
    figures = {
        "dead_queries": query.all(-1).double().mean(0).max().item(),
        "dead_keys": key.all(-1).double().mean(0).max().item(),
        "dead_channels": (query.all(0) | key.all(0)).double().mean(-1).max().item(),
        "blocks": float(sample.layout.num_blocks),
    }
    alive = ~query.all(-1) if rows is None else ~query.all(-1)[rows.to(query.device)]
    unstable, growth = [], []
    for head in range(sample.num_heads):
        total, divisor = sample.normalizer_terms(head=head, rows=rows)
        if divisor is not None:
            bad = (total > AMPLIFIED * divisor.abs()) | (divisor.abs() < TINY * config.eps) | ~divisor.isfinite()
            unstable.append((bad & alive[:, head]).double().mean())
        elif sample.causal and sample.mhla.output_norm is None and sample.layout.num_blocks >= 4:
            # A quarter is at least a block; within one, outputs grow in any case.
            quarter = max(1, len(total) // 4)
            growth.append(total[-quarter:].mean() / total[:quarter].mean().clamp_min(1e-30))
    means = {"unstable_rows": unstable, "growth": growth}
    return figures | {name: torch.stack(values).mean().item() for name, values in means.items() if values}


def probe_signatures(
    layer: str, facts: Mapping[str, Any], bound: int | None = None, linear: bool = False
) -> list[FailureSignature]:
    """Find failure signatures in a layer's attention on a probe.

    Args:
        layer: Name of the layer.
        facts: Its entry in a row of [`AttentionTracker`][mhla_hf.analysis.AttentionTracker], with `probe_figures`.
        bound: Bound of the rank for all rows of the longest sample; `None` for none.
        linear: Whether the host model's own attention is linear, as in SANA.
    """
    if facts["rank"] is None:
        return [_signature("non-finite-attention", layer, math.nan, part="attention on the probe is")]
    found = []
    if bound is not None and not (linear and facts["blocks"] == 1):
        # The rank of some rows says nothing about a bound above their number.
        reached = bound <= LOW_BOUND_REACHED * facts["rows"] and facts["rank"] >= REACHED * bound
        if bound < LOW_BOUND * facts["tokens"] or reached:
            found.append(_too_few_blocks(layer, bound, facts["tokens"], facts["blocks"]))
    unstable, growth = facts.get("unstable_rows", 0.0), facts.get("growth") or 0.0
    if unstable > UNSTABLE_ROWS:
        found.append(_signature("unstable-normalizer", layer, unstable))
    elif growth > GROWTH:
        longer = "late tokens as for early ones"
        found.append(_signature("unstable-normalizer", layer, growth, _GROWING, longer=longer))
    limits = {"dead_queries": DEAD_QUERIES, "dead_keys": DEAD_KEYS, "dead_channels": DEAD_CHANNELS}
    dead = [f"{facts[name]:.0%} of the {name[5:]}" for name, limit in limits.items() if facts[name] > limit]
    if dead and facts["tokens"] >= FEW_TOKENS:
        figure = max(facts[name] for name in limits)
        found.append(_signature("dead-features", layer, figure, dead=" and ".join(dead)))
    return found


def directory_signatures(root: str | Path) -> list[tuple[Path, FailureSignature]]:
    """Find failure signatures in the mixing weights of the MHLA models of a directory.

    Mixing weights are read one layer at a time, and no others; models are built on the meta device.

    Args:
        root: A pipeline of diffusers, or a model of diffusers or transformers, that
            [`check_directory`][mhla_hf.hub.checks.check_directory] finds nothing wrong with.

    Returns:
        What was found, with the folder of the model; nothing where there is no MHLA model.

    Raises:
        ValueError: If a file is missing, damaged, or of another model than it says.
    """
    try:
        models = ModelDirectory.read(Path(root)).mhla_models
    except ValueError:
        # No model that can be MHLA.
        return []
    return [(model.folder, signature) for model in models for signature in _stored_signatures(model)]


def _stored_signatures(directory: ModelDirectory) -> list[FailureSignature]:
    model = directory.build()
    entries = {entry.name: entry for entry in directory.weight_sets()[0].entries()}
    stored = {name: name for name in entries}
    if directory.is_transformers:
        stored = {name: file for file, name in StoredNames(model, list(entries)).loaded.items()}
    tokens = max_positions(model.config.get_text_config()) if directory.is_transformers else None
    found = []
    for layer in mhla_layers(model):
        mixing, decay = (stored.get(f"{layer.name}.mhla.{name}") for name in ("mixing", "mixing_decay"))
        if mixing is not None:
            found += weight_signatures(
                layer.mhla, layer.name, mixing=entries[mixing].load(),
                decay=None if decay is None else entries[decay].load(), tokens=tokens,
            )  # fmt: skip
    return found


def _unrotated(sample: LayerTokens, name: str) -> torch.Tensor:
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


def _tail_share(weights: torch.Tensor, decay: torch.Tensor | None, num_blocks: int) -> float:
    """Weight of the blocks from the farthest stored distance on over that of nearer ones: the most of any head."""
    beyond, by_distance = num_blocks - weights.shape[-1] + 1, weights[..., -1, :].abs().flip(-1)
    if beyond < 1 or by_distance.shape[-1] == 1:
        return 0.0
    # A geometric sum, and its limit for a decay of 1.
    count = beyond if decay is None else torch.where(decay < 1, (1 - decay**beyond) / (1 - decay), beyond)
    return (by_distance[..., -1] * count / by_distance[..., :-1].sum(-1)).max().item()


def _growth(weights: torch.Tensor, causal: bool, decay: torch.Tensor | None) -> float:
    """Sum of a row's absolute weights for longer texts over that at the length that the weights are for."""
    count = weights.shape[-1]
    longer = extend_mixing(weights, LONGER * count, causal=causal, mixing_decay=decay)
    return (longer[..., -1, :].abs().sum(-1) / weights[..., -1, :].abs().sum(-1)).max().item()


def _distance_over_equal(weights: torch.Tensor, layout: BlockLayout, causal: bool) -> float:
    """Mean distance of the blocks attended to, over that under equal weights; of heads, all together."""
    if layout.num_prefix_blocks:
        layout = BlockLayout(layout.grid, blocks=layout.blocks)
    equal = torch.ones(weights.shape[-2:], dtype=torch.double)
    equal = equal.tril() if causal else equal
    return mean_distance(normalized(weights), layout) / mean_distance(normalized(equal), layout)
