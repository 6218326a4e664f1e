# SPDX-License-Identifier: Apache-2.0
"""One training objective per family of models, found by the class of the transformer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from ...models.registry import FAMILIES, MHLA_CLASSES
from ..config import TrainingConfig
from .base import Objective, Tensors
from .dit import DiTObjective
from .sana import SanaObjective
from .wan import WanObjective


if TYPE_CHECKING:
    from ..loading import PipelineSource

__all__ = [
    "DiTObjective",
    "Objective",
    "SanaObjective",
    "Tensors",
    "WanObjective",
    "objective_class",
    "objective_class_of",
    "objective_for",
]

OBJECTIVES: dict[str, type[Objective]] = {
    objective.upstream: objective for objective in (WanObjective, SanaObjective, DiTObjective)
}


def objective_class(class_name: str, what: str = "model") -> type[Objective]:
    """The objective for a transformer class, upstream or MHLA, by name.

    Args:
        class_name: As in `_class_name` of a config.
        what: What the user calls the model, for the error.

    Raises:
        ValueError: If such models cannot be trained here.
    """
    family = FAMILIES.get(class_name) or MHLA_CLASSES.get(class_name)
    if family is None or family.upstream not in OBJECTIVES:
        supported = ", ".join(f"{name}, {FAMILIES[name].mhla_class}" for name in OBJECTIVES)
        raise ValueError(f"{what} is a {class_name}, which cannot be trained here; supported: {supported}")
    return OBJECTIVES[family.upstream]


def objective_class_of(model: nn.Module) -> type[Objective]:
    """The objective for a transformer; errors as in `objective_class`."""
    # Sharding gives a model a class of its own, derived from the one that is known.
    known = [cls.__name__ for cls in type(model).__mro__ if cls.__name__ in {*FAMILIES, *MHLA_CLASSES}]
    return objective_class(known[0] if known else type(model).__name__)


def objective_for(
    model: Any, directory: Path | PipelineSource | None = None, config: TrainingConfig | None = None
) -> Objective:
    """The objective that a model is trained and evaluated with.

    Args:
        model: The transformer.
        directory: The pipeline it comes from, as a directory or a source; its scheduler decides how samples are
            noised. None takes the defaults of the family.
        config: Options that change it; None changes nothing.

    Raises:
        ValueError: If such models cannot be trained here, an option belongs to other models, or the scheduler does
            not go with the objective.
    """
    objective, config = objective_class_of(model), config or TrainingConfig()
    objective.check_config(model.config)
    config.check_family(objective.family().name)
    if isinstance(directory, Path):
        from ..loading import PipelineSource

        directory = PipelineSource(directory, config.component)
    return objective.from_run(config, directory)
