# SPDX-License-Identifier: Apache-2.0
"""The cases to check, time and sweep, with random inputs.

What is computed from the projections of a video model on is RMSNorm of queries and keys across heads, feature map,
rotary embedding, the operator, output norm and gate, in both directions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..bench import EPS, SHAPES, Inputs, OperatorShape, attend, make_inputs, run_operator
from ..config import MHLAConfig
from ..layers import MHLA, HeadNorms, PairwiseRotary
from ..layers.fused import Call, OutputNorm, fused_attention
from ..ops import mhla_attention
from ..utils.messages import check_choice


ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# Triton's interpreter has no bfloat16.
DTYPE = torch.bfloat16 if ON_GPU else torch.float32

Tensors = tuple[Any, ...]
Attention = Callable[[Inputs], torch.Tensor]


@cache
def _path_modules(
    shape: OperatorShape, dtype: torch.dtype, device: torch.device
) -> tuple[HeadNorms, PairwiseRotary, OutputNorm]:
    norms = (nn.RMSNorm(shape.heads * shape.width, eps=EPS, dtype=dtype, device=device) for _ in range(2))
    angles = torch.arange(shape.tokens, device=device)[:, None] * torch.linspace(1, 0, shape.width // 2, device=device)
    tables = (table[None, :, None] for table in (angles.cos(), angles.sin()))
    output_norm = OutputNorm(shape.width, eps=EPS, dtype=dtype, device=device)
    return HeadNorms(*norms), PairwiseRotary(*tables), output_norm


def fused_path(shape: OperatorShape, normalizer: str, backend: str, inputs: Inputs) -> Attention:
    """Attention with ReLU as the feature map, with output norm and gate, `[B, T, H, V]`.

    Args:
        shape: Attention in both directions.
        normalizer: `"query"` or `"none"`.
        backend: `"triton"` for the fused kernels, `"torch"` for plain torch.
        inputs: Tensors of the type and device that projected queries, keys and values will have; the values are the
            gate's projection as well.
    """
    norms, rotary, output_norm = _path_modules(shape, inputs.value.dtype, inputs.value.device)
    layout = shape.layout()
    config = MHLAConfig(normalizer=normalizer, eps=EPS, backend=backend)
    options: dict[str, Any] = {"normalizer": normalizer, "eps": EPS, "backend": backend}

    def attention(inputs: Inputs) -> torch.Tensor:
        query, key, value = inputs[:3]
        gate = value.detach().requires_grad_(value.requires_grad)
        if backend == "triton":
            call = Call(query, key, value, layout, gate=gate, rotary=rotary, norms=norms)
            return fused_attention(config, call, inputs.mixing, output_norm)
        query, key = (tokens.relu() for tokens in norms.apply(query, key))
        output = mhla_attention(
            rotary(query),
            rotary(key),
            value,
            inputs.mixing,
            layout,
            normalizer_query=query,
            normalizer_key=key,
            **options,
        )
        return output_norm(output) * F.silu(gate)

    return attention


def hedgehog_path(shape: OperatorShape, normalizer: str, backend: str, inputs: Inputs) -> Attention:
    """A layer with hedgehog features and mixing weights of each head, as recoveries make it.

    Arguments and result are those of [`fused_path`]; there is no output norm and no gate.
    """
    device = inputs.value.device
    norms, rotary = _path_modules(shape, inputs.value.dtype, device)[:2]
    config = MHLAConfig(
        blocks=shape.layout().blocks, feature_map="hedgehog", rope="before_feature_map", mixing_heads="per_head",
        normalizer=normalizer, eps=EPS, backend=backend,
    )  # fmt: skip
    layer = MHLA(config, hidden_size=shape.heads * shape.width, num_heads=shape.heads, head_dim=shape.width).to(device)
    options = {"grid": shape.grid, "norms": norms, "rotary": rotary}

    def attention(inputs: Inputs) -> torch.Tensor:
        mixing = inputs.mixing.expand(shape.heads, -1, -1)
        return torch.func.functional_call(layer, {"mixing": mixing}, inputs[:3], options)

    return attention


@cache
def _attention(shape: OperatorShape, normalizer: str, kind: str, backend: str) -> Attention:
    if kind == "operator":
        return partial(attend, f"mhla-{backend}", shape=shape, normalizer=normalizer)
    path = {"fused": fused_path, "hedgehog": hedgehog_path}[kind]
    return path(shape, normalizer, backend, _inputs(shape))


@dataclass(frozen=True)
class KernelCase:
    """One case with its inputs.

    Attributes:
        name: Name for `--cases`.
        shape: Sizes; small ones where kernels are interpreted.
        normalizer: `"none"` or `"query"`.
        trains: Whether it includes the backward pass.
        kind: `"operator"`, or what is computed from the projections on: `"fused"` or `"hedgehog"`.
    """

    name: str
    shape: OperatorShape
    normalizer: str
    trains: bool
    kind: str = "operator"

    @property
    def inputs(self) -> Inputs:
        """Random inputs, the same for each case of a shape."""
        return _inputs(self.shape)

    def attention(self, backend: str = "triton") -> Attention:
        """Its attention as a function of inputs, by `"triton"` or `"torch"`."""
        return _attention(self.shape, self.normalizer, self.kind, backend)

    def run(self, inputs: Inputs | None = None, *, backend: str = "triton", trains: bool | None = None) -> Tensors:
        """Runs the case.

        Args:
            inputs: Inputs in place of its own, of any type.
            backend: `"triton"` or `"torch"`.
            trains: Whether to run the backward pass, in place of what belongs to the case.

        Returns:
            The output, and the gradients of query, key, value and mixing if there is a backward pass.
        """
        return run_operator(
            self.attention(backend),
            self.inputs if inputs is None else inputs,
            self.trains if trains is None else trains,
        )


@lru_cache(maxsize=1)
def _inputs(shape: OperatorShape) -> Inputs:
    """Inputs of the shape that was asked for last: all at once would take several gigabytes."""
    return make_inputs(shape, DTYPE, DEVICE, seed=0)


def small(shape: OperatorShape) -> OperatorShape:
    """A shape of the same kind that Triton's interpreter gets through in seconds: ragged blocks, narrow heads."""
    width = 24 if shape.width % 16 else 16
    sizes: dict[str, Any] = {"batch": min(shape.batch, 2), "heads": 2, "width": width}
    if shape.causal:
        return replace(shape, **sizes, grid=(40,), chunk=16)
    grid = {3: (3, 4, 5), 2: (5, 6)}[len(shape.grid)]
    return replace(shape, **sizes, grid=grid, blocks=(1, 2, 2) if len(grid) == 3 else (2, 2))


# A normaliser, or a kind with the `query` normaliser; `train` adds the backward pass.
_LABELS = {
    "wan": "none, query, none train, query train, fused, fused train, hedgehog, hedgehog train",
    "wan-720p-h24": "none, none train",
    "dit-512": "query, query train",
    "causal-2k": "query",
    "causal-32k": "query",
    "causal-128k": "query",
}


def _case(shape: str, label: str) -> KernelCase:
    kind = label.split()[0]
    normalizer, kind = (kind, "operator") if kind in ("none", "query") else ("query", kind)
    return KernelCase(f"{shape} {label}", SHAPES[shape], normalizer, label.endswith("train"), kind)


CASES: dict[str, KernelCase] = {
    f"{shape} {label}": _case(shape, label) for shape, labels in _LABELS.items() for label in labels.split(", ")
}
"""All cases by name."""


def kernel_cases(names: Sequence[str] | None = None, *, quick: bool = False) -> Iterator[KernelCase]:
    """The cases with some names, all by default.

    Args:
        names: Names of cases, or beginnings of them.
        quick: Take small sizes, as for kernels that are interpreted.

    Raises:
        ValueError: If there is no case of a name.
    """
    for name in names or ():
        if not any(known.startswith(name) for known in CASES):
            check_choice("cases", name, CASES)
    for name, case in CASES.items():
        if names is None or any(name.startswith(wanted) for wanted in names):
            yield replace(case, shape=small(case.shape)) if quick or not ON_GPU else case
