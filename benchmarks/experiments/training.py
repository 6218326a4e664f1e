# SPDX-License-Identifier: Apache-2.0
"""What the trainings of all experiments share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


GRADIENT_CLIP = 1.0


def freeze_mixing(model: nn.Module) -> None:
    """Keeps the mixing weights of all MHLA layers out of training."""
    for name, parameter in model.named_parameters():
        if name.endswith(".mhla.mixing"):
            parameter.requires_grad_(False)


def descend(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], loss: torch.Tensor) -> None:
    """One step of the optimizers along the gradient of a loss, whose norm is clipped to `GRADIENT_CLIP`."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_CLIP)
    for optimizer in optimizers:
        optimizer.step()
