# SPDX-License-Identifier: Apache-2.0
"""Models in directories and on the Hub: loading them with a probe and their base model, and inspecting them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..models.source import Component, Source, find_original, open_source, softmax_version
from ..models.weight_files import check_weights, damage_named
from ..recovery.probes import pipeline_batches
from ..training.matching.layers import Batch
from ..utils.locations import download_repository
from ..utils.machine import choose_device, machine_facts
from ..utils.messages import pluralize, shorten_list, shorten_text
from .findings import ModelInspection
from .grids import check_block
from .inspection import DEFAULT_TOKENS, inspect_model
from .probes import DEFAULT_SAMPLES, random_latents, transformers_batches
from .statistics import TOLERANCE


@dataclass
class InspectionReport:
    """What MHLA has learned in all models of a directory.

    Attributes:
        location: Directory or Hub id, as the user gave it.
        origin: The name of the directory, or the Hub repository and its commit.
        models: Its MHLA models.
        probe: What the probe is, in words; empty without one.
        prompts: Prompts of the probe that the user gave.
        base: Location of the base model; empty without one.
        tokens: Query tokens of a sample that attention matrices were computed for, at most.
        tolerance: Of the numerical rank.
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
    tolerance: float = TOLERANCE
    seed: int = 0
    machine: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON types, without the mixing weights themselves."""
        own = ("location", "origin", "probe", "prompts", "base", "tokens", "tolerance", "seed", "machine")
        return {
            **{name: getattr(self, name) for name in own},
            "models": [model.to_dict() for model in self.models],
        }


Progress = Callable[[str, int, int], None]
"""Called with a component's name, and the numbers of batches that were run and of all."""


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
    tolerance: float = TOLERANCE,
    seed: int = 0,
    device: str | None = None,
    progress: Progress | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    **call_options: Any,
) -> InspectionReport:
    """Inspects the MHLA models of a directory or Hub repository, in fp32.

    The probe of a pipeline is what its models see while it makes samples. That of a language model or encoder is
    texts, that of a vision model images; a model of diffusers without its pipeline gets noise.

    Args:
        location: A pipeline of diffusers, or a model of diffusers or transformers.
        base: The softmax original, to compare outputs with. By default the one that the records of a local directory
            name, where it is beside that or was downloaded before.
        component: The pipeline's model to inspect; by default all.
        prompts: Prompts of a pipeline, or texts.
        images: Image files for a vision model.
        samples: Samples of the probe; 0 looks at weights alone. Pipelines make four at least.
        layers: See [`inspect_model`][mhla_hf.analysis.inspect_model], like `tokens` and `tolerance`.
        block: Number of the block that a page will point out, checked before any sample is made.
        seed: Seed of the probe.
        device: Device, by default a GPU if there is one.
        progress: See `Progress`.
        revision: Branch, tag or commit of a Hub repository.
        token: Access token for the Hub.
        cache_dir: Cache folder for downloads.
        **call_options: Of a pipeline's samples: `steps` and arguments of the pipeline's call, such as `height`; see
            [`pipeline_batches`][mhla_hf.recovery.probes.pipeline_batches].

    Raises:
        ValueError: If there is no MHLA model, a file is damaged, or an argument is wrong.
    """
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 0:
        raise ValueError(f"samples={samples!r:.40} must be a whole number of at least 0.")
    if not samples and (prompts or images or base is not None):
        raise ValueError("samples=0 looks at weights alone: leave prompts, images and base out.")
    call_options = {name: value for name, value in call_options.items() if value is not None}
    hub: dict[str, Any] = {"token": token, "cache_dir": cache_dir}
    chosen = choose_device(device)
    source = open_source(location, revision=revision, **hub)
    parts = _mhla_parts(source, component)
    if images and not parts[0].is_transformers:
        raise ValueError(f"image: {source.location} takes no images; they are for vision models of transformers.")
    if call_options and (source.pipeline is None or not samples):
        raise ValueError(f"{', '.join(call_options)}: for samples of pipelines alone.")
    report = InspectionReport(
        str(location), source.origin, prompts=list(prompts), tokens=tokens, tolerance=tolerance, seed=seed,
        machine=machine_facts(chosen),
    )  # fmt: skip
    originals = _originals(source, parts, base, hub) if samples else {}
    models, pipeline = _load(source, parts, chosen, with_pipeline=samples > 0)
    for model in models.values():
        # Wrong arguments show before samples are made.
        for layer in inspect_model(model, layers=layers, tokens=tokens).mhla_layers:
            if block is not None and layer.mixing is not None:
                check_block(block, layer.mixing.layout)
    batches: Mapping[str, Sequence[Batch]] = {}
    if samples:
        options: dict[str, Any] = {"samples": samples, "seed": seed, "prompts": prompts}
        if pipeline is not None:
            batches, report.probe = _samples(pipeline, models, parts, tokens, call_options, **options)
        else:
            batches, report.probe = _inputs(source, parts[0], models, images, tokens, **options)
    report.base = next((name for name, _ in originals.values()), "")
    for part in parts:
        original = None
        if part.name in originals:
            original = originals[part.name][1].load(dtype=torch.float32).to(chosen).eval()
        inspected = inspect_model(
            models[part.name],
            batches.get(part.name, ()),
            base=original,
            layers=layers,
            tokens=tokens,
            tolerance=tolerance,
            seed=seed,
            component=part.name,
            progress=_told(progress, part.name),
        )
        report.models.append(inspected)
    return report


def _told(progress: Progress | None, name: str) -> Callable[[int, int], None] | None:
    return None if progress is None else lambda done, total: progress(name, done, total)


def _mhla_parts(source: Source, component: str | None) -> list[Component]:
    wanted = source.components if component is None else [source.component(component)]
    parts = [part for part in wanted if part.is_mhla]
    if not parts:
        raise ValueError(
            f"{source.location} has no MHLA model ({shorten_list(part.class_name for part in wanted)}): convert it "
            "first with `mhla-hf convert`."
        )
    return parts


def _originals(
    source: Source, parts: Sequence[Component], base: str | Path | None, hub: Mapping[str, Any]
) -> dict[str, tuple[str, Component]]:
    """Location and softmax model behind each MHLA model, as far as they are found.

    Raises:
        ValueError: If a base that the user names has no such model.
    """
    found: dict[str, tuple[str, Component]] = {}
    if base is not None:
        given = open_source(base, **hub)
        for part in parts:
            original = softmax_version(given, part)
            if original is None:
                raise ValueError(f"base {base} has no softmax model for {part.name} of {source.location}.")
            found[part.name] = (str(given.origin["location"]), original)
        return found
    for part in parts:
        # Nothing is downloaded that nobody asked for.
        match = find_original(source, part, lambda name: download_repository(name, local_files_only=True, **hub))
        if match is not None:
            found[part.name] = match
    return found


def _load(
    source: Source, parts: Sequence[Component], device: torch.device, *, with_pipeline: bool
) -> tuple[dict[str, nn.Module], Any]:
    """Models by component, and the pipeline that they belong to; `None` without one, and where it is not needed."""
    if source.pipeline is None or not with_pipeline:
        return {part.name: part.load(dtype=torch.float32).to(device).eval() for part in parts}, None
    from ..pipelines import load_pipeline

    for part in parts:
        check_weights(part.folder)
    with damage_named(source.root):
        pipeline = load_pipeline(source.root, attn_implementation=None, torch_dtype=torch.float32).to(device)
    return {part.name: getattr(pipeline, part.name) for part in parts}, pipeline


def _inputs(
    source: Source,
    part: Component,
    models: Mapping[str, nn.Module],
    images: Sequence[Path],
    tokens: int,
    *,
    samples: int,
    seed: int,
    prompts: Sequence[str],
) -> tuple[dict[str, list[Batch]], str]:
    """Batches for a model without a pipeline by component, and what they are in words."""
    model: Any = models[part.name]
    if part.is_transformers:
        batches, words = transformers_batches(
            model, part.folder, samples=samples, tokens=tokens, seed=seed, prompts=prompts, images=images
        )
        return {part.name: batches}, words
    if prompts:
        raise ValueError(f"prompt: {source.location} is a transformer alone; give the pipeline it belongs to.")
    return {part.name: random_latents(model, part, samples=samples, tokens=tokens, seed=seed)}, "latents of noise"


def _samples(
    pipeline: Any,
    models: Mapping[str, nn.Module],
    parts: Sequence[Component],
    tokens: int,
    call_options: dict[str, Any],
    *,
    samples: int,
    seed: int,
    prompts: Sequence[str],
) -> tuple[Mapping[str, list[Batch]], str]:
    """Batches of a pipeline's models, and what they are in words."""
    try:
        batches = pipeline_batches(
            pipeline,
            samples=max(samples, DEFAULT_SAMPLES),
            prompts=list(prompts) or None,
            seed=seed,
            original=False,
            **call_options,
        )
    except ValueError as error:
        if prompts or call_options:
            raise
        # Pipelines that start from an image, say.
        latents = {
            part.name: random_latents(models[part.name], part, samples=samples, tokens=tokens, seed=seed)
            for part in parts
        }
        return latents, f"latents of noise ({shorten_text(str(error), 200)})"
    subjects = pluralize(len(prompts), "prompt") if prompts else "its default prompts or classes"
    return batches, f"denoising steps of samples from {subjects}"
