# SPDX-License-Identifier: Apache-2.0
"""Causal MHLA in chunks by Triton kernels: summaries, mixed prefix, and one pass over the tokens of each chunk."""

from __future__ import annotations

import logging
from functools import cache

import torch
import torch.nn.functional as F

from ...layouts.blocks import BlockLayout
from ...layouts.sequences import SequenceLayout
from ..causal import causal_mhla_attention
from ..normalizers import NORMALIZERS
from ..numerics import normalizer_pair, records_gradients
from .causal_operators import causal_attention
from .launching import padded


logger = logging.getLogger(__name__)


def triton_causal_mhla_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mixing: torch.Tensor,
    layout: BlockLayout | SequenceLayout,
    *,
    normalizer_query: torch.Tensor | None = None,
    normalizer_key: torch.Tensor | None = None,
    normalizer: str = "query",
    eps: float = 1e-6,
) -> torch.Tensor:
    """Causal MHLA by Triton kernels; arguments as in [`mhla_hf.ops.causal.causal_mhla_attention`].

    Summaries are float32, but bfloat16 for bfloat16 tokens where no gradient is recorded; sums always run in float32.
    Normalisers without a kernel run in plain torch, which is logged once.

    Returns:
        `[B, T, H, V]` in the dtype of `value`; zero for padding.
    """
    entry = NORMALIZERS[normalizer]
    if entry.kernel is None:
        if not torch.compiler.is_compiling():
            _log_fallback(normalizer)
        return causal_mhla_attention(
            query, key, value, mixing, layout,
            normalizer_query=normalizer_query, normalizer_key=normalizer_key, normalizer=normalizer, eps=eps,
        )  # fmt: skip
    pair = None, None
    if entry.divides:
        pair = normalizer_pair(query, key, normalizer_query, normalizer_key)
    half = not records_gradients(query, key, value, mixing, *pair)
    starts = layout.first_blocks() if isinstance(layout, SequenceLayout) else None
    table = layout.token_table(query.device)
    if table.shape[-2] == 1:
        # A chunk that is not full: with empty slots after it, most lengths share what is compiled.
        table = F.pad(table, (0, padded(table.shape[-1]) - table.shape[-1]), value=query.shape[1])
    with torch.autocast(query.device.type, enabled=False):
        output, *_ = causal_attention(
            query.to(value.dtype), key.to(value.dtype), value, *pair, mixing.float(), table,
            starts, entry.divides, half, eps,
        )  # fmt: skip
    return output


@cache
def _log_fallback(normalizer: str) -> None:
    logger.warning("Causal MHLA runs in plain torch: the kernels do not have normalizer=%r.", normalizer)
