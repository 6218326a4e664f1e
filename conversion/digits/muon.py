# SPDX-License-Identifier: Apache-2.0
"""Muon, the optimiser of the transformer's matrices.

Momentum whose matrices are orthogonalised by a Newton-Schulz iteration (Keller Jordan and others, 2024), scaled so
that an update has the size of AdamW's (Liu and others, "Muon is Scalable for LLM Training", 2025). `torch.optim.Muon`
iterates in bfloat16, which most CPUs emulate; this one keeps the parameters' dtype and batches equal shapes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch


_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalize(matrices: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Brings the singular values of matrices close to 1.

    Args:
        matrices: `[N, rows, columns]`.
        steps: Newton-Schulz iterations.

    Returns:
        `[N, rows, columns]`, singular values in about 0.7..1.2.
    """
    a, b, c = _COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    result = matrices.mT if tall else matrices
    result = result / (result.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = result @ result.mT
        result = a * result + (b * gram + c * gram @ gram) @ result
    return result.mT if tall else result


class Muon(torch.optim.Optimizer):
    """Muon for two-dimensional parameters.

    Args:
        parameters: Matrices only.
        lr: Learning rate, on AdamW's scale.
        momentum: Nesterov momentum.
        weight_decay: Decoupled.

    Raises:
        ValueError: If a parameter is not a matrix.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        lr: float = 2e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.ndim != 2:
                    raise ValueError(f"parameters must be matrices; got one of shape {tuple(parameter.shape)}.")

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """Updates every parameter that has a gradient. `closure` is not supported and must be None."""
        if closure is not None:
            raise ValueError("closure must be None.")
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[torch.nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            for shape, parameters in by_shape.items():
                self._step_shape(shape, parameters, group)

    def _step_shape(self, shape: torch.Size, parameters: list[torch.nn.Parameter], group: dict) -> None:
        updates = []
        for parameter in parameters:
            state = self.state[parameter]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(parameter)
            state["momentum"].lerp_(parameter.grad, 1.0 - group["momentum"])
            updates.append(parameter.grad.lerp(state["momentum"], group["momentum"]))
        scale = 0.2 * max(shape) ** 0.5
        for parameter, update in zip(parameters, orthogonalize(torch.stack(updates)), strict=True):
            parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
            parameter.add_(update, alpha=-group["lr"] * scale)
