# SPDX-License-Identifier: Apache-2.0
"""One MHLA layer that learns, from recorded calls alone, to give what the original layer gave.

No gradient passes through any other layer, so layers train in any order, on any process, and one at a time where the
model does not fit. (Layer-wise attention transfer as in Zhang et al., "LoLCATs", 2024.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from .. import checkpoints
from ..checkpoints import Position
from ..optimization import learning_rate_factor, set_learning_rate
from .activations import moved
from .layers import AttentionLayer, LayerCall


STAGE = "transfer"
TRAINED = ("full", "mhla")
PRECISIONS = ("no", "bf16")
# Reading a loss waits for an accelerator; the CPU has it at once.
_STEPS_PER_CHECK = 16
# What measured best on the demo's Wan, whose 80 blocks give themselves 0.03 on average.
_MIXING_RATE = 5e-3


@dataclass(frozen=True, kw_only=True)
class MatchingOptions:
    """How layers learn.

    Attributes:
        steps: Optimizer steps of each layer.
        batch_size: Records that one step learns from.
        learning_rate: Peak learning rate of projections and norms.
        mhla_learning_rate: That of the parameters of `mhla`. Of a rate above 5e-3, mixing weights get their share: as
            much as a block gives to itself on average, for they are the smaller the more blocks there are; but 5e-3.
        train: `"full"` for all parameters of the attention layers, `"mhla"` for those of `mhla` alone.
        warmup_steps: Steps in which the learning rate rises; then it falls to zero along a cosine.
        max_grad_norm: Gradients of a layer are clipped to this norm; 0 switches clipping off.
        mixed_precision: `"bf16"` for autocast, `"no"` for none. Weights are in fp32 while they train.
        seed: Of the order of records.

    Raises:
        ValueError: If a value is not allowed; the message names the option.
    """

    steps: int = 600
    batch_size: int = 1
    learning_rate: float = 3e-3
    mhla_learning_rate: float = 5e-3
    train: str = "full"
    warmup_steps: int = 10
    max_grad_norm: float = 1.0
    mixed_precision: str = "no"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("batch_size", 1), ("warmup_steps", 0), ("seed", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}={value!r:.100} must be a whole number of at least {least}.")
        for name in ("learning_rate", "mhla_learning_rate", "max_grad_norm"):
            value = getattr(self, name)
            least_allowed = value == 0 and name == "max_grad_norm"
            if not isinstance(value, (int, float)) or not (0 < value < math.inf or least_allowed):
                raise ValueError(f"{name}={value!r:.100} must be a finite number above 0.")
        for name, choices in (("train", TRAINED), ("mixed_precision", PRECISIONS)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r:.100} must be one of {', '.join(choices)}.")


def attention_matching_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Squared distance to the original's output divided by that output's variance, a scalar in fp32.

    1 is what a constant output (the mean) would score, 0 is a perfect match.

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
        call: What the original layer was called with and gave.
    """
    output, target = layer(call.arguments, call.hidden_states), call.output
    if call.valid is not None:
        output, target = output[call.valid], target[call.valid]
    return attention_matching_loss(output, target)


class LayerTraining:
    """The training of one layer, in place.

    Args:
        model: The model.
        layer: One of its layers, with its projection.
        options: See [`MatchingOptions`].
        device: Where it trains; `None` for where it is.
        directory: Where it keeps its checkpoints; `None` for none.

    Attributes:
        step: Steps taken.
        losses: Loss of every step, before the step.
        names: The parameters that train.
    """

    def __init__(
        self,
        model: nn.Module,
        layer: AttentionLayer,
        options: MatchingOptions,
        device: torch.device | None = None,
        directory: Path | None = None,
    ) -> None:
        self.model, self.layer, self.options, self.device, self.directory = model, layer, options, device, directory
        self.names = trained_names(layer, options.train)
        self._before: dict[str, tuple[torch.dtype, torch.device]] = {}
        self.losses: list[float] = []
        self._unread: list[tuple[torch.Tensor, list[int]]] = []
        self.checkpoint = checkpoints.find_checkpoint("latest", directory) if directory is not None else None
        position = None if self.checkpoint is None else checkpoints.checkpoint_position(self.checkpoint)
        self.step = 0 if position is None else position.step
        if self.checkpoint is not None:
            stored = checkpoints.read_state(self.checkpoint).get("losses")
            if self.step > options.steps or not isinstance(stored, list) or len(stored) != self.step:
                raise ValueError(f"checkpoint {self.checkpoint} is damaged: its losses are missing; remove it")
            self.losses = stored

    @property
    def finished(self) -> bool:
        """Whether all steps are taken."""
        return self.step >= self.options.steps

    def open(self) -> None:
        """Takes the weights to the device, in fp32 at least, and goes on from the checkpoint, if there is one."""
        parameters = self.layer.parameters()
        self._before = {name: (parameters[name].dtype, parameters[name].device) for name in parameters}
        for module in self._modules():
            module.to(self.device)
        for name in self.names:
            parameters[name].data = parameters[name].data.to(
                torch.promote_types(parameters[name].dtype, torch.float32)
            )
        self.trained = [parameters[name] for name in self.names]
        self.optimizer = self._make_optimizer(parameters)
        if self.checkpoint is not None:
            checkpoints.load_weights(self.checkpoint, self.model, self.names)
            if not self.finished:
                checkpoints.load_optimizer(self.checkpoint, self.model, self.optimizer, self.names)
                for parameter, state in self.optimizer.state.items():
                    # Where the fused optimizer wants it.
                    state["step"] = state["step"].to(parameter.device)

    def learn(self, calls: Sequence[LayerCall], indices: list[int]) -> None:
        """Takes a step.

        Args:
            calls: The records of this step.
            indices: Their numbers, for messages.

        Raises:
            FloatingPointError: If the loss is no longer finite.
        """
        factor = learning_rate_factor(
            self.step,
            schedule="cosine",
            warmup_steps=self.options.warmup_steps,
            total_steps=self.options.steps,
        )
        set_learning_rate(self.optimizer, factor)
        parameter = self.trained[0]
        total = torch.zeros((), device=parameter.device)
        for call in calls:
            call = moved(call, parameter.device, parameter.dtype)
            with torch.autocast(parameter.device.type, torch.bfloat16, enabled=self.options.mixed_precision == "bf16"):
                loss = layer_loss(self.layer, call) / len(calls)
            loss.backward()
            total += loss.detach()
        if self.options.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(self.trained, self.options.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self._unread.append((total, indices))
        if parameter.device.type == "cpu" or len(self._unread) == _STEPS_PER_CHECK or self.finished:
            self.read_losses()

    def read_losses(self) -> None:
        """Reads the losses of the steps since the last time.

        Raises:
            FloatingPointError: If one of them, or a weight, is not finite.
        """
        for loss, indices in self._unread:
            value = loss.item()
            if not math.isfinite(value):
                self._diverged(f"loss is {value}", len(self.losses) + 1, indices)
            self.losses.append(value)
        self._unread.clear()

    def save(self) -> None:
        """Writes a checkpoint; of a finished layer without the state of its optimizer.

        Raises:
            FloatingPointError: See `read_losses`.
            OSError: If there is no room for it; the one before is still there.
        """
        self.read_losses()
        broken = next((name for name in self.names if not self._value(name).isfinite().all()), None)
        if broken is not None:
            self._diverged(f"weight {broken} is not finite", self.step, [])
        if self.directory is None:
            return
        weights, moments = checkpoints.collect_state(self.model, self.optimizer, self.names)
        self.checkpoint = checkpoints.save_checkpoint(
            self.directory,
            Position.of(STAGE, self.step),
            weights,
            {} if self.finished else moments,
            {"losses": self.losses},
            total_limit=1,
        )

    def close(self) -> None:
        """Puts the weights back to where they were, in their own types, and drops the optimizer."""
        parameters = self.layer.parameters()
        for name, (dtype, device) in self._before.items():
            parameters[name].data = parameters[name].data.to(device, dtype)
        if self.device is not None and self._before:
            # Buffers follow; the parameters are there already.
            for module in self._modules():
                module.to(next(iter(self._before.values()))[1])
        self._before = {}
        self.__dict__.pop("optimizer", None)
        self.__dict__.pop("trained", None)

    def _value(self, name: str) -> torch.Tensor:
        return self.layer.parameters()[name].detach()

    def _modules(self) -> list[nn.Module]:
        return [self.layer.attention, *([self.layer.projection] if self.layer.projects_outside else [])]  # type: ignore[list-item]

    def _make_optimizer(self, parameters: dict[str, nn.Parameter]) -> torch.optim.AdamW:
        mixing = f"{self.layer.name}.mhla.mixing"
        # A learning rate is a distance.
        own_block = self.layer.mhla.mixing_matrix().detach().diagonal(dim1=-2, dim2=-1).mean().item()
        rates: dict[float, list[nn.Parameter]] = {}
        for name in self.names:
            rate = self.options.learning_rate
            if name == mixing:
                highest = self.options.mhla_learning_rate
                rate = min(highest, max(highest * own_block, _MIXING_RATE))
            elif name.startswith(f"{self.layer.name}.mhla."):
                rate = self.options.mhla_learning_rate
            rates.setdefault(rate, []).append(parameters[name])
        return torch.optim.AdamW(
            [{"params": members, "lr": rate, "peak_lr": rate} for rate, members in rates.items()],
            betas=(0.9, 0.99),
            weight_decay=0.0,
            fused=all(parameters[name].device.type in ("cpu", "cuda") for name in self.names),
        )

    def _diverged(self, what: str, step: int, indices: list[int]) -> None:
        batch = f" (batch {', '.join(map(str, indices[:6]))})" if indices else ""
        good = (
            "there is no checkpoint" if self.checkpoint is None else f"the last good checkpoint is {self.checkpoint}"
        )
        raise FloatingPointError(
            f"matching {self.layer.name}: the {what} at step {step}{batch}; lower the learning rate; {good}"
        )


def trained_names(layer: AttentionLayer, train: str) -> list[str]:
    """Names of a layer's parameters that train; integers, as quantised weights are, never do."""
    return [
        name
        for name, parameter in layer.parameters().items()
        if parameter.is_floating_point() and (train == "full" or name.startswith(f"{layer.name}.mhla."))
    ]
