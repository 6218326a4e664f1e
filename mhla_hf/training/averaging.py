# SPDX-License-Identifier: Apache-2.0
"""Exponential moving average (EMA) of the weights that train, by `diffusers.training_utils.EMAModel`."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import checkpoints
from .config import TrainingConfig
from .sharding import full_tensor


logger = logging.getLogger(__name__)


class WeightAverage:
    """The average of some parameters of a model over the steps of a stage.

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
        """Takes the parameters after an optimizer step into the average."""
        self.ema.step(self.parameters)

    def collect(self) -> tuple[dict[str, torch.Tensor], int]:
        """The averages by parameter name, whole, and the number of steps in them. Every process must call it."""
        whole = [full_tensor(average) for average in self.ema.shadow_params]
        return dict(zip(self.names, whole, strict=True)), self.ema.optimization_step

    def load(self, checkpoint: Path) -> None:
        """Goes on with the average of a checkpoint; one without any starts from its weights.

        Raises:
            ValueError: If names or shapes are not those of the parameters that train.
        """
        steps = checkpoints.average_steps(checkpoint)
        if steps is None:
            logger.warning("%s holds no average of the weights (ema_decay): it starts there", checkpoint.name)
            return
        averages = dict(zip(self.names, self.ema.shadow_params, strict=True))
        checkpoints.load_tensors(checkpoint, checkpoints.AVERAGES, averages)
        self.ema.optimization_step = steps

    def copy_to_model(self) -> None:
        """Puts the average in the place of the parameters."""
        with torch.no_grad():
            self.ema.copy_to(self.parameters)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the model has the average for its parameters."""
        self.ema.store(self.parameters)
        self.copy_to_model()
        try:
            yield
        finally:
            self.ema.restore(self.parameters)
