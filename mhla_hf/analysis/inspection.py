# SPDX-License-Identifier: Apache-2.0
"""What the MHLA layers of models have learned, and how their attention compares on a probe."""

from __future__ import annotations

import argparse
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from ..config import parse_layers
from ..layouts.blocks import BlockLayout
from ..models.directory import ModelDirectory
from ..pipelines import load_pipeline
from ..training.data.images import read_image
from ..training.data.probes import pipeline_batches
from ..training.layers import Batch, evaluating, find_projections, first_output, mhla_layers, on_device
from ..training.teacher import shared_teacher
from ..utils.machine import choose_device, machine_facts
from ..utils.messages import StepCounter, check_count, pluralize
from .matrices import KINDS, LayerTokens
from .statistics import MixingSummary, mean_and_std, mixing_summary
from .tracking import AttentionSummary, Sample, attention_modules, observe_batch, query_rows


DEFAULT_TOKENS = 512
"""Query tokens of a sample that attention matrices are computed for."""
DEFAULT_SAMPLES = 4
"""Samples of a probe."""
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
# The module of the standard library whose source is the default text.
_TEXT = argparse


@dataclass
class LayerInspection:
    """One attention layer.

    Attributes:
        index: Number among the model's self-attention layers.
        name: Name of the attention module.
        kind: `"mhla"`, or `original` for a layer that was not converted.
        original: Attention of the host model: `"softmax"`, or `"linear"` for SANA.
        mixing: What the mixing weights have learned; `None` for layers that were not inspected.
        attention: Statistics on the probe; `None` without one.
        window_bias: Mean bias of the softmax window over the heads; `None` without a window.
        output_error: Mean and standard deviation over samples of ‖y − y₀‖ / ‖y₀‖: the layer's output compared with
            the base model's layer, for the inputs of that. `None` without a base model.
    """

    index: int
    name: str
    kind: str
    original: str = "softmax"
    mixing: MixingSummary | None = None
    attention: AttentionSummary | None = None
    window_bias: float | None = None
    output_error: dict[str, float] | None = None


@dataclass
class ModelInspection:
    """One model.

    Attributes:
        component: Its name in the pipeline.
        class_name: Its class.
        options: Its MHLA options.
        layers: All self-attention layers, MHLA or not.
        batches: Batches of the probe.
        output_error: Mean and standard deviation over batches of the relative error of the model's output against the
            base model's; `None` without a base model.
        notes: Token grids of the probe other than that of the mixing weights.
    """

    component: str
    class_name: str
    options: dict[str, Any]
    layers: list[LayerInspection]
    batches: int = 0
    output_error: dict[str, float] | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def mhla_layers(self) -> list[LayerInspection]:
        """The MHLA layers that were inspected."""
        return [layer for layer in self.layers if layer.mixing is not None]

    @property
    def is_untrained(self) -> bool:
        """Whether all mixing weights still have their initial values."""
        return not any(change > 1e-6 for layer in self.mhla_layers if layer.mixing for change in layer.mixing.movement)

    @property
    def kinds(self) -> dict[str, str]:
        """Names of the kinds of attention that statistics are of."""
        original = self.layers[0].original
        original = original if original == "softmax" else f"original ({original})"
        return {"original": original, "mhla": "MHLA", "linear": "linear"}

    def facts(self) -> dict[str, str]:
        """Summarise the model: names and values in words."""
        options, layers = self.options, self.mhla_layers
        mixing = [layer.mixing for layer in layers if layer.mixing]
        # Towers of a model have layouts of their own.
        layouts = dict.fromkeys((summary.layout, summary.grid) for summary in mixing)
        grids = (f"{times(grid) if grid else 'not stored'}{prefix(layout)}" for layout, grid in layouts)
        facts = {
            "MHLA layers": f"{sum(layer.kind == 'mhla' for layer in self.layers)} of {len(self.layers)}",
            "blocks": "; ".join(times(layout.blocks) for layout, _ in layouts),
            "token grid": "; ".join(grids),
            "feature map": str(options["feature_map"]),
            "mixing heads": options["mixing_heads"],
            "change of the pattern": percent(mean([mean(summary.pattern_movement) for summary in mixing])),
        }
        for kind, name in self.kinds.items():
            ranks = [layer.attention.statistics[kind]["effective_rank"]["mean"] for layer in layers if layer.attention]
            if ranks:
                facts[f"effective rank, {name}"] = f"{mean(ranks):.1f}"
        for kind, name in self.kinds.items():
            shares = [layer.attention.text_share.get(kind, []) for layer in layers if layer.attention]
            if any(shares):
                facts[f"attention to the text, {name}"] = percent(mean(list(map(mean, shares))))
        errors = [layer.output_error["mean"] for layer in layers if layer.output_error]
        if errors:
            facts["output error of a layer"] = percent(mean(errors))
        if self.output_error:
            facts["output error of the model"] = percent(self.output_error["mean"])
        if options["window"]:
            bias = mean([layer.window_bias for layer in layers if layer.window_bias is not None])
            sinks = f", {options['sink_tokens']} sinks" if options.get("sink_tokens") else ""
            facts["softmax window"] = f"{options['window']}{sinks}, mean bias {bias:.2f}"
        return facts


@dataclass
class InspectionReport:
    """What MHLA has learned in all models of a directory.

    Attributes:
        location: Directory or Hub id, as given.
        origin: The name of the directory, or the Hub repository and its commit.
        models: Its MHLA models.
        probe: Description of the probe; empty without one.
        prompts: Prompts of the probe that were given.
        base: Location of the base model; empty without one.
        tokens: Largest number of query tokens of a sample that attention matrices were computed for.
        seed: Seed of the probe.
        machine: Date, device and versions.
    """

    location: str
    origin: dict[str, Any]
    models: list[ModelInspection] = field(default_factory=list)
    probe: str = ""
    prompts: list[str] = field(default_factory=list)
    base: str = ""
    tokens: int = DEFAULT_TOKENS
    seed: int = 0
    machine: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types, without the mixing weights themselves."""
        return plain(self)


def plain(value: Any) -> Any:
    """Convert a report to plain JSON types; tensors are left out, and numbers that are not finite become `None`."""
    if is_dataclass(value):
        return {
            name: plain(each)
            for name, each in vars(value).items()
            if name[0] != "_" and not isinstance(each, torch.Tensor)
        }
    if isinstance(value, BlockLayout):
        return {"blocks": list(value.blocks), "prefix_tokens": value.num_prefix_tokens}
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def mean(values: Sequence[float]) -> float:
    """Return the mean, NaN of nothing."""
    return sum(values) / len(values) if values else math.nan


def percent(value: float) -> str:
    """Format a share: `12 %`, `0.3 %`."""
    return f"{100 * value:.{0 if value >= 0.1 else 1}f}\N{NO-BREAK SPACE}%"


def times(axes: tuple[int, ...]) -> str:
    """Format lengths along axes: `3 × 5 × 10`."""
    return " × ".join(map(str, axes))


def prefix(layout: BlockLayout) -> str:
    """Format the number of tokens before the grid; empty for none."""
    return f" + {layout.num_prefix_tokens} before" if layout.num_prefix_tokens else ""


def inspect_model(
    model: nn.Module,
    batches: Sequence[Batch] = (),
    *,
    base: nn.Module | None = None,
    layers: str | Iterable[int] | None = None,
    tokens: int = DEFAULT_TOKENS,
    seed: int = 0,
    component: str = "model",
    progress: Callable[[int, int], None] | None = None,
) -> ModelInspection:
    """Inspect a model with MHLA layers.

    Args:
        model: An MHLA model of diffusers or transformers; not changed.
        batches: The probe: keyword arguments of the model's `forward`. Without any, only weights are inspected.
        base: The softmax model that it was converted from, to compare outputs with.
        layers: The layers to inspect, as numbers or text such as `"1,2,4"`; `None` for all MHLA layers.
        tokens: Largest number of query tokens of a sample that attention matrices are computed for; in longer samples
            they are drawn at random. Keys are never left out.
        seed: Seed of the query tokens that are drawn.
        component: Name of the model in its pipeline.
        progress: Called with the number of finished batches and of all; with a base model, batches count twice.

    Raises:
        ValueError: If the model has no MHLA layers, an argument is wrong, or weights or activations are not finite.

    Examples:
        >>> report = inspect_model(model, [tokenizer(texts, return_tensors="pt", padding=True)])  # doctest: +SKIP
        >>> report.mhla_layers[0].attention.statistics["mhla"]["effective_rank"]["mean"]  # doctest: +SKIP
    """
    check_count("tokens", tokens, 2)
    converted = {layer.name: layer for layer in mhla_layers(model)}
    original = "linear" if next(iter(converted.values())).mhla.replaces_linear else "softmax"
    found, modules = [], attention_modules(model)
    chosen = parse_layers(layers, len(modules))
    for index, name in enumerate(modules):
        layer = LayerInspection(index, name, "mhla" if name in converted else original, original)
        found.append(layer)
        if name in converted and (chosen is None or index in chosen):
            mhla = converted[name].mhla
            try:
                layer.mixing = mixing_summary(mhla)
            except ValueError as error:
                raise ValueError(f"layer {name}: {error}") from error
            if mhla.window_bias is not None:
                layer.window_bias = mhla.window_bias.mean().item()
    wanted = {layer.name: layer for layer in found if layer.mixing is not None}
    if not wanted:
        known = ", ".join(str(layer.index) for layer in found if layer.kind == "mhla")
        raise ValueError(f"layers names none of the MHLA layers of this {type(model).__name__}: {known}.")
    options = next(iter(converted.values())).mhla.config.to_dict()
    report = ModelInspection(component, type(model).__name__, options, found, batches=len(batches))
    advance = StepCounter(progress, len(batches) * (1 if base is None else 2))
    notes: dict[str, None] = {}
    observe = partial(_add_sample, wanted=wanted, tokens=tokens, seed=seed, notes=notes)
    for batch in batches:
        observe_batch(model, batch, [layer.index for layer in wanted.values()], observe, seed)
        advance()
    report.notes = list(notes)
    with evaluating(model), torch.no_grad():
        for layer in wanted.values():
            if layer.attention is not None:
                layer.attention.statistics = {kind: layer.attention.summary(kind) for kind in KINDS}
        if batches and base is not None:
            _compare(model, base, batches, wanted, report, advance)
    return report


def inspect_directory(
    location: str | Path,
    *,
    base: str | Path | None = None,
    component: str | None = None,
    prompts: Sequence[str] = (),
    images: Sequence[Path] = (),
    samples: int = DEFAULT_SAMPLES,
    layers: str | Iterable[int] | None = None,
    tokens: int = DEFAULT_TOKENS,
    seed: int = 0,
    device: str | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    hub: Mapping[str, Any] | None = None,
    **call_options: Any,
) -> InspectionReport:
    """Inspect the MHLA models of a directory or Hub repository, in fp32.

    The probe of a pipeline is what its models see while it generates samples; that of a language model or encoder is
    texts, that of a vision model images.

    Args:
        location: A pipeline of diffusers, or a model of diffusers or transformers.
        base: The softmax original, to compare outputs with. By default the one that the records of a local directory
            name, if it is beside that or was downloaded before.
        component: The pipeline's model to inspect; by default all.
        prompts: Prompts of a pipeline, or texts.
        images: Image files for a vision model.
        samples: Samples of the probe; 0 inspects weights only. Pipelines make at least four.
        layers: See [`inspect_model`][mhla_hf.analysis.inspect_model], like `tokens`.
        seed: Seed of the probe.
        device: Device, by default a GPU if there is one.
        progress: Called with a component's name, and the number of finished batches and of all.
        hub: `revision`, `token` and `cache_dir` of repositories on the Hub.
        **call_options: For samples of a pipeline, `steps` and arguments of the pipeline's call, such as `height`; see
            [`pipeline_batches`][mhla_hf.training.data.probes.pipeline_batches].

    Raises:
        ValueError: If there is no MHLA model, a file is damaged, or an argument is wrong.
    """
    check_count("samples", samples, 0)
    call_options = {name: value for name, value in call_options.items() if value is not None}
    place = choose_device(device)
    directory = ModelDirectory.open(location, **(hub or {}))
    # The revision is that of the model, not of its original.
    access = {name: value for name, value in (hub or {}).items() if name != "revision"}
    parts = directory.select_mhla(component)
    if call_options and directory.index is None:
        raise ValueError(f"{', '.join(call_options)}: only for samples of pipelines.")
    originals: dict[str, ModelDirectory | None] = {}
    for part in parts if samples else ():
        # The default downloads nothing.
        if base is None:
            originals[part.component] = part.find_original(local_files_only=True, **access)
        else:
            originals[part.component] = part.original(base, "base", **access)
    if directory.index is not None and samples:
        pipeline: Any = load_pipeline(directory.root, attn_implementation=None, torch_dtype=torch.float32).to(place)
        models = {part.component: getattr(pipeline, part.component) for part in parts}
    else:
        pipeline = None
        models = {part.component: part.load(dtype=torch.float32).to(place).eval() for part in parts}
    for model in models.values():
        # Wrong arguments show before the probe runs.
        inspect_model(model, layers=layers, tokens=tokens)
    batches: Mapping[str, Sequence[Batch]] = {}
    probe = ""
    if pipeline is not None:
        if images:
            raise ValueError(f"image: a {type(pipeline).__name__} is probed with prompts; leave images out.")
        options = {"samples": max(samples, DEFAULT_SAMPLES), "prompts": list(prompts) or None, **call_options}
        batches = pipeline_batches(pipeline, seed=seed, original=False, **options)
        subjects = pluralize(len(prompts), "prompt") if prompts else "its default prompts or classes"
        probe = f"denoising steps of samples from {subjects}"
    elif samples:
        (part,) = parts
        made, probe = _probe_model(models[part.component], part, prompts, images, samples, tokens)
        batches = {part.component: made}
    bases = [original.origin["location"] for original in originals.values() if original is not None]
    report = InspectionReport(
        str(location),
        directory.origin,
        probe=probe,
        prompts=list(prompts),
        base=bases[0] if bases else "",
        tokens=tokens,
        seed=seed,
        machine=machine_facts(place),
    )
    for name, model in models.items():
        original = originals.get(name)
        inspected = inspect_model(
            model,
            batches.get(name, ()),
            base=None if original is None else original.load(dtype=torch.float32).to(place).eval(),
            layers=layers,
            tokens=tokens,
            seed=seed,
            component=name,
            progress=None if progress is None else partial(progress, name),
        )
        report.models.append(inspected)
    return report


def _probe_model(
    model: Any, part: ModelDirectory, prompts: Sequence[str], images: Sequence[Path], samples: int, tokens: int
) -> tuple[list[Batch], str]:
    """Make batches of one text or image each for a model of transformers; return them and what they are in words.

    Raises:
        ValueError: If the model takes no such input, or files are missing or damaged.
    """
    main = model.main_input_name if part.is_transformers else None
    problem = None
    if main is None:
        problem = "is a transformer alone: give the pipeline that it belongs to"
    elif main not in ("input_ids", "pixel_values") or hasattr(model, "get_text_features"):
        problem = "takes more than a text or an image"
    elif main == "pixel_values" and (prompts or not images):
        problem = "takes pixel_values: give images (--image) and no prompts"
    elif main == "input_ids" and images:
        problem = "takes texts, no images: leave images out"
    # Without files, transformers makes a tokenizer that knows no words.
    elif main == "input_ids" and not any(any(part.folder.glob(pattern)) for pattern in _TOKENIZER_FILES):
        problem = "has no tokenizer for the texts of a probe"
    if problem is not None:
        raise ValueError(
            f"The {type(model).__name__} in {part.folder} {problem}; samples=0 (--samples 0) inspects weights only."
        )
    if main == "pixel_values":
        processor = transformers.AutoImageProcessor.from_pretrained(part.folder)
        # Told, not guessed: an image of three rows has its channels last, too.
        channels: dict[str, Any] = {"return_tensors": "pt", "input_data_format": "channels_last"}
        found = [processor(images=read_image(path), **channels) for path in images]
        return [{"pixel_values": each["pixel_values"]} for each in found], pluralize(len(found), "image")
    tokenizer = transformers.AutoTokenizer.from_pretrained(part.folder)
    source, length = inspect.getsource(_TEXT), 12 * tokens
    starts = (number * length % max(1, len(source) - length) for number in range(samples))
    texts = prompts or [source[start : start + length] for start in starts]
    # Some models count positions from more than 0, and take fewer.
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or tokens
    longest = min(tokens, positions, tokenizer.model_max_length)
    ids = [tokenizer(text, truncation=True, max_length=longest, return_tensors="pt")["input_ids"] for text in texts]
    words = pluralize(len(prompts), "prompt") if prompts else "source code of Python's standard library"
    return [{"input_ids": each} for each in ids], words


def _add_sample(
    name: str, sample: Sample, *, wanted: Mapping[str, LayerInspection], tokens: int, seed: int, notes: dict[str, None]
) -> None:
    """Add the statistics of one sample of a layer."""
    assert isinstance(sample, LayerTokens)
    layer, layout = wanted[name], sample.layout
    if layer.attention is None:
        layer.attention = AttentionSummary()
        mixing = layer.mixing
        if mixing is not None and mixing.grid is None and mixing.layout.blocks == layout.blocks:
            # The probe tells the tokens of mixing weights whose options name none.
            layer.mixing = replace(mixing, layout=layout, grid=layout.grid)
        elif mixing is not None and len(layout.grid) > 1 and mixing.grid != layout.grid:
            notes[f"The probe ran in {times(layout.blocks)} blocks on a grid of {times(layout.grid)} tokens."] = None
    layer.attention.add(sample, query_rows(sample, tokens, seed), KINDS)
    if not layer.attention.is_finite:
        raise ValueError(f"layer {name}: attention of the probe is not finite.")


def _compare(
    model: nn.Module,
    base: nn.Module,
    batches: Iterable[Batch],
    wanted: Mapping[str, LayerInspection],
    report: ModelInspection,
    advance: Callable[[], None],
) -> None:
    """Compute the errors of the layers' and of the model's outputs against the base model."""
    errors: dict[str, list[float]] = {name: [] for name in wanted}
    outputs = []
    teacher = shared_teacher(model, base)
    layers = find_projections(model, mhla_layers(model), on_device(next(iter(batches)), model))
    for batch in (on_device(batch, model) for batch in batches):
        calls = teacher.record(layers, batch, only=list(wanted))
        for layer in layers:
            if layer.name in calls:
                call = calls[layer.name]
                output, target = layer(call.arguments, call.hidden_states), call.output
                for index in range(len(output)):
                    keep = slice(None) if call.valid is None else call.valid[index]
                    errors[layer.name].append(_relative_error(output[index, keep], target[index, keep]))
        expected = teacher.compute(partial(first_output, batch=batch))
        outputs.append(_relative_error(first_output(model, batch), expected))
        advance()
    for name, values in errors.items():
        wanted[name].output_error = mean_and_std(torch.tensor(values)) if values else None
    report.output_error = mean_and_std(torch.tensor(outputs))


def _relative_error(output: torch.Tensor, target: torch.Tensor) -> float:
    difference, size = (output.double() - target.double()).norm(), target.double().norm()
    return (difference / size).item() if size > 0 else math.inf if difference > 0 else 0.0
