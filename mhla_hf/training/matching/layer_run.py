# SPDX-License-Identifier: Apache-2.0
"""The run of one MHLA layer: its options, its optimizer, its checkpoints, and where its weights are meanwhile."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from .. import checkpoints
from ..checkpoints import Position
from ..config import TrainingConfig
from ..metrics import Metrics
from ..run import Callback, Run, suspects
from ..stages.diffusion import Stage
from ..stopping import StopSignals
from .distributed import OneProcess
from .layers import AttentionLayer
from .stage import STAGE


TRAINED = ("full", "mhla")
PRECISIONS = ("no", "bf16")
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


@dataclass(frozen=True, kw_only=True)
class LayerRun(Run):
    """The run of one layer, which trains by itself; see [`Run`].

    Attributes:
        layer: The layer.
        names: The parameters that train.
        options: How it learns.
        checkpoint: The checkpoint that it goes on from.
    """

    layer: AttentionLayer
    names: list[str]
    options: MatchingOptions
    checkpoint: Path | None

    @classmethod
    def of(
        cls,
        model: nn.Module,
        layer: AttentionLayer,
        options: MatchingOptions,
        dataset: Sized,
        signals: StopSignals,
        output: Path | None,
        save_every: int,
        callback: Callback | None,
        device: torch.device | None,
    ) -> LayerRun:
        """The run of a layer, from its newest checkpoint on if there is one.

        Raises:
            ValueError: If the checkpoint is damaged.
        """
        checkpoint = None if output is None else checkpoints.find_checkpoint("latest", output)
        losses: list[float] = []
        if checkpoint is not None:
            state = checkpoints.read_state(checkpoint)
            losses = state.get("losses", [])
            if not isinstance(losses, list) or len(losses) != state["step"] or state["step"] > options.steps:
                raise ValueError(f"checkpoint {checkpoint} is damaged: its losses are missing; remove it")
        metrics = Metrics([{"stage": STAGE, "step": step, "loss": loss} for step, loss in enumerate(losses, start=1)])
        config = TrainingConfig(
            transfer_steps=options.steps,
            max_steps=0,
            # Gradients of one record at a time.
            batch_size=1,
            gradient_accumulation_steps=options.batch_size,
            lr_schedule="cosine",
            warmup_steps=options.warmup_steps,
            max_grad_norm=options.max_grad_norm,
            seed=options.seed,
            checkpointing_steps=save_every,
            checkpoints_total_limit=1,
        )
        return cls(
            config=config,
            accelerator=OneProcess(device or next(iter(layer.parameters().values())).device, options.mixed_precision),
            model=model,
            dataset=dataset,
            state=lambda: {"losses": [row["loss"] for row in metrics.rows]},
            output=output,
            callback=callback,
            metrics=metrics,
            signals=signals,
            layer=layer,
            names=trained_names(layer, options.train),
            options=options,
            checkpoint=checkpoint,
        )

    @property
    def losses(self) -> list[float]:
        """Loss of every step so far."""
        assert self.metrics is not None
        return [row["loss"] for row in self.metrics.rows]

    @property
    def position(self) -> Position | None:
        """Where the run goes on."""
        return None if self.checkpoint is None else checkpoints.checkpoint_position(self.checkpoint)

    @property
    def checkpoints(self) -> Path | None:
        """Directory of the checkpoints."""
        return self.output

    def prepare_model(self, names: Iterable[str]) -> None:
        """Nothing: the model was prepared for all layers."""

    def make_optimizer(self, stage: Stage, names: Sequence[str]) -> torch.optim.Optimizer:
        """See [`layer_optimizer`]."""
        return layer_optimizer(self.layer, names, self.options)

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
            f"(batch {', '.join(map(str, suspects(batches)[:6]))}); lower the learning rate; "
            + ("there is no checkpoint" if good is None else f"the last good checkpoint is {good}")
        )

    @contextmanager
    def opened(self, device: torch.device | None) -> Iterator[None]:
        """A context in which the layer is on a device, and parameters that train are in fp32 at least."""
        parameters, modules = self.layer.parameters(), self.layer.modules().values()
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


def layer_optimizer(layer: AttentionLayer, names: Sequence[str], options: MatchingOptions) -> torch.optim.AdamW:
    """AdamW over some parameters of a layer, with a learning rate of their own for mixing weights."""
    parameters, ours = layer.parameters(), f"{layer.name}.mhla."
    # A learning rate is a distance.
    own_block = layer.mhla.mixing_matrix().detach().diagonal(dim1=-2, dim2=-1).mean().item()
    rates: dict[float, list[nn.Parameter]] = {}
    for name in names:
        rate = highest = options.mhla_learning_rate
        if not name.startswith(ours):
            rate = options.learning_rate
        elif name == f"{ours}mixing":
            rate = min(highest, max(highest * own_block, _MIXING_RATE))
        rates.setdefault(rate, []).append(parameters[name])
    return torch.optim.AdamW(
        [{"params": members, "lr": rate, "peak_lr": rate} for rate, members in rates.items()],
        betas=(0.9, 0.99),
        weight_decay=0.0,
        fused=all(parameters[name].device.type in ("cpu", "cuda") for name in names),
    )


def trained_names(layer: AttentionLayer, train: str) -> list[str]:
    """Names of a layer's parameters that train; integers, as quantised weights are, never do."""
    return [
        name
        for name, parameter in layer.parameters().items()
        if parameter.is_floating_point() and (train == "full" or name.startswith(f"{layer.name}.mhla."))
    ]
