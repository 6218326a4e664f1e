# SPDX-License-Identifier: Apache-2.0
"""Other attention than MHLA, on features `[B, T, H, K]`: softmax as torch implements it, and linear attention.

Shape letters: B batch, T tokens, H heads, K = V width, M chunks, C tokens of a chunk.
"""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


def softmax_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, backend: SDPBackend | None
) -> torch.Tensor:
    """`scaled_dot_product_attention`, by the implementation that is asked for and no other; None for torch's choice.

    Raises:
        RuntimeError: If that implementation does not take these tensors.
    """
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    with nullcontext() if backend is None else sdpa_kernel(backend):
        output = F.scaled_dot_product_attention(query, key, value, is_causal=causal)
    return output.transpose(1, 2)


def linear_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, eps: float | None) -> torch.Tensor:
    """φ(q)ᵀ Σ φ(k) vᵀ, divided by φ(q)ᵀ Σ φ(k) + eps; `eps=None` divides by nothing (arXiv 2006.16236, equation 5)."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    output = query @ (key.transpose(-1, -2) @ value)
    if eps is not None:
        output = output / (query @ key.sum(dim=-2, keepdim=True).transpose(-1, -2) + eps)
    return output.transpose(1, 2)


def causal_linear_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, eps: float | None, chunk: int
) -> torch.Tensor:
    """The same over earlier tokens only, in chunks that T is a multiple of (arXiv 2312.06635, section 2.2)."""
    query, key, value = (x.transpose(1, 2).unflatten(2, (-1, chunk)) for x in (query, key, value))
    scores = (query @ key.transpose(-1, -2)).tril()
    output = query @ _earlier(key.transpose(-1, -2) @ value) + scores @ value
    if eps is not None:
        sums = _earlier(key.sum(dim=-2, keepdim=True).transpose(-1, -2))
        output = output / (query @ sums + scores.sum(dim=-1, keepdim=True) + eps)
    return output.flatten(2, 3).transpose(1, 2)


def _earlier(summaries: torch.Tensor) -> torch.Tensor:
    """Sums over the chunks before each, in float32: `[B, H, M, K, V]`."""
    return (summaries.cumsum(dim=2, dtype=torch.float32) - summaries).to(summaries.dtype)


def fla_obstacle() -> str | None:
    """Why flash-linear-attention cannot be measured; None if it can."""
    if find_spec("fla") is None:
        return "flash-linear-attention is not installed (pip install flash-linear-attention)"
    return None


def fla_attention(
    name: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor | None, normalize: bool
) -> torch.Tensor:
    """A causal operator of flash-linear-attention.

    Args:
        name: `"chunk_linear_attn"` or `"chunk_simple_gla"`.
        query: `[B, T, H, K]`.
        key: `[B, T, H, K]`.
        value: `[B, T, H, V]`.
        decay: Logarithms of the decay, float32 `[B, T, H]`, for `chunk_simple_gla`.
        normalize: Divide by the normaliser, for `chunk_linear_attn`.
    """
    if name == "chunk_simple_gla":
        options: dict[str, object] = {"g": decay}
    else:
        options = {"normalize": normalize}
    module = importlib.import_module("fla.ops.simple_gla" if name == "chunk_simple_gla" else "fla.ops.linear_attn")
    return getattr(module, name)(query, key, value, scale=1.0, **options)[0]
