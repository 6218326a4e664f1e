# SPDX-License-Identifier: Apache-2.0
"""Distillation and fine-tuning of models of transformers: logits or hidden states of the teacher, and the own task.

Shapes of the losses: N tokens or samples, D width, V vocabulary or classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol
from unittest.mock import patch

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as _LANGUAGE_MODELS

from ..config import TrainingConfig
from ..data.batches import DataOrder
from ..matching.layers import evaluating, without_dropout
from ..matching.teacher import Teacher, compute_with
from ..parameters import set_trainable
from .prediction import Computed, Stage


IGNORED = -100
"""Label of tokens that are not predicted."""

# Numbers of a chunk of logits, half a gigabyte of them in fp32 for student, teacher and what comes of both.
CHUNK_ELEMENTS = 2**25

Head = Callable[[torch.Tensor], torch.Tensor]
"""From hidden states `[N, D]` to logits `[N, V]`."""


class BatchesByStep(Protocol):
    """Source of batches, such as a `mhla_hf.training.data.batches.BatchSource`.

    A batch holds keyword arguments of the model's `forward`.
    """

    def __len__(self) -> int: ...

    def batch(self, stage: str, step: int, batch_size: int, rank: int = 0, world_size: int = 1) -> Mapping[str, Any]:
        """Return the batch of a step, on the CPU; a pure function."""


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


class TransformersStage(Stage):
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
        """The part of the model that runs: without its head where the loss does not need it."""
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
        return super().trainable_names() if self._by_tokens else self._reached

    def _wrapped(self) -> nn.Module:
        if self._by_tokens:
            return Computed(self.model, partial(_token_losses, temperature=self.objective.temperature))
        return Computed(self._part, lambda model, inputs: model(**inputs, **self._options))

    def loss(self, module: nn.Module, batch: ModelBatch, accelerator: Accelerator) -> torch.Tensor:
        """Compute the distance to the teacher and the loss of the task, means over the tokens of all processes."""
        inputs, share = batch.inputs, self.teacher_share
        if self._by_tokens:
            return self._token_loss(module, inputs, accelerator)
        output = module(self._inputs(inputs))
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
        """Drop labels that the loss does not need: they cost the logits of all tokens."""
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

    @cached_property
    def _reached(self) -> list[str]:
        """The parameters that a loss reaches, found by running one sample."""
        names = super().trainable_names()
        device = next(self.model.parameters()).device
        inputs = send_to_device(dict(self.batches.batch(self.name, 0, 1)), device)
        there = dict(self.model.named_parameters())
        takes_gradients = {parameter: parameter.requires_grad for parameter in there.values()}
        set_trainable(self.model, names)
        try:
            with evaluating(self.model), torch.enable_grad():
                output = self._part(**self._inputs(inputs), **self._options)
                states = matched_states(self.objective.target, output, inputs) if self.teacher_share else []
                total = torch.stack([each.float().sum() for each in states]).sum() if states else output.loss
                total = total if self.teacher_share in (0, 1) else total + output.loss
                gradients = torch.autograd.grad(total, [there[name] for name in names], allow_unused=True)
        finally:
            for parameter, takes in takes_gradients.items():
                parameter.requires_grad_(takes)
        return [name for name, gradient in zip(names, gradients, strict=True) if gradient is not None]


def _token_losses(
    model: nn.Module,
    inputs: dict[str, Any],
    target_states: torch.Tensor | None,
    target_head: Head | None,
    temperature: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `language_losses`; the teacher's states are `[B, T, D]`."""
    where, labels = next_tokens(inputs)
    states = token_states(model, inputs)[:, :-1][where]
    target = None if target_states is None else target_states[:, :-1][where]
    return language_losses(
        states, head_of(model), labels, target_states=target, target_head=target_head, temperature=temperature
    )


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
    """Scale the sum over this process's tokens to its part of the mean over the tokens of all processes.

    Gradients of processes are averaged, hence the factor.
    """
    counts = torch.tensor(float(count), device=total.device)
    everywhere = accelerator.reduce(counts, reduction="sum") if accelerator.num_processes > 1 else counts
    return total * (accelerator.num_processes / everywhere.clamp(min=1))


def divergences(logits: torch.Tensor, target: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """KL(target || prediction) of each row, with temperature: T^2 times that of the softened distributions.

    The factor keeps the size of gradients (Hinton et al., "Distilling the Knowledge in a Neural Network", 2015).

    Args:
        logits: `[N, V]`, any dtype.
        target: The teacher's, same shape.
        temperature: T, above 0.

    Returns:
        `[N]`, fp32.
    """
    log_student = F.log_softmax(logits.float() / temperature, dim=-1)
    log_teacher = F.log_softmax(target.float() / temperature, dim=-1)
    return F.kl_div(log_student, log_teacher, reduction="none", log_target=True).sum(-1) * temperature**2


def relative_errors(states: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Squared distance of each row to the teacher's, relative to the squared length of the teacher's.

    Layers and tokens with large states weigh no more than others.

    Args:
        states: `[N, D]`, any dtype.
        target: The teacher's, same shape.

    Returns:
        `[N]`, fp32.
    """
    target = target.float()
    return (states.float() - target).square().sum(-1) / target.square().sum(-1).clamp(min=1e-12)


def language_losses(
    states: torch.Tensor,
    head: Head,
    labels: torch.Tensor,
    *,
    target_states: torch.Tensor | None = None,
    target_head: Head | None = None,
    temperature: float = 1.0,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute divergence from the teacher and cross entropy of tokens, holding the logits of a chunk at a time.

    Each chunk is computed again in the backward pass.

    Args:
        states: Hidden states `[N, D]` that the student's head makes logits of.
        head: The student's.
        labels: The tokens that come next `[N]`.
        target_states: The teacher's hidden states `[N, D]`; None computes the cross entropy alone.
        target_head: The teacher's head.
        temperature: See `divergences`.
        chunk_elements: Most logits of a chunk.

    Returns:
        The sums over tokens of the divergence and of the cross entropy, fp32.
    """
    total = states.new_zeros((), dtype=torch.float32)
    sums = (total, total.clone())
    if not len(states):
        # The head takes part even so: other processes wait for its gradients.
        return 0.0 * head(states).float().sum(), total
    with torch.no_grad():
        vocabulary = head(states[:1]).shape[-1]
    size = max(1, chunk_elements // vocabulary)

    def chunk_losses(chunk: torch.Tensor, labels: torch.Tensor, target: torch.Tensor | None):
        logits = head(chunk)
        divergence = logits.new_zeros((), dtype=torch.float32)
        if target is not None and target_head is not None:
            with torch.no_grad():
                target_logits = target_head(target)
            divergence = divergences(logits, target_logits, temperature).sum()
        return divergence, F.cross_entropy(logits.float(), labels, reduction="sum")

    for start in range(0, len(states), size):
        part = slice(start, start + size)
        target = None if target_states is None else target_states[part]
        one_chunk = len(states) <= size
        if one_chunk:
            found = chunk_losses(states[part], labels[part], target)
        else:
            found = checkpoint(chunk_losses, states[part], labels[part], target, use_reentrant=False)
        sums = (sums[0] + found[0], sums[1] + found[1])
    return sums


@dataclass(frozen=True, kw_only=True)
class TransformersObjective:
    """Training objective of a model of transformers.

    Attributes:
        predicts_tokens: True for a language model, whose logits are computed for some tokens at a time.
        target: Output that distillation matches: `logits`; `last_hidden_state`; `hidden_states` of all layers; or
            `pooled`, the mean of the last hidden states of a text, or the pooled output of a vision model.
        temperature: Of logits.
    """

    predicts_tokens: bool
    target: str
    temperature: float = 1.0

    @classmethod
    def of(cls, model: nn.Module, target: str | None = None, temperature: float = 1.0) -> TransformersObjective:
        """Choose the objective of a model.

        Args:
            model: Of transformers.
            target: See the class; None takes the logits of language models and of classifiers, and else the last
                hidden state.
            temperature: See the class.

        Raises:
            ValueError: If the model does not give that target.
        """
        # Sharding replaces the class of a model by a subclass.
        names = {base.__name__ for base in type(model).__mro__}
        predicts_tokens = not names.isdisjoint(_LANGUAGE_MODELS.values())
        classifies = any("Classification" in name for name in names)
        has_logits = predicts_tokens or classifies or model.get_output_embeddings() is not None  # type: ignore[operator]
        if target is None:
            target = "logits" if predicts_tokens or classifies else "last_hidden_state"
        if target == "logits" and not has_logits:
            raise ValueError(
                f"distill_target='logits' needs a model with logits, but {type(model).__name__} has none; use "
                "last_hidden_state, hidden_states or pooled"
            )
        return cls(predicts_tokens=predicts_tokens, target=target, temperature=temperature)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON values, to compare the objectives of two runs."""
        return {"distill_target": self.target, "distill_temperature": self.temperature}


def token_states(model: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
    """Hidden states `[B, T, D]` that the head of a language model makes logits of."""
    return model.get_decoder()(**{**inputs, "use_cache": False}).last_hidden_state


def head_of(model: Any) -> Head:
    """Return the head of a language model, with the scaling and capping of logits of its class.

    It is the model's own `forward`, with given hidden states in place of what lies under the head.

    Raises:
        ValueError: By the head, if the model's `forward` does not go through its decoder.
    """

    def head(states: torch.Tensor) -> torch.Tensor:
        calls = []

        def forward(*args: Any, **kwargs: Any) -> BaseModelOutputWithPastAndCrossAttentions:
            calls.append(True)
            return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=states[None])

        tokens = torch.zeros(1, len(states), dtype=torch.long, device=states.device)
        with patch.object(model.get_decoder(), "forward", forward):
            logits = model(input_ids=tokens, use_cache=False).logits[0]
        if not calls:
            raise ValueError(
                f"the logits of {type(model).__name__} cannot be matched: it computes them without its decoder; use "
                "distill_target='last_hidden_state'"
            )
        return logits

    return head


def matched_states(target: str, output: Any, inputs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Select the part of a model's output that is matched: one tensor `[N, D]`, or one for each layer.

    Tokens of padding are left out.

    Args:
        target: See `TransformersObjective`.
        output: Of the model; for anything but logits with `hidden_states`.
        inputs: The arguments of that call.
    """
    mask = inputs.get("attention_mask")
    mask = mask.bool() if isinstance(mask, torch.Tensor) and mask.dim() == 2 else None

    def rows(states: torch.Tensor) -> torch.Tensor:
        # A logit for each sample, or feature maps of an image.
        if states.dim() < 3:
            return states
        if states.dim() == 4:
            states = states.flatten(2).transpose(1, 2)
        if mask is not None and mask.shape == states.shape[:2]:
            return states[mask]
        return states.flatten(0, 1)

    if target == "logits":
        return [rows(output.logits)]
    last = output.get("last_hidden_state")
    last = output.hidden_states[-1] if last is None else last
    if target == "last_hidden_state":
        return [rows(last)]
    if target == "hidden_states":
        return [rows(states) for states in (*output.hidden_states[1:-1], last)]
    pooled = output.get("pooler_output") if mask is None else None
    if pooled is not None:
        return [pooled]
    if mask is None:
        return [last.flatten(2).mean(-1) if last.dim() == 4 else last.mean(1)]
    weights = mask.unsqueeze(-1).to(last)
    return [(last * weights).sum(1) / weights.sum(1).clamp(min=1)]
