# SPDX-License-Identifier: Apache-2.0
"""Training: layer matching, fine-tuning by each family's objective, their data and checkpoints.

Names are loaded when first used, so that reading the options needs neither torch nor diffusers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any


_PUBLIC_NAMES = {
    "CacheConfig": "config",
    "DiTObjective": "objectives",
    "DiffusionTrainer": "trainer",
    "EvaluationResult": "evaluation",
    "LatentDataset": "cache",
    "SanaObjective": "objectives",
    "TrainingConfig": "config",
    "TrainingResult": "trainer",
    "TransferStep": "attention_transfer",
    "WanObjective": "objectives",
    "add_noise": "flow_matching",
    "attention_matching_loss": "transfer",
    "evaluate": "evaluation",
    "evaluate_batches": "evaluation",
    "evaluation_batches": "evaluation",
    "flow_matching_loss": "flow_matching",
    "match_attention": "attention_transfer",
    "objective_for": "objectives",
    "record_attention": "transfer",
    "sample_sigmas": "flow_matching",
    "transfer_attention": "attention_transfer",
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
    "TransferStep",
    "WanObjective",
    "add_noise",
    "attention_matching_loss",
    "evaluate",
    "evaluate_batches",
    "evaluation_batches",
    "flow_matching_loss",
    "match_attention",
    "objective_for",
    "record_attention",
    "sample_sigmas",
    "transfer_attention",
]

if TYPE_CHECKING:
    from .attention_transfer import TransferStep, match_attention, transfer_attention
    from .cache import LatentDataset
    from .config import CacheConfig, TrainingConfig
    from .evaluation import EvaluationResult, evaluate, evaluate_batches, evaluation_batches
    from .flow_matching import add_noise, flow_matching_loss, sample_sigmas
    from .objectives import DiTObjective, SanaObjective, WanObjective, objective_for
    from .trainer import DiffusionTrainer, TrainingResult
    from .transfer import attention_matching_loss, record_attention


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_PUBLIC_NAMES[name]}"), name)
    globals()[name] = value
    return value
