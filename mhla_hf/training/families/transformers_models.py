# SPDX-License-Identifier: Apache-2.0
"""Objective of models of transformers: the teacher's logits or hidden states, and the model's own task.

Shapes of the losses: N tokens or samples, D width, V vocabulary or classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions


# Numbers of a chunk of logits, half a gigabyte of them in fp32 for student, teacher and what comes of both.
CHUNK_ELEMENTS = 2**25

Head = Callable[[torch.Tensor], torch.Tensor]
"""From hidden states `[N, D]` to logits `[N, V]`."""


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
    """Squared distance of each row to the teacher's, relative to the squared length of that.

    So layers whose states grow large weigh as much as others, and so do tokens.

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
    """Divergence from the teacher and cross entropy of tokens, without ever holding the logits of all of them.

    Both are computed for some tokens at a time, and once more in the backward pass.

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
        # An empty chunk still has the head take part, for processes wait for its gradients.
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
        """The objective of a model.

        Args:
            model: Of transformers.
            target: See the class; None takes the logits of language models and of classifiers, and else the last
                hidden state.
            temperature: See the class.

        Raises:
            ValueError: If the model does not give that target.
        """
        from transformers.models.auto.modeling_auto import (
            MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
            MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
            MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
            MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
        )

        # Sharding gives a model a class of its own, derived from the one that is known.
        names = {base.__name__ for base in type(model).__mro__}
        classifiers = (
            MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
            MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
            MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
        )
        classifies = any(name in names for mapping in classifiers for name in _strings(mapping.values()))
        predicts_tokens = any(name in names for name in _strings(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()))
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
        """The fields as plain JSON values, which tell the objectives of two runs apart."""
        return {"distill_target": self.target, "distill_temperature": self.temperature}


def _strings(values: Any) -> Iterator[str]:
    for value in values:
        yield from (value if isinstance(value, (list, tuple)) else (value,))


def token_states(model: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
    """Hidden states `[B, T, D]` that the head of a language model makes logits of."""
    return model.get_decoder()(**{**inputs, "use_cache": False}).last_hidden_state


def head_of(model: Any) -> Head:
    """The head of a language model, with whatever its class does to logits.

    It is the model's own `forward`, with given hidden states in place of what lies under the head.

    Raises:
        ValueError: By the head, if the model's `forward` does not go through its decoder.
    """

    def head(states: torch.Tensor) -> torch.Tensor:
        tokens = torch.zeros(1, len(states), dtype=torch.long, device=states.device)
        with _returning(model.get_decoder(), states[None]) as calls:
            logits = model(input_ids=tokens, use_cache=False).logits[0]
        if not calls:
            raise ValueError(
                f"the logits of {type(model).__name__} cannot be matched: it computes them without its decoder; use "
                "distill_target='last_hidden_state'"
            )
        return logits

    return head


@contextmanager
def _returning(module: nn.Module, states: torch.Tensor) -> Iterator[list[bool]]:
    """Has a module return hidden states instead of computing them; the list grows with every call."""
    before, calls = module.__dict__.get("forward"), []

    def forward(*args: Any, **kwargs: Any) -> BaseModelOutputWithPastAndCrossAttentions:
        calls.append(True)
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=states)

    module.forward = forward  # type: ignore[method-assign]
    try:
        yield calls
    finally:
        if before is None:
            del module.__dict__["forward"]
        else:
            module.forward = before  # type: ignore[method-assign]


def matched_states(target: str, output: Any, inputs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The part of a model's output that is matched: one tensor `[N, D]`, or one for each layer.

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
