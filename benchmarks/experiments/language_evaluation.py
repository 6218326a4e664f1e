# SPDX-License-Identifier: Apache-2.0
"""Bits per byte of held-out text by position, for language models with a tokenizer of their own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from mhla_hf.training.data.order import stable_seed

from .language_data import Corpus


# Logits of so many tokens are in memory at a time when a model is evaluated.
_HEAD_TOKENS = 4096


def token_losses(model: Any, tokens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cross-entropy of each token after the first, `[B, T - 1]`, float32; matrix products are in `dtype`."""
    with torch.autocast(tokens.device.type, dtype, enabled=dtype != torch.float32):
        hidden = model.model(input_ids=tokens[:, :-1], use_cache=False)[0].flatten(0, 1)
        parts = [
            F.cross_entropy(model.lm_head(part).float(), targets, reduction="none")
            for part, targets in zip(hidden.split(_HEAD_TOKENS), tokens[:, 1:].flatten().split(_HEAD_TOKENS))
        ]
    return torch.cat(parts).view(tokens.shape[0], -1)


def packed_windows(data: Corpus, context: int, count: int) -> list[np.ndarray]:
    """Held-out texts of `context + 1` tokens, spread over all held-out files one after another, as in training."""
    end = np.zeros(1, dtype=np.uint16)
    stream = np.concatenate([part for tokens in data.held_out for part in (end, tokens)])
    places = (len(stream) - 1) // context
    chosen = np.unique(np.linspace(0, places - 1, min(count, places)).astype(int))
    return [stream[place * context : (place + 1) * context + 1] for place in chosen]


def long_file_windows(data: Corpus, length: int, count: int) -> list[np.ndarray]:
    """Texts of `length + 1` tokens from the inside of held-out files that are long enough, one from each.

    They begin anywhere in their files, so that a token's position in the text says nothing about its place in the
    file.
    """
    long_enough = [tokens for tokens in data.held_out if len(tokens) > length]
    windows = []
    for number, tokens in enumerate(long_enough[:count]):
        start = stable_seed("language", "long", number) % (len(tokens) - length)
        windows.append(tokens[start : start + length + 1])
    return windows


def position_edges(length: int) -> list[int]:
    """Ends of buckets of positions, each twice as far as the one before: 16, 32, ... up to `length`."""
    edges = [min(16, length)]
    while edges[-1] < length:
        edges.append(min(2 * edges[-1], length))
    return edges


@torch.no_grad()
def bits_by_position(
    model: Any,
    texts: Sequence[np.ndarray],
    token_bytes: np.ndarray,
    *,
    dtype: torch.dtype,
    restart: int | None = None,
) -> dict[str, Any]:
    """Bits per byte of texts of equal length, by the number of tokens before the predicted one.

    Args:
        model: A language model in evaluation mode.
        texts: Tokens of each text, one more than are predicted.
        token_bytes: Bytes of each token of the vocabulary.
        dtype: Dtype of matrix products.
        restart: Let the model see no more than a text's tokens since the last multiple of this number.

    Returns:
        `bits_per_byte` over all; `edges`, the ends of buckets of positions; `bits` and `bytes` in each bucket.
    """
    length = len(texts[0]) - 1
    piece = length if restart is None else restart
    edges = position_edges(length)
    bits, size = np.zeros(len(edges)), np.zeros(len(edges), dtype=np.int64)
    bucket = np.searchsorted(edges, np.arange(1, length + 1))
    for text in texts:
        pieces = np.stack([text[start : start + piece + 1] for start in range(0, length, piece)])
        losses = token_losses(model, torch.from_numpy(pieces.astype(np.int64)).to(model.device), dtype)
        bits += np.bincount(bucket, losses.double().cpu().numpy().ravel() / math.log(2), minlength=len(edges))
        size += np.bincount(bucket, token_bytes[text[1:]], minlength=len(edges)).astype(np.int64)
    return {
        "bits_per_byte": float(bits.sum() / size.sum()),
        "edges": edges,
        "bits": [round(float(value), 2) for value in bits],
        "bytes": size.tolist(),
    }
