# SPDX-License-Identifier: Apache-2.0
"""AdamW groups and the learning rate as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from .config import LR_SCHEDULES, TrainingConfig
from .parameters import is_mhla_parameter


_TABLES = ("scale_shift_table", "embedding_table.weight")


def learning_rate_factor(step: int, *, schedule: str, warmup_steps: int, total_steps: int) -> float:
    """The factor on the peak learning rate at a step.

    Args:
        step: Optimizer step, from 0.
        schedule: `constant`, or `linear` or `cosine` decay to 0 over the steps after the warm-up.
        warmup_steps: Steps of linear warm-up; the first step has 1 / warmup_steps of the peak.
        total_steps: Steps of the stage, warm-up included.

    Raises:
        ValueError: If the schedule is unknown.
    """
    if schedule not in LR_SCHEDULES:
        raise ValueError(f"lr_schedule must be one of {', '.join(LR_SCHEDULES)}, got {schedule!r}")
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    progress = (step - warmup_steps) / max(total_steps - warmup_steps, 1)
    progress = min(progress, 1.0)
    return 1 - progress if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))


def make_optimizer(
    model: nn.Module,
    names: Sequence[str],
    config: TrainingConfig,
    learning_rate: float,
    mhla_learning_rate: float,
) -> torch.optim.AdamW:
    """AdamW over some parameters of a model.

    Weight decay acts on weight matrices only: not on biases, norms, scale-and-shift tables or MHLA parameters, whose
    resting point is not zero, nor on tables of classes, where it would wear away those that the data lack. Each group
    keeps its peak learning rate under `peak_lr`.

    Args:
        model: The transformer.
        names: Parameters to train.
        config: The options.
        learning_rate: Peak learning rate of the stage.
        mhla_learning_rate: That of the MHLA parameters.
    """
    parameters = dict(model.named_parameters())
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name in names:
        parameter, ours = parameters[name], is_mhla_parameter(name)
        decayed = not ours and parameter.ndim >= 2 and not name.endswith(_TABLES)
        groups.setdefault((ours, decayed), []).append(parameter)
    return torch.optim.AdamW(
        [
            {
                "params": members,
                "lr": mhla_learning_rate if ours else learning_rate,
                "peak_lr": mhla_learning_rate if ours else learning_rate,
                "weight_decay": config.weight_decay if decayed else 0.0,
            }
            for (ours, decayed), members in groups.items()
        ],
        lr=learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> float:
    """Sets every group to `factor` times its peak; returns the learning rate of the first group."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * factor
    return float(optimizer.param_groups[0]["lr"])
