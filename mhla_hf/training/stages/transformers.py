# SPDX-License-Identifier: Apache-2.0
"""Distillation and fine-tuning of models of transformers: logits or hidden states of the teacher, and the own task.

Shapes of the losses: N tokens or samples, D width, V vocabulary or classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as _LANGUAGE_MODELS

from ...layers.weight_record import original_name
from ..data.batches import BatchSource
from ..data.order import DataOrder
from ..layers import evaluating, only_trainable, without_dropout
from ..teacher import Teacher, compute_with
from .diffusion import Computed, Stage


IGNORED = -100
"""Label of tokens that are not predicted."""

# Numbers of a chunk of logits, half a gigabyte of them in fp32 for student, teacher and what comes of both.
CHUNK_ELEMENTS = 2**25

Head = Callable[[torch.Tensor], torch.Tensor]
"""From hidden states `[N, D]` to logits `[N, V]`."""


def model_batch(source: BatchSource, order: DataOrder, step: int, micro_step: int) -> dict[str, Any]:
    """Make the keyword arguments of the model's `forward` for a micro-batch, on the CPU."""
    number = step * order.accumulation_steps + micro_step
    return dict(source.batch(order.stage, number, order.batch_size, order.rank, order.world_size))


class TransformersStage(Stage):
    """The next token of language models, or the distance to the teacher's logits or hidden states.

    Raises:
        ValueError: If a model that is no language model is to train on a task of its own.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if self.teacher_share < 1 and not self.objective.predicts_tokens:
            option = "distill_ratio must be 1" if self.name == "distill" else "max_steps must be 0"
            raise ValueError(
                f"{option} for a {type(self.model).__name__}, which is no language model; train it on labels with "
                "transformers.Trainer"
            )

    @property
    def _part(self) -> Any:
        """The part of the model that runs: without its head where hidden states are matched."""
        return self.model if self.objective.target == "logits" else self.model.base_model

    def trainable_names(self) -> list[str]:
        """Names of the parameters that train, without those that no loss reaches, such as heads and mask tokens."""
        return super().trainable_names() if self.objective.target == "logits" else self._reached

    @cached_property
    def _reached(self) -> list[str]:
        """The parameters that the last hidden state depends on, found by running one sample."""
        names = super().trainable_names()
        batch = self.make_batch(DataOrder(dataset_size=1, batch_size=1, seed=0, stage=self.name), 0, 0)
        inputs = send_to_device(batch, next(self.model.parameters()).device)
        inputs.pop("labels", None)
        trained = [self.model.get_parameter(name) for name in names]
        with evaluating(self.model), only_trainable(self.model, names), torch.enable_grad():
            total = self._part(**inputs).last_hidden_state.float().sum()
            gradients = torch.autograd.grad(total, trained, allow_unused=True)
        return [name for name, gradient in zip(names, gradients, strict=True) if gradient is not None]

    def module(self) -> nn.Module:
        if self.objective.predicts_tokens:
            return Computed(self.model, partial(_token_losses, temperature=self.objective.temperature))
        return Computed(self._part, lambda model, inputs: model(**inputs))

    def loss(self, module: nn.Module, batch: dict[str, Any], accelerator: Accelerator) -> torch.Tensor:
        """Compute the distance to the teacher and the loss of the task, means over the tokens of all processes."""
        if self.objective.predicts_tokens:
            return self._token_loss(module, batch, accelerator)
        # Labels would cost a loss that nobody asks for.
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        assert self.teacher is not None
        whole = self._part is self.model
        with torch.no_grad(), accelerator.autocast(), self.sharded_teacher(module) as is_sharded:
            if is_sharded:
                target = module(inputs)
            else:
                target = compute_with(self.teacher, lambda model: (model if whole else model.base_model)(**inputs))
        mine, theirs = (self._matched(output, inputs) for output in (module(inputs), target))
        if self.objective.target == "logits":
            errors = divergences(mine, theirs, self.objective.temperature)
        else:
            errors = relative_errors(mine, theirs)
        return _mean(errors.sum(), len(mine), accelerator)

    def context(self) -> AbstractContextManager[None]:
        """No dropout in distillation: the teacher has none, and runs are short."""
        return without_dropout(self.model) if self.name == "distill" else nullcontext()

    def _token_loss(self, module: nn.Module, inputs: dict[str, Any], accelerator: Accelerator) -> torch.Tensor:
        share, teacher = self.teacher_share, self.teacher
        states, head = None, None
        if share and teacher is not None:
            with torch.no_grad(), accelerator.autocast(), self.sharded_teacher(module) as is_sharded:
                if is_sharded:
                    states = module(inputs, None, None, True)
                else:
                    states = compute_with(teacher, lambda model: token_states(model, inputs))
            head = self._sharded_head(teacher) if is_sharded else partial(_teacher_logits, teacher)
        divergence, entropy = module(inputs, states, head)
        total = share * divergence + (1 - share) * entropy
        return _mean(total, int(next_tokens(inputs)[0].sum()), accelerator)

    def _sharded_head(self, teacher: Any) -> Head:
        """The head of a teacher in shards, for the forward pass of the student."""
        embeddings: Any = self.model.get_output_embeddings()
        (place,) = (name for name, module in self.model.named_modules() if module is embeddings)
        # A weight that the head shares with the embeddings of the input has their name.
        names = {parameter: original_name(name) for name, parameter in self.model.named_parameters()}
        weights = {
            f"{place}.{own}": teacher.weights[names[parameter]].full_tensor()
            for own, parameter in embeddings.named_parameters()
            if names[parameter] in teacher.weights
        }
        return partial(_logits_with, self.model, weights)

    def _matched(self, output: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
        """Select the part of a model's output that is matched, `[N, D]`, without tokens of padding."""
        states = output.logits if self.objective.target == "logits" else output.last_hidden_state
        # A logit for each sample, or feature maps of an image.
        if states.dim() < 3:
            return states
        if states.dim() == 4:
            states = states.flatten(2).transpose(1, 2)
        mask = inputs.get("attention_mask")
        if mask is not None and mask.shape == states.shape[:2]:
            return states[mask.bool()]
        return states.flatten(0, 1)


def _token_losses(
    model: nn.Module,
    inputs: dict[str, Any],
    target_states: torch.Tensor | None,
    target_head: Head | None,
    states_alone: bool = False,
    *,
    temperature: float,
) -> Any:
    """See `language_losses`; the teacher's states are `[B, T, D]`. With `states_alone` those of the model."""
    if states_alone:
        return token_states(model, inputs)
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


@torch.no_grad()
def _logits_with(model: nn.Module, weights: Mapping[str, torch.Tensor], states: torch.Tensor) -> torch.Tensor:
    """The logits of a model with other weights of its head, by their names."""
    call = Computed(model, lambda model: head_of(model)(states))
    return functional_call(call, {f"model.{name}": value for name, value in weights.items()}, (), tie_weights=False)


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
        target: Output that distillation matches: `logits` of language models and classifiers, else
            `last_hidden_state`.
        temperature: Of logits.
    """

    predicts_tokens: bool
    target: str
    temperature: float = 1.0

    @classmethod
    def of(cls, model: nn.Module, temperature: float = 1.0) -> TransformersObjective:
        """Choose the objective of a model of transformers."""
        # Sharding replaces the class of a model by a subclass.
        names = {base.__name__ for base in type(model).__mro__}
        predicts_tokens = not names.isdisjoint(_LANGUAGE_MODELS.values())
        has_logits = predicts_tokens or any("Classification" in name for name in names)
        target = "logits" if has_logits else "last_hidden_state"
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
                f"the logits of {type(model).__name__} cannot be matched: it computes them without its decoder"
            )
        return logits

    return head
