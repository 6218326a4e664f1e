# SPDX-License-Identifier: Apache-2.0
"""Look-up in causal language models: which heads find what followed a token before, and how well a model recalls.

A head that looks up attends from a token to the one after its former occurrence (an *induction head*, arXiv
2209.11895). Few heads do, losses on ordinary text hardly show them, and without them a model cannot repeat a passage
that its window no longer reaches.

Shapes: T tokens, H heads, H_kv key/value heads, K width of queries and keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..ops.sums import repeat_heads
from ..training.layers import (
    AttentionLayer,
    Batch,
    evaluating,
    mhla_layers,
    on_device,
    original_heads,
    run,
    trunk_for,
)


PASSAGE, BETWEEN = 128, 512
"""Tokens of a passage that is repeated, and of other text between its occurrences."""

# The first tokens of a passage do not tell yet which passage it is.
_SKIPPED = 8
_MOST_TEXTS = 4


def looks_up(model: nn.Module, batches: Sequence[Batch]) -> bool:
    """Return whether look-up can be measured: all MHLA layers look back only, and the batches are tokens."""
    return "input_ids" in batches[0] and all(layer.mhla.config.causal for layer in mhla_layers(model))


@torch.no_grad()
def lookup_scores(model: nn.Module, batches: Sequence[Batch], seed: int = 0) -> list[list[float]]:
    """Measure how much each group of heads looks up, in one forward pass of the original on random tokens.

    128 random tokens come again after 512 of the text, farther than a window reaches: some heads look up nearby alone.
    The score of a head is the mean probability with which queries of the second occurrence attend to the token after
    the first. No layer's probabilities are kept.

    Args:
        model: A converted causal language model with its original weights.
        batches: Batches with `input_ids`; the random tokens are drawn from those that occur there, without those that
            begin, end and pad texts. Fewer tokens are taken where the model takes fewer.
        seed: Seed of the random tokens.

    Returns:
        For each MHLA layer the scores of its key/value heads, each the largest of the query heads that share it.

    Raises:
        ValueError: If the model is not causal, or the batches have no tokens.
    """
    if not looks_up(model, batches):
        raise ValueError("look-up is measured on causal language models, from batches with input_ids.")
    layers, found = mhla_layers(model), dict[str, list[float]]()
    of_model: Any = model.config
    config = of_model.get_text_config()
    special = {name: getattr(config, f"{name}_token_id", None) for name in ("bos", "eos", "pad")}
    unwanted = {token for entry in special.values() for token in (entry if isinstance(entry, list) else [entry])}
    text = torch.cat([batch["input_ids"].flatten().cpu() for batch in batches])
    known = text.unique()
    known = known[[token not in unwanted for token in known.tolist()]]
    length = min(PASSAGE, (_longest(model) - 1) // 2)
    order = torch.randperm(len(known), generator=torch.Generator().manual_seed(seed))
    passage = known[order].repeat(-(-length // len(known)))[:length]
    start = known.new_tensor([] if special["bos"] is None else [special["bos"]])
    between = text[: min(BETWEEN, _longest(model) - 1 - 2 * length)]
    tokens = {"input_ids": torch.cat([start, passage, between, passage])[None]}

    def observe(layer: AttentionLayer) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found[layer.name] = _mass(layer, args[0], args[1], length, len(between), kwargs).tolist()

        return hook

    with evaluating(model), original_heads(layers), ExitStack() as hooks:
        for layer in layers:
            hooks.callback(layer.mhla.register_forward_pre_hook(observe(layer), with_kwargs=True).remove)
        run(trunk_for(model, tokens), on_device(tokens, model))
    return [found[layer.name] for layer in layers]


def _mass(
    layer: AttentionLayer,
    query: torch.Tensor,
    key: torch.Tensor,
    length: int,
    between: int,
    given: Mapping[str, Any],
) -> torch.Tensor:
    """Mean probability of the token after the former occurrence, for each key/value head `[H_kv]`.

    Args:
        layer: The layer.
        query: `[1, T, H, K]`.
        key: `[1, T, H_kv, K]`.
        length: Tokens of the passage, with whose second occurrence the text ends.
        between: Tokens between its occurrences.
        given: Keyword arguments of the layer's `mhla`.
    """
    mhla, rotary = layer.mhla, given.get("rotary")
    rows = torch.arange(query.shape[1] - length, query.shape[1] - 1, device=query.device)
    if rotary is not None:
        query, key = rotary(query), rotary(key)
    scale = given.get("scaling") or query.shape[-1] ** -0.5
    key = repeat_heads(key, mhla.num_heads, 2)
    logits = torch.einsum("thk,shk->hts", query[0, rows].float(), key[0].float()) * scale
    later = torch.arange(key.shape[1], device=rows.device) > rows[:, None]
    mass = logits.masked_fill(later, -math.inf).softmax(-1)
    mass = mass.gather(2, (rows - length - between + 1)[None, :, None].expand(len(mass), -1, -1)).mean((1, 2))
    return mass.unflatten(0, (mhla.num_key_value_heads, -1)).amax(1)


def recall_texts(model: nn.Module, batches: Iterable[Batch]) -> list[torch.Tensor]:
    """Make texts to recall from: a passage of 128 tokens, the 512 that follow it, and the passage again.

    Args:
        model: A causal language model.
        batches: Batches with `input_ids`, read one row after the other.

    Returns:
        At most 4 texts `[768]`; none where the batches have too few tokens, or the model takes fewer.
    """
    if _longest(model) < 2 * PASSAGE + BETWEEN:
        return []
    tokens = torch.cat([batch["input_ids"].flatten().cpu() for batch in batches])
    parts = tokens.split(PASSAGE + BETWEEN)[:_MOST_TEXTS]
    return [torch.cat([part, part[:PASSAGE]]) for part in parts if len(part) == PASSAGE + BETWEEN]


def _longest(model: nn.Module) -> int:
    """Most tokens that a model takes."""
    config: Any = model.config
    return getattr(config.get_text_config(), "max_position_embeddings", None) or 1 << 20


@torch.no_grad()
def recall(model: nn.Module, texts: Sequence[torch.Tensor]) -> tuple[float, float]:
    """Bits per token of a passage at its first and at its second occurrence; what is recalled costs few.

    Args:
        model: A causal language model, converted or not.
        texts: From [`recall_texts`][mhla_hf.recovery.lookup.recall_texts], one at least.

    Returns:
        Both means over the texts, without the first 8 tokens of the passages.

    Examples:
        >>> first, second = recall(model, recall_texts(model, batches))  # doctest: +SKIP
    """
    nats = torch.zeros(2, dtype=torch.float64)
    with evaluating(model):
        for text in texts:
            batch = on_device({"input_ids": text[None]}, model)
            logits = run(model, batch)[0][0]
            for time, begin in enumerate((0, len(text) - PASSAGE)):
                predicted = slice(begin + _SKIPPED, begin + PASSAGE - 1)
                targets = batch["input_ids"][0, begin + _SKIPPED + 1 : begin + PASSAGE]
                nats[time] += F.cross_entropy(logits[predicted].float(), targets).item()
    first, second = (nats / math.log(2) / len(texts)).tolist()
    return first, second
