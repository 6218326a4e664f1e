# SPDX-License-Identifier: Apache-2.0
"""What matching trains, and the options of that training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from ...layers.mhla import MHLA
from ...utils.options import Options, option
from ..config import LR_SCHEDULES, PRECISIONS, TRAIN_MODES
from .layers import CallArguments


class Trainable(Protocol):
    """A part of a model that trains alone, towards what the original has in its place: a layer or a block."""

    @property
    def name(self) -> str:
        """Its name in the model; its `mhla` is a submodule."""

    @property
    def mhla(self) -> MHLA | None:
        """Its MHLA layer, which a part that trains has."""

    @property
    def projection(self) -> nn.Module | None:
        """The linear map of the heads alone, whose columns belong to heads; `None` for none."""

    def modules(self) -> dict[str, nn.Module]:
        """Its modules, by their names in the model."""

    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of its modules, by their names in the model."""

    def __call__(self, arguments: CallArguments, hidden_states: torch.Tensor) -> torch.Tensor:
        """The output that the loss compares with the original's `[B, T, D]`."""


@dataclass(frozen=True, kw_only=True)
class MatchSettings(Options):
    """How layers or blocks are trained.

    Raises:
        ValueError: If a value is not allowed; the message names the option and what it may be.
    """

    optimizer: str = option("muon", "Optimizer of matrices; the rest has Adam.", choices=("muon", "adam"))
    learning_rate: float = option(6e-3, "Peak learning rate.", above=0)
    mhla_learning_rate: float = option(2e-2, "Peak learning rate of the parameters of `mhla`.", above=0)
    train: str = option("full", "Parameters to train.", choices=TRAIN_MODES)
    warmup_steps: int = option(10, "Steps of linear warm-up.", minimum=0)
    lr_schedule: str = option("cosine", "Learning rate after the warm-up.", choices=LR_SCHEDULES)
    max_grad_norm: float = option(1.0, "Gradients are clipped to this norm; 0 switches clipping off.", minimum=0)
    weight_decay: float = option(0.0, "Weight decay of matrices.", minimum=0)
    adam_beta1: float = option(0.9, "Adam's first beta.", minimum=0, below=1)
    adam_beta2: float = option(0.99, "Adam's second beta; the runs are short.", minimum=0, below=1)
    mixed_precision: str = option("no", "Autocast type over fp32 weights.", choices=PRECISIONS)
    seed: int = option(0, "Seed of the order of batches.", minimum=0, maximum=2**32 - 1)
    save_every: int = option(200, "Steps between checkpoints; 0 for the end alone.", minimum=0)
