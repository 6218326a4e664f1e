# SPDX-License-Identifier: Apache-2.0
"""Training: layer matching, fine-tuning by each family's objective, their data and checkpoints.

Names are loaded when first used, so that reading the options needs neither torch nor diffusers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..utils.imports import lazy_names


_PUBLIC_NAMES = {
    "CacheConfig": "config",
    "DiTObjective": "families",
    "DiffusionTrainer": "trainer",
    "EvaluationResult": "evaluation",
    "LatentDataset": "data.cache",
    "SanaObjective": "families",
    "TrainingConfig": "config",
    "TrainingResult": "trainer",
    "TransformersTrainer": "trainer",
    "WanObjective": "families",
    "add_noise": "stages.flow_matching",
    "evaluate": "evaluation",
    "evaluate_batches": "evaluation",
    "evaluation_batches": "evaluation",
    "flow_matching_loss": "stages.flow_matching",
    "objective_for": "loading",
    "sample_sigmas": "stages.flow_matching",
}

__all__ = [
    "CacheConfig",
    "DiTObjective",
    "DiffusionTrainer",
    "EvaluationResult",
    "LatentDataset",
    "SanaObjective",
    "TrainingConfig",
    "TrainingResult",
    "TransformersTrainer",
    "WanObjective",
    "add_noise",
    "evaluate",
    "evaluate_batches",
    "evaluation_batches",
    "flow_matching_loss",
    "objective_for",
    "sample_sigmas",
]

if TYPE_CHECKING:
    from .config import CacheConfig, TrainingConfig
    from .data.cache import LatentDataset
    from .evaluation import EvaluationResult, evaluate, evaluate_batches, evaluation_batches
    from .families import DiTObjective, SanaObjective, WanObjective
    from .loading import objective_for
    from .stages.flow_matching import add_noise, flow_matching_loss, sample_sigmas
    from .trainer import DiffusionTrainer, TrainingResult, TransformersTrainer


__getattr__, __dir__ = lazy_names(__name__, _PUBLIC_NAMES)
