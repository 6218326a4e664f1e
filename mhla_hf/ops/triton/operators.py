# SPDX-License-Identifier: Apache-2.0
"""Definition of custom operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch


OPERATORS: dict[str, Callable[..., Any]] = {}
"""Functions that operators run, by name."""


def operator(name: str, *, writes: Sequence[str] = (), differentiable: bool = True) -> Callable[[Callable], Any]:
    """Define an operator, in place of `torch.library.custom_op`.

    The latter takes longer for every call: 10 to 60 µs.

    Args:
        name: Its name after that of its namespace, `namespace::name`.
        writes: Arguments that it writes to.
        differentiable: Whether a backward pass will be registered; otherwise it is an error to ask for one. Operators
            without either have a derivative of zero.

    Returns:
        A decorator, which turns the function into the operator.
    """

    def define(run: Callable) -> Any:
        torch.library.define(name, torch.library.infer_schema(run, mutates_args=writes))
        torch.library.impl(name, ("cpu", "cuda"))(run)
        if not differentiable:
            torch.library.register_autograd(name, _second_derivative)
        OPERATORS[name] = run
        return attrgetter(name.replace("::", "."))(torch.ops).default

    return define


def _second_derivative(ctx: Any, *gradients: torch.Tensor) -> None:
    raise RuntimeError("The kernels of MHLA have no second derivatives; backend='torch' has.")
