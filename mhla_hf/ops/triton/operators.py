# SPDX-License-Identifier: Apache-2.0
"""Definition of custom operators.

What is defined here is called directly in eager mode, by its plan; torch.compile, modes, functorch and subclasses of
tensors see the operator. Its gradients are an `autograd.Function` outside of the operator in the one case, and part of
it in the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch

from ..operands import records_gradients
from ..plans import BODIES, is_plain, kind_of, planned


def operator(name: str, *, writes: Sequence[str] = (), differentiable: bool = True) -> Callable[[Callable], Any]:
    """Define an operator, in place of `torch.library.custom_op`.

    The latter takes longer for every call: 10 to 60 µs.

    Args:
        name: Its name after that of its namespace, `namespace::name`.
        writes: Arguments that it writes to.
        differentiable: Whether a backward pass will be registered; otherwise it is an error to ask for one. Operators
            without either have a derivative of zero.

    Returns:
        A decorator, which turns the function into one that is called like the operator, its `overload`. Its
        `register_autograd` is that of `torch.library`, for an operator that is differentiable.
    """

    def define(run: Callable) -> Any:
        schema = torch.library.infer_schema(run, mutates_args=writes)
        torch.library.define(name, schema)
        # Tensors come first.
        count = schema.count("Tensor") - schema.partition("->")[2].count("Tensor")

        def run_planned(*arguments: Any) -> Any:
            tensors, options = arguments[:count], arguments[count:]
            return planned(kind_of(tensors, name, options), run, tensors, *options, is_repeatable=not writes)

        torch.library.impl(name, ("cpu", "cuda"))(run_planned)
        if not differentiable:
            torch.library.register_autograd(name, _second_derivative)
        BODIES[name] = run
        functions: list[Any] = []
        overload = attrgetter(name.replace("::", "."))(torch.ops).default

        def call(*arguments: Any) -> Any:
            tensors = arguments[:count]
            # What operators write to, autograd has to know of.
            if writes or not is_plain(tensors) or tensors[0].device.type not in ("cpu", "cuda"):
                return overload(*arguments)
            if not records_gradients(*tensors):
                return run_planned(*arguments)
            return functions[0].apply(*arguments) if functions else overload(*arguments)

        def register_autograd(backward: Callable[..., Any], *, setup_context: Callable[..., None]) -> None:
            torch.library.register_autograd(name, backward, setup_context=setup_context)
            functions.append(_differentiable(run_planned, backward, setup_context))

        call.register_autograd, call.overload = register_autograd, overload  # type: ignore[attr-defined]
        return call

    return define


def _differentiable(run: Callable, backward: Callable[..., Any], setup_context: Callable[..., None]) -> Any:
    """A function with these gradients outside of the operator, where they cost the host a third as much."""

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            # None of them but the first has one.
            ctx.set_materialize_grads(False)
            ctx.count = len(inputs)
            output = run(*inputs)
            setup_context(ctx, inputs, output)
            return output

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return (None,) * ctx.count if gradients[0] is None else backward(ctx, *gradients)

    return Differentiable


def _second_derivative(ctx: Any, *gradients: torch.Tensor) -> None:
    raise RuntimeError("The kernels of MHLA have no second derivatives; backend='torch' has.")
