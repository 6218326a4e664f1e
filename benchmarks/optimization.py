# SPDX-License-Identifier: Apache-2.0
"""Optimizers, schedule and step shared by the trainings of small models."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import nn

from mhla_hf.training.optimizers import Muon
from mhla_hf.training.parameters import learning_rate_factor, set_learning_rate


GRADIENT_CLIP = 1.0
# Parameters of transformer layers, in transformers and in diffusers, without tables of classes.
_OF_LAYERS = re.compile(r"(?!.*embedding_table)(.*\.layers|(.*\.)?(single_)?transformer_blocks)\.")


def freeze_mixing(model: nn.Module) -> None:
    """Keeps the mixing weights of all MHLA layers out of training."""
    for name, parameter in model.named_parameters():
        if name.endswith(".mhla.mixing"):
            parameter.requires_grad_(False)


def make_optimizers(
    model: nn.Module,
    *,
    matrix_rate: float,
    other_rate: float,
    mixing_rate: float | None = None,
    betas: tuple[float, float] = (0.9, 0.999),
) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the transformer layers, AdamW for the rest; without weight decay.

    Models of these sizes learn several times as fast as with AdamW alone. The matrix of the output gate is one of the
    layer's.

    Args:
        model: The model; parameters that take no gradient are left out.
        matrix_rate: Peak learning rate of Muon.
        other_rate: Peak learning rate of AdamW.
        mixing_rate: That of the mixing weights; `None` for `other_rate`.
        betas: Of AdamW.
    """
    matrices, mixing, others = [], [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_matrix = parameter.ndim == 2 and _OF_LAYERS.match(name)
            (mixing if name.endswith(".mhla.mixing") else matrices if is_matrix else others).append(parameter)
    groups = [{"params": others, "peak_lr": other_rate}]
    if mixing:
        groups.append({"params": mixing, "peak_lr": other_rate if mixing_rate is None else mixing_rate})
    return [
        Muon([{"params": matrices, "peak_lr": matrix_rate}], weight_decay=0.0),
        torch.optim.AdamW(groups, betas=betas, weight_decay=0.0),
    ]


def follow_cosine(optimizers: Sequence[torch.optim.Optimizer], step: int, *, warmup_steps: int, steps: int) -> None:
    """Sets the learning rates of a step, counted from 0: linear warm-up, then down to 0 by a cosine."""
    factor = learning_rate_factor(step, schedule="cosine", warmup_steps=warmup_steps, total_steps=steps)
    for optimizer in optimizers:
        set_learning_rate(optimizer, factor)


def descend(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], loss: torch.Tensor) -> None:
    """One step of the optimizers along the gradient of a loss, whose norm is clipped to `GRADIENT_CLIP`."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_CLIP)
    for optimizer in optimizers:
        optimizer.step()
