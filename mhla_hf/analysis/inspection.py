# SPDX-License-Identifier: Apache-2.0
"""What the MHLA layers of models have learned, and how their attention compares on a probe."""

from __future__ import annotations

import heapq
import inspect
import json.decoder
import math
import shlex
import textwrap
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
from ..training.matching.layers import Batch, evaluating, find_projections, first, mhla_layers, on_device, run
from ..training.matching.teacher import shared_teacher
from ..utils.machine import choose_device, machine_facts
from ..utils.messages import check_count, pluralize
from .matrices import KINDS, LayerTokens
from .statistics import MixingSummary, check_block, mean_and_std, mixing_summary
from .tracking import MatrixStatistics, Sample, attention_modules, observe_batch, query_rows


DEFAULT_TOKENS = 512
"""Query tokens of a sample that attention matrices are computed for."""
DEFAULT_SAMPLES = 4
"""Samples of a probe."""
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
# Modules of the standard library whose source is the default text.
_TEXTS = (textwrap, heapq, json.decoder, shlex)


@dataclass
class AttentionSummary(MatrixStatistics):
    """Statistics of a layer's attention matrices on the probe.

    Attributes:
        tokens: Tokens of a sample (the most, if samples differ).
        rows: Query tokens of a sample that the matrices were computed for; ranks are at most this.
        samples: Number of samples.
        rank_bound: Bound of the rank of MHLA: min(rows, Σ_b min(n_b, d)); `None` for causal attention and with a
            softmax window.
        grid: Token grid of the first sample.
        blocks: Its blocks.
        linear_bound: Bound of the rank of linear attention; `None` for causal attention.
        statistics: Mean and standard deviation over samples and heads, by kind of attention and statistic, see
            [`attention_statistics`][mhla_hf.analysis.attention_statistics].
    """

    grid: tuple[int, ...] = ()
    blocks: tuple[int, ...] = ()
    linear_bound: int | None = None
    statistics: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)


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
        gains: Mean gains of MHLA and of the softmax window; `None` without a window.
        output_error: Mean and standard deviation over samples of ‖y − y₀‖ / ‖y₀‖: the layer's output compared with
            the base model's layer, for the inputs of that. `None` without a base model.
    """

    index: int
    name: str
    kind: str
    original: str = "softmax"
    mixing: MixingSummary | None = None
    attention: AttentionSummary | None = None
    gains: tuple[float, float] | None = None
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
        notes: What was left out, and why.
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
        layouts = list(dict.fromkeys((summary.layout, summary.grid) for summary in mixing))
        counts = [f" = {math.prod(layout.blocks)}" if len(layout.blocks) > 1 else "" for layout, _ in layouts]
        grids = (f"{times(grid) if grid else 'not stored'}{prefix(layout)}" for layout, grid in layouts)
        facts = {
            "MHLA layers": f"{sum(layer.kind == 'mhla' for layer in self.layers)} of {len(self.layers)}",
            "blocks": "; ".join(times(layout.blocks) + count for (layout, _), count in zip(layouts, counts)),
            "token grid": "; ".join(grids),
            "feature map": str(options["feature_map"]),
            "mixing weights": "one matrix per head"
            if options["mixing_heads"] == "per_head"
            else "shared by all heads",
            "change of the pattern": percent(mean([mean(summary.pattern_movement) for summary in mixing])),
        }
        for kind, name in self.kinds.items():
            ranks = [layer.attention.statistics[kind]["effective_rank"]["mean"] for layer in layers if layer.attention]
            if ranks:
                facts[f"effective rank, {name}"] = f"{mean(ranks):.1f}"
        errors = [layer.output_error["mean"] for layer in layers if layer.output_error]
        if errors:
            facts["output error of a layer"] = percent(mean(errors))
        if self.output_error:
            facts["output error of the model"] = percent(self.output_error["mean"])
        if options["window"]:
            gain = mean([layer.gains[1] for layer in layers if layer.gains])
            facts["softmax window"] = f"{options['window']}, mean gain {gain:.2f}"
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
        ValueError: If the model has no MHLA layers, an argument is wrong, weights or activations are not finite, or
            the matrices would take too much memory.

    Examples:
        >>> report = inspect_model(model, [tokenizer(texts, return_tensors="pt", padding=True)])  # doctest: +SKIP
        >>> report.mhla_layers[0].attention.statistics["mhla"]["effective_rank"]["mean"]  # doctest: +SKIP
    """
    check_count("tokens", tokens, 2)
    converted = {layer.name: layer for layer in mhla_layers(model)}
    original = "linear" if getattr(model, "upstream_is_linear", False) else "softmax"
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
            if mhla.window_gain is not None:
                layer.gains = (mhla.window_gain[0].mean().item(), mhla.window_gain[1].mean().item())
    wanted = {layer.name: layer for layer in found if layer.mixing is not None}
    if not wanted:
        known = ", ".join(str(layer.index) for layer in found if layer.kind == "mhla")
        raise ValueError(f"layers names none of the MHLA layers of this {type(model).__name__}: {known}.")
    options = next(iter(converted.values())).mhla.config.to_dict()
    report = ModelInspection(component, type(model).__name__, options, found, batches=len(batches))
    total, done = len(batches) * (1 if base is None else 2), 0

    def advance() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    observe = partial(_add_sample, wanted=wanted, tokens=tokens, seed=seed)
    for batch in batches:
        observe_batch(model, batch, [layer.index for layer in wanted.values()], observe, seed)
        advance()
    with evaluating(model), torch.no_grad():
        for layer in wanted.values():
            if layer.attention is not None:
                layer.attention.statistics = {kind: layer.attention.summary(kind) for kind in KINDS}
        if batches:
            _note_grids(wanted, report.notes)
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
    block: int | None = None,
    tokens: int = DEFAULT_TOKENS,
    seed: int = 0,
    device: str | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
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
        block: Number of the block that a page will show, checked before the probe runs.
        seed: Seed of the probe.
        device: Device, by default a GPU if there is one.
        progress: Called with a component's name, and the number of finished batches and of all.
        revision: Branch, tag or commit of a Hub repository.
        token: Access token for the Hub.
        cache_dir: Cache folder for downloads.
        **call_options: Of a pipeline's samples: `steps` and arguments of the pipeline's call, such as `height`; see
            [`pipeline_batches`][mhla_hf.training.data.probes.pipeline_batches].

    Raises:
        ValueError: If there is no MHLA model, a file is damaged, or an argument is wrong.
    """
    check_count("samples", samples, 0)
    call_options = {name: value for name, value in call_options.items() if value is not None}
    if not samples and (prompts or images or base is not None or call_options):
        raise ValueError("samples=0 inspects weights only: leave prompts, images, sizes and base out.")
    hub: dict[str, Any] = {"token": token, "cache_dir": cache_dir}
    place = choose_device(device)
    directory = ModelDirectory.open(location, revision=revision, **hub)
    parts = directory.select_mhla(component)
    if call_options and directory.index is None:
        raise ValueError(f"{', '.join(call_options)}: only for samples of pipelines.")
    originals: dict[str, ModelDirectory | None] = {}
    for part in parts if samples else ():
        # The default downloads nothing.
        found = (
            part.find_original(local_files_only=True, **hub) if base is None else part.original(base, "base", **hub)
        )
        originals[part.component] = found
    if directory.index is not None and samples:
        pipeline: Any = load_pipeline(directory.root, attn_implementation=None, torch_dtype=torch.float32).to(place)
        models = {part.component: getattr(pipeline, part.component) for part in parts}
    else:
        pipeline = None
        models = {part.component: part.load(dtype=torch.float32).to(place).eval() for part in parts}
    for model in models.values():
        # Wrong arguments show before the probe runs.
        for layer in inspect_model(model, layers=layers, tokens=tokens).mhla_layers:
            if block is not None and layer.mixing is not None:
                check_block(block, layer.mixing.layout)
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
        made, probe = _probe_model(models[part.component], part, prompts, images, samples, tokens, seed)
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
    model: Any,
    part: ModelDirectory,
    prompts: Sequence[str],
    images: Sequence[Path],
    samples: int,
    tokens: int,
    seed: int,
) -> tuple[list[Batch], str]:
    """Make batches of one text or image each for a model of transformers; return them and what they are in words.

    Raises:
        ValueError: If the model takes no such input, or files are missing or damaged.
    """
    if not part.is_transformers:
        raise ValueError(
            f"{part.folder} is a transformer alone: give the pipeline that it belongs to, or samples=0 (--samples 0) "
            "to inspect its weights only."
        )
    main, wanted = model.main_input_name, "pixel_values" if images else "input_ids"
    if main not in ("input_ids", "pixel_values") or ((images or prompts) and main != wanted):
        raise ValueError(
            f"A {type(model).__name__} takes {main}: leave prompts (texts) or images out, or use samples=0 "
            "(--samples 0) to inspect its weights only."
        )
    if images:
        processor = transformers.AutoImageProcessor.from_pretrained(part.folder)
        found = [processor(images=read_image(path), return_tensors="pt") for path in images]
        return [{"pixel_values": each["pixel_values"]} for each in found], pluralize(len(found), "image")
    generator = torch.Generator().manual_seed(seed)
    pixels: list[Batch] = [{}] * (len(prompts) or samples)
    # Models that compare texts with images, such as CLIP, take both.
    if main == "pixel_values" or hasattr(model, "get_text_features"):
        vision = getattr(model.config, "vision_config", model.config)
        side = getattr(vision, "image_size", 224)
        size = side if isinstance(side, (list, tuple)) else (side, side)
        shape = (1, getattr(vision, "num_channels", 3), *size)
        pixels = [{"pixel_values": torch.randn(shape, generator=generator)} for _ in pixels]
    if main == "pixel_values":
        return pixels, "images of noise"
    config = model.config.get_text_config()
    longest = min(tokens, getattr(config, "max_position_embeddings", None) or tokens)
    # Without files, transformers makes a tokenizer that knows no words.
    if any(file for pattern in _TOKENIZER_FILES for file in part.folder.glob(pattern)):
        tokenizer = transformers.AutoTokenizer.from_pretrained(part.folder)
        source, length = "".join(map(inspect.getsource, _TEXTS)), 12 * tokens
        starts = (number * length % max(1, len(source) - length) for number in range(samples))
        # Some models count positions from more than 0, and take fewer.
        options = {"truncation": True, "max_length": min(longest, tokenizer.model_max_length), "return_tensors": "pt"}
        texts = prompts or [source[start : start + length] for start in starts]
        ids = [tokenizer(text, **options)["input_ids"] for text in texts]
        words = pluralize(len(prompts), "prompt") if prompts else "source code of Python's standard library"
        if (largest := max(int(each.max()) for each in ids)) >= config.vocab_size:
            raise ValueError(f"{part.folder}: the tokenizer has a token {largest}, the model {config.vocab_size}.")
    elif prompts:
        raise ValueError(f"{part.folder} has no tokenizer: leave the prompt out, and tokens are random.")
    else:
        size = (1, max(longest - 2, 2))
        ids = [torch.randint(3, config.vocab_size, size, generator=generator) for _ in range(samples)]
        words = "random tokens (there is no tokenizer)"
    return [{"input_ids": each, **others} for each, others in zip(ids, pixels)], words


def _add_sample(name: str, sample: Sample, *, wanted: Mapping[str, LayerInspection], tokens: int, seed: int) -> None:
    """Add the statistics of one sample of a layer."""
    assert isinstance(sample, LayerTokens)
    layer, layout = wanted[name], sample.layout
    if layer.attention is None:
        layer.attention = AttentionSummary(grid=layout.grid, blocks=layout.blocks)
        mixing = layer.mixing
        if mixing is not None and mixing.grid is None and mixing.layout.blocks == layout.blocks:
            # The probe tells the tokens of mixing weights whose options name none.
            layer.mixing = replace(mixing, layout=layout, grid=layout.grid)
    layer.attention.add(sample, query_rows(sample, tokens, "tokens", seed), KINDS)
    if not layer.attention.is_finite:
        raise ValueError(f"layer {name}: attention of the probe is not finite.")
    if not sample.causal:
        layer.attention.linear_bound = min(layer.attention.rows, sample.num_features)


def _note_grids(layers: Mapping[str, LayerInspection], notes: list[str]) -> None:
    """Note layers that the probe does not reach, and token grids other than that of the mixing weights."""
    for layer in layers.values():
        mixing, probe = layer.mixing, layer.attention
        if mixing is None or probe is None or len(probe.grid) < 2 or mixing.grid == probe.grid:
            continue
        blocks, grid = ("×".join(map(str, axes)) for axes in (probe.blocks, probe.grid))
        note = f"The probe ran in {blocks} blocks on a grid of {grid} tokens."
        if note not in notes:
            notes.append(note)
    unreached = [name for name, layer in layers.items() if layer.attention is None]
    if unreached:
        notes.append(f"The probe does not reach {', '.join(unreached)}.")


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
        expected = teacher.compute(partial(_output, batch=batch))
        outputs.append(_relative_error(_output(model, batch), expected))
        advance()
    for name, values in errors.items():
        wanted[name].output_error = mean_and_std(torch.tensor(values)) if values else None
    report.output_error = mean_and_std(torch.tensor(outputs))


def _output(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The first output of a model, without padding."""
    output = first(run(model, batch)[0])
    mask = batch.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.dim() == 2 and mask.shape == output.shape[:2]:
        return output[mask.bool()]
    return output


def _relative_error(output: torch.Tensor, target: torch.Tensor) -> float:
    difference, size = (output.double() - target.double()).norm(), target.double().norm()
    return (difference / size).item() if size > 0 else math.inf if difference > 0 else 0.0
