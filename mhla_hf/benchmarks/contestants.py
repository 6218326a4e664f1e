# SPDX-License-Identifier: Apache-2.0
"""The attention that the operator is compared with, as a table: each contestant with its requirements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

import torch
from torch.nn.attention import SDPBackend

from ..ops import triton_obstacle
from ..ops.kernel_check import kernels_pass
from . import attention
from .attention import Inputs
from .shapes import OperatorShape, check_names


def _kernels(shape: OperatorShape, dtype: torch.dtype, device: torch.device) -> str | None:
    if device.type != "cuda":
        # Interpreted kernels, which tests run on CPUs, say nothing about time.
        return f"the kernels run on GPUs, and the tensors are on {device.type}"
    tokens = torch.empty(1, 1, 1, shape.width, dtype=dtype, device=device)
    return triton_obstacle(tokens) or _failed_check("causal" if shape.causal else "block", tokens)


def _fused(shape: OperatorShape, dtype: torch.dtype, device: torch.device) -> str | None:
    from ..ops.triton import fits_fused_kernels

    if not fits_fused_kernels(shape.width, shape.width, True, dtype):
        return "heads are too wide for the fused kernels in this type"
    return _failed_check("fused", torch.empty(1, 1, 1, shape.width, dtype=dtype, device=device))


def _failed_check(family: str, tokens: torch.Tensor) -> str | None:
    """The reason where plain torch would take the place of kernels, and be timed for them."""
    passed = kernels_pass(family, tokens, tokens)
    return None if passed else f"the {family} kernels failed their check (mhla-hf doctor --kernels)"


Requirement = Callable[[OperatorShape, torch.dtype, torch.device], str | None]

REQUIREMENTS: dict[str, Requirement] = {
    "gpu": lambda shape, dtype, device: None if device.type == "cuda" else f"runs on GPUs only, not on {device.type}",
    "kernels": _kernels,
    "fused": _fused,
    "causal": lambda shape, dtype, device: None if shape.causal else "causal attention only",
    "bidirectional": lambda shape, dtype, device: "attention in both directions only" if shape.causal else None,
    "fla": lambda shape, dtype, device: (
        None
        if find_spec("fla") is not None
        else "flash-linear-attention is not installed (pip install flash-linear-attention)"
    ),
}
"""Checks by name; each returns why a contestant cannot run there, None if it can."""


@dataclass(frozen=True)
class Contestant:
    """One kind of attention.

    Args:
        name: Name for `--contestants`.
        family: `"mhla"`, `"softmax"` or `"linear"`, for counting floating-point operations.
        attend: Called with inputs, shape, normaliser and the backend of torch.compile; returns `[B, T, H, V]`.
        requires: Names of `REQUIREMENTS`, checked in this order.
        normalizers: Normalisers it is measured with; `None` stands for its own.
        usual: Whether it is measured when no contestants are named.
        compiled: Whether torch.compile compiles it.
        whole_path: Whether it computes from projections on, as a layer does, and not the operator alone.
    """

    name: str
    family: str
    attend: Callable[[Inputs, OperatorShape, str | None, str], torch.Tensor]
    requires: tuple[str, ...] = ()
    normalizers: tuple[str | None, ...] = ("none", "query")
    usual: bool = True
    compiled: bool = False
    whole_path: bool = False

    def obstacle(self, shape: OperatorShape, dtype: torch.dtype, device: torch.device) -> str | None:
        """Reason why it cannot run with this shape, type and device; None if it can."""
        reasons = (REQUIREMENTS[name](shape, dtype, device) for name in self.requires)
        return next((reason for reason in reasons if reason is not None), None)


def _softmax(name: str, backend: SDPBackend | None, *requires: str, usual: bool = True) -> Contestant:
    attend = partial(attention.softmax, backend=backend)
    return Contestant(name, "softmax", attend, requires, normalizers=(None,), usual=usual)


def _path(name: str, backend: str, *requires: str, fused: bool = False) -> Contestant:
    attend = partial(attention.mhla_path, backend=backend, fused=fused)
    return Contestant(name, "mhla", attend, ("bidirectional", *requires), whole_path=True)


_COMPILED = partial(attention.mhla, backend="torch", compiled=True)
_GATED = partial(attention.fla, name="simple_gla")
_FLA = ("causal", "fla", "gpu")

CONTESTANTS: dict[str, Contestant] = {
    contestant.name: contestant
    for contestant in (
        Contestant("mhla-torch", "mhla", partial(attention.mhla, backend="torch")),
        Contestant("mhla-triton", "mhla", partial(attention.mhla, backend="triton"), ("kernels",)),
        Contestant("mhla-compiled", "mhla", _COMPILED, usual=False, compiled=True),
        _softmax("softmax", None),
        _softmax("softmax-flash", SDPBackend.FLASH_ATTENTION, "gpu"),
        _softmax("softmax-cudnn", SDPBackend.CUDNN_ATTENTION, "gpu"),
        _softmax("softmax-math", SDPBackend.MATH, usual=False),
        Contestant("linear", "linear", attention.linear),
        Contestant("fla-linear", "linear", partial(attention.fla, name="linear_attn"), _FLA),
        _path("mhla-path-torch", "torch"),
        _path("mhla-path-triton", "triton", "kernels"),
        _path("mhla-path-fused", "triton", "kernels", "fused", fused=True),
        *(
            Contestant(
                f"mhla-path-hedgehog-{backend}",
                "mhla",
                partial(attention.hedgehog_path, backend=backend),
                ("bidirectional", *requires),
                usual=False,
                whole_path=True,
            )
            for backend, requires in (("torch", ()), ("triton", ("kernels",)))
        ),
        Contestant("softmax-path", "softmax", attention.softmax_path, ("bidirectional",), (None,), whole_path=True),
        Contestant("fla-simple-gla", "linear", _GATED, _FLA, (None,)),
    )
}
"""All contestants by name."""


def choose_contestants(names: Sequence[str] | None) -> list[Contestant]:
    """The contestants with some names, or the usual ones.

    Raises:
        ValueError: If a name is unknown.
    """
    if names is None:
        return [contestant for contestant in CONTESTANTS.values() if contestant.usual]
    check_names("contestants", names, CONTESTANTS)
    return [CONTESTANTS[name] for name in names]
