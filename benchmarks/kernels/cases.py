# SPDX-License-Identifier: Apache-2.0
"""What is checked, timed and swept: the cases of the predictions, with random inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch

from mhla_hf.benchmarks.attention import Inputs, hedgehog_path, make_inputs, mhla, mhla_path
from mhla_hf.benchmarks.shapes import OperatorShape, check_names

from ..predictions.stages import fused_forward, hedgehog_forward
from ..predictions.tables import CASES, Case


ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# Triton's interpreter has no bfloat16.
DTYPE = torch.bfloat16 if ON_GPU else torch.float32

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class KernelCase:
    """One case with its inputs.

    Attributes:
        name: A key of the predictions' `CASES`.
        case: What is predicted for it.
        shape: The sizes, small ones where kernels are interpreted.
    """

    name: str
    case: Case
    shape: OperatorShape

    @property
    def trains(self) -> bool:
        """Whether the backward pass belongs to it."""
        return self.case.backward is not None

    @property
    def inputs(self) -> Inputs:
        """Random inputs, the same for each case of a shape."""
        return _inputs(self.shape)

    def run(self, inputs: Inputs | None = None, *, backend: str = "triton", trains: bool | None = None) -> Tensors:
        """Runs the case.

        Args:
            inputs: Inputs in place of its own, of any type.
            backend: `"triton"` or `"torch"`.
            trains: Whether to run the backward pass, in place of what belongs to the case.

        Returns:
            The output, and the gradients of query, key, value and mixing if there is a backward pass.
        """
        inputs = self.inputs if inputs is None else inputs
        trains = self.trains if trains is None else trains
        attend: Callable[..., torch.Tensor] = {
            fused_forward: partial(mhla_path, fused=backend == "triton"), hedgehog_forward: hedgehog_path
        }.get(self.case.forward, mhla)  # fmt: skip
        inputs = inputs.differentiable() if trains else inputs
        with torch.set_grad_enabled(trains):
            output = attend(inputs, self.shape, self.case.problem.normalizer, "", backend=backend)
        if not trains:
            return (output,)
        wanted = (*inputs.tokens, inputs.mixing)
        return output.detach(), *torch.autograd.grad(output, wanted, inputs.gradient)


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


def kernel_cases(names: Sequence[str] | None = None, *, quick: bool = False) -> Iterator[KernelCase]:
    """The cases with some names, all by default.

    Args:
        names: Names of cases, or beginnings of them.
        quick: Take small sizes, as for kernels that are interpreted.

    Raises:
        ValueError: If there is no case of a name.
    """
    unknown = [name for name in names or () if not any(known.startswith(name) for known in CASES)]
    check_names("cases", unknown, CASES)
    for name, case in CASES.items():
        if names is None or any(name.startswith(wanted) for wanted in names):
            yield KernelCase(name, case, small(case.problem.shape) if quick or not ON_GPU else case.problem.shape)
