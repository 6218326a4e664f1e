# SPDX-License-Identifier: Apache-2.0
"""Teachers of a distillation: how they share weights with the model, and the memory that they take."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn

from ..matching.teacher import SharedTeacher


logger = logging.getLogger(__name__)

Teacher: TypeAlias = nn.Module | SharedTeacher
"""Called like the model."""


def share_weights(model: nn.Module, teacher: nn.Module) -> Teacher:
    """A teacher that stores only what the model does not have: the weights that differ, or will.

    Args:
        model: The converted model, before it trains.
        teacher: The model it was converted from.

    Returns:
        A teacher in the model itself; the one handed in where another configuration or other shapes leave nothing to
        share.
    """
    student, unrelated = _entries(model), ("architectures", "dtype", "torch_dtype", "transformers_version")
    for name, value in _entries(teacher).items():
        if not name.startswith("_") and name not in unrelated and student.get(name) != value:
            return teacher
    try:
        shared = SharedTeacher(model, dict(teacher.named_parameters()))
    except ValueError:
        return teacher
    shared.keep(name for name, parameter in model.named_parameters() if parameter.requires_grad)
    return shared


def compute_with(teacher: Teacher, function: Callable[[Any], Any]) -> Any:
    """Calls a function on the teacher's model, without gradients.

    Args:
        teacher: The teacher.
        function: Called with its model.
    """
    if isinstance(teacher, SharedTeacher):
        return teacher.compute(function)
    with torch.no_grad():
        return function(teacher)


def memory_of(teacher: Teacher) -> dict[str, int]:
    """Bytes of a teacher's weights: `stored` for it alone, and `shared` with the model."""
    if isinstance(teacher, SharedTeacher):
        memory = {"stored": teacher.stored_bytes, "shared": teacher.shared_bytes}
    else:
        stored = sum(parameter.numel() * parameter.element_size() for parameter in teacher.parameters())
        memory = {"stored": stored, "shared": 0}
    logger.info(
        "distill: the teacher stores %.1f MB of weights and shares %.1f MB with the model",
        memory["stored"] / 1e6,
        memory["shared"] / 1e6,
    )
    return memory


def _entries(model: nn.Module) -> Mapping[str, Any]:
    """The configuration of a model of either library."""
    config: Any = model.config
    return config if isinstance(config, Mapping) else config.to_dict()
