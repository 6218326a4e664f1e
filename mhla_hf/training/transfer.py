# SPDX-License-Identifier: Apache-2.0
"""The layer-matching stage: every MHLA layer learns to put out what the layer it replaced puts out.

Teacher forced: each student layer gets the hidden states that the teacher's layer got, so all layers learn at once
and errors do not add up over depth. The loss of a layer is the squared distance to the teacher's output divided by
that output's variance, so layers of every scale count alike. (Layer-wise attention transfer as in Zhang et al.,
"LoLCATs", 2024.)

Shapes: B batch, T tokens, D width of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .batches import Batch
from .objectives import Objective


@dataclass(frozen=True)
class AttentionRecord:
    """What went into one self-attention layer and what came out of it, both `[B, T, D]`, without gradients."""

    hidden_states: torch.Tensor
    output: torch.Tensor


class _LastRecorded(Exception):
    """Ends a forward pass of which nothing more is wanted."""


@torch.no_grad()
def record_attention(
    model: nn.Module, layers: Sequence[int], objective: Objective, noisy_latents: torch.Tensor, batch: Batch
) -> dict[int, AttentionRecord]:
    """Runs the teacher and keeps the inputs and outputs of the self-attention of some layers.

    The pass ends at the last of them: what comes after is not needed, and the end of diffusers' DiT cannot put
    together pictures that are not square.

    Args:
        model: The teacher, of the class that diffusers has.
        layers: Indices of the layers to record.
        objective: Runs the model.
        noisy_latents: `[B, C, ...]`.
        batch: What they were made from.

    Returns:
        A record per layer.
    """
    records: dict[int, AttentionRecord] = {}
    with ExitStack() as hooks:
        for layer in layers:
            # The layer is bound as a default: the loop variable will have moved on when the hook runs.
            def keep(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: torch.Tensor, layer: int = layer):
                hidden_states = args[0] if args else kwargs["hidden_states"]
                records[layer] = AttentionRecord(hidden_states.detach(), output.detach())
                if len(records) == len(layers):
                    raise _LastRecorded

            attention = model.get_submodule(objective.attention_name(layer))
            hooks.callback(attention.register_forward_hook(keep, with_kwargs=True).remove)
        hooks.enter_context(suppress(_LastRecorded))
        objective.run(model, noisy_latents, batch, model.dtype)
    return records


def attention_matching_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Squared distance to the teacher's output divided by that output's variance, a scalar in fp32.

    1 is what a constant output (the mean) would score, 0 is a perfect match.

    Args:
        output: The student layer's output `[B, T, D]`.
        target: The teacher layer's output, same shape.
    """
    target = target.float()
    variance = target.var(unbiased=False).clamp_min(torch.finfo(torch.float32).tiny)
    return (output.float() - target).square().mean() / variance


class LayerMatching(nn.Module):
    """The student's MHLA layers side by side, called on recorded inputs instead of on one another's outputs.

    Only these layers run, and under gradient checkpointing only one of them keeps activations at a time. It shares
    its parameters with the student.

    Args:
        model: The student.
        layers: Indices of the layers to match; all must be MHLA layers.
        objective: Knows where they are and what they take.
        gradient_checkpointing: Recompute each layer in the backward pass.

    Raises:
        ValueError: If there is no layer to match.
    """

    def __init__(
        self, model: nn.Module, layers: Sequence[int], objective: Objective, gradient_checkpointing: bool = False
    ) -> None:
        super().__init__()
        if not layers:
            raise ValueError("transfer_steps needs at least one MHLA layer, but the model has none")
        self.layers = list(layers)
        self.attentions = nn.ModuleList(model.get_submodule(objective.attention_name(layer)) for layer in self.layers)
        self.positions = objective.positions(model)
        self.gradient_checkpointing = gradient_checkpointing

    def forward(self, noisy_latents: torch.Tensor, records: dict[int, AttentionRecord]) -> torch.Tensor:
        """The matching loss of each layer.

        Args:
            noisy_latents: `[B, C, ...]`; only their size matters, for the tokens' positions.
            records: The teacher's inputs and outputs, one for each layer.

        Returns:
            Losses `[number of layers]`, fp32.
        """
        positions = self.positions(noisy_latents)
        losses = []
        for layer, attention in zip(self.layers, self.attentions, strict=True):
            record = records[layer]
            if self.gradient_checkpointing and torch.is_grad_enabled():
                output = checkpoint(attention, record.hidden_states, use_reentrant=False, **positions)
            else:
                output = attention(record.hidden_states, **positions)
            losses.append(attention_matching_loss(output, record.output))
        return torch.stack(losses)
