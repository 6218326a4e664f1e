# SPDX-License-Identifier: Apache-2.0
"""Matching as a stage of training: MHLA layers learn to give what the layers they replaced gave, from records alone.

No gradient passes from one layer to another, so layers can train side by side, one after the other, and in several
processes, with the same result. (Layer-wise attention transfer as in Zhang et al., "LoLCATs", 2024.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..data.data_order import DataOrder
from .activations import ActivationCache, moved
from .layers import AttentionLayer, LayerCall, evaluating


STAGE = "transfer"


def attention_matching_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Squared distance to the original's output divided by that output's variance, a scalar in fp32.

    1 is the loss of a constant output (the mean), 0 a perfect match.

    Args:
        output: Output of the MHLA layer `[..., D]`.
        target: Output of the original layer, same shape.
    """
    target = target.float()
    variance = target.var(unbiased=False).clamp_min(torch.finfo(torch.float32).tiny)
    return (output.float() - target).square().mean() / variance


def layer_loss(layer: AttentionLayer, call: LayerCall) -> torch.Tensor:
    """The matching loss of a layer on one record; padding does not count.

    Args:
        layer: The layer, with its projection.
        call: Input and output of the original layer.
    """
    output, target = layer(call.arguments, call.hidden_states), call.output
    if call.valid is not None:
        output, target = output[call.valid], target[call.valid]
    return attention_matching_loss(output, target)


class LayerMatching(nn.Module):
    """MHLA layers side by side, called on recorded hidden states instead of on one another's outputs.

    Only these layers run, and under gradient checkpointing only one of them keeps activations at a time. It shares
    its parameters with the model.

    Args:
        layers: The layers, with their projections.
        gradient_checkpointing: Recompute each layer in the backward pass.
    """

    def __init__(self, layers: Sequence[AttentionLayer], gradient_checkpointing: bool = False) -> None:
        super().__init__()
        self.layers = list(layers)
        self.modules_of_layers = nn.ModuleList(module for layer in layers for module in layer.modules().values())
        self.gradient_checkpointing = gradient_checkpointing

    def forward(self, records: Sequence[Mapping[str, LayerCall]]) -> torch.Tensor:
        """The matching loss of each layer, the mean over some records.

        Args:
            records: Input and output of the original layers, by layer.

        Returns:
            Losses `[number of layers]`, fp32.
        """
        recompute = self.gradient_checkpointing and torch.is_grad_enabled()
        losses = []
        for layer in self.layers:
            # Quantised weights are integers.
            weight = next(value for value in layer.attention.parameters() if value.is_floating_point())
            calls = [moved(record[layer.name], weight.device, weight.dtype) for record in records]
            terms = [
                checkpoint(layer_loss, layer, call, use_reentrant=False) if recompute else layer_loss(layer, call)
                for call in calls
            ]
            losses.append(sum(terms[1:], terms[0]) / len(terms))
        return torch.stack(losses)


@dataclass(frozen=True)
class RecordNumbers:
    """The numbers of the records of a micro-batch, which are read when its loss is computed.

    Attributes:
        numbers: The numbers.
        indices: See `TrainingBatch`.
    """

    numbers: tuple[int, ...]
    indices: tuple[int, ...]

    def to(self, device: torch.device | str) -> RecordNumbers:
        """The numbers: records move by themselves."""
        return self


class MatchingStage:
    """Some layers of a model, trained side by side on records; see `stages.prediction.Stage`.

    Args:
        model: The model.
        layers: The layers, with their projections.
        names: Names of the parameters that train.
        records: The records; None for stages that make them later.
        steps: Optimizer steps.
    """

    name = STAGE
    validates = False
    # Set by stages whose optimizer is that of a run.
    learning_rate = mhla_learning_rate = 0.0

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[AttentionLayer],
        names: Sequence[str],
        records: ActivationCache | None,
        steps: int,
    ) -> None:
        self.model, self.layers, self.names, self.steps = model, list(layers), list(names), steps
        self.records = records
        self.gradient_checkpointing = False

    def make_batch(self, order: DataOrder, step: int, micro_step: int) -> RecordNumbers:
        """Numbers of records, in the order of the data."""
        numbers = tuple(order.dataset_index(number) for number in order.sample_numbers(step, micro_step))
        return RecordNumbers(numbers, numbers)

    def trainable_names(self) -> list[str]:
        """The parameters that it was given."""
        return self.names

    def module(self) -> nn.Module:
        """The layers side by side."""
        return LayerMatching(self.layers, self.gradient_checkpointing)

    def loss(self, module: nn.Module, batch: RecordNumbers, accelerator: Any) -> torch.Tensor:
        """The matching loss, the mean over layers and records."""
        assert self.records is not None
        calls = [
            {layer.name: self.records.call(number, layer.name) for layer in self.layers} for number in batch.numbers
        ]
        with accelerator.autocast():
            return module(calls).mean()

    def context(self) -> AbstractContextManager[None]:
        """No dropout."""
        return evaluating(self.model)

    def close(self) -> None:
        """Nothing: other layers may need the records."""
