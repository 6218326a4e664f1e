# SPDX-License-Identifier: Apache-2.0
"""Distillation and fine-tuning of models of transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import nn

from ..config import TrainingConfig
from ..data.batches import DataOrder
from ..families.transformers_models import (
    Head,
    TransformersObjective,
    divergences,
    head_of,
    language_losses,
    matched_states,
    relative_errors,
    token_states,
)
from ..matching.layers import without_dropout
from ..matching.teacher import Teacher, compute_with
from ..parameters import set_trainable
from .prediction import PredictionStage, split_units


IGNORED = -100
"""Label of tokens that are not predicted."""


class BatchesByStep(Protocol):
    """Source of batches, such as a `mhla_hf.training.data.batch_sources.BatchSource`.

    A batch holds keyword arguments of the model's `forward`.
    """

    def __len__(self) -> int: ...

    def batch(self, stage: str, step: int, batch_size: int, rank: int = 0, world_size: int = 1) -> Mapping[str, Any]:
        """The batch of a step, on the CPU; a pure function."""


@dataclass(frozen=True)
class ModelBatch:
    """Keyword arguments of a model's `forward`.

    Attributes:
        inputs: The arguments.
        indices: Numbers of the samples in the order of the stage.
    """

    inputs: dict[str, Any]
    indices: tuple[int, ...] = ()

    def to(self, device: torch.device | str) -> ModelBatch:
        """The batch on another device."""
        return ModelBatch(send_to_device(self.inputs, device, non_blocking=True), self.indices)


class TokenPredictions(nn.Module):
    """A language model, called for the sums of its losses over tokens.

    All of it runs within `forward`, where sharding and other processes expect it.
    """

    def __init__(self, model: nn.Module, temperature: float) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        self._no_split_modules = split_units(model)

    def forward(
        self, inputs: dict[str, Any], target_states: torch.Tensor | None, target_head: Head | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `language_losses`; the teacher's states are `[B, T, D]`."""
        where, labels = next_tokens(inputs)
        states = token_states(self.model, inputs)
        return language_losses(
            states[:, :-1][where],
            head_of(self.model),
            labels,
            target_states=None if target_states is None else target_states[:, :-1][where],
            target_head=target_head,
            temperature=self.temperature,
        )


class ModelOutputs(nn.Module):
    """A model, with or without its head, called for its output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._no_split_modules = split_units(model)

    def forward(self, inputs: dict[str, Any], options: dict[str, Any]) -> Any:
        """The model's output."""
        return self.model(**inputs, **options)


class TransformersStage(PredictionStage):
    """The model's own task, or the distance to the teacher's logits or hidden states.

    The task is the next token for language models, and the loss of the model's class on batches with labels for
    others.

    Raises:
        ValueError: If labels are missing.
    """

    def __init__(
        self,
        config: TrainingConfig,
        model: nn.Module,
        objective: TransformersObjective,
        batches: BatchesByStep,
        get_teacher: Callable[[], Teacher] | None = None,
    ) -> None:
        super().__init__(config, model, objective, batches, get_teacher)
        self._names: list[str] | None = None
        has_task = self.teacher_share == 1 or objective.predicts_tokens
        if not has_task and "labels" not in batches.batch(self.name, 0, 1):
            option = "distill_ratio must be 1" if self.name == "distill" else "max_steps must be 0"
            raise ValueError(f"{option} for a {type(model).__name__} whose batches have no labels: no task")

    @property
    def _by_tokens(self) -> bool:
        """True if losses are computed for some tokens at a time."""
        return self.objective.predicts_tokens and (self.objective.target == "logits" or not self.teacher_share)

    @property
    def _part(self) -> Any:
        """The part of the model that runs: without its head where nothing is learned from that."""
        needs_head = self.objective.target == "logits" or self.teacher_share < 1
        return self.model if needs_head else self.model.base_model

    @property
    def _options(self) -> dict[str, Any]:
        matches_states = self.teacher_share and self.objective.target != "logits"
        options: dict[str, Any] = {"output_hidden_states": True} if matches_states else {}
        return {**options, "use_cache": False} if self.objective.predicts_tokens else options

    def make_batch(self, order: DataOrder, step: int, micro_step: int) -> ModelBatch:
        number = step * order.accumulation_steps + micro_step
        inputs = self.batches.batch(self.name, number, order.batch_size, order.rank, order.world_size)
        return ModelBatch(dict(inputs), tuple(order.sample_numbers(step, micro_step)))

    def trainable_names(self) -> list[str]:
        """Names of the parameters that train, without those that no loss reaches, such as an unused pooler's."""
        if self._names is None:
            names = super().trainable_names()
            self._names = names if self._by_tokens else self._reached(names)
        return self._names

    def _wrapped(self) -> nn.Module:
        if self._by_tokens:
            return TokenPredictions(self.model, self.objective.temperature)
        return ModelOutputs(self._part)

    def loss(self, module: nn.Module, batch: ModelBatch, accelerator: Accelerator) -> torch.Tensor:
        """The distance to the teacher, mixed with the task's loss; both are means over the tokens of all processes."""
        inputs, share = batch.inputs, self.teacher_share
        if self._by_tokens:
            return self._token_loss(module, inputs, accelerator)
        output = module(self._inputs(inputs), self._options)
        losses = []
        if share:
            target = self._target(inputs, accelerator)
            errors = divergences if self.objective.target == "logits" else relative_errors
            options = {"temperature": self.objective.temperature} if self.objective.target == "logits" else {}
            means = [
                _mean(errors(mine, theirs, **options).sum(), len(mine), accelerator)
                for mine, theirs in zip(matched_states(self.objective.target, output, inputs), target, strict=True)
            ]
            losses.append(share * torch.stack(means).mean())
        if share < 1:
            losses.append((1 - share) * output.loss.float())
        return torch.stack(losses).sum()

    def context(self) -> AbstractContextManager[None]:
        """No dropout in distillation: the teacher has none, and runs are short."""
        return without_dropout(self.model) if self.name == "distill" else nullcontext()

    def _inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of the model that runs; labels cost the logits of all tokens."""
        if self.teacher_share < 1:
            return inputs
        return {name: value for name, value in inputs.items() if name != "labels"}

    def _token_loss(self, module: nn.Module, inputs: dict[str, Any], accelerator: Accelerator) -> torch.Tensor:
        share, teacher = self.teacher_share, self.teacher
        states, head = None, None
        if share and teacher is not None:
            with accelerator.autocast():
                states = compute_with(teacher, lambda model: token_states(model, inputs))
            head = partial(_teacher_logits, teacher)
        divergence, entropy = module(inputs, states, head)
        total = share * divergence + (1 - share) * entropy
        return _mean(total, int(next_tokens(inputs)[0].sum()), accelerator)

    def _target(self, inputs: dict[str, Any], accelerator: Accelerator) -> list[torch.Tensor]:
        """The teacher's output in the places that count."""
        teacher, objective, options = self.teacher, self.objective, self._options
        assert teacher is not None
        wanted = {name: value for name, value in inputs.items() if name != "labels"}

        def output(model: Any) -> Any:
            return (model if self._part is self.model else model.base_model)(**wanted, **options)

        with accelerator.autocast():
            return matched_states(objective.target, compute_with(teacher, output), inputs)

    def _reached(self, names: list[str]) -> list[str]:
        """The parameters that a loss reaches, found by running one sample."""
        inputs = self.make_batch(
            DataOrder(dataset_size=len(self.batches), batch_size=1, seed=0, stage=self.name), 0, 0
        )
        inputs = inputs.to(next(self.model.parameters()).device)
        there = dict(self.model.named_parameters())
        takes_gradients = {parameter: parameter.requires_grad for parameter in there.values()}
        was_training = self.model.training
        set_trainable(self.model, names)
        try:
            with torch.enable_grad():
                output = self._part.eval()(**self._inputs(inputs.inputs), **self._options)
                total: Any = output.loss.float() if self.teacher_share < 1 else 0.0
                if self.teacher_share:
                    total = total + sum(
                        states.float().sum() for states in matched_states(self.objective.target, output, inputs.inputs)
                    )
                gradients = torch.autograd.grad(total, [there[name] for name in names], allow_unused=True)
        finally:
            self.model.train(was_training)
            for parameter, takes in takes_gradients.items():
                parameter.requires_grad_(takes)
        return [name for name, gradient in zip(names, gradients, strict=True) if gradient is not None]


def next_tokens(inputs: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions where a language model predicts a token, BoolTensor `[B, T - 1]`, and these tokens `[N]`.

    Padding is left out, and so are tokens whose label is -100.
    """
    tokens = inputs["labels"] if inputs.get("labels") is not None else inputs["input_ids"]
    where = tokens[:, 1:] != IGNORED
    mask = inputs.get("attention_mask")
    if mask is not None:
        where = where & mask[:, 1:].bool() & mask[:, :-1].bool()
    return where, tokens[:, 1:][where]


def _teacher_logits(teacher: Teacher, states: torch.Tensor) -> torch.Tensor:
    return compute_with(teacher, lambda model: head_of(model)(states))


def _mean(total: torch.Tensor, count: int, accelerator: Accelerator) -> torch.Tensor:
    """The sum over this process's tokens as its part of the mean over those of all processes.

    Gradients of processes are averaged, hence the factor.
    """
    counts = torch.tensor(float(count), device=total.device)
    everywhere = accelerator.reduce(counts, reduction="sum") if accelerator.num_processes > 1 else counts
    return total * (accelerator.num_processes / everywhere.clamp(min=1))
