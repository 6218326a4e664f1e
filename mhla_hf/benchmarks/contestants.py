# SPDX-License-Identifier: Apache-2.0
"""What the operator is measured against, as data: each contestant with what it needs and how it is called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from ..config import MHLAConfig
from ..layers.mixing import initial_mixing
from ..ops import mhla_attention, triton_obstacle
from . import paths, peers
from .shapes import OperatorShape


EPS = 1e-6
# Logarithm of what a gated contestant keeps of the past at every token.
_LOG_DECAY = -0.01


@dataclass(frozen=True)
class Inputs:
    """One set of tensors for a shape.

    Args:
        query: Positive features `[B, T, H, K]`.
        key: The same of keys.
        value: `[B, T, H, V]`.
        mixing: float32 `[M, M]`.
        decay: float32 `[B, T, H]`, logarithms.
        gradient: Of the output, `[B, T, H, V]`.
        gate: What a gate's projection puts out: the numbers of `value` again, which nothing reads together with it.
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
        """The same tensors, whose gradients are wanted."""
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
    layout = shape.layout()
    mixing = initial_mixing(MHLAConfig(causal=shape.causal, **_block_options(shape)), layout.blocks).to(device)
    decay = torch.full(size[:3], _LOG_DECAY, device=device)
    return Inputs(F.elu(query) + 1, F.elu(key) + 1, value, mixing, decay, gradient, value)


def _block_options(shape: OperatorShape) -> dict[str, Any]:
    return {"block_size": (shape.chunk,)} if shape.causal else {}


@dataclass(frozen=True)
class Contestant:
    """One way to attend.

    Args:
        name: What `--contestants` calls it.
        family: `"mhla"`, `"softmax"` or `"linear"`, which tells its floating-point operations.
        attend: Called with inputs, shape, normaliser and the backend of torch.compile; returns `[B, T, H, V]`.
        obstacle: Called with shape, dtype and device: why it cannot run there, None if it can.
        normalizers: Those it is measured with; `None` stands for its own.
        usual: Whether it is measured when no contestants are named.
        compiled: Whether torch.compile makes it.
        whole_path: Whether it takes projections, and does what a layer does before and after the operator too.
    """

    name: str
    family: str
    attend: Callable[[Inputs, OperatorShape, str | None, str], torch.Tensor]
    obstacle: Callable[[OperatorShape, torch.dtype, torch.device], str | None] = lambda *_: None
    normalizers: tuple[str | None, ...] = ("none", "query")
    usual: bool = True
    compiled: bool = False
    whole_path: bool = False


def _mhla(backend: str, compiled: bool = False) -> Callable[..., torch.Tensor]:
    def attend(inputs: Inputs, shape: OperatorShape, normalizer: str | None, compile_backend: str) -> torch.Tensor:
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

    return attend


@cache
def _compiled_operator(compile_backend: str) -> Callable[..., torch.Tensor]:
    return torch.compile(mhla_attention, backend=compile_backend, dynamic=False)


def _triton_obstacle(shape: OperatorShape, dtype: torch.dtype, device: torch.device) -> str | None:
    if device.type != "cuda":
        # Interpreted kernels, which tests run on CPUs, say nothing about time.
        return f"the kernels run on GPUs, and the tensors are on {device.type}"
    return triton_obstacle(torch.empty(1, 1, 1, shape.width, dtype=dtype, device=device))


def _softmax(backend: SDPBackend | None) -> Callable[..., torch.Tensor]:
    def attend(inputs: Inputs, shape: OperatorShape, *_: object) -> torch.Tensor:
        return peers.softmax_attention(*inputs.tokens, shape.causal, backend)

    return attend


def _mhla_path(backend: str, fused: bool) -> Callable[..., torch.Tensor]:
    def attend(inputs: Inputs, shape: OperatorShape, normalizer: str | None, _: str) -> torch.Tensor:
        return paths.mhla_path(inputs, shape, normalizer or "query", backend, fused)

    return attend


def _softmax_path(backend: SDPBackend | None) -> Callable[..., torch.Tensor]:
    def attend(inputs: Inputs, shape: OperatorShape, *_: object) -> torch.Tensor:
        return paths.softmax_path(inputs, shape, backend)

    return attend


def _path_obstacle(shape: OperatorShape, dtype: torch.dtype, device: torch.device) -> str | None:
    return "attention in both directions only" if shape.causal else None


def _triton_path_obstacle(shape: OperatorShape, dtype: torch.dtype, device: torch.device) -> str | None:
    return _path_obstacle(shape, dtype, device) or _triton_obstacle(shape, dtype, device)


def _fused_path_obstacle(shape: OperatorShape, dtype: torch.dtype, device: torch.device) -> str | None:
    obstacle = _triton_path_obstacle(shape, dtype, device)
    return obstacle or (None if paths.fits(shape, dtype) else "heads are too wide for the fused kernels in this type")


def _needs_gpu(shape: OperatorShape, dtype: torch.dtype, device: torch.device) -> str | None:
    return None if device.type == "cuda" else f"runs on GPUs only, not on {device.type}"


def _linear(inputs: Inputs, shape: OperatorShape, normalizer: str | None, _: str) -> torch.Tensor:
    eps = EPS if normalizer == "query" else None
    if shape.chunk is not None:
        return peers.causal_linear_attention(*inputs.tokens, eps, shape.chunk)
    return peers.linear_attention(*inputs.tokens, eps)


def _fla(name: str) -> Callable[..., torch.Tensor]:
    def attend(inputs: Inputs, shape: OperatorShape, normalizer: str | None, _: str) -> torch.Tensor:
        return peers.fla_attention(name, *inputs.tokens, inputs.decay, normalizer == "query")

    return attend


def _fla_obstacle(shape: OperatorShape, dtype: torch.dtype, device: torch.device) -> str | None:
    if not shape.causal:
        return "causal attention only"
    return peers.fla_obstacle() or _needs_gpu(shape, dtype, device)


CONTESTANTS: dict[str, Contestant] = {
    contestant.name: contestant
    for contestant in (
        Contestant("mhla-torch", "mhla", _mhla("torch")),
        Contestant("mhla-triton", "mhla", _mhla("triton"), _triton_obstacle),
        Contestant("mhla-compiled", "mhla", _mhla("torch", compiled=True), usual=False, compiled=True),
        Contestant("softmax", "softmax", _softmax(None), normalizers=(None,)),
        Contestant("softmax-flash", "softmax", _softmax(SDPBackend.FLASH_ATTENTION), _needs_gpu, (None,)),
        Contestant("softmax-cudnn", "softmax", _softmax(SDPBackend.CUDNN_ATTENTION), _needs_gpu, (None,)),
        Contestant("softmax-math", "softmax", _softmax(SDPBackend.MATH), normalizers=(None,), usual=False),
        Contestant("linear", "linear", _linear),
        Contestant("fla-linear", "linear", _fla("chunk_linear_attn"), _fla_obstacle),
        Contestant("mhla-path-torch", "mhla", _mhla_path("torch", False), _path_obstacle, whole_path=True),
        Contestant("mhla-path-triton", "mhla", _mhla_path("triton", False), _triton_path_obstacle, whole_path=True),
        Contestant("mhla-path-fused", "mhla", _mhla_path("triton", True), _fused_path_obstacle, whole_path=True),
        Contestant("softmax-path", "softmax", _softmax_path(None), _path_obstacle, (None,), whole_path=True),
        Contestant("fla-simple-gla", "linear", _fla("chunk_simple_gla"), _fla_obstacle, (None,)),
    )
}
"""All contestants by name."""


def choose_contestants(names: Sequence[str] | None) -> list[Contestant]:
    """The contestants of some names, or the usual ones.

    Raises:
        ValueError: If a name is unknown.
    """
    if names is None:
        return [contestant for contestant in CONTESTANTS.values() if contestant.usual]
    for name in names:
        if name not in CONTESTANTS:
            raise ValueError(f"contestants={name!r} must be one of {', '.join(CONTESTANTS)}.")
    return [CONTESTANTS[name] for name in names]
