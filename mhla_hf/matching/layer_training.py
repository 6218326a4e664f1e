# SPDX-License-Identifier: Apache-2.0
"""The training of one layer, or block, towards what the original has in its place."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from ..training.config import LR_SCHEDULES, PRECISIONS, TRAIN_MODES
from ..training.layers import LayerCall, Trainable, swapped_parameters
from ..training.optimizers import ADAM, LOGARITHM, MATRIX, Muon
from ..training.parameters import learning_rate_factor, set_learning_rate
from ..training.processes import Processes
from ..utils.files import atomic_file
from ..utils.options import Options, option


Progress = Callable[[str, int, float], None]
"""Called with the name of a layer, its steps so far and the loss of the last of them."""

_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Rates of mixing weights (of their logarithms) and convolutions, as multiples of that of feature maps; what measured
# best on the demo's Wan.
_MIXING_FACTOR, _CONVOLUTION_FACTOR = 2.5, 0.5
# Smaller matrices, such as tables of few rows, are no maps to orthogonalise.
_LEAST_SIDE = 8
# Rates of a second attempt, relative to those of the first.
_SECOND_RATE = 0.1


@dataclass(frozen=True, kw_only=True)
class MatchSettings(Options):
    """How layers or blocks are trained.

    Convolutions have half of `mhla_learning_rate`, and logarithms of mixing weights 2.5 times as much. Weights are in
    fp32 while they train.

    Raises:
        ValueError: If a value is not allowed; the message names the option and what it may be.
    """

    optimizer: str = option("muon", "Of the matrices of projections; the rest has Adam.", choices=("muon", "adam"))
    learning_rate: float = option(6e-3, "Peak learning rate of what the original has.", above=0)
    mhla_learning_rate: float = option(2e-2, "Peak learning rate of the parameters that MHLA adds.", above=0)
    train: str = option("full", "Parameters to train: MHLA's, LoRA and MHLA's, or all.", choices=TRAIN_MODES)
    warmup_steps: int = option(10, "Steps of linear warm-up.", minimum=0)
    lr_schedule: str = option("cosine", "Learning rate after the warm-up.", choices=LR_SCHEDULES)
    max_grad_norm: float = option(1.0, "Gradients are clipped to this norm; 0 switches clipping off.", minimum=0)
    weight_decay: float = option(0.0, "Weight decay of matrices.", minimum=0)
    adam_beta1: float = option(0.9, "Adam's first beta.", minimum=0, below=1)
    adam_beta2: float = option(0.99, "Adam's second beta, for short runs.", minimum=0, below=1)
    mixed_precision: str = option("no", "Autocast type over fp32 weights.", choices=PRECISIONS)
    seed: int = option(0, "Seed of the order of batches.", minimum=0, maximum=2**32 - 1)
    save_every: int = option(200, "Steps between checkpoints of layers that train together.", minimum=0)


def autocast(device: torch.device, precision: str | None) -> torch.autocast:
    """Autocast to `bf16` or `fp16`; for `no` and None a context without effect."""
    return torch.autocast(device.type, _TYPES.get(precision or "no"), enabled=precision in _TYPES)


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


def summarize(losses: Sequence[float]) -> dict[str, float]:
    """The loss of the first step and the mean of the last tenth."""
    last = losses[-max(1, len(losses) // 10) :]
    return {"first": losses[0], "last_tenth": sum(last) / len(last)}


def layer_loss(layer: Trainable, call: LayerCall) -> torch.Tensor:
    """Compute the matching loss of a layer on one record; padding does not count.

    What is beside the grid, as text is, counts as much as the grid.

    Args:
        layer: The layer, with its projection.
        call: Input and output of the original layer.
    """
    losses, output = [], layer(call.arguments, call.hidden_states)
    for part in (slice(call.num_beside), slice(call.num_beside, None)):
        pair = output[:, part], call.output[:, part]
        if call.valid is not None:
            pair = pair[0][call.valid[:, part]], pair[1][call.valid[:, part]]
        if pair[0].numel():
            losses.append(attention_matching_loss(*pair))
    return torch.stack(losses).mean()


def trained_names(layer: Trainable, train: str) -> list[str]:
    """Names of a layer's parameters that train; integers, as quantised weights are, never do.

    Args:
        layer: The layer, with its projection.
        train: `"full"`, `"mhla"`, or `"lora"` for adapters and the parameters of `mhla`.
    """
    return [
        name
        for name, parameter in layer.parameters().items()
        if parameter.is_floating_point()
        and (train == "full" or name.startswith(f"{layer.name}.mhla.") or (train == "lora" and ".lora_" in name))
    ]


def layer_optimizer(layer: Trainable, names: Sequence[str], settings: MatchSettings) -> Muon:
    """The optimizer of some parameters of a layer: Muon or Adam for matrices, multiplicative steps for mixing weights.

    Matrices are orthogonalised head by head: that takes a fraction of the time, and whole matrices overfit few tokens.
    """
    parameters = layer.parameters()
    base, highest = settings.learning_rate, settings.mhla_learning_rate
    groups: list[dict[str, Any]] = []
    for name in names:
        parameter = parameters[name]
        group: dict[str, Any] = {"params": [parameter], "kind": ADAM, "peak_lr": base, "weight_decay": 0.0}
        if name.endswith(".mhla.mixing"):
            group |= {"kind": LOGARITHM, "peak_lr": _MIXING_FACTOR * highest, "config": layer.mhla.config}  # type: ignore[union-attr]
        elif ".mhla." in name:
            group["peak_lr"] = highest * (_CONVOLUTION_FACTOR if ".lepe." in name else 1)
        elif parameter.ndim >= 2 and ".lora_" not in name:
            group["weight_decay"] = settings.weight_decay
            if parameter.ndim == 2 and min(parameter.shape) >= _LEAST_SIDE and settings.optimizer == "muon":
                group |= {"kind": MATRIX, **_heads(layer, parameter)}
        groups.append(group)
    return Muon(groups, betas=(settings.adam_beta1, settings.adam_beta2))


def _heads(layer: Trainable, parameter: nn.Parameter) -> dict[str, Any]:
    """Divide a matrix into parts as wide as a head: an output projection by columns, others by rows."""
    assert layer.mhla is not None
    by_columns = layer.projection is not None and parameter is layer.projection.weight
    length, width = parameter.shape[1 if by_columns else 0], layer.mhla.head_dim
    if length % width or length > width * layer.mhla.all_heads:
        return {}
    return {"heads": length // width, "by_columns": by_columns}


class LayerTraining:
    """The training of one layer.

    Args:
        layer: The layer, with its projection.
        settings: The options.
        file: Where to save it; None for nowhere. What it holds is resumed from.
        steps: Steps to take.

    Attributes:
        names: Names of the parameters that train.
        losses: Loss of every step so far.
        errors: Held-out error of the layer before and after, once [`settle`] has measured them.
        attempt: 1, or 2 for the second attempt.
    """

    errors: tuple[float, float] | None = None
    attempt = 1

    def __init__(self, layer: Trainable, settings: MatchSettings, file: Path | None, steps: int) -> None:
        self.layer, self.settings, self.file, self.steps = layer, settings, file, steps
        self.names = trained_names(layer, settings.train)
        self.losses: list[float] = []
        if file is not None and file.is_file():
            with safe_open(str(file), framework="pt") as stored:
                self.losses = json.loads(stored.metadata()["losses"])
                self.errors = json.loads(stored.metadata().get("errors", "null"))
                self.attempt = int(stored.metadata().get("attempt", 1))

    @property
    def finished(self) -> bool:
        """True once all steps are taken."""
        return len(self.losses) >= self.steps

    @contextmanager
    def prepared(self, device: torch.device | None) -> Iterator[None]:
        """Hold the layer on a device (None: where it is) and what trains of it in fp32; restore what is saved."""
        parameters, modules = self.layer.parameters(), self.layer.modules().values()
        before = {name: (parameter.dtype, parameter.device) for name, parameter in parameters.items()}
        self.parameters = {name: parameters[name] for name in self.names}
        try:
            for module in modules:
                module.to(device)
            for parameter in self.parameters.values():
                parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
            self.former = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
            self._restore()
            yield
        finally:
            for name, (dtype, home) in before.items():
                parameters[name].data = parameters[name].data.to(home, dtype)
            if device is not None:
                # Buffers follow; the parameters are there already.
                for module in modules:
                    module.to(next(iter(before.values()))[1])

    def _restore(self) -> None:
        settings = self.settings
        if self.attempt == 2:
            rates = {name: _SECOND_RATE * getattr(settings, name) for name in ("learning_rate", "mhla_learning_rate")}
            settings = replace(settings, **rates)
        self.optimizer = layer_optimizer(self.layer, self.names, settings)
        # Quantised weights are integers.
        self.weight = next(value for value in self.layer.parameters().values() if value.is_floating_point())
        self.scaler = torch.amp.GradScaler(self.weight.device.type, enabled=self.settings.mixed_precision == "fp16")
        if not self.losses:
            return
        assert self.file is not None
        stored = load_file(self.file)
        for name, parameter in self.parameters.items():
            parameter.data.copy_(stored.pop(name))
        for key, value in stored.items():
            name, _, kind = key.rpartition("::")
            parameter = self.parameters[name]
            self.optimizer.state[parameter][kind] = value.to(parameter.device)

    @torch.no_grad()
    def settle(self, calls: Sequence[Callable[[], LayerCall]], processes: Processes) -> None:
        """Keep what was trained if it lowers the loss on records that no step has seen, else what was there before.

        A layer that learned nothing has a second attempt, at a tenth of the rates: it is not finished then. The rates
        are for layers far from their originals, and lead away from where calibration comes close.

        Args:
            calls: Functions that return the layer's calls in the records of this process.
            processes: Those that have the others.
        """

        def error() -> float:
            losses: list[float] = sum(processes.all([self._loss(call()).item() for call in calls]), [])
            return math.fsum(losses) / len(losses)

        after = error()
        with swapped_parameters({parameter: self.former[name] for name, parameter in self.parameters.items()}):
            before = error()
        self.errors = (before, after)
        if not after < before:
            for name, parameter in self.parameters.items():
                parameter.copy_(self.former[name])
            if self.attempt == 1:
                self.attempt, self.errors, self.losses = 2, None, []
                self._restore()

    def summary(self) -> dict[str, Any]:
        """Its losses, and the held-out error before and after where that was measured, as plain JSON values."""
        found: dict[str, Any] = summarize(self.losses)
        if self.errors is not None:
            found |= dict(zip(("held_out_before", "held_out_after"), self.errors)) | {"attempt": self.attempt}
        return found

    def take_step(self, calls: Iterable[LayerCall], numbers: Sequence[int]) -> None:
        """Take an optimizer step.

        Args:
            calls: The layer's calls in some records.
            numbers: Numbers of the records.

        Raises:
            FloatingPointError: If the loss or gradient is not finite.
        """
        settings, step = self.settings, len(self.losses)
        factor = learning_rate_factor(
            step, schedule=settings.lr_schedule, warmup_steps=settings.warmup_steps, total_steps=self.steps
        )
        set_learning_rate(self.optimizer, factor)
        losses = []
        for call in calls:
            loss = self._loss(call) / len(numbers)
            self.scaler.scale(loss).backward()
            losses.append(loss.detach())
        self.scaler.unscale_(self.optimizer)
        norm = float(nn.utils.clip_grad_norm_(self.parameters.values(), settings.max_grad_norm or math.inf))
        loss_value = torch.stack(losses).sum().item()
        # Scaled gradients of fp16 may overflow: their step is left out.
        if not math.isfinite(loss_value) or not (math.isfinite(norm) or self.scaler.is_enabled()):
            problem = f"gradient is {norm}" if math.isfinite(loss_value) else f"loss is {loss_value}"
            bad = [number for number, each in zip(numbers, losses) if not each.isfinite()] or numbers
            raise FloatingPointError(
                f"matching {self.layer.name}: the {problem} at step {step + 1}, batch {', '.join(map(str, bad[:6]))}; "
                "lower the learning rate if the batch is sound"
            )
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.losses.append(loss_value)

    def _loss(self, call: LayerCall) -> torch.Tensor:
        call = send_to_device(call, self.weight.device, non_blocking=True)
        call = call._replace(hidden_states=call.hidden_states.to(self.weight.dtype))
        with autocast(self.weight.device, self.settings.mixed_precision):
            return layer_loss(self.layer, call)

    def save(self) -> None:
        """Save the weights; of a layer that is not finished the optimizer's moments, too."""
        if self.file is None:
            return
        tensors = {name: parameter.detach() for name, parameter in self.parameters.items()}
        if not self.finished:
            for name, parameter in self.parameters.items():
                tensors |= {f"{name}::{kind}": value for kind, value in self.optimizer.state[parameter].items()}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(self.file) as temporary:
            plain = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
            state = {name: json.dumps(getattr(self, name)) for name in ("losses", "errors", "attempt")}
            save_file(plain, temporary, state)
