# SPDX-License-Identifier: Apache-2.0
"""The two models that the application compares: an MHLA model, and the original that it was made from."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from ..conversion.options import parse_dtype
from ..conversion.report import describe_file
from ..demo import DemoConfig, base_pipeline_directory
from ..models.registry import MHLA_CLASSES
from ..models.source import (
    CONVERSION_RECORD,
    TRAINING_RECORD,
    Component,
    Source,
    find_original,
    open_source,
    read_source,
    softmax_version,
)
from ..pipelines import load_pipeline
from ..utils.json_files import read_json
from ..utils.machine import choose_device


DEMO_OUTPUT = Path("demo-output") / "mhla"
"""The pipeline that `make demo` recovers, opened where no model is named."""


@dataclass(frozen=True)
class Comparison:
    """An MHLA model and its original, ready to generate.

    Attributes:
        name: The model as the user named it.
        base: Where the original comes from.
        kind: `"video"`, `"image"` or `"text"`: what they generate.
        source: The MHLA model's directory.
        mhla: A pipeline of diffusers, or a model of transformers.
        original: The same with the original attention. Pipelines share all but their denoisers and schedulers.
        components: Names of the MHLA models in the pipeline.
        tokenizer: Of a language model.
        device: Device of both.
        text_length: Tokens that prompts of a pipeline are padded to; `None` for the pipeline's own number.
        record: Contents of `conversion.json`.
        lock: Held by the one who generates.
    """

    name: str
    base: str
    kind: str
    source: Source
    mhla: Any
    original: Any
    components: tuple[str, ...]
    device: torch.device
    tokenizer: Any = None
    text_length: int | None = None
    record: Mapping[str, Any] = field(default_factory=dict)
    lock: Any = field(default_factory=threading.Lock)

    @property
    def is_demo(self) -> bool:
        """`True` if the model was made from the packaged pipeline."""
        source = self.record.get("source")
        return isinstance(source, Mapping) and source.get("location") == base_pipeline_directory().name

    @property
    def attention(self) -> str:
        """The original's kind of attention: SANA's is linear."""
        return f"{self.source.component(self.components[0]).original_attention} attention"

    @property
    def is_recovered(self) -> bool:
        """`True` if a record says that the model was trained after its conversion."""
        stages = self.record.get("recovery", {}).get("stages", {}) if _is_record(self.record) else {}
        return bool(set(stages) - {"calibrate"}) or (self.source.root / TRAINING_RECORD).is_file()

    def mhla_models(self) -> dict[str, nn.Module]:
        """The MHLA models by name."""
        if self.kind == "text":
            return {self.components[0]: self.mhla}
        return {name: getattr(self.mhla, name) for name in self.components}


def open_comparison(
    model: str | Path,
    base: str | Path | None = None,
    *,
    device: str | None = None,
    dtype: str | None = None,
    text_length: int | None = None,
) -> Comparison:
    """Loads an MHLA model and its original.

    Args:
        model: A pipeline or language model that was converted; a directory or a Hub id.
        base: The original; by default the one that the model's records name.
        device: Device of both, a GPU if there is one.
        dtype: Type of the weights: bfloat16 on a GPU and float32 on a CPU if not given.
        text_length: Tokens that prompts of a pipeline are padded to, where that is not the pipeline's own number:
            models without a mask for the padding answer best at the length that they were trained with.

    Raises:
        ValueError: If the model is not MHLA, generates nothing, or its original is not found; or for damaged files.
        OSError: If files are missing.
    """
    place = choose_device(device)
    weights = parse_dtype(dtype or ("float32" if place.type == "cpu" else "bfloat16"))
    assert weights is not None
    source = open_source(model)
    originals = originals_of(source, base)
    parts = source.mhla_components
    path = source.root / CONVERSION_RECORD
    record = read_json(path, "the record") if path.is_file() else {}
    shared: dict[str, Any] = {
        "name": _shown(model),
        "base": _shown(base if base is not None else next(iter(originals.values()))[0]),
        "source": source,
        "components": tuple(originals),
        "device": place,
        "text_length": text_length,
        "record": record if _is_record(record) else {},
    }
    if parts[0].is_transformers:
        return _open_language_model(parts[0], originals[parts[0].name][1], weights, shared)
    if source.pipeline is None:
        raise ValueError(f"{model} is a transformer alone, which generates nothing; give the pipeline of it.")
    pipeline = load_pipeline(source.root, attn_implementation=None, torch_dtype=weights).to(place)
    pipeline.set_progress_bar_config(disable=True)
    softmax = {name: part.load(dtype=weights).to(place).eval() for name, (_, part) in originals.items()}
    kind = MHLA_CLASSES[parts[0].class_name].kind
    return Comparison(kind=kind, mhla=pipeline, original=_sharing(pipeline, softmax), **shared)


def originals_of(source: Source, base: str | Path | None) -> dict[str, tuple[str, Component]]:
    """The originals of the MHLA models in a directory, with their locations, by name.

    Args:
        source: The directory.
        base: Directory or Hub id of the originals; `None` to follow the records.

    Raises:
        ValueError: If there is no MHLA model, or an original is not found.
    """
    if not source.mhla_components:
        raise ValueError(f"{source.location} is no MHLA model: convert it first (mhla-hf convert, mhla-hf recover).")
    given = None if base is None else open_source(base)
    originals: dict[str, tuple[str, Component]] = {}
    for part in source.mhla_components:
        if given is not None:
            found = softmax_version(given, part)
            if found is None:
                raise ValueError(
                    f"base {base} is no original of {source.location}: it has no softmax version of {part.name}."
                )
            originals[part.name] = (str(base), found)
            continue
        recorded = find_original(source, part) or _packaged_original(source, part)
        if recorded is None:
            named = f" (its record names {', '.join(source.records())})" if source.records() else ""
            raise ValueError(f"the original of {source.location} is not found{named}; say where it is: --base")
        originals[part.name] = recorded
    return originals


@contextmanager
def demo_model() -> Iterator[tuple[Path, Path]]:
    """The demo's pipeline and its base: the recovered one of `make demo`, else one that is calibrated now.

    The latter takes seconds, and is removed at the end of the context.
    """
    base = base_pipeline_directory()
    if (DEMO_OUTPUT / "model_index.json").is_file():
        yield DEMO_OUTPUT, base
        return
    from ..conversion import convert_pretrained
    from ..demo.runner import token_grid
    from ..recovery.directories import calibrate_directory
    from ..recovery.recipes import default_recipe

    with TemporaryDirectory(prefix="mhla-hf-app-") as folder:
        directory = Path(folder) / "digits-mhla"
        options = {**default_recipe("wan").mhla, "grid": token_grid(base), "blocks": DemoConfig.blocks}
        convert_pretrained(base, directory, options, layers=DemoConfig.layers, progress=False)
        prompts = ["a zero moves down", "a one moves right", "a six moves up", "a three moves left"]
        calibrate_directory(directory, prompts=prompts, samples=16, steps=4)
        yield directory, base


def _open_language_model(
    part: Component, original: Component, dtype: torch.dtype, shared: Mapping[str, Any]
) -> Comparison:
    from transformers import AutoTokenizer, GenerationMixin

    if not issubclass(part.load_class(), GenerationMixin):
        raise ValueError(
            f"{shared['name']} is a {part.class_name}, which generates nothing; look at it with mhla-hf inspect."
        )
    tokenizer = AutoTokenizer.from_pretrained(shared["source"].root, trust_remote_code=False)
    models = [found.load(dtype=dtype).to(shared["device"]).eval() for found in (part, original)]
    return Comparison(kind="text", mhla=models[0], original=models[1], tokenizer=tokenizer, **shared)


def _packaged_original(source: Source, part: Component) -> tuple[str, Component] | None:
    """The demo's base pipeline, where a conversion read the very file that it has."""
    path = source.root / CONVERSION_RECORD
    if not path.is_file():
        return None
    try:
        base = base_pipeline_directory()
        weights = read_json(path, "the record")["components"][part.name]["weight_sets"][0]["source_files"]
        found = softmax_version(read_source(base), part)
        if found is None or any(describe_file(found.folder / name) != weights[name] for name in weights):
            return None
    except (ValueError, OSError, KeyError, IndexError, TypeError, AttributeError):
        # A record of another kind.
        return None
    return base.name, found


def _sharing(pipeline: Any, models: Mapping[str, nn.Module]) -> Any:
    """A pipeline with other denoisers, a scheduler of its own, and everything else of a pipeline."""
    scheduler = type(pipeline.scheduler).from_config(pipeline.scheduler.config)
    parts = {**pipeline.components, **models, "scheduler": scheduler}
    # Settings of the pipeline itself, such as the noise level at which experts change.
    settings = inspect.signature(type(pipeline).__init__).parameters
    parts |= {name: value for name, value in pipeline.config.items() if name in settings and name not in parts}
    other = type(pipeline)(**parts)
    other.set_progress_bar_config(disable=True)
    return other


def _shown(location: str | Path) -> str:
    """A location for the page: of a directory the name alone, for the rest of the path is private."""
    return Path(location).resolve().name if Path(location).is_dir() else str(location)


def _is_record(value: Any) -> bool:
    """True for the contents of a record whose entries can be read: files of others hold anything."""
    recovery = value.get("recovery", {}) if isinstance(value, Mapping) else None
    return isinstance(recovery, Mapping) and isinstance(recovery.get("stages", {}), Mapping)
