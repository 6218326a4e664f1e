# SPDX-License-Identifier: Apache-2.0
"""Stages of a run, and those that train the whole model on its predictions: distillation and fine-tuning."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import nn

from ..config import TrainingConfig
from ..data.batches import TrainingBatch
from ..data.data_order import DataOrder
from ..parameters import trainable_names
from .teachers import Teacher


class Stage(Protocol):
    """A stage as the training loop sees it.

    Attributes:
        name: One of `checkpoints.STAGES`.
        steps: Number of optimizer steps.
        learning_rate: Peak learning rate.
        mhla_learning_rate: Peak learning rate of the MHLA parameters.
        validates: Whether validation samples are made during the stage, in which the whole model trains.
    """

    name: str
    steps: int
    learning_rate: float
    mhla_learning_rate: float
    validates: bool

    def make_batch(self, order: DataOrder, step: int, micro_step: int) -> TrainingBatch:
        """Makes a micro-batch on the CPU; a pure function.

        Args:
            order: The data order of this process.
            step: Optimizer step, from 0.
            micro_step: Micro-step within it, from 0.
        """

    def trainable_names(self) -> list[str]:
        """Names of the parameters that train."""

    def module(self) -> nn.Module:
        """The module that accelerate wraps, which shares its parameters with the model."""

    def loss(self, module: nn.Module, batch: Any, accelerator: Accelerator) -> torch.Tensor:
        """The loss of a micro-batch, a scalar.

        Args:
            module: The wrapped module.
            batch: A micro-batch of `make_batch`, on the device.
            accelerator: The processes.
        """

    def context(self) -> AbstractContextManager[None]:
        """Context of the stage's steps."""

    def close(self) -> None:
        """Releases everything that only this stage needs."""


class PredictionStage(ABC):
    """Fine-tuning on the model's own task or, with a teacher, distillation towards its predictions.

    Args:
        config: The options.
        model: The model.
        objective: The objective of the model.
        batches: Source of the batches.
        get_teacher: Returns the teacher when the stage begins; None for fine-tuning.

    Attributes:
        teacher_share: Weight of the distance to the teacher in the loss; the rest is the weight of the task's loss.
    """

    def __init__(
        self,
        config: TrainingConfig,
        model: nn.Module,
        objective: Any,
        batches: Any,
        get_teacher: Callable[[], Teacher] | None = None,
    ) -> None:
        self.config, self.objective, self.batches = config, objective, batches
        self.model: Any = model
        self.get_teacher = get_teacher
        self.teacher: Teacher | None = None
        self.name, self.steps, self.teacher_share = "finetune", config.max_steps, 0.0
        own_rate = None
        if get_teacher is not None:
            self.name, self.steps, self.teacher_share = "distill", config.distill_steps, config.distill_ratio
            own_rate = config.distill_learning_rate
        self.learning_rate = own_rate or config.learning_rate
        # The more particular option wins, as in the matching stage.
        self.mhla_learning_rate = own_rate or config.mhla_learning_rate or config.learning_rate
        # Fine-tuning makes them later, of the same steps.
        self.validates = get_teacher is None or not config.max_steps

    @abstractmethod
    def make_batch(self, order: DataOrder, step: int, micro_step: int) -> TrainingBatch: ...

    def trainable_names(self) -> list[str]:
        return trainable_names(self.model, self.config.train)

    def module(self) -> nn.Module:
        if self.get_teacher is not None:
            self.teacher = self.get_teacher()
        return self._wrapped()

    @abstractmethod
    def _wrapped(self) -> nn.Module: ...

    @abstractmethod
    def loss(self, module: nn.Module, batch: Any, accelerator: Accelerator) -> torch.Tensor: ...

    @abstractmethod
    def context(self) -> AbstractContextManager[None]: ...

    def close(self) -> None:
        """Releases the teacher."""
        self.teacher = None
