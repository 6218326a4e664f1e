# SPDX-License-Identifier: Apache-2.0
"""Stages that train on predictions: distillation and fine-tuning; and the objective of a diffusion transformer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from ...families.objectives import LatentBatch, Objective
from ...models.directory import ModelDirectory
from ...models.registry import FAMILIES, MHLA_CLASSES, trained_family
from ...utils.compat import unsplit_classes
from ..config import TrainingConfig, check_options
from ..parameters import trainable_names
from ..processes import is_fully_sharded
from ..teacher import SharedTeacher, Teacher


def objective_for(
    model: Any, directory: ModelDirectory | str | Path | None = None, config: TrainingConfig | None = None
) -> Objective:
    """The objective that a model is trained and evaluated with.

    Args:
        model: The transformer.
        directory: The pipeline it comes from; its scheduler decides how samples are noised. None takes the defaults
            of the family.
        config: Options that change it; None changes nothing.

    Raises:
        ValueError: If such models cannot be trained here, an option belongs to other models, or the scheduler does
            not go with the objective.
    """
    config = config or TrainingConfig()
    # Sharding replaces the class of a model by a subclass.
    names = [cls.__name__ for cls in type(model).__mro__]
    family = trained_family(next((name for name in names if name in {**FAMILIES, **MHLA_CLASSES}), names[0]))
    objective = family.load_objective()
    objective.check_model(model.config)
    check_options(config, family.name)
    if directory is not None and not isinstance(directory, ModelDirectory):
        directory = ModelDirectory.open(directory, config.component)
    return objective.for_run(config, directory)


class Stage(ABC):
    """Fine-tuning on the model's own task or, with a teacher, distillation towards its predictions.

    Args:
        config: The options.
        model: The model.
        objective: The objective of the model.
        make_batch: Makes a micro-batch on the CPU from the data order of this process, the step and the micro-step.
        get_teacher: Returns the teacher when the stage runs; None for fine-tuning.

    Attributes:
        name: One of `checkpoints.STAGES`.
        steps: Number of optimizer steps.
        learning_rate: Peak learning rate.
        mhla_learning_rate: Peak learning rate of the MHLA parameters.
        validates: True if the stage generates validation samples.
        teacher_share: Weight of the distance to the teacher in the loss; the rest is the weight of the task's loss.
    """

    def __init__(
        self,
        config: TrainingConfig,
        model: Any,
        objective: Any,
        make_batch: Callable[[Any, int, int], Any],
        get_teacher: Callable[[], Teacher] | None = None,
    ) -> None:
        self.config, self.model, self.objective, self.make_batch = config, model, objective, make_batch
        self.get_teacher = get_teacher
        self.name, self.steps, self.teacher_share = "finetune", config.max_steps, 0.0
        own_rate = None
        if get_teacher is not None:
            self.name, self.steps, self.teacher_share = "distill", config.distill_steps, config.distill_ratio
            own_rate = config.distill_learning_rate
        self.learning_rate = own_rate or config.learning_rate
        # The more particular option wins, over one of these parameters.
        self.mhla_learning_rate = own_rate or config.mhla_learning_rate or config.learning_rate
        # Fine-tuning generates them later, for the same steps.
        self.validates = get_teacher is None or not config.max_steps

    def trainable_names(self) -> list[str]:
        """Names of the parameters that train."""
        return trainable_names(self.model, self.config.train)

    @cached_property
    def teacher(self) -> Teacher | None:
        """The teacher; the trainer releases it after the stage."""
        return None if self.get_teacher is None else self.get_teacher()

    @contextmanager
    def sharded_teacher(self, module: nn.Module) -> Iterator[bool]:
        """A context in which a sharded module computes what the teacher in it does; tells whether it does."""
        if isinstance(self.teacher, SharedTeacher) and is_fully_sharded(module):
            with self.teacher.in_shards(module):
                yield True
        else:
            yield False

    @abstractmethod
    def module(self) -> nn.Module:
        """The module that accelerate wraps, which shares its parameters with the model."""

    @abstractmethod
    def loss(self, module: nn.Module, batch: Any, accelerator: Any) -> torch.Tensor:
        """Compute the loss of a micro-batch, a scalar.

        Args:
            module: The wrapped module.
            batch: A micro-batch, on the device.
            accelerator: The processes.
        """

    @abstractmethod
    def context(self) -> AbstractContextManager[None]:
        """Context of the stage's steps."""


class Computed(nn.Module):
    """A model within the function that a stage computes with it.

    Accelerate changes the forward method of what it wraps; wrapping this leaves the model as it was. Everything that
    needs the model's parameters runs within `forward`, as sharding and distributed training require.

    Args:
        model: The model.
        compute: Called with the model and the arguments.
        sharded_classes: Names of classes that sharding gathers separately, besides those that the model names.
    """

    def __init__(self, model: nn.Module, compute: Callable[..., Any], sharded_classes: Iterable[str] = ()) -> None:
        super().__init__()
        self.model, self.compute = model, compute
        # Sharding refuses names that no module has.
        there = {type(module).__name__ for module in model.modules()}
        self._no_split_modules = sorted({*unsplit_classes(model), *sharded_classes} & there)

    def forward(self, *args: Any) -> Any:
        """Compute."""
        return self.compute(self.model, *args)


class DiffusionStage(Stage):
    """The family's objective, or the distance to the teacher's prediction of the same noisy latents."""

    def module(self) -> nn.Module:
        return Computed(self.model, self._predict, self.objective.sharded_classes)

    def _predict(
        self, model: nn.Module, noisy: torch.Tensor, levels: torch.Tensor, condition: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """See `Objective.predict`; fractional `levels` come as int32.

        The loss is not in here: sharding under mixed precision casts arguments, and the targets are better in fp32.
        """
        levels = levels.view(torch.float32) if levels.dtype == torch.int32 else levels
        return self.objective.predict(model, noisy, levels, condition)

    def loss(self, module: nn.Module, batch: LatentBatch, accelerator: Accelerator) -> torch.Tensor:
        """Compute the distance to the teacher's prediction, the objective's loss, or a mixture of both."""
        objective, share = self.objective, self.teacher_share
        noisy = objective.add_noise(batch.latents, batch.noise, batch.levels)
        # Sharding under mixed precision rounds floating-point arguments: the model would be conditioned on other noise
        # levels than those of its input.
        levels = batch.levels.view(torch.int32) if batch.levels.dtype == torch.float32 else batch.levels
        if share:
            with torch.no_grad(), accelerator.autocast(), self.sharded_teacher(module) as is_sharded:
                if is_sharded:
                    target = module(noisy, levels, batch.condition)
                else:
                    target = objective.predict(self.teacher, noisy, batch.levels, batch.condition)
        prediction = module(noisy, levels, batch.condition)
        if not share:
            return objective.losses_of(prediction, noisy, batch).mean()
        loss = objective.distillation_losses(prediction, target, noisy, batch).mean()
        if share < 1:
            loss = share * loss + (1 - share) * objective.losses_of(prediction, noisy, batch).mean()
        return loss

    def context(self) -> AbstractContextManager[None]:
        return self.objective.training_context(self.model)
