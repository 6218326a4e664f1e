# SPDX-License-Identifier: Apache-2.0
"""Selection of layers that stay softmax: by look-up, or by the error and the time that each costs."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..config import MEASURES, check_shares, parse_share
from ..layers.mhla import MHLA
from ..layers.original import original_attention
from ..layers.weight_record import base_parameters, original_name, original_values
from ..models.directory import ModelDirectory
from ..ops.sums import HeadGroups
from ..training.layers import (
    AttentionLayer,
    Batch,
    evaluating,
    find_projections,
    first_output,
    mhla_layers,
    on_device,
    original_heads,
    replaced_forward,
    run,
    swapped_parameters,
)
from ..training.processes import Processes
from ..training.teacher import SharedTeacher
from ..utils.machine import synchronize
from ..utils.messages import StepCounter, check_choice
from .calibration import CalibrationReport, calibrate_model, check_batches
from .data import open_probe
from .lookup import looks_up, lookup_scores, recall, recall_texts


# Batches of the probe that the model's output is compared on.
_COMPARED_BATCHES = 4
_TIMED_CALLS = 3


@dataclass
class LayerScore:
    """Error and time of one layer.

    Attributes:
        index: Its number among the model's layers.
        name: The attention module.
        error: Relative error of its output after calibration.
        restored: By how much keeping it softmax, and no other, lowers the error of the model's output; `None` where
            layers were chosen by look-up.
        lookup: Scores of its key/value heads, see [`lookup_scores`][mhla_hf.recovery.lookup.lookup_scores]; of causal
            language models alone.
        softmax_ms: Time of its original attention for one batch of the probe.
        mhla_ms: Time of MHLA.
        kept: Whether it is best kept softmax.
        kept_groups: Its key/value heads that stay softmax with their query heads, where others become MHLA.
    """

    index: int
    name: str
    error: float
    restored: float | None = None
    lookup: list[float] = field(default_factory=list)
    softmax_ms: float = 0.0
    mhla_ms: float = 0.0
    kept: bool = False
    kept_groups: list[int] = field(default_factory=list)

    @property
    def extra_ms(self) -> float:
        """Additional time for keeping it softmax."""
        return self.softmax_ms - self.mhla_ms


@dataclass
class SelectionReport:
    """Layers to keep softmax.

    Attributes:
        layers: Every layer that can be MHLA.
        order: Layers and groups of heads that are kept, in the order in which they were chosen.
        by: How they were chosen: `"lookup"` or `"error"`.
        errors: Relative error of the model's output, with no layer kept and after each choice; by look-up with none
            and with all of them.
        recall: Bits per token of a passage at its first and second occurrence, see
            [`recall`][mhla_hf.recovery.lookup.recall], of the original (`"softmax"`), with no layer kept (`"mhla"`),
            and with those `"chosen"`; empty where that cannot be measured.
        softmax_ms: Time of the softmax model for one batch of the probe.
        mhla_ms: Time with every layer MHLA.
        chosen_ms: Time with the layers kept; groups of heads count as their share of a layer.
        calibration: Report of the calibration before.
    """

    layers: list[LayerScore]
    order: list[int | str] = field(default_factory=list)
    by: str = "error"
    errors: list[float] = field(default_factory=list)
    recall: dict[str, tuple[float, float]] = field(default_factory=dict)
    softmax_ms: float = 0.0
    mhla_ms: float = 0.0
    chosen_ms: float = 0.0
    calibration: CalibrationReport = field(default_factory=CalibrationReport)

    @property
    def mhla_layers(self) -> list[int | str]:
        """Indices of the layers that become MHLA, or their groups of heads, such as `"18.2"`."""
        chosen: list[int | str] = []
        for layer in self.layers:
            groups = [group for group in range(len(layer.lookup)) if group not in layer.kept_groups]
            own = [f"{layer.index}.{group}" for group in groups] if layer.kept_groups else [layer.index]
            chosen += [] if layer.kept else own
        return chosen

    @property
    def option(self) -> str:
        """The layers that become MHLA, as text for `--layers`."""
        return ",".join(map(str, self.mhla_layers))

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {**asdict(self), "calibration": self.calibration.to_dict(), "mhla_layers": self.mhla_layers}


def select_layers(
    model: nn.Module,
    batches: Sequence[Batch],
    *,
    keep: int | float | str | None = None,
    latency: float | str | None = None,
    by: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    processes: Processes | None = None,
) -> SelectionReport:
    """Calibrate a converted model and select the layers to keep softmax.

    By error, layers are picked one after the other: each time the one that brings the model's output closest to that
    of the softmax model, with those picked before softmax already. By look-up, those are picked whose heads find
    repeated text most surely: the loss on ordinary text hardly depends on them, and recall does. The model stays
    calibrated.

    Args:
        model: A converted model that was not trained, every layer of interest MHLA.
        batches: The probe, as for [`calibrate`][mhla_hf.calibrate].
        keep: Number of layers to keep softmax, or their share (`"25%"`, 0.25); a quarter if `latency` is not given
            either. By look-up it is the share of groups of heads with a key/value head each, of any layers.
        latency: Largest time of the model, as a share of the softmax model's (`"80%"`, 0.8) on this machine, at the
            size of the probe: layers are kept as long as it allows.
        by: `"lookup"` or `"error"`; by default look-up for causal language models, and error for others.
        progress: Called with the number of runs of the model and of all.
        processes: Processes that share the runs and all have the same batches; this one alone by default.

    Raises:
        ValueError: As `calibrate`, or if `keep`, `latency` or `by` has a value that is not allowed.
    """
    if by is not None:
        check_choice("by", by, MEASURES)
    if keep is not None and latency is not None:
        raise ValueError("Give keep or latency, not both.")
    batches, layers, processes = check_batches(batches), mhla_layers(model), processes or Processes(alone=True)
    if any(layer.mhla.groups is not None for layer in layers):
        raise ValueError("layers of this model have groups of heads that are softmax: select layers of its original.")
    share = None if latency is None else float(parse_share("latency", latency))
    is_language, keep = looks_up(model, batches), "25%" if keep is None else keep
    by = by or ("lookup" if is_language else "error")
    by_groups = by == "lookup" and share is None and not _is_number(keep)
    choices = sum(layer.mhla.num_key_value_heads for layer in layers) if by_groups else len(layers)
    count = choices if share is not None else _kept_count(keep, choices, "groups of heads" if by_groups else "layers")
    of_modules = {module: index for index, module in getattr(model, "mhla_modules", dict)().items()}
    indices = [of_modules.get(layer.mhla, _index(layer.name)) for layer in layers]
    if len(set(indices)) < len(indices):
        raise ValueError("layers of this model have the same numbers (several towers): select them tower by tower.")
    advance = StepCounter(progress, 2 * len(batches) + (2 if by == "lookup" else len(layers) * max(1, count)))
    parameters = base_parameters(model)
    for name, original in original_values(model, "select layers").items():
        parameters[name].data.copy_(original)
    with evaluating(model):
        found = lookup_scores(model, batches) if is_language or by == "lookup" else [[] for _ in layers]
        trial = _Trial(model, SharedTeacher(model), batches[:_COMPARED_BATCHES])
        layers = trial.layers
        calibration = calibrate_model(model, batches, fit_steps=0, progress=lambda *_: advance(), processes=processes)
        report = SelectionReport(
            [
                LayerScore(index, layer.name, done.error_after, lookup=lookup)
                for index, layer, done, lookup in zip(indices, layers, calibration.layers, found, strict=True)
            ],
            by=by,
            calibration=calibration,
        )
        report = processes.decide(lambda: _time(model, layers, batches[0], report))

        def errors(*choices: Iterable[int]) -> list[float]:
            def error(kept: Mapping[int, list[int]]) -> float:
                advance()
                return trial.error(kept)

            return processes.map(
                error, [{place: report.layers[place].kept_groups for place in kept} for kept in choices]
            )

        report.errors += errors([])
        if by == "lookup":
            tried = {place: -max(lookup) for place, lookup in enumerate(found)}
        else:
            tried = dict(enumerate(errors(*([place] for place in range(len(layers))))))
            for place, value in tried.items():
                report.layers[place].restored = report.errors[0] - value
        chosen: list[int] = []
        if by_groups:
            chosen, count = _keep_groups(report, count), 0
        while len(chosen) < count:
            open_places = [place for place in tried if place not in chosen]
            if share is not None:
                limit = share * report.softmax_ms - report.chosen_ms
                open_places = [place for place in open_places if report.layers[place].extra_ms <= limit]
            if not open_places:
                break
            if chosen and by == "error":
                tried.update(zip(open_places, errors(*([*chosen, place] for place in open_places))))
            best = min(open_places, key=tried.__getitem__)
            chosen.append(best)
            report.order.append(indices[best])
            report.errors += [tried[best]] if by == "error" else []
            report.layers[best].kept = True
            report.chosen_ms += report.layers[best].extra_ms
        if by == "lookup":
            report.errors += errors(chosen)
        texts = recall_texts(model, batches) if is_language else []
        if texts:
            report.recall["softmax"] = trial.teacher.compute(partial(recall, texts=texts))
            for name, kept in (("mhla", []), ("chosen", chosen)):
                with trial.hybrid({place: report.layers[place].kept_groups for place in kept}):
                    report.recall[name] = recall(model, texts)
    if all(layer.kept for layer in report.layers):
        raise ValueError("latency leaves every layer softmax: MHLA saves nothing at the size of the probe here.")
    if progress is not None:
        progress(advance.done, advance.done)
    return report


def select_layers_of(
    source: str | Path,
    mhla: Mapping[str, Any] | None = None,
    *,
    component: str | None = None,
    hub: Mapping[str, Any] | None = None,
    probe: Mapping[str, Any] | None = None,
    **options: Any,
) -> SelectionReport:
    """Select layers of a softmax model on disk; it is converted in memory, and nothing is written.

    Args:
        source: A pipeline of diffusers or a model of transformers, directory or Hub id.
        mhla: Options of the conversion.
        component: Which transformer of a pipeline.
        hub: `revision`, `token` and `cache_dir`.
        probe: The probe; arguments of [`open_probe`].
        **options: Arguments of [`select_layers`][mhla_hf.recovery.selection.select_layers].

    Raises:
        ValueError: If the source cannot be converted, data are missing, or an argument is wrong.
    """
    part = ModelDirectory.open(source, component, **(hub or {}))
    if component is None and len(part.configs) > 1:
        raise ValueError(
            f"component must be given, for {source} has {', '.join(part.configs)}: select layers of each separately."
        )
    check_shares(**{name: options.get(name) for name in ("keep", "latency")})
    models, batches, _ = open_probe([part], dict(mhla or {}), **(probe or {}))
    return select_layers(models[part.component], batches[part.component], **options)


class _Trial:
    """Errors of a converted model's output, with some layers as they are in its original.

    Args:
        model: The converted model, in evaluation mode.
        teacher: The original, with the values of all parameters of the layers that have changed or will.
        batches: What the outputs are compared on; the layers' projections are found on the first.
    """

    def __init__(self, model: nn.Module, teacher: SharedTeacher, batches: Sequence[Batch]) -> None:
        self.model, self.teacher, self.batches = model, teacher, batches
        self.layers = find_projections(model, mhla_layers(model), on_device(batches[0], model))
        teacher.keep(name for layer in self.layers for name in layer.parameters())
        self.reference = [teacher.compute(partial(_output, batch=batch)) for batch in batches]

    @contextmanager
    def hybrid(self, kept: Mapping[int, Sequence[int]]) -> Iterator[None]:
        """A context in which the model has some layers as they are in its original.

        Args:
            kept: Their places, each with its groups of heads that are softmax; none for all of them.
        """
        parameters, weights = base_parameters(self.model), self.teacher.weights
        names = {original_name(name) for place in kept for name in self.layers[place].parameters()}
        with swapped_parameters({parameters[name]: weights[name] for name in names & set(weights)}):
            with original_heads(self.layers[place] for place in kept if not kept[place]), ExitStack() as stack:
                for place in kept:
                    if kept[place]:
                        mhla = self.layers[place].mhla
                        stack.enter_context(replaced_forward(mhla, partial(_mixed, mhla, kept[place])))
                yield

    def error(self, kept: Mapping[int, Sequence[int]]) -> float:
        """Relative squared error of the model's output."""
        with self.hybrid(kept):
            return _relative_error([_output(self.model, batch) for batch in self.batches], self.reference)


def _mixed(mhla: MHLA, softmax: Sequence[int], *args: Any, **kwargs: Any) -> torch.Tensor:
    """Heads of a layer of which some groups have their original attention."""
    count = mhla.num_key_value_heads
    groups = HeadGroups(tuple(group for group in range(count) if group not in softmax), count)
    own, _ = groups.split(type(mhla).forward(mhla, *args, **kwargs), 2)
    return groups.join(own, groups.split(original_attention(mhla, *args, **kwargs), 2)[1])


def _keep_groups(report: SelectionReport, count: int) -> list[int]:
    """Keep the groups of heads with the highest scores, and note them; returns the places of their layers."""
    scores = [
        (score, place, group) for place, layer in enumerate(report.layers) for group, score in enumerate(layer.lookup)
    ]
    for _, place, group in sorted(scores, reverse=True)[:count]:
        layer = report.layers[place]
        report.order.append(f"{layer.index}.{group}")
        report.chosen_ms += layer.extra_ms / len(layer.lookup)
        layer.kept_groups.append(group)
    kept = [place for place, layer in enumerate(report.layers) if layer.kept_groups]
    for layer in report.layers:
        if len(layer.kept_groups) == len(layer.lookup):
            layer.kept, layer.kept_groups = True, []
    return kept


def importance(
    model: nn.Module,
    teacher: SharedTeacher,
    batches: Sequence[Batch],
    processes: Processes | None = None,
    *,
    known: Sequence[float] = (),
    progress: Callable[[list[float]], None] | None = None,
) -> list[float]:
    """By how much each MHLA layer raises the relative squared error of the model's output.

    Args:
        model: The converted model.
        teacher: Its original, with the values of all parameters of the layers.
        batches: What the outputs are compared on.
        processes: Processes that share the layers; this one alone by default.
        known: What an earlier call, which was stopped, has told its `progress` last.
        progress: Called with all errors so far: with no layer, and with each as it was.

    Returns:
        For each layer the part of the error that goes when it alone has its original attention and weights; 0 where
        the error rises.
    """
    with evaluating(model):
        trial = _Trial(model, teacher, batches)
        processes, errors = processes or Processes(alone=True), [*known]
        choices: list[dict[int, list[int]]] = [{}]
        choices += [{place: []} for place in range(len(trial.layers))]
        while len(errors) < len(choices):
            errors += processes.map(trial.error, choices[len(errors) :][: processes.size])
            if progress is not None:
                progress(errors)
        return [max(0.0, errors[0] - error) for error in errors[1:]]


def steps_by_importance(steps: int, values: Sequence[float], least: float) -> list[int]:
    """Divide steps among layers in proportion to what they cost the model's output.

    Args:
        steps: Steps of a layer, on average.
        values: See [`importance`].
        least: What a layer gets at least, relative to the average.
    """
    mean = sum(values) / len(values) or 1.0
    shares = [max(least, value / mean) for value in values]
    return [round(steps * len(shares) * share / (sum(shares) or 1.0)) for share in shares]


@torch.no_grad()
def _output(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The model's output: rows `[N, D]` without padding, on the CPU."""
    return first_output(model, on_device(batch, model)).float().cpu()


def _relative_error(outputs: Sequence[torch.Tensor], reference: Sequence[torch.Tensor]) -> float:
    squares = sum(float((own - other).square().sum()) for own, other in zip(outputs, reference))
    mean = sum(float(other.sum()) for other in reference) / sum(other.numel() for other in reference)
    scale = sum(float((other - mean).square().sum()) for other in reference)
    return squares / max(scale, torch.finfo(torch.float32).tiny)


@torch.no_grad()
def _time(
    model: nn.Module, layers: Sequence[AttentionLayer], batch: Batch, report: SelectionReport
) -> SelectionReport:
    """Time the original attention and MHLA of every layer; derive the times of the models. Returns the report."""
    scores = {score.name: score for score in report.layers}
    batch = on_device(batch, model)

    def observe(layer: AttentionLayer, args: Any, kwargs: Any, output: torch.Tensor, heads: torch.Tensor) -> None:
        original = partial(original_attention, layer.mhla, *args, **kwargs)
        scores[layer.name].softmax_ms = _milliseconds(original, heads.device)
        scores[layer.name].mhla_ms = _milliseconds(partial(layer.mhla.forward, *args, **kwargs), heads.device)

    with original_heads(layers, observe):
        run(model, batch)
    report.mhla_ms = report.chosen_ms = _milliseconds(partial(run, model, batch), next(model.parameters()).device)
    report.softmax_ms = report.mhla_ms + sum(score.extra_ms for score in report.layers)
    return report


def _milliseconds(call: Callable[[], Any], device: torch.device) -> float:
    """The shortest time of a few calls, after one that warms up."""
    times = []
    for _ in range(1 + _TIMED_CALLS):
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        times.append(1e3 * (time.perf_counter() - start))
    return min(times[1:])


def _index(name: str) -> int:
    """The number of a layer, from the name of its attention module."""
    match = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    return int(match[1]) if match else 0


def _is_number(keep: int | float | str) -> bool:
    """Whether it is a number of layers and no share."""
    return isinstance(keep, int) and not isinstance(keep, bool) or isinstance(keep, str) and keep.isdecimal()


def _kept_count(keep: int | float | str, of: int, what: str) -> int:
    """Number of layers, or of groups of heads, to keep: as given, or the nearest to a share."""
    count = int(str(keep)[:9]) if _is_number(keep) else round(parse_share("keep", keep) * of)
    if not 0 <= count < of:
        raise ValueError(f"keep={keep!r:.40} keeps {count} of {of} {what}; at least one must become MHLA.")
    return count
