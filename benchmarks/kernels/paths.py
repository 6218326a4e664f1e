# SPDX-License-Identifier: Apache-2.0
"""MHLA in both directions from the projections of a video model to its output projection.

That is RMSNorm of queries and keys across heads, feature map, rotary embedding, the operator, output norm and gate.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import nn

from mhla_hf import MHLAConfig, mhla_attention
from mhla_hf.bench import EPS, Inputs, OperatorShape
from mhla_hf.layers import MHLA, HeadNorms, PairwiseRotary
from mhla_hf.layers.fused import Call, OutputNorm, fused_attention


@cache
def _path_modules(
    shape: OperatorShape, dtype: torch.dtype, device: torch.device
) -> tuple[HeadNorms, PairwiseRotary, OutputNorm]:
    norms = (nn.RMSNorm(shape.heads * shape.width, eps=EPS, dtype=dtype, device=device) for _ in range(2))
    angles = torch.arange(shape.tokens, device=device)[:, None] * torch.linspace(1, 0, shape.width // 2, device=device)
    tables = (table[None, :, None] for table in (angles.cos(), angles.sin()))
    output_norm = OutputNorm(shape.width, eps=EPS, dtype=dtype, device=device)
    return HeadNorms(*norms), PairwiseRotary(*tables), output_norm


def fused_path(inputs: Inputs, shape: OperatorShape, normalizer: str, *, backend: str) -> torch.Tensor:
    """Attention with ReLU as the feature map, with output norm and gate, `[B, T, H, V]`.

    Args:
        inputs: Projected queries, keys and values; the latter are the gate's projection as well.
        shape: Attention in both directions.
        normalizer: `"query"` or `"none"`.
        backend: `"triton"` for the fused kernels, `"torch"` for plain torch.
    """
    norms, rotary, output_norm = _path_modules(shape, inputs.value.dtype, inputs.value.device)
    query, key, value = inputs[:3]
    gate = value.detach().requires_grad_(value.requires_grad)
    if backend == "triton":
        call = Call(query, key, value, shape.layout(), gate=gate, rotary=rotary, norms=norms, backend=backend)
        config = MHLAConfig(normalizer=normalizer, eps=EPS, backend=backend)
        return fused_attention(config, call, inputs.mixing, output_norm)
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
    return output_norm(output) * F.silu(gate)


@cache
def _hedgehog_layer(shape: OperatorShape, normalizer: str, backend: str, device: torch.device) -> MHLA:
    config = MHLAConfig(
        blocks=shape.layout().blocks, feature_map="hedgehog", rope="before_feature_map", mixing_heads="per_head",
        normalizer=normalizer, eps=EPS, backend=backend,
    )  # fmt: skip
    hidden_size = shape.heads * shape.width
    return MHLA(config, hidden_size=hidden_size, num_heads=shape.heads, head_dim=shape.width).to(device)


def hedgehog_path(inputs: Inputs, shape: OperatorShape, normalizer: str, *, backend: str) -> torch.Tensor:
    """A layer with hedgehog features and mixing weights of each head, as recoveries make it.

    Arguments and result are those of [`fused_path`]; there is no output norm and no gate.
    """
    norms, rotary = _path_modules(shape, inputs.value.dtype, inputs.value.device)[:2]
    layer = _hedgehog_layer(shape, normalizer, backend, inputs.value.device)
    mixing = inputs.mixing.expand(shape.heads, -1, -1)
    options = {"grid": shape.grid, "norms": norms, "rotary": rotary}
    return torch.func.functional_call(layer, {"mixing": mixing}, inputs[:3], options)
