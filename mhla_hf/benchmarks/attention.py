# SPDX-License-Identifier: Apache-2.0
"""Attention to be compared, on inputs of one shape: MHLA, softmax as torch implements it, and linear attention.

Shape letters: B batch, T tokens, H heads, K = V width, M blocks, C tokens of a chunk.

Functions whose names end in `path` compute everything between the projections of a video model and its output
projection: RMSNorm of queries and keys across heads, feature map, rotary embedding, the operator, output norm and gate
for MHLA; the same norms, rotary embedding and softmax attention for the original model.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..config import MHLAConfig
from ..layers import MHLA, HeadNorms, PairwiseRotary
from ..layers.fused import OutputNorm, fused_attention
from ..layers.mixing import initial_mixing
from ..ops import mhla_attention
from .shapes import OperatorShape


EPS = 1e-6
# Logarithm of the decay of gated linear attention, at every token.
_LOG_DECAY = -0.01


@dataclass(frozen=True)
class Inputs:
    """One set of tensors for a shape.

    Args:
        query: Positive features `[B, T, H, K]`.
        key: The same for keys.
        value: `[B, T, H, V]`.
        mixing: float32 `[M, M]`.
        decay: float32 `[B, T, H]`, logarithms.
        gradient: Gradient of the output, `[B, T, H, V]`.
        gate: Output of the gate's projection, `[B, T, H, V]`; the tensor of `value`.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mixing: torch.Tensor
    decay: torch.Tensor
    gradient: torch.Tensor
    gate: torch.Tensor

    @property
    def tokens(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value."""
        return self.query, self.key, self.value

    def differentiable(self) -> Inputs:
        """The same tensors with gradients enabled."""
        parts = (*self.tokens, self.mixing, self.gate)
        query, key, value, mixing, gate = (part.detach().requires_grad_() for part in parts)
        return replace(self, query=query, key=key, value=value, mixing=mixing, gate=gate)


def make_inputs(shape: OperatorShape, dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    """Random inputs of a shape: `elu(x) + 1` of normal queries and keys, normal values and gradients."""
    generator = torch.Generator(device).manual_seed(seed)
    size = (shape.batch, shape.tokens, shape.heads, shape.width)
    query, key, value, gradient = (
        torch.randn(size, generator=generator, dtype=dtype, device=device) for _ in range(4)
    )
    block_size = None if shape.chunk is None else (shape.chunk,)
    config = MHLAConfig(causal=shape.causal, block_size=block_size)
    mixing = initial_mixing(config, shape.layout().blocks).to(device)
    decay = torch.full(size[:3], _LOG_DECAY, device=device)
    return Inputs(F.elu(query) + 1, F.elu(key) + 1, value, mixing, decay, gradient, value)


def mhla(
    inputs: Inputs,
    shape: OperatorShape,
    normalizer: str | None,
    compile_backend: str,
    *,
    backend: str,
    compiled: bool = False,
) -> torch.Tensor:
    """The MHLA operator by one backend, `[B, T, H, V]`."""
    operator = _compiled_operator(compile_backend) if compiled else mhla_attention
    return operator(
        *inputs.tokens,
        inputs.mixing,
        shape.layout(),
        normalizer=normalizer or "query",
        causal=shape.causal,
        eps=EPS,
        backend=backend,
    )


@cache
def _compiled_operator(compile_backend: str) -> Callable[..., torch.Tensor]:
    return torch.compile(mhla_attention, backend=compile_backend, dynamic=False)


def softmax(inputs: Inputs, shape: OperatorShape, *_: object, backend: SDPBackend | None = None) -> torch.Tensor:
    """`scaled_dot_product_attention`, `[B, T, H, V]`, by the given implementation alone; None for torch's choice.

    Raises:
        RuntimeError: If that implementation does not support these tensors.
    """
    query, key, value = (x.transpose(1, 2) for x in inputs.tokens)
    with nullcontext() if backend is None else sdpa_kernel(backend):
        output = F.scaled_dot_product_attention(query, key, value, is_causal=shape.causal)
    return output.transpose(1, 2)


def linear(inputs: Inputs, shape: OperatorShape, normalizer: str | None, *_: object) -> torch.Tensor:
    """φ(q)ᵀ Σ φ(k) vᵀ, divided by φ(q)ᵀ Σ φ(k) + eps with the `query` normaliser (arXiv 2006.16236, equation 5).

    Causal attention takes the sums over earlier tokens, in chunks that T is a multiple of (arXiv 2312.06635, section
    2.2).

    Returns:
        `[B, T, H, V]`.
    """
    query, key, value = (x.transpose(1, 2) for x in inputs.tokens)
    if shape.chunk is None:
        output = query @ (key.transpose(-1, -2) @ value)
        if normalizer == "query":
            output = output / (query @ key.sum(dim=-2, keepdim=True).transpose(-1, -2) + EPS)
        return output.transpose(1, 2)
    query, key, value = (x.unflatten(2, (-1, shape.chunk)) for x in (query, key, value))
    scores = (query @ key.transpose(-1, -2)).tril()
    output = query @ _earlier(key.transpose(-1, -2) @ value) + scores @ value
    if normalizer == "query":
        sums = _earlier(key.sum(dim=-2, keepdim=True).transpose(-1, -2))
        output = output / (query @ sums + scores.sum(dim=-1, keepdim=True) + EPS)
    return output.flatten(2, 3).transpose(1, 2)


def _earlier(summaries: torch.Tensor) -> torch.Tensor:
    """Sums over the chunks before each, in float32: `[B, H, M, K, V]`."""
    return (summaries.cumsum(dim=2, dtype=torch.float32) - summaries).to(summaries.dtype)


def fla(inputs: Inputs, shape: OperatorShape, normalizer: str | None, *_: object, name: str) -> torch.Tensor:
    """A causal operator of flash-linear-attention, `"linear_attn"` or `"simple_gla"`; `[B, T, H, V]`."""
    options = {"g": inputs.decay} if name == "simple_gla" else {"normalize": normalizer == "query"}
    operator = getattr(importlib.import_module(f"fla.ops.{name}"), f"chunk_{name}")
    return operator(*inputs.tokens, scale=1.0, **options)[0]


@cache
def _path_modules(
    shape: OperatorShape, dtype: torch.dtype, device: torch.device
) -> tuple[HeadNorms, PairwiseRotary, OutputNorm]:
    norms = (nn.RMSNorm(shape.heads * shape.width, eps=EPS, dtype=dtype, device=device) for _ in range(2))
    angles = torch.arange(shape.tokens, device=device)[:, None] * torch.linspace(1, 0, shape.width // 2, device=device)
    tables = (table[None, :, None] for table in (angles.cos(), angles.sin()))
    output_norm = OutputNorm(shape.width, eps=EPS, dtype=dtype, device=device)
    return HeadNorms(*norms), PairwiseRotary(*tables), output_norm


def mhla_path(
    inputs: Inputs, shape: OperatorShape, normalizer: str | None, *_: object, backend: str, fused: bool = False
) -> torch.Tensor:
    """MHLA in both directions from projections on.

    Args:
        inputs: Projected queries, keys, values and gates.
        shape: Attention in both directions.
        normalizer: `"query"` or `"none"`.
        backend: `"torch"` or `"triton"`, for the operator.
        fused: Compute everything in the fused kernels; `backend` must be `"triton"`.

    Returns:
        `[B, T, H, V]`.
    """
    norms, rotary, output_norm = _path_modules(shape, inputs.value.dtype, inputs.value.device)
    normalizer = normalizer or "query"
    query, key, value = inputs.tokens
    if fused:
        return fused_attention(
            MHLAConfig(normalizer=normalizer, eps=EPS, backend=backend),
            query,
            key,
            value,
            inputs.mixing,
            shape.layout(),
            rotary=rotary,
            norms=norms,
            scaling=None,
            gate=inputs.gate,
            output_norm=output_norm,
        )
    query, key = (tokens.relu() for tokens in norms.apply(query, key))
    output = mhla_attention(
        rotary(query),
        rotary(key),
        value,
        inputs.mixing,
        shape.layout(),
        normalizer_query=query,
        normalizer_key=key,
        normalizer=normalizer,
        eps=EPS,
        backend=backend,
    )
    return output_norm(output) * F.silu(inputs.gate)


@cache
def _hedgehog_layer(shape: OperatorShape, normalizer: str, backend: str, device: torch.device) -> MHLA:
    config = MHLAConfig(
        blocks=shape.layout().blocks, feature_map="hedgehog", rope="before_feature_map", mixing_heads="per_head",
        normalizer=normalizer, eps=EPS, backend=backend,
    )  # fmt: skip
    hidden_size = shape.heads * shape.width
    return MHLA(config, hidden_size=hidden_size, num_heads=shape.heads, head_dim=shape.width).to(device)


def hedgehog_path(
    inputs: Inputs, shape: OperatorShape, normalizer: str | None, *_: object, backend: str
) -> torch.Tensor:
    """A layer with hedgehog features and mixing weights of each head, as recoveries make it, from projections on.

    Arguments and result are those of [`mhla_path`]; there is no output norm and no gate.
    """
    norms, rotary = _path_modules(shape, inputs.value.dtype, inputs.value.device)[:2]
    layer = _hedgehog_layer(shape, normalizer or "query", backend, inputs.value.device)
    mixing = inputs.mixing.expand(shape.heads, -1, -1)
    options = {"grid": shape.grid, "norms": norms, "rotary": rotary}
    return torch.func.functional_call(layer, {"mixing": mixing}, inputs.tokens, options)


def softmax_path(inputs: Inputs, shape: OperatorShape, *_: object) -> torch.Tensor:
    """Softmax attention from projections on, `[B, T, H, V]`, without output norm and gate."""
    norms, rotary = _path_modules(shape, inputs.value.dtype, inputs.value.device)[:2]
    query, key = norms.apply(inputs.query, inputs.key)
    return softmax(replace(inputs, query=rotary(query), key=rotary(key)), shape)
