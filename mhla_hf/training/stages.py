# SPDX-License-Identifier: Apache-2.0
"""The two stages of a run: what trains, which module runs, and the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from accelerate import Accelerator
from torch import nn

from .batches import FlowBatch
from .config import TrainingConfig
from .flow_matching import flow_matching_loss, predict_flow
from .parameters import mhla_layers, trainable_names
from .transfer import LayerMatching, record_attention


class Stage(Protocol):
    """What the training loop needs to know of a stage."""

    name: str
    steps: int
    learning_rate: float
    mhla_learning_rate: float

    def trainable_names(self) -> list[str]:
        """Names of the parameters that train."""

    def module(self) -> nn.Module:
        """The module that accelerate wraps; it shares its parameters with the model."""

    def loss(self, module: nn.Module, batch: FlowBatch, accelerator: Accelerator) -> torch.Tensor:
        """The loss of a micro-batch, a scalar; `module` is the wrapped one."""

    def close(self) -> None:
        """Lets go of what only this stage needs."""


class FlowMatching(nn.Module):
    """The transformer and the flow-matching loss in one module.

    Accelerate changes the forward method of what it wraps; wrapping this leaves the transformer as it was.
    """

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__()
        self.transformer = transformer
        # Sharding takes the units to wrap from here.
        self._no_split_modules = getattr(transformer, "_no_split_modules", None)

    def forward(
        self, latents: torch.Tensor, noise: torch.Tensor, sigmas: torch.Tensor, prompt_embeds: torch.Tensor
    ) -> torch.Tensor:
        """The loss, a scalar; see `flow_matching` for the arguments."""
        prediction = predict_flow(self.transformer, latents, noise, sigmas, prompt_embeds)
        return flow_matching_loss(prediction, latents, noise)


class FineTuning:
    """Flow matching on the whole model."""

    name = "finetune"

    def __init__(self, config: TrainingConfig, model: nn.Module) -> None:
        self.config = config
        self.model = model
        self.steps = config.max_steps
        self.learning_rate = config.learning_rate
        self.mhla_learning_rate = config.mhla_learning_rate or config.learning_rate

    def trainable_names(self) -> list[str]:
        """What `train` says."""
        return trainable_names(self.model, self.config.train)

    def module(self) -> nn.Module:
        """The transformer with its loss."""
        return FlowMatching(self.model)

    def loss(self, module: nn.Module, batch: FlowBatch, accelerator: Accelerator) -> torch.Tensor:
        """The flow-matching loss."""
        return module(batch.latents, batch.noise, batch.sigmas, batch.prompt_embeds)

    def close(self) -> None:
        """There is nothing to let go of."""


class Transfer:
    """Layer matching: each MHLA layer on the teacher's inputs, against the teacher's outputs."""

    name = "transfer"

    def __init__(self, config: TrainingConfig, model: nn.Module, get_teacher: Callable[[], nn.Module]) -> None:
        self.config = config
        self.model = model
        self.get_teacher = get_teacher
        self.teacher: nn.Module | None = None
        self.steps = config.transfer_steps
        self.learning_rate = config.transfer_learning_rate or config.learning_rate
        # The more particular option wins: a rate for this stage over one for these parameters in every stage.
        self.mhla_learning_rate = config.transfer_learning_rate or config.mhla_learning_rate or config.learning_rate
        self.layers = mhla_layers(model)
        if not self.layers:
            raise ValueError("transfer_steps needs at least one MHLA layer, but the model has none")

    def trainable_names(self) -> list[str]:
        """What `train` says, within the self-attention of MHLA layers."""
        return trainable_names(self.model, self.config.train, self.layers)

    def module(self) -> nn.Module:
        """The MHLA layers side by side."""
        self.teacher = self.get_teacher()
        return LayerMatching(self.model, self.layers, self.config.gradient_checkpointing)

    def loss(self, module: nn.Module, batch: FlowBatch, accelerator: Accelerator) -> torch.Tensor:
        """The matching loss, averaged over layers."""
        assert self.teacher is not None
        noisy_latents = batch.noisy_latents
        with accelerator.autocast():
            records = record_attention(
                self.teacher,
                self.layers,
                noisy_latents=noisy_latents,
                sigmas=batch.sigmas,
                prompt_embeds=batch.prompt_embeds,
            )
        return module(noisy_latents, records).mean()

    def close(self) -> None:
        """Lets go of the teacher, which is as large as the model."""
        self.teacher = None
