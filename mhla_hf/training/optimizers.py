# SPDX-License-Identifier: Apache-2.0
"""`Muon`: the optimizer of matrices, with Adam for everything else and multiplicative steps for mixing weights."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..layers.mixing import constrained, unconstrained


_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
# Floor of mixing weights that take multiplicative steps.
SMALLEST_WEIGHT = 1e-5
MATRIX, ADAM, LOGARITHM = "matrix", "adam", "logarithm"


def orthogonalize(matrices: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Bring the singular values of matrices close to 1 by Newton-Schulz iterations.

    Args:
        matrices: `[..., rows, columns]`.
        steps: Number of iterations.

    Returns:
        The same shape; singular values in about 0.7..1.2.
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
    """Muon for matrices; groups may have Adam instead.

    Muon is momentum whose matrices are orthogonalised (Keller Jordan and others, 2024), scaled so that an update has
    the size of AdamW's (Liu and others, "Muon is Scalable for LLM Training", 2025). `torch.optim.Muon` iterates in
    bfloat16, which most CPUs emulate, and takes matrices alone; this one keeps the parameters' dtype, batches
    equal shapes, and orthogonalises the rows, or columns, of each head by themselves where a group has `heads`.

    The `kind` of a group is `"matrix"` for Muon, `"adam"`, or `"logarithm"` for mixing weights:
    m ← m · exp(-lr · Adam(m · ∂L/∂m)) keeps positive weights positive and moves small and large ones at one rate.
    Such a group has the layer's `config`, which says how the weights are stored.

    Args:
        parameters: As for any optimizer; of groups of kind `"matrix"` all must be matrices.
        lr: Learning rate, on AdamW's scale.
        momentum: Nesterov momentum of matrices.
        betas: Adam's.
        weight_decay: Decoupled; not for kind `"logarithm"`.

    Raises:
        ValueError: If a parameter of kind `"matrix"` is not a matrix.
    """

    def __init__(
        self,
        parameters: Iterable[Any],
        lr: float = 2e-3,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.01,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "betas": betas, "weight_decay": weight_decay}
        super().__init__(parameters, {**defaults, "kind": MATRIX, "heads": None, "by_columns": False})
        for group in self.param_groups:
            for parameter in group["params"] if group["kind"] == MATRIX else ():
                if parameter.ndim != 2:
                    raise ValueError(f"parameters must be matrices; got one of shape {tuple(parameter.shape)}.")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. `closure` must be None."""
        if closure is not None:
            raise ValueError("closure must be None.")
        for group in self.param_groups:
            updated = [parameter for parameter in group["params"] if parameter.grad is not None]
            if group["kind"] == MATRIX:
                self._step_matrices(updated, group)
            else:
                for parameter in updated:
                    self._step_adam(parameter, group)

    def _step_matrices(self, parameters: list[torch.Tensor], group: dict[str, Any]) -> None:
        by_shape: dict[torch.Size, list[torch.Tensor]] = defaultdict(list)
        for parameter in parameters:
            by_shape[parameter.shape].append(parameter)
        for members in by_shape.values():
            updates = []
            for parameter in members:
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                assert parameter.grad is not None
                state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                updates.append(parameter.grad.lerp(state["momentum"], group["momentum"]))
            update = torch.stack(updates)
            update = update.mT if group["by_columns"] else update
            parts = update if group["heads"] is None else update.unflatten(1, (group["heads"], -1))
            parts = orthogonalize(parts) * (0.2 * max(parts.shape[-2:]) ** 0.5)
            update = parts if group["heads"] is None else parts.flatten(1, 2)
            update = update.mT if group["by_columns"] else update
            for parameter, change in zip(members, update, strict=True):
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(change, alpha=-group["lr"])

    def _step_adam(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        gradient, state, (first, second) = parameter.grad, self.state[parameter], group["betas"]
        assert gradient is not None
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        weights = parameter
        if group["kind"] == LOGARITHM:
            with torch.enable_grad():
                stored = parameter.detach().requires_grad_()
                weights = constrained(group["config"], stored)
                slope = torch.autograd.grad(weights.sum(), stored)[0]
            # Zero would stay zero; weights that are not used, as those of later blocks, have no gradient.
            weights = weights.detach().where((weights.abs() >= SMALLEST_WEIGHT) | (gradient == 0), SMALLEST_WEIGHT)
            gradient = gradient / slope * weights
        state["step"] += 1
        step = float(state["step"])
        state["exp_avg"].lerp_(gradient, 1 - first)
        state["exp_avg_sq"].lerp_(gradient.square(), 1 - second)
        root = state["exp_avg_sq"].sqrt().div_(math.sqrt(1 - second**step)).add_(1e-10)
        change = state["exp_avg"].div(root).mul_(-group["lr"] / (1 - first**step))
        if group["kind"] == LOGARITHM:
            parameter.copy_(unconstrained(group["config"], weights * change.clamp_(-1, 1).exp_()))
        else:
            parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(change)
