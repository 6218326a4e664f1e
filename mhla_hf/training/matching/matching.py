# SPDX-License-Identifier: Apache-2.0
"""Matching: every MHLA layer of a model learns to give what the layer it replaced gave.

The original runs once over some batches, and input and output of each layer are kept; then every layer trains alone on
that. Records that do not fit are made again for each step, for all layers at once.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...conversion.options import parse_dtype, parse_size
from ...utils.files import remove_leftovers, write_json
from ...utils.json_files import read_json
from ...utils.locks import lock_output
from ..config import TrainingConfig
from ..data.data_order import DataOrder
from ..data.fingerprints import add_tensor, model_fingerprint, spread
from ..loop import StageLoop
from ..stopping import StopSignals, TrainingStopped
from .activations import (
    CACHES,
    ActivationCache,
    DiskCache,
    MemoryCache,
    OnlineCache,
    choose_cache,
    pack,
    total_size,
)
from .distributed import Processes
from .layer_run import LayerRun, trained_names
from .layers import AttentionLayer, Batch, evaluating, find_projections, mhla_layers
from .recording import Recorder, check_originals, only_trainable, original_values
from .stage import STAGE, MatchingStage, layer_loss
from .teacher import SharedTeacher


logger = logging.getLogger(__name__)

TRAINED = ("full", "mhla")
PRECISIONS = ("no", "bf16")

Progress = Callable[[str, int, float], None]
"""Called with the name of a layer, its steps so far and the loss of the last of them."""


@dataclass
class MatchingReport:
    """What matching did.

    Attributes:
        losses: Loss of every step of each layer, before the step, by the name of its attention module: the squared
            distance to the original's output divided by that output's variance.
        cache: Where the records were: `"memory"`, `"disk"` or `"none"`.
        cache_bytes: Size of all records, stated before they are made; 0 if there were none to make.
        seconds: Of the two parts, `"recording"` and `"training"`, in this process.
    """

    losses: dict[str, list[float]] = field(default_factory=dict)
    cache: str = "none"
    cache_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def mean_losses(self) -> list[float]:
        """Loss of every step, the mean over the layers."""
        return [sum(step) / len(step) for step in zip(*self.losses.values(), strict=True)]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values: of each layer the loss of the first step and the mean of the last tenth."""
        layers = {
            name: {"first": losses[0], "last_tenth": sum(last := losses[-max(1, len(losses) // 10) :]) / len(last)}
            for name, losses in self.losses.items()
        }
        return {"layers": layers, "cache": self.cache, "cache_bytes": self.cache_bytes, "seconds": self.seconds}


def match_layers(
    model: nn.Module,
    batches: Sequence[Batch] | Callable[[int], Batch],
    *,
    steps: int = 600,
    num_batches: int | None = None,
    teacher: nn.Module | SharedTeacher | None = None,
    original_parameters: Mapping[str, torch.Tensor] | None = None,
    batch_size: int = 1,
    learning_rate: float = 3e-3,
    mhla_learning_rate: float = 5e-3,
    train: str = "full",
    warmup_steps: int = 10,
    max_grad_norm: float = 1.0,
    mixed_precision: str = "no",
    cache: str = "auto",
    cache_limit: int | str | None = None,
    cache_dtype: str | torch.dtype = "bfloat16",
    device: torch.device | str | None = None,
    output: str | Path | None = None,
    save_every: int = 200,
    seed: int = 0,
    progress: Progress | None = None,
) -> MatchingReport:
    """Trains the MHLA layers of a model, each alone, towards what the layers of the original give.

    The original is the model itself, run with its original attention: that is exact for a freshly converted model.
    Of a model whose other parameters have changed since, by calibration or training, give `teacher` or
    `original_parameters`.

    Dropout is off throughout. Afterwards the model is in the mode it was in, and what required gradients does again.
    With several processes of `torch.distributed`, each trains its share of the layers and all get the result, which is
    that of one process; batches must be the same in all of them, and `output` a directory that all see.

    Args:
        model: A model with MHLA layers, of any family. Changed in place.
        batches: Keyword arguments of the model's `forward`, or a function that makes those of a number, always the
            same. They are visited in an order that follows from `seed`, all of them before any comes again. Tokens
            that an `attention_mask` leaves out do not count.
        steps: Optimizer steps of each layer.
        num_batches: How many batches there are; only for a function.
        teacher: The original, of the class that transformers or diffusers has; or a `SharedTeacher` of the model.
        original_parameters: Values of the changed parameters in the original, by name.
        batch_size: Batches that one step learns from.
        learning_rate: Peak learning rate of projections, norms and output projections.
        mhla_learning_rate: That of the parameters of `mhla`; for mixing weights, above 5e-3, times the mean weight
            that a block gives to itself, but at least 5e-3.
        train: `"full"`, or `"mhla"` for the parameters of `mhla` alone.
        warmup_steps: Steps in which the learning rate rises; then it falls to zero along a cosine.
        max_grad_norm: Gradients of a layer are clipped to this norm; 0 switches clipping off.
        mixed_precision: `"bf16"` for autocast, `"no"` for none. Weights are in fp32 while they train.
        cache: Where records are kept: `"memory"`, `"disk"` (in `output`), `"none"` to make them anew for each step,
            or `"auto"` for the first of these that they fit in.
        cache_limit: Most bytes of records, such as `"20GB"`; by default half of the free memory, and nearly all of
            the free disk.
        cache_dtype: Type in which hidden states and outputs are kept.
        device: Where a layer trains, while the model stays where it is; by default where it is. Without a cache all
            layers train where they are.
        output: Directory for checkpoints and records. A run that was stopped or killed goes on there when called
            again with the same arguments.
        save_every: Steps between the checkpoints of a layer that trains.
        seed: Of the order of batches.
        progress: Called after every step.

    Returns:
        What it did.

    Raises:
        ValueError: If the model has no MHLA layers, an argument is wrong, the records do not fit, or `output` holds
            another run.
        FloatingPointError: If a loss is no longer finite.
        TrainingStopped: After Ctrl-C or SIGTERM, when a checkpoint is saved.
        OSError: If there is no room on the disk.
    """
    for name, number in (("steps", steps), ("batch_size", batch_size), ("save_every", save_every)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"{name}={number!r:.100} must be a whole number of at least 1.")
    for name, value, choices in (
        ("train", train, TRAINED), ("mixed_precision", mixed_precision, PRECISIONS), ("cache", cache, CACHES)
    ):  # fmt: skip
        if value not in choices:
            raise ValueError(f"{name}={value!r:.100} must be one of {', '.join(choices)}.")
    if cache == "disk" and output is None:
        raise ValueError("cache='disk' needs output, the directory to keep the records in.")
    options: dict[str, Any] = {
        "learning_rate": learning_rate, "mhla_learning_rate": mhla_learning_rate, "train": train,
        "warmup_steps": warmup_steps, "max_grad_norm": max_grad_norm, "mixed_precision": mixed_precision, "seed": seed,
    }  # fmt: skip
    config = TrainingConfig(
        transfer_steps=steps,
        max_steps=0,
        # Gradients of one record at a time.
        gradient_accumulation_steps=batch_size,
        lr_schedule="cosine",
        adam_beta2=0.99,
        weight_decay=0.0,
        checkpointing_steps=save_every,
        checkpoints_total_limit=1,
        **options,
    )
    limit, dtype = parse_size(cache_limit, "cache_limit"), parse_dtype(cache_dtype)
    assert dtype is not None
    _check_not_offloaded(model)
    run = _Matching(
        model=model,
        data=_Batches.of(batches, num_batches, _input_device(model)),
        config=config,
        originals=_originals(model, teacher, original_parameters),
        dtype=dtype,
        device=None if device is None else torch.device(device),
        output=None if output is None else Path(output),
        progress=progress,
        identity={**options, "steps": steps, "batch_size": batch_size, "cache_dtype": str(dtype)},
    )
    with run.locked(), run.whole_model(), StopSignals() as signals:
        return run.run(cache, limit, signals)


def matching_losses(
    model: nn.Module,
    batch: Batch,
    *,
    teacher: nn.Module | SharedTeacher | None = None,
    original_parameters: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, float]:
    """How well each MHLA layer matches the original on one batch, given the original's hidden states.

    Args:
        model: A model with MHLA layers.
        batch: Keyword arguments of its `forward`.
        teacher: See [`match_layers`].
        original_parameters: See [`match_layers`].

    Returns:
        Loss of each layer, by the name of its attention module; 0 is a perfect match, 1 what the mean would score.
    """
    originals = _originals(model, teacher, original_parameters)
    batch = _Batches.of([batch], None, _input_device(model))[0]
    layers = _layers(model, batch)
    calls = Recorder(model, layers, originals)(batch)
    with torch.no_grad(), evaluating(model):
        return {layer.name: layer_loss(layer, calls[layer.name]).item() for layer in layers}


class _Batches:
    """Batches by their number, on the model's device."""

    def __init__(self, make: Callable[[int], Batch], count: int, device: torch.device) -> None:
        self.make, self.count, self.device = make, count, device

    @classmethod
    def of(
        cls, batches: Sequence[Batch] | Callable[[int], Batch], count: int | None, device: torch.device
    ) -> _Batches:
        if callable(batches):
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ValueError(f"num_batches={count!r:.100} must say how many batches the function makes.")
            return cls(batches, count, device)
        if count is not None:
            raise ValueError("num_batches is only for batches that a function makes.")
        if not len(batches):
            raise ValueError("batches is empty: give at least one batch of inputs.")
        return cls(batches.__getitem__, len(batches), device)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        batch = self.make(index)
        if not isinstance(batch, Mapping) or not any(isinstance(value, torch.Tensor) for value in batch.values()):
            raise ValueError(
                f"batch {index} must be a dict of the model's keyword arguments, tensors among them, and is a "
                f"{type(batch).__name__}."
            )
        return {
            name: value.to(self.device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()
        }

    def fingerprint(self) -> str:
        digest = hashlib.sha256(f"{self.count};".encode())
        for index in spread(range(self.count), 16):
            for name, value in sorted(self[index].items()):
                if isinstance(value, torch.Tensor):
                    digest.update(f"{name}:{tuple(value.shape)};".encode())
                    add_tensor(digest, value, samples=1024)
                else:
                    digest.update(f"{name}:{value!r:.100};".encode())
        return digest.hexdigest()[:16]


@dataclass
class _Matching:
    """One run of [`match_layers`]."""

    model: nn.Module
    data: _Batches
    config: TrainingConfig
    originals: dict[str, torch.Tensor]
    dtype: torch.dtype
    device: torch.device | None
    output: Path | None
    progress: Progress | None
    identity: dict[str, Any]

    def __post_init__(self) -> None:
        self.processes = Processes()
        self.layers = _layers(self.model, self.data[0])
        self.mine = self.processes.share_of(self.layers)
        self.steps, self.batch_size = self.config.transfer_steps, self.config.gradient_accumulation_steps
        self.report = MatchingReport(seconds={"recording": 0.0, "training": 0.0})

    @contextmanager
    def locked(self) -> Iterator[None]:
        """A context in which no other run writes to the output, which holds this run or none."""
        if self.output is None:
            yield
            return
        self.identity["fingerprint"] = self._fingerprint()
        with ExitStack() as stack:
            with self.processes.together():
                if self.processes.rank == 0:
                    lock = lock_output(self.output)
                    if lock is not None:
                        stack.enter_context(lock)
                    self._claim_output(self.output)
            yield

    @contextmanager
    def whole_model(self) -> Iterator[None]:
        """A context in which the model is in evaluation mode, and only what trains requires gradients."""
        names = [name for layer in self.layers for name in trained_names(layer, self.config.train)]
        with evaluating(self.model), only_trainable(self.model, names):
            yield

    def run(self, cache: str, limit: int | None, signals: StopSignals) -> MatchingReport:
        """Trains what is not trained yet."""
        with self.processes.together():
            runs = [self._layer_run(layer, signals) for layer in self.mine]
        unfinished = any(self.processes.all(any(len(run.losses) < self.steps for run in runs)))
        records: ActivationCache = MemoryCache()
        if unfinished:
            with self.processes.together():
                records = self._records(cache, limit, signals)
        with self.processes.together():
            began = time.perf_counter()
            # Records that are not kept are made for all layers at once.
            together = [runs] if records.kind == "none" else [[run] for run in runs]
            for group in together:
                self._train(group, records, signals)
            self.report.seconds["training"] = time.perf_counter() - began
        self._exchange(runs)
        if records.kind != "disk" or self.processes.rank == 0:
            records.close()
        return self.report

    def _train(self, runs: Sequence[LayerRun], records: ActivationCache, signals: StopSignals) -> None:
        """Trains some layers step by step, each of them once a step."""
        with ExitStack() as stack:
            loops = []
            for run in runs:
                stack.enter_context(run.opened(None if records.kind == "none" else self.device))
                stage = MatchingStage(self.model, [run.layer], run.names, records, self.steps)
                loops.append(StageLoop(run, stage))
                loops[-1].start(run.position, run.checkpoint)
            while not all(loop.finished for loop in loops):
                step = min(loop.step for loop in loops)
                # A run that was killed between the checkpoints of two layers has one that is ahead.
                for loop in loops:
                    if loop.step == step:
                        loop.take_step()
                if signals.received is not None:
                    raise self._stopped(loops, signals.received)

    def _records(self, cache: str, limit: int | None, signals: StopSignals) -> ActivationCache:
        """Records of all batches that steps take, or a cache that makes them when they are asked for."""
        began = time.perf_counter()
        order = DataOrder(dataset_size=len(self.data), batch_size=1, seed=self.config.seed, stage=STAGE)
        needed = sorted({order.dataset_index(number) for number in range(self.steps * self.batch_size)})
        disk = None if self.output is None else self.output / "activations"
        if cache not in ("memory", "none") and any(self.processes.all(disk is not None and disk.is_dir())):
            cache = "disk"
        elif cache != "none":
            first = pack(Recorder(self.model, self.layers, self.originals)(self.data[needed[0]], self._kept))
            size = total_size(first.bytes, self.data, needed)
            cache, note = choose_cache(cache, size, limit, disk, len(self.mine) / len(self.layers))
            # What has room in one process has to have it in all.
            cache = max(self.processes.all(cache), key=CACHES.index)
            self.report.cache_bytes = size
            logger.log(logging.WARNING if cache == "none" else logging.INFO, "matching: %s", note)
        self.report.cache = cache
        mine = [layer.name for layer in self.mine]
        if cache == "none":
            # The layers will change.
            changing = {
                name: parameter.detach().clone()
                for layer in self.layers
                if self.config.train == "full"
                for name, parameter in layer.parameters().items()
                if parameter.is_floating_point() and not name.startswith(f"{layer.name}.mhla.")
            }
            recorder = Recorder(self.model, self.layers, {**changing, **self.originals}, only=mine)
            return OnlineCache(lambda index: recorder(self.data[index], self._rounded), self.batch_size)
        recorder = Recorder(self.model, self.layers, self.originals, only=mine)
        records: ActivationCache = MemoryCache()
        if cache == "disk":
            assert disk is not None
            records = DiskCache(disk, f"{self.identity['fingerprint']}-{self.dtype}")
            # Each process writes some of the batches, for all layers.
            recorder.only, needed = None, self.processes.share_of(needed)
        for index in records.missing(needed):
            if signals.received is not None:
                raise TrainingStopped(
                    "stopped recording activations; the same command goes on"
                    + (f" from there (saved in {self.output})" if cache == "disk" else " from the beginning"),
                    signals.received,
                )
            records.put(index, pack(recorder(self.data[index], self._kept)))
        self.report.seconds["recording"] = time.perf_counter() - began
        return records

    def _kept(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to("cpu", self.dtype, copy=True).contiguous()

    def _rounded(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a cache would give: a run that changes over to one goes on as it was."""
        return tensor.detach().to(self.dtype, copy=True)

    def _layer_run(self, layer: AttentionLayer, signals: StopSignals) -> LayerRun:
        number = [other.name for other in self.layers].index(layer.name)
        output = None if self.output is None else self.output / "layers" / f"{number:03d}"
        progress = self.progress
        callback = None if progress is None else lambda stage, step, loss: progress(layer.name, step, loss)
        return LayerRun.of(
            layer, self.config, output, self.device,
            model=self.model, dataset=self.data, signals=signals, callback=callback,
        )  # fmt: skip

    def _stopped(self, loops: Sequence[Any], number: int) -> TrainingStopped:
        for loop in loops:
            loop.save()
        way_on = "nothing was saved, for there is no output"
        if self.output is not None:
            way_on = f"the same command goes on from there (saved in {self.output})"
        name = loops[0].stage.layers[0].name
        return TrainingStopped(f"stopped matching {name} after step {loops[0].step} of {self.steps}; {way_on}", number)

    def _exchange(self, runs: Sequence[LayerRun]) -> None:
        """Gives all processes the weights and losses of all layers."""
        mine = {run.layer.name: run.losses for run in runs}
        losses = {name: values for each in self.processes.all(mine) for name, values in each.items()}
        self.report.losses = {layer.name: losses[layer.name] for layer in self.layers}
        for number, layer in enumerate(self.layers):
            parameters = layer.parameters()
            for name in trained_names(layer, self.config.train):
                self.processes.send(parameters[name], self.processes.owner(number))

    def _fingerprint(self) -> str:
        originals = hashlib.sha256()
        for name, value in sorted(self.originals.items()):
            originals.update(f"{name};".encode())
            add_tensor(originals, value, samples=64)
        return f"{model_fingerprint(self.model)}-{originals.hexdigest()[:8]}-{self.data.fingerprint()}"

    def _claim_output(self, output: Path) -> None:
        """Writes down the identity of this run, or checks that it is the one that was here.

        Raises:
            ValueError: If the output holds another run.
        """
        identity, record = self.identity, output / "matching.json"
        for folder in (output, output / "activations", *(output / "layers").glob("*")):
            remove_leftovers(folder)
        if record.is_file():
            before = read_json(record, "the record of a matching run")
            changed = sorted(name for name in identity if before.get(name) != identity[name])
            if changed:
                names = ", ".join("model or data" if name == "fingerprint" else name for name in changed)
                raise ValueError(
                    f"output {output} holds a matching run with another {names}; use the same, or choose another "
                    "output."
                )
            return
        write_json(record, identity)


def _layers(model: nn.Module, batch: Batch) -> list[AttentionLayer]:
    layers = mhla_layers(model)
    with evaluating(model):
        return find_projections(model, layers, batch)


def _originals(
    model: nn.Module, teacher: nn.Module | SharedTeacher | None, original_parameters: Mapping[str, torch.Tensor] | None
) -> dict[str, torch.Tensor]:
    mhla_layers(model)
    if teacher is None:
        originals = dict(original_parameters or {})
        check_originals(model, originals)
        return originals
    if original_parameters is not None:
        raise ValueError("give teacher or original_parameters, not both.")
    return original_values(model, teacher)


def _check_not_offloaded(model: nn.Module) -> None:
    """Refuses weights that are elsewhere, where training them would be lost."""
    for layer in mhla_layers(model):
        if any(parameter.is_meta for parameter in layer.attention.parameters()):
            raise ValueError(
                f"{layer.name} is offloaded: load the model on the CPU, without a device map, and give device, where "
                "one layer at a time is."
            )


def _input_device(model: nn.Module) -> torch.device:
    """Where a model takes its inputs; one whose weights are elsewhere moves them on by itself."""
    return next((parameter.device for parameter in model.parameters() if not parameter.is_meta), torch.device("cpu"))
