# SPDX-License-Identifier: Apache-2.0
"""The stages of a run: their batches, what trains, which module runs, and the loss."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import nn

from ...utils.compat import unsplit_classes
from ..config import TrainingConfig
from ..data.batches import Batch, TrainingBatch
from ..data.data_order import DataOrder
from ..families import Objective
from ..parameters import trainable_names
from .teachers import Teacher


BatchMaker = Callable[[DataOrder, int, int], TrainingBatch]
"""Makes the micro-batch of (data order, step, micro-step), on the CPU; a pure function."""


class Stage(Protocol):
    """What the training loop needs to know of a stage.

    Attributes:
        name: One of `checkpoints.STAGES`.
        steps: How many optimizer steps it has.
        learning_rate: Peak learning rate.
        mhla_learning_rate: That of the MHLA parameters.
        validates: Whether validation samples are made on the way: the whole model trains.
    """

    name: str
    steps: int
    learning_rate: float
    mhla_learning_rate: float
    validates: bool

    def make_batch(self, order: DataOrder, step: int, micro_step: int) -> TrainingBatch:
        """A micro-batch of the samples that the order says, on the CPU; a pure function.

        Args:
            order: The data order of this process.
            step: Optimizer step, from 0.
            micro_step: Micro-step within it, from 0.
        """

    def trainable_names(self) -> list[str]:
        """Names of the parameters that train."""

    def module(self) -> nn.Module:
        """The module that accelerate wraps; it shares its parameters with the model."""

    def loss(self, module: nn.Module, batch: Any, accelerator: Accelerator) -> torch.Tensor:
        """The loss of a micro-batch, a scalar.

        Args:
            module: The wrapped one.
            batch: What `make_batch` made, on the device.
            accelerator: The processes.
        """

    def context(self) -> AbstractContextManager[None]:
        """What the stage's steps run in."""

    def close(self) -> None:
        """Lets go of what only this stage needs."""


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


class FineTuning:
    """The family's own objective on the whole model."""

    name = "finetune"
    validates = True

    def __init__(self, config: TrainingConfig, model: nn.Module, objective: Objective, make_batch: BatchMaker) -> None:
        self.config = config
        self.model = model
        self.objective = objective
        self.make_batch = make_batch
        self.steps = config.max_steps
        self.learning_rate = config.learning_rate
        self.mhla_learning_rate = config.mhla_learning_rate or config.learning_rate

    def trainable_names(self) -> list[str]:
        """What `train` says."""
        return trainable_names(self.model, self.config.train)

    def module(self) -> nn.Module:
        """The transformer."""
        return ObjectivePrediction(self.model, self.objective)

    def loss(self, module: nn.Module, batch: Batch, accelerator: Accelerator) -> torch.Tensor:
        """The objective's loss."""
        noisy = self.objective.add_noise(batch.latents, batch.noise, batch.levels)
        prediction = module(noisy, ObjectivePrediction.whole_numbers(batch.levels), batch.condition)
        return self.objective.losses_of(prediction, noisy, batch).mean()

    def context(self) -> AbstractContextManager[None]:
        """What the objective asks for."""
        return self.objective.fine_tuning(self.model)

    def close(self) -> None:
        """There is nothing to let go of."""


class Distillation:
    """The teacher's prediction on the data, alone or weighted against the family's own objective."""

    name = "distill"

    def __init__(
        self,
        config: TrainingConfig,
        model: nn.Module,
        objective: Objective,
        make_batch: BatchMaker,
        get_teacher: Callable[[], Teacher],
    ) -> None:
        self.config = config
        self.model = model
        self.objective = objective
        self.make_batch = make_batch
        self.get_teacher = get_teacher
        self.teacher: Teacher | None = None
        self.steps = config.distill_steps
        self.learning_rate = config.distill_learning_rate or config.learning_rate
        # The more particular option wins, as in the matching stage.
        self.mhla_learning_rate = config.distill_learning_rate or config.mhla_learning_rate or config.learning_rate
        # Fine-tuning makes them later, of the same steps.
        self.validates = not config.max_steps

    def trainable_names(self) -> list[str]:
        """What `train` says."""
        return trainable_names(self.model, self.config.train)

    def module(self) -> nn.Module:
        """The transformer."""
        self.teacher = self.get_teacher()
        return ObjectivePrediction(self.model, self.objective)

    def loss(self, module: nn.Module, batch: Batch, accelerator: Accelerator) -> torch.Tensor:
        """The distance to the teacher's prediction, mixed with the objective's loss."""
        assert self.teacher is not None
        objective, share = self.objective, self.config.distill_ratio
        noisy = objective.add_noise(batch.latents, batch.noise, batch.levels)
        with torch.no_grad(), accelerator.autocast():
            target = objective.predict(self.teacher, noisy, batch.levels, batch.condition)
        prediction = module(noisy, ObjectivePrediction.whole_numbers(batch.levels), batch.condition)
        loss = objective.distillation_losses(prediction, target, noisy, batch).mean()
        if share < 1:
            loss = share * loss + (1 - share) * objective.losses_of(prediction, noisy, batch).mean()
        return loss

    def context(self) -> AbstractContextManager[None]:
        """What the objective asks for."""
        return self.objective.fine_tuning(self.model)

    def close(self) -> None:
        """Lets go of the teacher."""
        self.teacher = None
