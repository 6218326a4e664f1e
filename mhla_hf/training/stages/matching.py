# SPDX-License-Identifier: Apache-2.0
"""Layer matching as a stage of training: MHLA layers learn from recorded calls of the layers that they replaced.

No gradient passes from one layer to another, so layers can train side by side, one after the other, and in several
processes, with the same result (layer-wise attention transfer as in Zhang et al., "LoLCATs", 2024). `LayerRun` trains
one layer for `mhla_hf.recovery.match_layers`; `Transfer` trains all layers in one step of a run, with the run's
optimizer, checkpoints and metrics, on noised samples of the data set.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from torch import nn
from torch.utils.checkpoint import checkpoint

from ...utils.files import read_json, write_json
from .. import checkpoints
from ..checkpoints import Position
from ..config import TrainingConfig
from ..data.batches import DataOrder
from ..data.folders import model_fingerprint, samples_fingerprint
from ..matching.activations import DiskCache, MemoryCache, OnlineCache, choose_cache, moved, pack
from ..matching.layers import AttentionLayer, LayerCall, evaluating, find_projections
from ..matching.layers import mhla_layers as attention_layers
from ..matching.teacher import SharedTeacher, shared_teacher
from ..parameters import mhla_layers, trainable_names
from ..processes import Processes
from ..run import Metrics, Run, samples_behind_bad_loss
from .objectives import LatentBatch, Objective
from .prediction import Stage


logger = logging.getLogger(__name__)

STAGE = "transfer"
# What measured best on the demo's Wan, whose 80 blocks give themselves 0.03 on average.
_MIXING_RATE = 5e-3
BatchMaker = Callable[[DataOrder, int, int], LatentBatch]

# At least so many draws of noise, however few samples.
_LEAST_RECORDS = 128


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
    """Compute the matching loss of a layer on one record; padding does not count.

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
        """Compute the matching loss of each layer, the mean over records.

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
    """Stage that trains some layers of a model side by side on records.

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
        records: MemoryCache | None,
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


class OneProcess:
    """The part of `accelerate.Accelerator` that the training loop uses, for layers that one process trains.

    An `Accelerator` would have all processes of `torch.distributed` train the same layer.

    Args:
        mixed_precision: `"bf16"` for autocast, `"no"` for none.

    Attributes:
        device: Where it trains.
    """

    distributed_type = DistributedType.NO
    is_main_process = is_local_main_process = True
    num_processes, process_index = 1, 0
    scaler, trackers = None, ()

    def __init__(self, mixed_precision: str) -> None:
        self.mixed_precision = mixed_precision
        self.device = torch.device("cpu")

    def prepare(self, *objects: Any) -> tuple[Any, ...]:
        """Return the objects unchanged."""
        return objects

    def autocast(self) -> torch.autocast:
        """Autocast to bf16, where it was asked for."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.mixed_precision == "bf16")

    def no_sync(self, module: nn.Module) -> AbstractContextManager[None]:
        """No-op in a single process."""
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        """The backward pass."""
        loss.backward()

    def clip_grad_norm_(self, parameters: Iterable[nn.Parameter], max_norm: float) -> torch.Tensor:
        """Clips gradients, and returns their norm before."""
        return nn.utils.clip_grad_norm_(parameters, max_norm)

    def reduce(self, tensor: torch.Tensor, reduction: str) -> torch.Tensor:
        """Return the tensor unchanged."""
        return tensor

    def wait_for_everyone(self) -> None:
        """No-op in a single process."""

    def free_memory(self) -> None:
        """No-op: nothing was prepared."""


@dataclass(frozen=True, kw_only=True)
class LayerRun(Run):
    """The run of one layer; see [`Run`].

    Attributes:
        layer: The layer.
        checkpoint: The checkpoint that it resumes from.
    """

    layer: AttentionLayer
    checkpoint: Path | None

    @classmethod
    def of(cls, layer: AttentionLayer, config: TrainingConfig, output: Path | None, **shared: Any) -> LayerRun:
        """Start the run of a layer, or resume it from its newest checkpoint.

        Args:
            layer: The layer.
            config: The options.
            output: Directory of its checkpoints.
            shared: Further fields of the run.
        """
        checkpoint = None if output is None else checkpoints.find_checkpoint("latest", output)
        losses: list[float] = []
        if checkpoint is not None:
            state = checkpoints.read_state(checkpoint)
            losses = state["losses"]
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
        """No-op: the model was prepared for all layers."""

    def make_optimizer(self, stage: Stage, names: Sequence[str]) -> torch.optim.Optimizer:
        """See [`layer_optimizer`]."""
        return layer_optimizer(self.layer, names, self.config)

    def moments_to_keep(self, moments: dict[str, torch.Tensor], finished: bool) -> dict[str, torch.Tensor]:
        """None of a finished layer, which takes no more steps."""
        return {} if finished else moments

    def diverged(
        self, problem: str, position: Position, batches: Sequence[tuple[float, tuple[int, ...]]]
    ) -> FloatingPointError:
        """Describe a loss or gradient that is not finite; arguments as in [`Run`]."""
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


class Transfer(MatchingStage):
    """Layer matching: each MHLA layer on the teacher's inputs, against the teacher's outputs.

    Unless `transfer_cache` is `none`, the teacher runs once on each of a set of samples with their noise, and steps go
    over the records of that: as many as the data set has samples, and at least 128, or as many as the steps take.

    Args:
        config: The options.
        model: The model that trains.
        objective: Makes the model's inputs of a batch.
        make_batch: Makes batches.
        get_teacher: Gives the model before its conversion.
        accelerator: The processes.
        dataset: The samples.
        folder: Where records may be kept; None for memory alone.
    """

    def __init__(
        self,
        config: TrainingConfig,
        model: nn.Module,
        objective: Objective,
        make_batch: BatchMaker,
        get_teacher: Callable[[], nn.Module],
        accelerator: Accelerator,
        dataset: Any,
        folder: Path | None,
    ) -> None:
        super().__init__(model, [], [], None, config.transfer_steps)
        self.config, self.objective, self.gradient_checkpointing = config, objective, config.gradient_checkpointing
        self.make_one, self.get_teacher = make_batch, get_teacher
        self.accelerator, self.dataset, self.folder = accelerator, dataset, folder
        self.learning_rate = config.transfer_learning_rate or config.learning_rate
        # The more particular option wins: a rate for this stage over one for these parameters in every stage.
        self.mhla_learning_rate = config.transfer_learning_rate or config.mhla_learning_rate or config.learning_rate
        if not mhla_layers(model):
            raise ValueError("transfer_steps needs at least one MHLA layer, but the model has none")
        per_step = config.batch_size * config.gradient_accumulation_steps * accelerator.num_processes
        size = min(max(len(dataset), _LEAST_RECORDS), self.steps * per_step)
        self.pool = DataOrder(dataset_size=size, batch_size=1, seed=config.seed, stage="records")
        self.samples = DataOrder(dataset_size=len(dataset), batch_size=1, seed=config.seed, stage=self.name)
        self.teacher: SharedTeacher | None = None

    def make_batch(self, order: DataOrder, step: int, micro_step: int) -> RecordNumbers:
        """Numbers of records or, where none are kept, of samples with new noise."""
        numbers = order.sample_numbers(step, micro_step)
        if not isinstance(self.records, OnlineCache):
            numbers = [self.pool.dataset_index(number) for number in numbers]
        return RecordNumbers(tuple(numbers), tuple(self.samples.dataset_index(number) for number in numbers))

    def trainable_names(self) -> list[str]:
        """Those that `train` selects, within the self-attention of MHLA layers."""
        names = map(self.objective.attention_name, mhla_layers(self.model))
        return trainable_names(self.model, self.config.train, names)

    def module(self) -> nn.Module:
        """The MHLA layers side by side."""
        self.model.to(self.accelerator.device)
        self.teacher = shared_teacher(self.model, self.get_teacher())
        self.teacher.keep(self.trainable_names())
        first = self._inputs(0)
        with evaluating(self.model), self.accelerator.autocast():
            self.layers = find_projections(self.model, attention_layers(self.model), first)
        self.records = self._open_records(first)
        return super().module()

    def loss(self, module: nn.Module, batch: RecordNumbers, accelerator: Accelerator) -> torch.Tensor:
        """Compute the matching loss, averaged over layers, after recording what is missing."""
        assert self.records is not None
        for number in self.records.missing(batch.numbers):
            self.records.put(number, pack(self._record(self._inputs(number), _kept)))
        return super().loss(module, batch, accelerator)

    def close(self) -> None:
        """Releases the teacher, which may be as large as the model, and the records."""
        self.teacher = None
        if self.records is not None:
            self.accelerator.wait_for_everyone()
            if self.records.kind != "disk" or self.accelerator.is_main_process:
                self.records.close()
        self.records = None

    def _inputs(self, number: int) -> dict[str, Any]:
        """Keyword arguments of the model's forward for a sample."""
        return self.objective.inputs_of(self.model, self.make_one(self.samples, number, 0).to(self.accelerator.device))

    def _record(
        self, inputs: dict[str, Any], keep: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach
    ) -> dict[str, LayerCall]:
        assert self.teacher is not None
        with self.accelerator.autocast():
            return self.teacher.record(self.layers, inputs, keep=keep)

    def _open_records(self, first: dict[str, Any]) -> MemoryCache:
        """Open the cache that was asked for, or that the records fit in; the main process decides for all."""
        kind, problem = self.config.transfer_cache, None
        if self.accelerator.is_main_process and kind != "none":
            try:
                kind = self._choose(kind, first)
            except (OSError, ValueError) as error:
                problem = str(error)
        kind, problem = Processes().all((kind, problem))[0]
        if problem is not None:
            raise ValueError(problem)
        if kind == "memory":
            return MemoryCache()
        if kind == "disk":
            assert self.folder is not None
            with self.accelerator.main_process_first():
                return DiskCache(self.folder / "activations", self._fingerprint())
        return OnlineCache(lambda number: self._record(self._inputs(number)), self.config.batch_size)

    def _choose(self, kind: str, first: dict[str, Any]) -> str:
        """Choose the place of the records; a resumed run keeps its first choice."""
        choice = None if self.folder is None else self.folder / "choice.json"
        if choice is not None and choice.is_file() and kind == "auto":
            return read_json(choice, "the choice of a run", required={"cache": str})["cache"]
        size = pack(self._record(first, _kept)).bytes * self.pool.dataset_size
        found, note = choose_cache(kind, size, None, None if self.folder is None else self.folder / "activations")
        logger.log(logging.WARNING if found == "none" else logging.INFO, "transfer: %s", note)
        if choice is not None:
            write_json(choice, {"cache": found})
        return found

    def _fingerprint(self) -> str:
        trained = set(self.trainable_names())
        options = f"{self.config.seed}-{self.config.condition_dropout}-{self.accelerator.mixed_precision}"
        return (
            f"{model_fingerprint(self.model, trained)}-{model_fingerprint(self.teacher)}-"
            f"{samples_fingerprint(self.dataset)}-{options}-{self.objective.to_dict()}"
        )


def _kept(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", torch.bfloat16, copy=True).contiguous()
