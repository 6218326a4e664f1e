# SPDX-License-Identifier: Apache-2.0
"""Whole paths: everything that attention does between the projections of a video model and its output projection.

That is RMSNorm of queries and keys across heads, feature map, rotary embedding, the operator, output norm and gate for
MHLA; the same norms, rotary embedding and softmax attention for the model as it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from ..config import MHLAConfig
from ..layers import HeadNorms, PairwiseRotary
from ..layers.fused import OutputNorm, fused_attention
from ..ops import mhla_attention
from . import peers
from .shapes import OperatorShape


if TYPE_CHECKING:
    from .contestants import Inputs

EPS = 1e-6


@dataclass(frozen=True)
class _Parts:
    """What a layer of this shape has beside its projections."""

    norms: HeadNorms
    rotary: PairwiseRotary
    output_norm: OutputNorm


@cache
def _parts(shape: OperatorShape, dtype: torch.dtype, device: torch.device) -> _Parts:
    norms = (nn.RMSNorm(shape.heads * shape.width, eps=EPS, dtype=dtype, device=device) for _ in range(2))
    angles = torch.arange(shape.tokens, device=device)[:, None] * torch.linspace(1, 0, shape.width // 2, device=device)
    tables = (table[None, :, None] for table in (angles.cos(), angles.sin()))
    output_norm = OutputNorm(shape.width, eps=EPS, dtype=dtype, device=device)
    return _Parts(HeadNorms(*norms), PairwiseRotary(*tables), output_norm)


def fits(shape: OperatorShape, dtype: torch.dtype) -> bool:
    """Whether the fused kernels take heads of this shape."""
    from ..ops.triton import fused_launch

    return fused_launch.fits(shape.width, shape.width, True, dtype)


def mhla_path(inputs: Inputs, shape: OperatorShape, normalizer: str, backend: str, fused: bool) -> torch.Tensor:
    """MHLA from projections on.

    Args:
        inputs: Projected queries, keys, values and gates.
        shape: Attention in both directions.
        normalizer: `"query"` or `"none"`.
        backend: `"torch"` or `"triton"`, for the operator.
        fused: Do everything in the fused kernels; `backend` must be `"triton"`.

    Returns:
        `[B, T, H, V]`.
    """
    parts = _parts(shape, inputs.value.dtype, inputs.value.device)
    query, key, value = inputs.tokens
    if fused:
        return fused_attention(
            MHLAConfig(normalizer=normalizer, eps=EPS, backend=backend),
            query,
            key,
            value,
            inputs.mixing,
            shape.layout(),
            rotary=parts.rotary,
            norms=parts.norms,
            scaling=None,
            gate=inputs.gate,
            output_norm=parts.output_norm,
        )
    query, key = (tokens.relu() for tokens in parts.norms.apply(query, key))
    output = mhla_attention(
        parts.rotary(query),
        parts.rotary(key),
        value,
        inputs.mixing,
        shape.layout(),
        normalizer_query=query,
        normalizer_key=key,
        normalizer=normalizer,
        eps=EPS,
        backend=backend,
    )
    return parts.output_norm(output) * F.silu(inputs.gate)


def softmax_path(inputs: Inputs, shape: OperatorShape, backend: SDPBackend | None) -> torch.Tensor:
    """Softmax attention from projections on, `[B, T, H, V]`; it has neither output norm nor gate."""
    parts = _parts(shape, inputs.value.dtype, inputs.value.device)
    query, key = parts.norms.apply(inputs.query, inputs.key)
    return peers.softmax_attention(parts.rotary(query), parts.rotary(key), inputs.value, causal=False, backend=backend)
