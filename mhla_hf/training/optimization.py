# SPDX-License-Identifier: Apache-2.0
"""AdamW groups, the learning rate as a pure function of the step, and the moving average (EMA) of the weights."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import checkpoints
from .config import TrainingConfig
from .parameters import is_mhla_parameter
from .processes import full_tensor


logger = logging.getLogger(__name__)

_TABLES = ("scale_shift_table", "embedding_table.weight")


def learning_rate_factor(step: int, *, schedule: str, warmup_steps: int, total_steps: int) -> float:
    """The factor on the peak learning rate at a step, as in `diffusers.optimization` after the warm-up.

    Args:
        step: Optimizer step, from 0.
        schedule: `constant`, or `linear` or `cosine` decay to 0 over the steps after the warm-up.
        warmup_steps: Steps of linear warm-up; the first step has 1 / warmup_steps of the peak.
        total_steps: Steps of the stage, warm-up included.
    """
    if step < warmup_steps:
        # Diffusers begins at a rate of 0, with which the first step would learn nothing.
        return (step + 1) / warmup_steps
    progress = min(max(step - warmup_steps, 0) / max(total_steps - warmup_steps, 1), 1.0)
    return {"constant": 1.0, "linear": 1 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress))}[schedule]


def make_optimizer(
    model: nn.Module, names: Sequence[str], config: TrainingConfig, learning_rate: float, mhla_learning_rate: float
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
    """Set every group to `factor` times its peak; return the learning rate of the first group."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * factor
    return float(optimizer.param_groups[0]["lr"])


class WeightAverage:
    """The average of some parameters over the steps of a stage, by `diffusers.training_utils.EMAModel`.

    It lies where the parameters lie, sharded as they are. Without `ema_power` the decay grows as
    (1 + step) / (10 + step) up to `ema_decay`; with it, as 1 - (1 + step / ema_inv_gamma)^-ema_power.

    Args:
        model: The model, on its device and sharded already.
        names: Parameters that train.
        config: The options; `ema_decay` must be given.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], config: TrainingConfig) -> None:
        from diffusers.training_utils import EMAModel

        assert config.ema_decay is not None
        every = dict(model.named_parameters())
        self.names = list(names)
        self.parameters = [every[name] for name in self.names]
        warmup: dict[str, Any] = {}
        if config.ema_power is not None:
            warmup = {"use_ema_warmup": True, "inv_gamma": config.ema_inv_gamma or 1.0, "power": config.ema_power}
        self.ema = EMAModel(self.parameters, decay=config.ema_decay, **warmup)

    def step(self) -> None:
        """Update the average after an optimizer step."""
        self.ema.step(self.parameters)

    def collect(self) -> dict[str, torch.Tensor]:
        """Return the averages by parameter name, unsharded. Every process must call it."""
        return {name: full_tensor(average) for name, average in self._named().items()}

    def load(self, checkpoint: Path) -> None:
        """Resume the average of a checkpoint; if it has none, start from the checkpoint's weights.

        Raises:
            ValueError: If names or shapes are not those of the parameters that train.
        """
        steps = checkpoints.read_state(checkpoint).get(checkpoints.AVERAGE_STEPS)
        if steps is None:
            logger.warning("%s holds no average of the weights (ema_decay): it starts there", checkpoint.name)
            return
        checkpoints.load_tensors(checkpoint / checkpoints.AVERAGES, self._named())
        self.ema.optimization_step = steps

    def _named(self) -> dict[str, torch.Tensor]:
        return dict(zip(self.names, self.ema.shadow_params, strict=True))

    def copy_to_model(self) -> None:
        """Copy the average into the parameters."""
        with torch.no_grad():
            self.ema.copy_to(self.parameters)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """A context in which the model has the average for its parameters."""
        self.ema.store(self.parameters)
        self.copy_to_model()
        try:
            yield
        finally:
            self.ema.restore(self.parameters)
