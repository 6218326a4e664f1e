# SPDX-License-Identifier: Apache-2.0
"""Matching as a stage of training, and the run of one layer: MHLA layers learn from recorded calls alone.

No gradient passes from one layer to another, so layers can train side by side, one after the other, and in several
processes, with the same result. (Layer-wise attention transfer as in Zhang et al., "LoLCATs", 2024.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .. import checkpoints
from ..checkpoints import Position
from ..config import TrainingConfig
from ..data.batches import DataOrder
from ..metrics import Metrics
from ..run import Run, samples_behind_bad_loss
from ..stages.prediction import Stage
from .activations import ActivationCache, moved
from .distributed import OneProcess
from .layers import AttentionLayer, LayerCall, evaluating


STAGE = "transfer"
# What measured best on the demo's Wan, whose 80 blocks give themselves 0.03 on average.
_MIXING_RATE = 5e-3


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


class MatchingStage(Stage):
    """Some layers of a model, trained side by side on records.

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


@dataclass(frozen=True, kw_only=True)
class LayerRun(Run):
    """The run of one layer, which trains by itself; see [`Run`].

    Attributes:
        layer: The layer.
        checkpoint: The checkpoint that it resumes from.
    """

    layer: AttentionLayer
    checkpoint: Path | None

    @classmethod
    def of(cls, layer: AttentionLayer, config: TrainingConfig, output: Path | None, **shared: Any) -> LayerRun:
        """The run of a layer, from its newest checkpoint on if there is one.

        Args:
            layer: The layer.
            config: The options.
            output: Directory of its checkpoints.
            shared: Further fields of the run.

        Raises:
            ValueError: If the checkpoint is damaged.
        """
        checkpoint = None if output is None else checkpoints.find_checkpoint("latest", output)
        losses: list[float] = []
        if checkpoint is not None:
            state = checkpoints.read_state(checkpoint)
            losses = state.get("losses", [])
            if not isinstance(losses, list) or len(losses) != state["step"] or state["step"] > config.transfer_steps:
                raise ValueError(f"checkpoint {checkpoint} is damaged: its losses are missing; remove it")
        metrics = Metrics([{"stage": STAGE, "step": step, "loss": loss} for step, loss in enumerate(losses, start=1)])
        return cls(
            config=config,
            accelerator=OneProcess(config.mixed_precision or "no"),
            state=lambda: {"losses": [row["loss"] for row in metrics.rows]},
            output=output,
            metrics=metrics,
            layer=layer,
            checkpoint=checkpoint,
            **shared,
        )

    @property
    def names(self) -> list[str]:
        """The parameters that train."""
        return trained_names(self.layer, self.config.train)

    @property
    def losses(self) -> list[float]:
        """Loss of every step so far."""
        assert self.metrics is not None
        return [row["loss"] for row in self.metrics.rows]

    @property
    def position(self) -> Position | None:
        """Position of the checkpoint."""
        return None if self.checkpoint is None else checkpoints.checkpoint_position(self.checkpoint)

    @property
    def checkpoints(self) -> Path | None:
        """Directory of the checkpoints."""
        return self.output

    def prepare_model(self, names: Iterable[str]) -> None:
        """Nothing: the model was prepared for all layers."""

    def make_optimizer(self, stage: Stage, names: Sequence[str]) -> torch.optim.Optimizer:
        """See [`layer_optimizer`]."""
        return layer_optimizer(self.layer, names, self.config)

    def moments_to_keep(self, moments: dict[str, torch.Tensor], finished: bool) -> dict[str, torch.Tensor]:
        """None of a finished layer, which takes no more steps."""
        return {} if finished else moments

    def diverged(
        self, problem: str, position: Position, batches: Sequence[tuple[float, tuple[int, ...]]]
    ) -> FloatingPointError:
        """The end of a run whose loss or gradient is not finite; arguments as in [`Run`]."""
        good = None
        if self.output is not None:
            good = checkpoints.last_good_checkpoint(self.output, position)
        return FloatingPointError(
            f"matching {self.layer.name}: the {problem} at step {position.step} "
            f"(batch {', '.join(map(str, samples_behind_bad_loss(batches)[:6]))}); lower the learning rate; "
            + ("there is no checkpoint" if good is None else f"the last good checkpoint is {good}")
        )

    @contextmanager
    def opened(self, device: torch.device | None) -> Iterator[None]:
        """A context in which the layer is on a device, or where it is, and what trains of it is in fp32 at least."""
        parameters, modules = self.layer.parameters(), self.layer.modules().values()
        self.accelerator.device = device or next(iter(parameters.values())).device
        before = {name: (parameter.dtype, parameter.device) for name, parameter in parameters.items()}
        try:
            for module in modules:
                module.to(device)
            for name in self.names:
                data = parameters[name].data
                parameters[name].data = data.to(torch.promote_types(data.dtype, torch.float32))
            yield
        finally:
            for name, (dtype, home) in before.items():
                parameters[name].data = parameters[name].data.to(home, dtype)
            if device is not None:
                # Buffers follow; the parameters are there already.
                for module in modules:
                    module.to(next(iter(before.values()))[1])


def layer_optimizer(layer: AttentionLayer, names: Sequence[str], config: TrainingConfig) -> torch.optim.AdamW:
    """AdamW over some parameters of a layer, with a learning rate of their own for mixing weights."""
    parameters, ours = layer.parameters(), f"{layer.name}.mhla."
    # A learning rate is a distance.
    own_block = layer.mhla.mixing_matrix().detach().diagonal(dim1=-2, dim2=-1).mean().item()
    rates: dict[float, list[nn.Parameter]] = {}
    for name in names:
        rate = highest = config.mhla_learning_rate or config.learning_rate
        if not name.startswith(ours):
            rate = config.learning_rate
        elif name == f"{ours}mixing":
            rate = min(highest, max(highest * own_block, _MIXING_RATE))
        rates.setdefault(rate, []).append(parameters[name])
    return torch.optim.AdamW(
        [{"params": members, "lr": rate, "peak_lr": rate} for rate, members in rates.items()],
        betas=(config.adam_beta1, config.adam_beta2),
        weight_decay=config.weight_decay,
        fused=all(parameters[name].device.type in ("cpu", "cuda") for name in names),
    )


def trained_names(layer: AttentionLayer, train: str) -> list[str]:
    """Names of a layer's parameters that train; integers, as quantised weights are, never do."""
    return [
        name
        for name, parameter in layer.parameters().items()
        if parameter.is_floating_point() and (train == "full" or name.startswith(f"{layer.name}.mhla."))
    ]
