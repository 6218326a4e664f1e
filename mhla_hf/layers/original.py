# SPDX-License-Identifier: Apache-2.0
"""The attention of the host model, which MHLA replaced, from the arguments of an MHLA layer.

Shape letters: B batch, T tokens, H feature heads, H_kv key/value heads, K query/key width, V value width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ..ops.sharded import TokenShard
from ..ops.sums import repeat_heads
from .fused import HeadNorms
from .joint import TextTokens
from .mhla import MHLA
from .state import TokenSequence


# SANA's, of the attention in diffusers.
LINEAR_EPS = 1e-15


def original_attention(
    mhla: MHLA,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    sequence: TokenSequence | None = None,
    rotary: Callable[[torch.Tensor], torch.Tensor] | None = None,
    norms: HeadNorms | None = None,
    scaling: float | None = None,
    shard: TokenShard | None = None,
    text: TextTokens | None = None,
    exact: torch.Tensor | None = None,
    **unused: Any,
) -> torch.Tensor:
    """Output of the host model's own attention for the arguments of [`MHLA.forward`].

    It depends on no parameter of `mhla`. Options of [`MHLA.forward`] that softmax has no use for are ignored, and
    `shard` has to be `None`: the tokens of other processes are needed.

    Args:
        mhla: The layer.
        scaling: Scale of the logits; `None` for `K ** -0.5`.
        shard: Has to be `None`: the tokens of other processes are needed.
        text: The text of joint attention.
        exact: Heads that are softmax in any case, see [`MHLA.forward`].

    Returns:
        `[B, T, H, V]` in the dtype of `value`; zero for padding. With `text="block"` of text and grid, text first.

    Raises:
        ValueError: Under context parallelism.
    """
    if text is not None:
        text = text.without_padding()
        grid = text.attend(key, value, rotary, query)
        return grid if mhla.config.text == "softmax" else torch.cat([text.attend(key, value, rotary), grid], dim=1)
    if shard is not None:
        raise ValueError("A model's original attention cannot be computed under context parallelism.")
    if norms is not None:
        query, key = norms.apply(query, key)
    if mhla.replaces_linear:
        # With ReLU as its feature map (SANA, arXiv 2410.10629).
        return _linear_attention(query, key, value, rotary)
    if rotary is not None:
        query, key = rotary(query), rotary(key)
    key, value = repeat_heads(key, mhla.num_heads, 2), repeat_heads(value, mhla.num_heads, 2)
    query, key = query.to(value.dtype), key.to(value.dtype)
    mask, causal = (None, False) if sequence is None else _mask(sequence, query.shape[1])
    output = F.scaled_dot_product_attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), mask, is_causal=causal, scale=scaling
    ).transpose(1, 2)
    if sequence is not None and sequence.valid is not None:
        output = output.masked_fill(~sequence.valid[:, :, None, None], 0.0)
    return output if exact is None or mhla.groups is None else mhla.groups.join(output, exact)


def _mask(sequence: TokenSequence, length: int) -> tuple[torch.Tensor | None, bool]:
    """The mask `[B, 1, T, T]`, True where a token is seen; or `None` and whether attention is causal."""
    valid, documents = sequence.valid, sequence.documents
    if valid is None and documents is None:
        return None, sequence.causal
    allowed = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=(valid if valid is not None else documents).device)  # type: ignore[union-attr]
    if valid is not None:
        allowed = allowed & valid[:, None, None, :]
    if documents is not None:
        allowed = allowed & (documents[:, None, :, None] == documents[:, None, None, :])
    itself = torch.eye(length, dtype=torch.bool, device=allowed.device)
    allowed = allowed.expand(-1, -1, length, length)
    if sequence.causal:
        allowed = allowed & torch.ones_like(itself).tril()
    # A row that sees nothing would be NaN; those of padding are set to zero afterwards.
    return allowed | itself, False


def _linear_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rotary: Callable[[torch.Tensor], torch.Tensor] | None
) -> torch.Tensor:
    query, key = torch.relu(query.float()), torch.relu(key.float())
    normalizer = torch.einsum("bthk,bhk->bth", query, key.sum(1)) + LINEAR_EPS
    if rotary is not None:
        query, key = rotary(query), rotary(key)
    summary = torch.einsum("bthk,bthv->bhkv", key, value.float())
    output = torch.einsum("bthk,bhkv->bthv", query, summary) / normalizer.unsqueeze(-1)
    return output.to(value.dtype)
