# SPDX-License-Identifier: Apache-2.0
"""Layer matching: train each MHLA layer of a model towards the output of the layer that it replaced.

No gradient passes from one layer to another (layer-wise attention transfer as in Zhang et al., "LoLCATs", 2024). The
original runs once over some batches, and input and output of each layer are kept; then every layer trains alone on
these records. Records that do not fit are computed again in each step, for all layers together.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import nn

from ..layers.weight_record import original_name, record_step
from ..training.config import RECORD_CACHES
from ..training.data.order import DataOrder, model_fingerprint, samples_fingerprint
from ..training.layers import (
    AttentionLayer,
    Batch,
    LayerCall,
    evaluating,
    find_projections,
    mhla_layers,
    only_trainable,
)
from ..training.processes import Processes, StopSignals, TrainingStopped
from ..training.teacher import SharedTeacher, shared_teacher
from ..utils.destinations import RunFolder, remove_directory, remove_leftovers
from ..utils.machine import parse_dtype
from ..utils.messages import check_choice, check_count, format_bytes
from .layer_training import LayerTraining, MatchSettings, Progress, autocast, layer_loss, trained_names
from .records import Record, Records, choose_cache, free_room, tensor_bytes
from .ridge import ProjectionFit


logger = logging.getLogger(__name__)

# The order of batches follows from it.
STAGE = "transfer"
# Folder of records on the disk.
ACTIVATIONS = "activations"
# Records that a projection is fitted to in the end, and which of them are held out where none is by itself: one in N.
_FITTED_RECORDS, _HELD_OUT = 128, 4
# Inputs with an entry for every token of every sample, in the order they are looked for.
_TOKEN_INPUTS = ("input_ids", "inputs_embeds", "hidden_states", "pixel_values")


@dataclass
class MatchingReport:
    """The outcome of matching.

    Attributes:
        losses: Loss of every step of each layer, before the step, by the name of its attention module: the squared
            distance to the original's output divided by that output's variance.
        layers: Of each layer the loss of the first step and the mean of the last tenth, and the error on held-out
            batches before and after, where there are such.
        cache: Where the records were: `"memory"`, `"disk"` or `"none"`.
        cache_bytes: Size of all records, computed before recording; 0 if there was nothing to record.
        seconds: Of the two parts, `"recording"` and `"training"`, in this process.
    """

    losses: dict[str, list[float]] = field(default_factory=dict)
    layers: dict[str, dict[str, float]] = field(default_factory=dict)
    cache: str = "none"
    cache_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def mean_losses(self) -> list[float]:
        """Loss of every step, the mean over the layers."""
        return [sum(step) / len(step) for step in zip(*self.losses.values(), strict=True)]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, without the losses of all steps."""
        return {"layers": self.layers, "cache": self.cache, "cache_bytes": self.cache_bytes, "seconds": self.seconds}


class Batches:
    """Batches by their number, on the model's device."""

    def __init__(
        self, batches: Sequence[Batch] | Callable[[int], Batch], count: int | None, device: torch.device
    ) -> None:
        if callable(batches):
            check_count("num_batches", count)
        elif count is not None or not len(batches):
            raise ValueError("batches must have at least one batch, and num_batches is only for a function.")
        self.make = batches if callable(batches) else batches.__getitem__
        self.count = count or len(batches)  # type: ignore[arg-type]
        self.device = device

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        return send_to_device(dict(self.make(index)), self.device)


@dataclass
class Matching:
    """A run over all layers of a model, in one process or several, each of which trains its share of the layers.

    Attributes:
        model: The model.
        data: The batches.
        settings: The options.
        steps: Steps of each layer; one number for all of them.
        batch_size: Records of a step.
        teacher: The original.
        output: Directory of the run; None writes nothing.
        progress: Called after every step.
        dtype: Type in which hidden states and outputs are kept.
        device: Where a layer trains; None for where it is.
        held_out: Number of the last batches that are not trained on.
    """

    model: nn.Module
    data: Batches
    settings: MatchSettings
    steps: int | Sequence[int]
    batch_size: int
    teacher: SharedTeacher
    output: Path | None
    progress: Progress | None
    dtype: torch.dtype = torch.bfloat16
    device: torch.device | None = None
    held_out: int = 0

    def __post_init__(self) -> None:
        self.processes = Processes()
        self.layers = layers_with_projections(self.model, self.data[0])
        self.mine = self.processes.share_of(self.layers)
        self.names = [layer.name for layer in self.mine]
        by_layer = [self.steps] * len(self.layers) if isinstance(self.steps, int) else self.steps
        self.layer_steps = {layer.name: steps for layer, steps in zip(self.layers, by_layer, strict=True)}
        count = len(self.data) - self.held_out
        self.unseen = [*range(count, len(self.data))]
        self.order = DataOrder(dataset_size=count, batch_size=1, seed=self.settings.seed, stage=STAGE)
        self.report = MatchingReport(seconds={"recording": 0.0, "training": 0.0})

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Hold the lock of the output, and the model in evaluation mode with gradients for what trains alone."""
        names = [name for layer in self.layers for name in trained_names(layer, self.settings.train)]
        with ExitStack() as stack:
            if self.output is not None:
                identity = self._identity()
                with self.processes.together():
                    if self.processes.rank == 0:
                        stack.enter_context(RunFolder(self.output, "matching.json").claimed(identity))
                        remove_leftovers(self.output / "layers")
                        # What a run that was killed has left, and what this one will.
                        self._remove_records()
                        stack.callback(self._remove_records)
            stack.enter_context(evaluating(self.model))
            stack.enter_context(only_trainable(self.model, names))
            yield

    def run(self, cache: str) -> MatchingReport:
        """Train the layers that are not finished, in `prepared`; see [`match_layers`] for the arguments."""
        with StopSignals() as signals:
            with self.processes.together():
                runs = [
                    LayerTraining(layer, self.settings, self._file(layer), self.layer_steps[layer.name])
                    for layer in self.mine
                ]
            records: Records | None = Records()
            if any(self.processes.all(any(not run.finished for run in runs))):
                with self.processes.together():
                    records = self._records(cache, signals)
            with self.processes.together():
                began = time.perf_counter()
                # Records that are not kept serve all layers of a step.
                for group in [runs] if records is None else [[run] for run in runs]:
                    self._train(group, records, signals)
                self.report.seconds["training"] = time.perf_counter() - began
        self._exchange(runs)
        return self.report

    def _train(self, runs: Sequence[LayerTraining], records: Records | None, signals: StopSignals) -> None:
        """Train some layers, one step of each at a time."""
        with ExitStack() as stack:
            for run in runs:
                stack.enter_context(run.prepared(None if records is None else self.device))
            while any(not run.finished for run in runs):
                self._take_steps(runs, records, signals)

    def _take_steps(self, runs: Sequence[LayerTraining], records: Records | None, signals: StopSignals) -> None:
        """Take the steps of one attempt."""
        steps = max((run.steps for run in runs), default=0)
        for step in range(min((len(run.losses) for run in runs), default=steps), steps):
            numbers = self._numbers(step)
            # A process that was killed while it saved several layers left some of them ahead.
            behind = [run for run in runs if len(run.losses) == step < run.steps]
            made = [self._record(number, self._rounded) for number in numbers if records is None]
            for run in behind:
                name = run.layer.name
                kept = (records.call(number, name) for number in numbers) if records is not None else ()
                run.take_step([record[name] for record in made] or kept, numbers)
                if self.progress is not None:
                    self.progress(name, step + 1, run.losses[-1])
            finished = [run for run in behind if run.finished]
            self._fit_projections(finished, records)
            if self.unseen and finished:
                self._settle(finished, records)
            # Layers that train one after another are saved when they are finished.
            due = records is None and (step + 1) % (self.settings.save_every or steps) == 0
            for run in behind:
                if due or run.finished or signals.received is not None:
                    run.save()
            if signals.received is not None:
                way_on = "nothing was saved, for there is no output"
                if self.output is not None:
                    way_on = f"the same command continues from there (saved in {self.output})"
                name = runs[0].layer.name
                message = f"stopped matching {name} after step {step + 1} of {steps}; {way_on}"
                raise TrainingStopped(message, signals.received)

    def _settle(self, runs: Sequence[LayerTraining], records: Records | None) -> None:
        """Have layers keep what they learned where their held-out error has fallen."""
        kept = records or Records()
        for number in self.unseen if records is None else ():
            kept.calls[number] = self._record(number, self._rounded)
        for run in runs:
            run.settle([partial(kept.call, number, run.layer.name) for number in self.unseen], Processes(alone=True))

    def _fit_projections(self, runs: Sequence[LayerTraining], records: Records | None) -> None:
        """Fit the output projections of layers that are trained once more in closed form, as calibration does."""
        finished = {run.layer.name for run in runs}
        trained = {name for run in runs for name in run.names}
        # Maps that do not train as a whole, as under an adapter, are not fitted.
        fits = {
            layer: ProjectionFit(layer)
            for layer in self.mine
            if layer.name in finished and f"{layer.projection_name}.weight" in trained
        }
        seen = self._needed()[:_FITTED_RECORDS]
        held_out = self.unseen or [number for number in seen if number % _HELD_OUT == 1]
        for number in sorted({*seen, *held_out}) if fits else ():
            made = self._record(number, self._rounded) if records is None else {}
            for layer, fit in fits.items():
                call = made[layer.name] if records is None else records.call(number, layer.name)
                self._observe(layer, call, fit, number in held_out)
        for fit in fits.values():
            if min(fit.counts):
                with torch.no_grad():
                    for parameter, value in fit.solve().changes.items():
                        parameter.copy_(value)

    def _observe(self, layer: AttentionLayer, call: LayerCall, fit: ProjectionFit, held_out: bool) -> None:
        """Show a call of a layer to a fit of its projection."""
        rows: list[torch.Tensor] = []
        assert layer.projection is not None
        weight = next(value for value in layer.parameters().values() if value.is_floating_point())
        hook = layer.projection.register_forward_pre_hook(lambda module, args: rows.append(args[0].detach()))
        with torch.no_grad(), autocast(weight.device, self.settings.mixed_precision):
            call = send_to_device(call, weight.device)
            layer(call.arguments, call.hidden_states.to(weight.dtype))
        hook.remove()
        heads = rows[0].flatten(2)
        # The projection of joint attention covers the grid alone.
        output, valid = (None if x is None else x[:, -heads.shape[1] :] for x in (call.output, call.valid))
        valid = torch.ones_like(heads[..., 0], dtype=torch.bool) if valid is None else valid
        fit.add(heads[valid], output[valid], held_out)  # type: ignore[index]

    def _numbers(self, step: int) -> list[int]:
        """Numbers of the batches that a step learns from."""
        return [self.order.dataset_index(step * self.batch_size + number) for number in range(self.batch_size)]

    def _needed(self) -> list[int]:
        """Numbers of all batches that steps learn from."""
        return sorted({number for step in range(max(self.layer_steps.values())) for number in self._numbers(step)})

    def _records(self, cache: str, signals: StopSignals) -> Records | None:
        """Record all batches that steps take; None where each step makes its records."""
        began = time.perf_counter()
        needed = self._needed() + self.unseen
        if cache != "none":
            calls = self._record(needed[0], self._kept)
            size = tensor_bytes(calls)
            # The size of a record is proportional to the tokens of its batch.
            tokens = [_count_tokens(self.data[number]) for number in needed]
            sizes = self.processes.all(size * sum(tokens) // tokens[0])
            self.report.cache_bytes = sum(sizes)
            cache = choose_cache(cache, sizes, self.processes.all(free_room(self.output)))
            logger.log(
                logging.WARNING if cache == "none" else logging.INFO,
                "matching: activations of %s %s",
                format_bytes(self.report.cache_bytes),
                "do not fit; they are recorded again in every step" if cache == "none" else f"are kept ({cache})",
            )
        self.report.cache = cache
        if cache == "none":
            # The layers will change.
            self.teacher.keep(name for layer in self.layers for name in trained_names(layer, self.settings.train))
            return None
        records = Records()
        if cache == "disk" and self.output is not None:
            records = Records(self.output / ACTIVATIONS / str(self.processes.rank))
        for number in needed:
            if signals.received is not None:
                message = "stopped recording activations; the same command continues from the beginning"
                raise TrainingStopped(message, signals.received)
            records.put(number, self._record(number, self._kept))
        self.report.seconds["recording"] = time.perf_counter() - began
        return records

    def _record(self, number: int, keep: Callable[[torch.Tensor], torch.Tensor]) -> Record:
        with autocast(self.data.device, self.settings.mixed_precision):
            return self.teacher.record(self.layers, self.data[number], self.names, keep)

    def _kept(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to("cpu", self.dtype, copy=True).contiguous()

    def _rounded(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy as a cache would return it: the choice of the cache has no effect on the result."""
        return tensor.detach().to(self.dtype, copy=True)

    def _file(self, layer: AttentionLayer) -> Path | None:
        if self.output is None:
            return None
        return self.output / "layers" / f"{self.layers.index(layer):03d}.safetensors"

    def _remove_records(self) -> None:
        if self.output is not None and (self.output / ACTIVATIONS).is_dir():
            remove_directory(self.output / ACTIVATIONS)

    def _exchange(self, runs: Sequence[LayerTraining]) -> None:
        """Send the weights and losses of all layers to all processes."""
        mine = {run.layer.name: (run.losses, run.summary()) for run in runs}
        found = {name: values for each in self.processes.all(mine) for name, values in each.items()}
        self.report.losses = {layer.name: found[layer.name][0] for layer in self.layers}
        self.report.layers = {layer.name: found[layer.name][1] for layer in self.layers}
        for number, layer in enumerate(self.layers):
            parameters = layer.parameters()
            for name in trained_names(layer, self.settings.train):
                self.processes.send(parameters[name], self.processes.owner(number))

    def _identity(self) -> dict[str, Any]:
        """What an earlier run in the output must agree in."""
        return {
            **{name: value for name, value in self.settings.to_dict().items() if name != "save_every"},
            "steps": list(self.layer_steps.values()),
            "batch_size": self.batch_size,
            **({"held_out": self.held_out} if self.held_out else {}),
            "cache_dtype": str(self.dtype),
            "model or data": "-".join(
                (model_fingerprint(self.model), model_fingerprint(self.teacher), samples_fingerprint(self.data, 16))
            ),
        }


def _count_tokens(batch: Mapping[str, Any]) -> int:
    """Return a number that grows with the tokens of a batch."""
    tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
    named = [tensors[name] for name in _TOKEN_INPUTS if name in tensors]
    return max(1, *(value.numel() for value in named[:1] or tensors.values()))


def layers_with_projections(model: nn.Module, batch: Batch) -> list[AttentionLayer]:
    layers = mhla_layers(model)
    with evaluating(model):
        return find_projections(model, layers, batch)


def match_layers(
    model: nn.Module,
    batches: Sequence[Batch] | Callable[[int], Batch],
    *,
    steps: int | Sequence[int] = 600,
    num_batches: int | None = None,
    teacher: nn.Module | SharedTeacher | None = None,
    batch_size: int = 1,
    cache: str = "auto",
    cache_dtype: str | torch.dtype = "bfloat16",
    device: torch.device | str | None = None,
    output: str | Path | None = None,
    held_out: int = 0,
    progress: Progress | None = None,
    **settings: Any,
) -> MatchingReport:
    """Train the MHLA layers of a model, each alone, towards the outputs of the original's layers.

    The original is the model itself, run with its original attention and its pretrained weights, which the model keeps
    where calibration or matching replaced them. Of a model that was trained, or calibrated before it was loaded, give
    `teacher`.

    Dropout is off throughout. Afterwards the model is in the mode it was in, and what required gradients does again.
    With several processes of `torch.distributed`, each trains its share of the layers and all get the result, which is
    that of one process; batches must be the same in all of them, and `output` a directory that all see.

    Args:
        model: A model with MHLA layers, of any family. Changed in place.
        batches: Keyword arguments of the model's `forward`, or a function that makes those of a number, always the
            same. They are visited in an order that follows from `seed`, all of them before any comes again. Tokens
            that an `attention_mask` leaves out do not count.
        steps: Optimizer steps of each layer, or of every layer its own, in the order of the model's modules.
        num_batches: Number of batches; only for a function.
        teacher: The original, of the class that transformers or diffusers has; or a `SharedTeacher` of the model, made
            with the original values of changed parameters.
        batch_size: Batches that one step learns from.
        cache: Where records are kept: `"memory"` (at most half of what is free), `"disk"` (in `output`), `"none"` to
            make them again for each step, or `"auto"` for the first of these that has room.
        cache_dtype: Type in which hidden states and outputs are kept.
        device: Where a layer trains, while the model stays where it is; by default where it is. Without a cache all
            layers train where they are.
        output: Directory for records and finished layers. A run that was stopped or killed resumes when called again
            with the same arguments; a killed one repeats the layer that it was at.
        held_out: Number of the last batches that are not trained on. A layer whose error on them does not fall keeps
            the weights that it had.
        progress: Called after every step.
        **settings: Options of `mhla_hf.matching.layer_training.MatchSettings`: `learning_rate` (6e-3) of
            projections and norms, `mhla_learning_rate` (2e-2) of the parameters of `mhla`, `optimizer` (`"muon"` or
            `"adam"`), `train` (`"full"`, `"mhla"` or `"lora"`), `warmup_steps` (10), `max_grad_norm` (1.0),
            `mixed_precision` (`"no"`, `"bf16"` or `"fp16"`), `save_every` (200) steps without a cache, `seed` (0).

    Returns:
        A report.

    Raises:
        ValueError: If the model has no MHLA layers, an argument is wrong, the records do not fit, `output` holds
            another run, or the original of a model that was trained is not given.
        FloatingPointError: If a loss is no longer finite.
        TrainingStopped: After Ctrl-C or SIGTERM, when a checkpoint is saved.
        OSError: If there is no room on the disk.
    """
    layers = mhla_layers(model)
    by_layer = [steps] * len(layers) if isinstance(steps, int) else list(steps)
    for name, number in (*(("steps", number) for number in by_layer), ("batch_size", batch_size)):
        check_count(name, number)
    if len(by_layer) != len(layers):
        raise ValueError(f"steps has {len(by_layer)} numbers, and the model {len(layers)} MHLA layers.")
    check_choice("cache", cache, RECORD_CACHES)
    if cache == "disk" and output is None:
        raise ValueError("cache='disk' needs output, the directory to keep the records in.")
    dtype = parse_dtype(cache_dtype)
    assert dtype is not None
    _check_not_offloaded(model)
    data = Batches(batches, num_batches, _input_device(model))
    check_count("held_out", held_out, 0, len(data) - 1)
    matching = Matching(
        model=model,
        data=data,
        settings=MatchSettings.from_dict(settings),
        steps=by_layer,
        batch_size=batch_size,
        teacher=shared_teacher(model, teacher),
        output=None if output is None else Path(output),
        progress=progress,
        dtype=dtype,
        device=None if device is None else torch.device(device),
        held_out=held_out,
    )
    with matching.prepared():
        before = {
            original_name(name): parameter.detach().to("cpu", copy=True)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        try:
            return matching.run(cache)
        finally:
            record_step(model, "matched", before)


def matching_losses(
    model: nn.Module,
    batch: Batch,
    *,
    teacher: nn.Module | SharedTeacher | None = None,
) -> dict[str, float]:
    """Compute the matching loss of each MHLA layer on one batch, given the original's hidden states.

    Args:
        model: A model with MHLA layers.
        batch: Keyword arguments of its `forward`.
        teacher: See [`match_layers`].

    Returns:
        Loss of each layer, by the name of its attention module; 0 is a perfect match, 1 what the mean would score.
    """
    original = shared_teacher(model, teacher)
    batch = Batches([batch], None, _input_device(model))[0]
    layers = layers_with_projections(model, batch)
    calls = original.record(layers, batch)
    with torch.no_grad(), evaluating(model):
        return {layer.name: layer_loss(layer, calls[layer.name]).item() for layer in layers}


def _check_not_offloaded(model: nn.Module) -> None:
    """Refuse offloaded weights: what trains of them would be lost."""
    for layer in mhla_layers(model):
        if any(parameter.is_meta for parameter in layer.attention.parameters()):
            raise ValueError(
                f"{layer.name} is offloaded, and what trains of it would be lost: load the model on the CPU, without "
                "a device map, and give device, where one layer at a time is."
            )


def _input_device(model: nn.Module) -> torch.device:
    """The device of a model's inputs; hooks of a model with offloaded weights move them on."""
    return next((parameter.device for parameter in model.parameters() if not parameter.is_meta), torch.device("cpu"))
