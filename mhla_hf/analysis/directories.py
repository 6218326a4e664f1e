# SPDX-License-Identifier: Apache-2.0
"""Inspecting the models of a directory or of a Hub repository: loading them, their probe and their base model."""

from __future__ import annotations

import heapq
import inspect
import json.decoder
import shlex
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..layouts.blocks import is_integer
from ..lora_check import mhla_parts
from ..models.source import Component, Source, find_original, open_source, softmax_version
from ..models.weight_files import check_weights, damage_named
from ..training.data.images import read_image
from ..training.data.probes import pipeline_batches
from ..training.matching.layers import Batch
from ..utils.locations import download_repository
from ..utils.machine import choose_device, machine_facts
from ..utils.messages import pluralize, shorten_text, shorten_value
from .inspection import DEFAULT_TOKENS, ModelInspection, inspect_model, plain
from .statistics import check_block


DEFAULT_SAMPLES = 4
"""Samples of a probe."""
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
# Modules of the standard library whose source is the default text.
_TEXTS = (textwrap, heapq, json.decoder, shlex)


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
    if not is_integer(samples) or samples < 0:
        raise ValueError(f"samples={shorten_value(samples)} must be a whole number of at least 0.")
    call_options = {name: value for name, value in call_options.items() if value is not None}
    if not samples and (prompts or images or base is not None or call_options):
        raise ValueError("samples=0 inspects weights only: leave prompts, images, sizes and base out.")
    hub: dict[str, Any] = {"token": token, "cache_dir": cache_dir}
    chosen = choose_device(device)
    source = open_source(location, revision=revision, **hub)
    parts = mhla_parts(source, component)
    if call_options and source.pipeline is None:
        raise ValueError(f"{', '.join(call_options)}: only for samples of pipelines.")
    report = InspectionReport(str(location), source.origin, prompts=list(prompts), tokens=tokens, seed=seed)
    report.machine = machine_facts(chosen)
    originals = {part.name: _find_original(source, part, base, hub) for part in parts if samples}
    models, pipeline = _load(source, parts, chosen, with_pipeline=samples > 0)
    for model in models.values():
        # Wrong arguments show before the probe runs.
        for layer in inspect_model(model, layers=layers, tokens=tokens).mhla_layers:
            if block is not None and layer.mixing is not None:
                check_block(block, layer.mixing.layout)
    batches: Mapping[str, Sequence[Batch]] = {}
    probe = _Probe(samples, tokens, seed, prompts, images)
    if pipeline is not None:
        batches, report.probe = probe.of_pipeline(pipeline, call_options)
    elif samples:
        found, report.probe = probe.of_model(models[parts[0].name], parts[0])
        batches = {parts[0].name: found}
    report.base = next((match[0] for match in originals.values() if match), "")
    for part in parts:
        match, told = originals.get(part.name), None if progress is None else partial(progress, part.name)
        inspected = inspect_model(
            models[part.name],
            batches.get(part.name, ()),
            base=match[1].load(dtype=torch.float32).to(chosen).eval() if match else None,
            layers=layers,
            tokens=tokens,
            seed=seed,
            component=part.name,
            progress=told,
        )
        report.models.append(inspected)
    return report


def _find_original(
    source: Source, part: Component, base: str | Path | None, hub: Mapping[str, Any]
) -> tuple[str, Component] | None:
    """Location and softmax model behind an MHLA model, if there is one.

    Raises:
        ValueError: If a base that was given has no such model.
    """
    if base is None:
        # The default downloads nothing.
        return find_original(source, part, lambda name: download_repository(name, local_files_only=True, **hub))
    given = open_source(base, **hub)
    original = softmax_version(given, part)
    if original is None:
        raise ValueError(f"base {base} has no softmax model for {part.name} of {source.location}.")
    return str(given.origin["location"]), original


def _load(
    source: Source, parts: Sequence[Component], device: torch.device, *, with_pipeline: bool
) -> tuple[dict[str, nn.Module], Any]:
    """Models by component, and their pipeline; `None` without one, and if it is not needed."""
    if source.pipeline is None or not with_pipeline:
        return {part.name: part.load(dtype=torch.float32).to(device).eval() for part in parts}, None
    from ..pipelines import load_pipeline

    for part in parts:
        check_weights(part.folder)
    with damage_named(source.root):
        pipeline = load_pipeline(source.root, attn_implementation=None, torch_dtype=torch.float32).to(device)
    return {part.name: getattr(pipeline, part.name) for part in parts}, pipeline


@dataclass(frozen=True)
class _Probe:
    """Inputs of models, and what they are in words.

    Attributes:
        samples: Number of samples, if neither prompts nor images are given.
        tokens: Largest number of tokens of a sample.
        seed: Seed of random inputs.
        prompts: Prompts of a pipeline, or texts.
        images: Image files for a vision model.
    """

    samples: int
    tokens: int
    seed: int
    prompts: Sequence[str]
    images: Sequence[Path]

    def of_pipeline(self, pipeline: Any, options: Mapping[str, Any]) -> tuple[Mapping[str, list[Batch]], str]:
        """Make batches for the models of a pipeline, by component."""
        if self.images:
            raise ValueError(f"image: a {type(pipeline).__name__} is probed with prompts; leave images out.")
        samples, prompts = max(self.samples, DEFAULT_SAMPLES), list(self.prompts) or None
        batches = pipeline_batches(
            pipeline, samples=samples, prompts=prompts, seed=self.seed, original=False, **options
        )
        subjects = pluralize(len(prompts), "prompt") if prompts else "its default prompts or classes"
        return batches, f"denoising steps of samples from {subjects}"

    def of_model(self, model: Any, part: Component) -> tuple[list[Batch], str]:
        """Make batches of one text or image each for a model of transformers.

        Raises:
            ValueError: If the model takes no such input, or files are missing or damaged.
        """
        if not part.is_transformers:
            raise ValueError(
                f"{part.folder} is a transformer alone: give the pipeline that it belongs to, or samples=0 "
                "(--samples 0) to inspect its weights only."
            )
        main, wanted = model.main_input_name, "pixel_values" if self.images else "input_ids"
        if main not in ("input_ids", "pixel_values") or ((self.images or self.prompts) and main != wanted):
            raise ValueError(
                f"A {type(model).__name__} takes {main}: leave prompts (texts) or images out, or use samples=0 "
                "(--samples 0) to inspect its weights only."
            )
        if self.images:
            processor = _processor("AutoImageProcessor", part.folder)
            found = [processor(images=read_image(path), return_tensors="pt") for path in self.images]
            return [{"pixel_values": each["pixel_values"]} for each in found], pluralize(len(found), "image")
        generator = torch.Generator().manual_seed(self.seed)
        vision = getattr(model.config, "vision_config", model.config)
        side = getattr(vision, "image_size", 224)
        pixels: list[Batch] = [{}] * (len(self.prompts) or self.samples)
        # Models that compare texts with images, such as CLIP, take both.
        if main == "pixel_values" or hasattr(model, "get_text_features"):
            height, width = side if isinstance(side, (list, tuple)) else (side, side)
            shape = (1, getattr(vision, "num_channels", 3), height, width)
            pixels = [{"pixel_values": torch.randn(shape, generator=generator)} for _ in pixels]
        if main == "pixel_values":
            return pixels, "images of noise"
        texts, words = self._texts(model, part.folder, generator)
        return [{"input_ids": ids, **others} for ids, others in zip(texts, pixels)], words

    def _texts(self, model: Any, folder: Path, generator: torch.Generator) -> tuple[list[torch.Tensor], str]:
        """Token ids `[1, T]` of texts."""
        config, tokens, prompts = model.config.get_text_config(), self.tokens, self.prompts
        longest = min(tokens, getattr(config, "max_position_embeddings", None) or tokens)
        # Without files, transformers makes a tokenizer that knows no words.
        if not any(file for pattern in _TOKENIZER_FILES for file in folder.glob(pattern)):
            if prompts:
                raise ValueError(f"{folder} has no tokenizer: leave the prompt out, and tokens are random.")
            shape = (1, max(longest - 2, 2))
            ids = [torch.randint(3, config.vocab_size, shape, generator=generator) for _ in range(self.samples)]
            return ids, "random tokens (there is no tokenizer)"
        tokenizer = _processor("AutoTokenizer", folder)
        # Some models count positions from more than 0, and take fewer.
        longest = min(longest, tokenizer.model_max_length)
        source, length = "".join(map(inspect.getsource, _TEXTS)), 12 * tokens
        starts = (number * length % max(1, len(source) - length) for number in range(self.samples))
        texts = prompts or [source[start : start + length] for start in starts]
        found = [
            tokenizer(text, truncation=True, max_length=longest, return_tensors="pt")["input_ids"] for text in texts
        ]
        largest = max(int(ids.max()) for ids in found)
        if largest >= config.vocab_size:
            raise ValueError(f"{folder}: the tokenizer has a token {largest}, the model {config.vocab_size}.")
        return found, pluralize(len(prompts), "prompt") if prompts else "source code of Python's standard library"


def _processor(auto_class: str, folder: Path) -> Any:
    import transformers

    try:
        return getattr(transformers, auto_class).from_pretrained(folder)
    # The error for a damaged file depends on the class.
    except Exception as error:
        raise ValueError(f"{auto_class} cannot load from {folder}: {shorten_text(str(error), 200)}") from error
