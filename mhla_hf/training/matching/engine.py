# SPDX-License-Identifier: Apache-2.0
"""Matching of a model's layers to those of its original on some batches, in one process or several."""

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
from accelerate.utils import send_to_device
from torch import nn

from ...utils.destinations import lock_output, remove_leftovers
from ...utils.files import write_json
from ...utils.json_files import read_json
from ..config import TrainingConfig
from ..data.batches import DataOrder
from ..data.fingerprints import add_tensor, evenly_spaced, model_fingerprint
from ..loop import StageLoop
from ..processes import StopSignals, TrainingStopped
from .activations import CACHES, ActivationCache, DiskCache, MemoryCache, OnlineCache, choose_cache, pack, total_size
from .distributed import Processes
from .layers import AttentionLayer, Batch, evaluating, find_projections, mhla_layers, only_trainable
from .stage import STAGE, LayerRun, MatchingStage, trained_names
from .teacher import SharedTeacher


logger = logging.getLogger(__name__)

Progress = Callable[[str, int, float], None]
"""Called with the name of a layer, its steps so far and the loss of the last of them."""


@dataclass
class MatchingReport:
    """The outcome of matching.

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


class Batches:
    """Batches by their number, on the model's device."""

    def __init__(self, make: Callable[[int], Batch], count: int, device: torch.device) -> None:
        self.make, self.count, self.device = make, count, device

    @classmethod
    def of(cls, batches: Sequence[Batch] | Callable[[int], Batch], count: int | None, device: torch.device) -> Batches:
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
        return send_to_device(dict(batch), self.device)

    def fingerprint(self) -> str:
        digest = hashlib.sha256(f"{self.count};".encode())
        for index in evenly_spaced(range(self.count), 16):
            for name, value in sorted(self[index].items()):
                if isinstance(value, torch.Tensor):
                    digest.update(f"{name}:{tuple(value.shape)};".encode())
                    add_tensor(digest, value, samples=1024)
                else:
                    digest.update(f"{name}:{value!r:.100};".encode())
        return digest.hexdigest()[:16]


@dataclass
class Matching:
    """One run of [`match_layers`]."""

    model: nn.Module
    data: Batches
    config: TrainingConfig
    teacher: SharedTeacher
    dtype: torch.dtype
    device: torch.device | None
    output: Path | None
    progress: Progress | None
    identity: dict[str, Any]

    def __post_init__(self) -> None:
        self.processes = Processes()
        self.layers = layers_with_projections(self.model, self.data[0])
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
                if not loops[-1].finished:
                    stack.callback(loops[-1].batches.close)
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
            first = pack(self.teacher.record(self.layers, self.data[needed[0]], keep=self._kept))
            size = total_size(first.bytes, self.data, needed)
            cache, note = choose_cache(cache, size, limit, disk, len(self.mine) / len(self.layers))
            # What has room in one process has to have it in all.
            cache = max(self.processes.all(cache), key=CACHES.index)
            self.report.cache_bytes = size
            logger.log(logging.WARNING if cache == "none" else logging.INFO, "matching: %s", note)
        self.report.cache = cache
        mine: list[str] | None = [layer.name for layer in self.mine]
        if cache == "none":
            # The layers will change.
            self.teacher.keep(name for layer in self.layers for name in trained_names(layer, self.config.train))
            return OnlineCache(
                lambda index: self.teacher.record(self.layers, self.data[index], mine, self._rounded), self.batch_size
            )
        records: ActivationCache = MemoryCache()
        if cache == "disk":
            assert disk is not None
            records = DiskCache(disk, f"{self.identity['fingerprint']}-{self.dtype}")
            # Each process writes some of the batches, for all layers.
            mine, needed = None, self.processes.share_of(needed)
        for index in records.missing(needed):
            if signals.received is not None:
                raise TrainingStopped(
                    "stopped recording activations; the same command continues"
                    + (f" from there (saved in {self.output})" if cache == "disk" else " from the beginning"),
                    signals.received,
                )
            records.put(index, pack(self.teacher.record(self.layers, self.data[index], mine, self._kept)))
        self.report.seconds["recording"] = time.perf_counter() - began
        return records

    def _kept(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to("cpu", self.dtype, copy=True).contiguous()

    def _rounded(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy as a cache would return it: the choice of the cache has no effect on the result."""
        return tensor.detach().to(self.dtype, copy=True)

    def _layer_run(self, layer: AttentionLayer, signals: StopSignals) -> LayerRun:
        number = [other.name for other in self.layers].index(layer.name)
        output = None if self.output is None else self.output / "layers" / f"{number:03d}"
        progress = self.progress
        callback = None if progress is None else lambda stage, step, loss: progress(layer.name, step, loss)
        shared = {"model": self.model, "dataset": self.data, "signals": signals, "callback": callback}
        return LayerRun.of(layer, self.config, output, **shared)

    def _stopped(self, loops: Sequence[Any], number: int) -> TrainingStopped:
        for loop in loops:
            loop.save()
        way_on = "nothing was saved, for there is no output"
        if self.output is not None:
            way_on = f"the same command continues from there (saved in {self.output})"
        last = min(loops, key=lambda loop: loop.step)
        name = last.stage.layers[0].name
        return TrainingStopped(f"stopped matching {name} after step {last.step} of {self.steps}; {way_on}", number)

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
        for name, value in sorted(self.teacher.weights.items()):
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


def layers_with_projections(model: nn.Module, batch: Batch) -> list[AttentionLayer]:
    layers = mhla_layers(model)
    with evaluating(model):
        return find_projections(model, layers, batch)
