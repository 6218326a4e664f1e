# SPDX-License-Identifier: Apache-2.0
"""Distances of a student's prediction to a teacher's, for models of transformers: pure functions of tensors.

Shapes: N tokens or samples, D width, V vocabulary or classes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


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
