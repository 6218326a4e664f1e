# SPDX-License-Identifier: Apache-2.0
"""Calibration: a converted model is fitted to its original layer by layer, in closed form and by a short training.

Every layer gets the inputs that it has in the original model. The probe runs once for as many layers as have room in
memory for their queries, keys, values and heads. Nothing is written before all layers are solved.
"""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..layers.weight_record import STATE_KEY, STATES, base_parameters, original_values, record_step, record_weights
from ..matching.ridge import ProjectionFit, ProjectionSolution
from ..models.directory import CONVERSION_RECORD, ModelDirectory
from ..training.layers import (
    AttentionLayer,
    Batch,
    Changes,
    evaluating,
    find_projections,
    mhla_layers,
    on_device,
    original_heads,
    run,
    swapped_parameters,
)
from ..training.processes import Processes, available_memory
from ..utils.destinations import claim_destination
from ..utils.files import link_or_copy, list_files, read_json, write_json
from ..utils.messages import StepCounter, check_count, did_you_mean, shorten_text
from ..utils.tensor_files import FLOATS, read_entries
from .data import open_probe
from .fits import HeadsCall, TemperatureFit, fit_heads
from .own_weights import fit_own_weights, trained_weights


Progress = Callable[[int, int], None]
"""Called with the number of batches, fitting steps and calls that were solved for so far, and of all."""

FIT_STEPS = 300
"""Steps of the fit of a layer's own weights, where nothing else is said."""
# One batch in N is held out, or one sample if there are fewer batches.
_HELD_OUT = 4
# Calls that are enough to fit temperatures, which are few numbers, and everything else that has a closed form.
_TEMPERATURE_CALLS, _CLOSED_FORM_CALLS = 16, 128
# One to fit and one to measure the error.
_LEAST_BATCHES = 2
# Relative errors below this are rounding.
_NEGLIGIBLE = 1e-7


@dataclass
class LayerCalibration:
    """Calibration of one layer.

    Attributes:
        name: The attention module.
        error_before: Squared error of the layer's output on held-out samples, relative to the variance of the
            original's; with the weights as they were.
        error_after: The same with the weights as they are written.
        changed: Changed parts: `"feature_map"`, `"mixing"`, `"window_bias"`, `"window_query"`, `"text_bias"`,
            `"normalizer_scale"`, `"lepe"`, `"projection"`.
        projection_ridge: Strength of the ridge that the projection was fitted with.
        tokens: Tokens that were fitted.
        held_out_tokens: Tokens that the errors were measured on.
        note: Reason for leaving the layer alone, if it was.
    """

    name: str
    error_before: float = 0.0
    error_after: float = 0.0
    changed: list[str] = field(default_factory=list)
    projection_ridge: float | None = None
    tokens: int = 0
    held_out_tokens: int = 0
    note: str = ""


@dataclass
class CalibrationReport:
    """Result of a calibration, also written to `conversion.json`.

    Attributes:
        layers: Calibration of each MHLA layer; names in pipelines begin with that of the component.
        batches: Batches of the probe.
        seconds: Time it took.
        probe: Origin of the probe.
    """

    layers: list[LayerCalibration] = field(default_factory=list)
    batches: int = 0
    seconds: float = 0.0
    probe: dict[str, Any] = field(default_factory=dict)

    @property
    def error_before(self) -> float:
        """Mean over the layers."""
        return sum(layer.error_before for layer in self.layers) / max(1, len(self.layers))

    @property
    def error_after(self) -> float:
        """Mean over the layers."""
        return sum(layer.error_after for layer in self.layers) / max(1, len(self.layers))

    def add(self, other: CalibrationReport, prefix: str) -> None:
        """Add the report of another model, with a prefix before the names of its layers."""
        for layer in other.layers:
            layer.name = f"{prefix}{layer.name}"
        self.layers += other.layers
        self.batches += other.batches
        self.seconds += other.seconds

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {**asdict(self), "seconds": round(self.seconds, 2)}


def calibrate(
    model_or_pipeline: Any,
    batches: Iterable[Batch] | Mapping[str, Iterable[Batch]] | None = None,
    *,
    fit_steps: int = FIT_STEPS,
    progress: Progress | None = None,
    **probe_options: Any,
) -> CalibrationReport:
    """Fit a converted model to its original layer by layer, in place, in seconds.

    The projections of a freshly converted model are those of its original, so the model itself provides the outputs of
    its softmax attention. Each layer is fitted to those on a small probe: the temperature of a hedgehog feature map;
    then feature map, mixing weights and the bias of a window by a short training on recorded queries, keys and values;
    in closed form the convolution of the values (`lepe_kernel`) and the output projection, by ridge regression towards
    its present value. In joint attention the bias of the text is fitted in closed form, and the convolution stays as
    it is. A quarter of the batches (of the samples, if there are fewer than four batches) is held
    out; strengths are chosen by the error on them, and a layer whose error does not fall is left alone.

    Args:
        model_or_pipeline: A converted model of transformers or diffusers, or a pipeline with one. What an earlier
            calibration or matching of the same object has changed is restored first; a model that was trained, or
            calibrated before it was loaded, is refused.
        batches: The probe: keyword arguments of the model's `forward`, such as tokenised texts or images, of two
            samples at least; some dozens are better. Of a pipeline with several MHLA models a dict of such by
            component. A pipeline needs none: what its models see while it makes samples with their original attention
            is the probe.
        fit_steps: Steps of the short training of each layer; 0 leaves it out, and only closed forms are fitted.
        progress: Called with the number of batches and steps so far and of all.
        **probe_options: How the samples of a pipeline are made: `samples`, `prompts`, `steps`, `seed` and arguments of
            the pipeline's call; see [`pipeline_batches`][mhla_hf.training.data.probes.pipeline_batches].

    Returns:
        Changes of each layer, and its error before and after.

    Raises:
        ValueError: If there is no MHLA layer or no batch, the pretrained weights are not known, weights are offloaded
            or quantised, or activations are not finite. The model is unchanged then, and when it is interrupted.

    Examples:
        >>> report = calibrate(model, [tokenizer(texts, return_tensors="pt", padding=True)])  # doctest: +SKIP
        >>> report.error_before, report.error_after  # doctest: +SKIP
    """
    if probe_options and (batches is not None or isinstance(model_or_pipeline, nn.Module)):
        hint = did_you_mean(next(iter(probe_options)), inspect.signature(calibrate).parameters)
        raise ValueError(f"{', '.join(probe_options)}: only for pipelines without batches.{hint}")
    if isinstance(model_or_pipeline, nn.Module):
        return calibrate_model(model_or_pipeline, batches, fit_steps=fit_steps, progress=progress)  # type: ignore[arg-type]
    from ..training.data.probes import mhla_components, pipeline_batches

    models = mhla_components(model_or_pipeline)
    if batches is None:
        batches = pipeline_batches(model_or_pipeline, **probe_options)
    elif not isinstance(batches, Mapping) and len(models) == 1:
        batches = dict.fromkeys(models, batches)
    if not isinstance(batches, Mapping) or not set(batches) <= set(models):
        raise ValueError(f"batches must be a dict by component for this pipeline: {', '.join(models)}.")
    total = CalibrationReport()
    for name, own in batches.items():
        total.add(calibrate_model(models[name], own, fit_steps=fit_steps, progress=progress), f"{name}.")
    return total


def calibrate_model(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    fit_steps: int = FIT_STEPS,
    progress: Progress | None = None,
    processes: Processes | None = None,
) -> CalibrationReport:
    """Calibrate one model in place.

    Args:
        model: The model.
        batches: See [`calibrate`][mhla_hf.calibrate], as for the other arguments and errors.
        fit_steps: See there.
        progress: See there.
        processes: Processes that share the layers and all have the same batches; this one alone by default.
    """
    processes = processes or Processes(alone=True)
    started = time.monotonic()
    check_count("fit_steps", fit_steps, minimum=0)
    batches = check_batches(batches)
    layers = mhla_layers(model)
    report, changes = CalibrationReport(batches=len(batches)), {}
    parameters = base_parameters(model)
    # Starts from the original's values of what an earlier calibration or matching has changed.
    originals: Changes = {
        parameters[name]: value.to(parameters[name])
        for name, value in original_values(model, "calibrate the model").items()
    }
    with evaluating(model), swapped_parameters(originals):
        layers = find_projections(model, layers, on_device(batches[0], model))
        _check_weights(layers)
        mine = processes.share_of(layers)
        groups, count = _groups(model, mine, layers, batches)
        # A layer is solved in two passes over its calls at least.
        passes = 2 * min(count, _CLOSED_FORM_CALLS)
        total = len(groups) * count + len(mine) * (fit_steps + passes)
        advance = StepCounter(progress, total)
        probe = _Probe(model, layers, batches, advance)
        solved: dict[str, LayerCalibration] = {}
        with processes.together():
            for group in groups:
                calls = probe.calls([layer.name for layer in group], count)
                for layer in group:
                    solved[layer.name], new = _calibrate_layer(layer, calls.pop(layer.name), fit_steps, advance)
                    changes.update(new)
        report.layers, changes = _exchange(processes, layers, solved, changes)
        # Count the steps of layers that had nothing to train.
        if progress is not None and advance.done < total:
            progress(total, total)
        before = {name: parameter.clone() for name, parameter in parameters.items() if parameter in changes}
    new = {**originals, **changes}
    present = {parameter: parameter.detach().clone() for parameter in new}
    with torch.no_grad(), ExitStack() as undo:
        undo.callback(lambda: [parameter.copy_(value) for parameter, value in present.items()])
        for parameter, value in new.items():
            parameter.copy_(value)
        undo.pop_all()
    record_step(model, "calibrated", before)
    report.seconds = time.monotonic() - started
    return report


@dataclass
class _Probe:
    """The batches, run through the model with its original attention.

    Attributes:
        model: The model.
        layers: Its MHLA layers.
        batches: The batches.
        advance: Called after every batch.
    """

    model: nn.Module
    layers: Sequence[AttentionLayer]
    batches: Sequence[Batch]
    advance: Callable[[], None]

    @torch.no_grad()
    def calls(self, names: Sequence[str], count: int | None = None) -> dict[str, list[HeadsCall]]:
        """Record the calls of some layers, in the first `count` batches."""
        found: dict[str, list[HeadsCall]] = {name: [] for name in names}

        def observe(
            layer: AttentionLayer, args: Any, kwargs: dict[str, Any], output: torch.Tensor, heads: torch.Tensor
        ) -> None:
            if layer.name not in found:
                return
            for tensor, which in ((heads, "its original attention"), (output, "MHLA")):
                if not torch.isfinite(tensor).all():
                    raise ValueError(
                        f"layer {layer.name}: {which} gives numbers that are not finite for batch {index} of "
                        "the probe. The model is unchanged; check that batch, or calibrate in float32."
                    )
            # Hold out every fourth batch, or every fourth sample if there are fewer than four batches.
            seen = sum(len(call.heads) for call in found[layer.name])
            numbers = torch.arange(seen, seen + len(output), device=output.device)
            if len(self.batches) >= _HELD_OUT:
                numbers = torch.full_like(numbers, index)
            found[layer.name].append(HeadsCall(args, kwargs, heads, numbers % _HELD_OUT == 1))

        for index, batch in enumerate(self.batches[:count]):  # noqa: B007 (observe reads it)
            with original_heads(self.layers, observe):
                run(self.model, on_device(batch, self.model))
            self.advance()
        return found


def _exchange(
    processes: Processes, layers: Sequence[AttentionLayer], solved: Mapping[str, LayerCalibration], changes: Changes
) -> tuple[list[LayerCalibration], Changes]:
    """The reports of all layers, in their order, and the new values of their parameters, from all processes."""
    changed = {
        name: [own for own, parameter in layer.parameters().items() if parameter in changes]
        for layer in layers
        if (name := layer.name) in solved
    }
    reports, names = (
        {key: each for part in processes.all(own) for key, each in part.items()} for own in (solved, changed)
    )
    everything: Changes = {}
    for number, layer in enumerate(layers):
        parameters = layer.parameters()
        for name in names[layer.name]:
            parameter = parameters[name]
            everything[parameter] = changes.get(parameter, torch.empty_like(parameter)).detach()
            processes.send(everything[parameter], processes.owner(number))
    return [reports[layer.name] for layer in layers], everything


def _groups(
    model: nn.Module, mine: Sequence[AttentionLayer], layers: Sequence[AttentionLayer], batches: Sequence[Batch]
) -> tuple[list[Sequence[AttentionLayer]], int]:
    """Layers of this process whose calls fit into memory together, and how many batches do where one's do not."""
    sample = _Probe(model, layers, batches, lambda: None).calls([layer.name for layer in layers], 1)
    nbytes = max(1, *(sum(map(_nbytes, calls)) for calls in sample.values()))
    room = _room(next(model.parameters()).device)
    count = min(len(batches), max(_LEAST_BATCHES, room // nbytes))
    size = max(1, room // (nbytes * count))
    return [mine[start : start + size] for start in range(0, len(mine), size)], count


def _nbytes(call: HeadsCall) -> int:
    """Memory of a call, without what it shares with others."""
    return sum(value.nbytes for value in (*call.args, *call.kwargs.values(), call.heads) if torch.is_tensor(value))


def _room(device: torch.device) -> int:
    """Bytes that calls may take."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()
    # The fit of a layer needs about as much again, and as much once more in half precision.
    return free // 3


def _calibrate_layer(
    layer: AttentionLayer, calls: list[HeadsCall], fit_steps: int, advance: Callable[[], None]
) -> tuple[LayerCalibration, Changes]:
    """Choose new values for a layer without changing it: none if they would not lower the held-out error."""
    report = LayerCalibration(layer.name)
    probe, calls = calls, calls[:_CLOSED_FORM_CALLS]
    report.tokens = sum(len(call.rows(call.heads, held_out=False)) for call in probe)
    report.held_out_tokens = sum(len(call.rows(call.heads, held_out=True)) for call in calls)
    if not report.tokens:
        report.note = "the probe does not reach it"
        return report, {}
    if not report.held_out_tokens:
        raise ValueError(
            "batches must hold at least 2 samples, one to fit and one to measure the error; the more, the better."
        )
    own_probe = [call.of_own_heads(layer.mhla.groups) for call in probe]
    own_calls = own_probe[:_CLOSED_FORM_CALLS]
    starts = [layer.mhla.fit_text(call.fitted for call in calls[:_TEMPERATURE_CALLS])]
    if TemperatureFit.applies(layer):
        temperatures = TemperatureFit(layer)
        with swapped_parameters(starts[0]):
            for call in own_calls[:_TEMPERATURE_CALLS]:
                temperatures.observe(call)
        starts += [{**starts[0], **changes}] if (changes := temperatures.solve()) else []
    # The best temperature of MHLA by itself need not be that of MHLA with what is fitted to it: both are followed up.
    candidates: list[Changes] = [{**start, **fit_heads(layer, own_calls, start)} for start in starts]
    if fit_steps and trained_weights(layer):
        candidates.append(fit_own_weights(layer, own_probe, candidates[-1], fit_steps, advance))
    errors = [_held_out_error(layer, calls, own, advance) for own in ({}, *candidates)]
    # The fit of the projection is the most expensive one: it has no say in the choice.
    own = candidates[min(range(len(candidates)), key=lambda index: errors[1 + index])]
    solution = _project(layer, calls, own, advance)
    scale = max(solution.scale, torch.finfo(torch.float32).tiny)
    report.error_before = report.error_after = errors[0] / scale
    changes = {**own, **solution.changes}
    if report.error_before <= _NEGLIGIBLE:
        report.note = "computes what the original does already"
        return report, {}
    if not changes or solution.error >= errors[0]:
        report.note = "left alone: the held-out error does not fall"
        return report, {}
    report.error_after, report.projection_ridge = solution.error / scale, solution.strength
    names = [name for name, parameter in layer.mhla.named_parameters() if parameter in changes]
    parts = {re.sub(r"(_query|_key)?(\..*)?$", "", name) for name in names}
    report.changed = [*sorted(parts), *["projection"] * bool(solution.changes)]
    return report, changes


@torch.no_grad()
def _held_out_error(
    layer: AttentionLayer, calls: Sequence[HeadsCall], own: Changes, advance: Callable[[], None]
) -> float:
    """Squared error of a layer's output on held-out samples, with other values for parameters of `mhla`."""
    total = 0.0
    with swapped_parameters(own):
        for call in calls:
            if call.held_out.any():
                advance()
                heads = layer.mhla(*call.args, **call.kwargs)
                mine, theirs = (layer.project(call.rows(x.flatten(2), True)).float() for x in (heads, call.heads))
                total += float((mine - theirs).square().sum())
    return total


@torch.no_grad()
def _project(
    layer: AttentionLayer, calls: Sequence[HeadsCall], own: Changes, advance: Callable[[], None]
) -> ProjectionSolution:
    """Fit the output projection to a layer with other values for parameters of `mhla`."""
    fit = ProjectionFit(layer)
    with swapped_parameters(own):
        for call in calls:
            advance()
            heads = layer.mhla(*call.args, **call.kwargs)
            for held_out in (False, True):
                mine, theirs = (call.rows(tokens.flatten(2), held_out) for tokens in (heads, call.heads))
                fit.add(mine, layer.project(theirs), held_out)
    return fit.solve()


def check_batches(batches: Iterable[Batch] | None) -> list[Batch]:
    """Return the batches of a probe as a list.

    Raises:
        ValueError: If they are not dicts, or there is none.
    """
    found = [] if batches is None or isinstance(batches, Mapping) else list(batches)
    if not found or not all(isinstance(batch, Mapping) for batch in found):
        raise ValueError("batches must be a list of dicts of keyword arguments of the model's forward, one at least.")
    return found


def _check_weights(layers: Sequence[AttentionLayer]) -> None:
    """Refuse weights that cannot be read and written as numbers, and projections with an adapter."""
    for layer in layers:
        has_adapter = layer.projection_name.endswith(".base_layer")
        for name, parameter in layer.parameters().items():
            plain = type(parameter.data) is torch.Tensor and parameter.is_floating_point() and not parameter.is_meta
            if has_adapter or not plain or parameter.element_size() < 2:
                problem = "has an adapter" if has_adapter else "is quantised, sharded or offloaded"
                raise ValueError(f"{name} {problem}: calibrate the model before that.")


def calibrate_directory(
    directory: str | Path,
    *,
    output: str | Path | None = None,
    force: bool = False,
    overwrite: bool = False,
    fit_steps: int = FIT_STEPS,
    progress: Callable[[int, int], None] | None = None,
    **probe: Any,
) -> CalibrationReport:
    """Calibrate a converted directory; see [`calibrate`][mhla_hf.calibrate].

    Weights are calibrated in fp32 and written in the types that their files have; all other files are kept. The
    directory is replaced only when the result is complete.

    Args:
        directory: A converted pipeline of diffusers, or a converted model of diffusers or transformers.
        output: Another directory to write.
        force: Take a model that has been trained or calibrated for one that has not.
        overwrite: Replace `output`.
        fit_steps: See [`calibrate`][mhla_hf.calibrate].
        progress: See [`calibrate`][mhla_hf.calibrate].
        **probe: The probe; arguments of [`open_probe`][mhla_hf.recovery.data.open_probe].

    Returns:
        The changes; the same is written to `conversion.json` under `calibration`.

    Raises:
        ValueError: If the directory is no MHLA model or was trained, data are missing, or an argument is wrong.
    """
    root = Path(directory).expanduser()
    parts = ModelDirectory.read(root, location=str(directory)).select_mhla()
    for part in () if force else parts:
        state = part.config.get(STATE_KEY, "trained")
        if state != STATES[0]:
            raise ValueError(
                f"{part.folder} has been {shorten_text(str(state))}: its projections are not those of the original, "
                "which tell what to aim at. Convert the original again, or pass force=True (--force) to take it for "
                "untrained."
            )
    destination = root if output is None else Path(output).expanduser()
    with claim_destination(destination, overwrite=output is None or overwrite) as claimed:
        models, batches, origin = open_probe(parts, **probe)
        report = CalibrationReport(probe=origin)
        for name, model in models.items():
            if force:
                record_weights(model)
            own = calibrate(model, batches[name], fit_steps=fit_steps, progress=progress)
            report.add(own, f"{name}." if len(models) > 1 else "")
        with claimed.staging() as staging:
            write_models(parts[0], staging, models, {"calibration": report.to_dict()})
    return report


def write_models(
    source: ModelDirectory, destination: Path, models: Mapping[str, nn.Module], record: Mapping[str, Any]
) -> None:
    """Write a copy of a converted directory with the weights of other models.

    Args:
        source: A model of the converted directory, on the same disk.
        destination: Empty directory to fill.
        models: Models by component; moved to the CPU and cast to the types that their files have.
        record: Added to `conversion.json`.
    """
    written = {source.root / CONVERSION_RECORD}
    for part in source.models:
        if part.component in models:
            model: Any = models[part.component].to("cpu")
            files = sorted(part.folder.glob("*.safetensors"))
            _cast_as_stored(model, files)
            # The same number of files, up to the order of the weights.
            shard_size = max(path.stat().st_size for path in files)
            model.save_pretrained(destination / part.folder.relative_to(source.root), max_shard_size=shard_size)
            written |= {part.folder / "config.json", *filter(part.names.match, part.folder.iterdir())}
    # After the models: `save_pretrained` would write through links, such as that to a generation_config.json.
    for path in list_files(source.root):
        if source.root / path not in written:
            (destination / path).parent.mkdir(parents=True, exist_ok=True)
            (destination / path).unlink(missing_ok=True)
            link_or_copy(source.root / path, destination / path)
    stored = source.root / CONVERSION_RECORD
    content = read_json(stored, "the record") if stored.is_file() else {}
    write_json(destination / CONVERSION_RECORD, {**content, **record})


def _cast_as_stored(model: nn.Module, files: Sequence[Path]) -> None:
    """Cast parameters to the types that they have in files."""
    stored = {entry.name: entry.dtype for path in files for entry in read_entries(path) if entry.dtype in FLOATS}
    # Names in the file differ from the model's where transformers maps them.
    kinds = sorted(stored.values(), key=str)
    usual = max(kinds, key=kinds.count) if kinds else torch.float32
    for name, parameter in model.named_parameters():
        fallback = torch.float32 if ".mhla." in name else usual
        parameter.data = parameter.data.to(stored.get(name, fallback))
