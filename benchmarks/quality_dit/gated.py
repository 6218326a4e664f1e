# SPDX-License-Identifier: Apache-2.0
"""A DiT with gated linear attention in both directions, after DiG (arXiv 2405.18428), for comparison.

Gated linear attention (GLA, arXiv 2312.06635) is causal: token t sees S_t = diag(a_t) S_{t-1} + k_t v_tᵀ, where the
gates a_t depend on the token. DiG scans an image in another direction in every layer; here every layer scans forwards
and backwards, with gates of their own, and adds both. As in DiG, a depthwise convolution that starts as an identity
goes before the projections. The scan is that of flash-linear-attention, whose kernels need a GPU.

Shapes: B images, T tokens, H heads, K width of a head.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


VARIANT = "dig"
"""Name of the variant."""

# As in the paper of GLA.
_GATE_RANK = 16
_GATE_TEMPERATURE = 16

Scan = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def can_scan(device: torch.device) -> bool:
    """Returns whether flash-linear-attention is installed and its kernels run on this device."""
    return device.type == "cuda" and importlib.util.find_spec("fla") is not None


def scan_with_kernels(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, log_gates: torch.Tensor
) -> torch.Tensor:
    """Causal gated linear attention by flash-linear-attention's kernels, with queries scaled by K^-1/2.

    Args:
        query: `[B, T, H, K]`.
        key: `[B, T, H, K]`.
        value: `[B, T, H, K]`.
        log_gates: Logarithms of the gates, `[B, T, H, K]`, at most 0.

    Returns:
        `[B, T, H, K]`.
    """
    from fla.ops.gla import chunk_gla

    return chunk_gla(q=query, k=key, v=value, g=log_gates)[0]


class GatedScan(nn.Module):
    """Token mixing of one layer, between the projections of an attention module of diffusers.

    Args:
        hidden_size: Width of the tokens.
        heads: H.
        scan: Computes causal gated linear attention, as [`scan_with_kernels`] does.
    """

    def __init__(self, hidden_size: int, heads: int, scan: Scan = scan_with_kernels) -> None:
        super().__init__()
        self.heads, self.scan = heads, scan
        self.convolution = nn.Conv2d(hidden_size, hidden_size, 3, padding=1, groups=hidden_size)
        self.forget = nn.Sequential(
            nn.Linear(hidden_size, _GATE_RANK, bias=False), nn.Linear(_GATE_RANK, 2 * hidden_size)
        )
        self.norm = nn.RMSNorm(hidden_size // heads, eps=1e-5)
        self.gate = nn.Linear(hidden_size, hidden_size)
        nn.init.dirac_(self.convolution.weight, groups=hidden_size)
        nn.init.zeros_(self.convolution.bias)

    def local(self, tokens: torch.Tensor) -> torch.Tensor:
        """The convolution of a square image's tokens `[B, T, hidden_size]`."""
        side = math.isqrt(tokens.shape[1])
        image = tokens.transpose(1, 2).unflatten(2, (side, side))
        return self.convolution(image).flatten(2).transpose(1, 2)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        """Mixes tokens.

        Args:
            query: `[B, T, H, K]`.
            key: `[B, T, H, K]`.
            value: `[B, T, H, K]`.
            tokens: What they were projected from, `[B, T, H·K]`.

        Returns:
            `[B, T, H·K]`.
        """
        gates = F.logsigmoid(self.forget(tokens).float()) / _GATE_TEMPERATURE
        forwards, backwards = gates.to(value.dtype).unflatten(2, (2, self.heads, -1)).unbind(2)
        mixed = self.scan(query, key, value, forwards)
        reversed_order = (part.flip(1) for part in (query, key, value, backwards))
        mixed = mixed + self.scan(*reversed_order).flip(1)
        return self.norm(mixed).flatten(2).type_as(tokens) * F.silu(self.gate(tokens))


class GatedAttnProcessor:
    """Stateless processor of an attention module of diffusers that has a [`GatedScan`] as `gated`."""

    def __call__(self, attn: Any, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        """Mixes `hidden_states` `[B, T, hidden]`; a DiT block's other arguments have no meaning here."""
        tokens = attn.gated.local(hidden_states)
        query, key, value = (
            project(tokens).unflatten(2, (attn.heads, -1)) for project in (attn.to_q, attn.to_k, attn.to_v)
        )
        return attn.to_out[1](attn.to_out[0](attn.gated(query, key, value, tokens)))


def use_gated_attention(model: Any, scan: Scan = scan_with_kernels) -> Any:
    """Replaces the attention of every layer of a `DiTTransformer2DModel`, in place; projections keep their weights.

    Args:
        model: The model.
        scan: As in [`GatedScan`].
    """
    for block in model.transformer_blocks:
        attention = block.attn1
        attention.gated = GatedScan(attention.to_q.in_features, attention.heads, scan)
        attention.set_processor(GatedAttnProcessor())
    return model
