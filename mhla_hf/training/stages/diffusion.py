# SPDX-License-Identifier: Apache-2.0
"""Distillation and fine-tuning of diffusion models."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from accelerate import Accelerator
from torch import nn

from ...utils.compat import unsplit_classes
from ..data.batches import Batch
from ..data.data_order import DataOrder
from ..families import Objective
from .prediction import PredictionStage


class ObjectivePrediction(nn.Module):
    """The transformer, called as its objective calls it.

    Accelerate changes the forward method of what it wraps; wrapping this leaves the transformer as it was. The loss is
    not in here: sharding under mixed precision casts whatever it is handed, and the targets are better in fp32.
    """

    def __init__(self, transformer: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.transformer = transformer
        self.objective = objective
        # Sharding takes the units to wrap from here, and refuses names that no module has.
        there = {type(module).__name__ for module in transformer.modules()}
        units = {*unsplit_classes(transformer), *objective.sharded_classes}
        self._no_split_modules = sorted(units & there)

    def forward(self, noisy: torch.Tensor, levels: torch.Tensor, condition: dict[str, torch.Tensor]) -> torch.Tensor:
        """See `Objective.predict`; `levels` are as `whole_numbers` makes them."""
        levels = levels.view(torch.float32) if levels.dtype == torch.int32 else levels
        return self.objective.predict(self.transformer, noisy, levels, condition)

    @staticmethod
    def whole_numbers(levels: torch.Tensor) -> torch.Tensor:
        """Noise levels, or the bits of those that are fractions, int32.

        Sharding under mixed precision rounds whatever fractions it is handed, and the model would be told other noise
        levels than it sees.
        """
        return levels.view(torch.int32) if levels.dtype == torch.float32 else levels


class DiffusionStage(PredictionStage):
    """The family's objective, or the distance to the teacher's prediction of the same noisy latents."""

    def make_batch(self, order: DataOrder, step: int, micro_step: int) -> Batch:
        return self.batches(order, step, micro_step)

    def _wrapped(self) -> nn.Module:
        return ObjectivePrediction(self.model, self.objective)

    def loss(self, module: nn.Module, batch: Batch, accelerator: Accelerator) -> torch.Tensor:
        """The distance to the teacher's prediction, the objective's loss, or a mixture of both."""
        objective, share = self.objective, self.teacher_share
        noisy = objective.add_noise(batch.latents, batch.noise, batch.levels)
        if share:
            with torch.no_grad(), accelerator.autocast():
                target = objective.predict(self.teacher, noisy, batch.levels, batch.condition)
        prediction = module(noisy, ObjectivePrediction.whole_numbers(batch.levels), batch.condition)
        if not share:
            return objective.losses_of(prediction, noisy, batch).mean()
        loss = objective.distillation_losses(prediction, target, noisy, batch).mean()
        if share < 1:
            loss = share * loss + (1 - share) * objective.losses_of(prediction, noisy, batch).mean()
        return loss

    def context(self) -> AbstractContextManager[None]:
        return self.objective.fine_tuning(self.model)
