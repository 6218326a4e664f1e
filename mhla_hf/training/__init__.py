# SPDX-License-Identifier: Apache-2.0
"""Training: fine-tuning and distillation by each family's objective, their data and checkpoints.

Names are loaded when first used, so that reading the options needs neither torch nor diffusers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..utils import lazy_names


if TYPE_CHECKING:
    from ..families.dit import DiTObjective as DiTObjective
    from ..families.flux import FluxObjective as FluxObjective
    from ..families.hunyuan_video import HunyuanVideoObjective as HunyuanVideoObjective
    from ..families.ltx import LTXObjective as LTXObjective
    from ..families.objectives import add_noise as add_noise
    from ..families.objectives import flow_matching_loss as flow_matching_loss
    from ..families.objectives import sample_sigmas as sample_sigmas
    from ..families.sana import SanaObjective as SanaObjective
    from ..families.wan import WanObjective as WanObjective
    from ..families.wan import WanVACEObjective as WanVACEObjective
    from .config import CacheConfig as CacheConfig
    from .config import TrainingConfig as TrainingConfig
    from .data.batches import evaluation_batches as evaluation_batches
    from .data.latent_cache import LatentDataset as LatentDataset
    from .evaluation import EvaluationResult as EvaluationResult
    from .evaluation import evaluate as evaluate
    from .evaluation import evaluate_batches as evaluate_batches
    from .libraries import DiffusionTrainer as DiffusionTrainer
    from .libraries import TransformersTrainer as TransformersTrainer
    from .stages.diffusion import objective_for as objective_for
    from .trainer import TrainingResult as TrainingResult

__getattr__, __dir__, __all__ = lazy_names(__name__)
