# SPDX-License-Identifier: Apache-2.0
"""The model that is recovered: finding out what it is, loading it converted, and writing it with new weights."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..conversion.planning import PlanOptions
from ..conversion.report import FILE_NAME
from ..models.registry import family_for, is_mhla_class
from ..models.source import Component, open_source, read_source
from ..models.weight_files import check_weights
from ..utils.files import atomic_directory, link_or_copy, write_json
from ..utils.json_files import read_json
from ..utils.messages import shorten_list
from ..utils.source_files import list_files
from ..utils.tensor_files import read_header


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Subject:
    """What is to be recovered.

    Attributes:
        location: What the user gave.
        root: Its directory.
        component: The model in it.
        is_pipeline: Whether the directory is a pipeline of diffusers.
        family: See `recipes.FAMILIES`.
    """

    location: str
    root: Path
    component: Component
    is_pipeline: bool
    family: str


def find_subject(location: str | Path, component: str | None = None, **hub: Any) -> Subject:
    """Looks at what is to be recovered, without loading weights.

    Args:
        location: A pipeline of diffusers or a model of transformers, directory or Hub id.
        component: Which transformer of a pipeline; `transformer` by default.
        **hub: Options of `download_or_find`.

    Raises:
        ValueError: If it is no such thing, has no version with MHLA, is MHLA already, or of a kind that takes its
            inputs from several places.
    """
    source = open_source(location, **hub)
    names = [part.name for part in source.components]
    chosen = component or names[0]
    if chosen not in names:
        raise ValueError(f"component must be one of {', '.join(names)} for {location}, got {chosen!r:.100}")
    part = next(part for part in source.components if part.name == chosen)
    if not part.is_transformers and is_mhla_class(part.class_name):
        raise ValueError(f"{location} is MHLA already; recover from the model that it was converted from")
    if not part.is_transformers and source.pipeline is None:
        raise ValueError(f"{location} is a transformer alone; give the pipeline that it belongs to")
    check_weights(part.folder)
    family = _transformers_family(part) if part.is_transformers else family_for(part.class_name).name
    return Subject(str(location), source.root, part, source.pipeline is not None, family)


def _transformers_family(component: Component) -> str:
    """`causal`, `encoder` or `vision`, from the options that the model would have."""
    from ..conversion.transformers_planning import plan_transformers_model

    options: Mapping[str, Any] = plan_transformers_model(component, None, PlanOptions()).report.mhla
    if "causal" not in options:
        raise ValueError(
            f"{component.folder} has several towers ({shorten_list(options)}); recover them in Python, with "
            "mhla_hf.calibrate and mhla_hf.recovery.match_layers"
        )
    grid = options.get("grid")
    if grid is not None and len(grid) == 2:
        return "vision"
    return "causal" if options["causal"] else "encoder"


def load_converted(directory: Path, component: str, device: torch.device) -> nn.Module:
    """Loads a converted model, in fp32.

    Args:
        directory: What `convert_pretrained` wrote.
        component: Name of the model in a pipeline.
        device: Where to.

    Raises:
        ValueError: If files are damaged.
    """
    return _component(directory, component).load().to(device).eval()


def write_recovered(
    converted: Path, destination: Path, component: str, model: nn.Module, record: Mapping[str, Any]
) -> None:
    """Writes a directory like the converted one, with the weights of a model, all at once.

    Args:
        converted: What `convert_pretrained` wrote, on the same disk.
        destination: Directory to make.
        component: Name of the model in a pipeline.
        model: The recovered model; its weights take the types that the converted ones have.
        record: Added to `conversion.json`.
    """
    part = _component(converted, component)
    model = model.to("cpu")
    stored = _stored_dtypes(part.folder)
    # Names in the file differ from the model's where transformers maps them.
    kinds = sorted(stored.values(), key=str)
    usual = max(kinds, key=kinds.count) if kinds else torch.float32
    for name, parameter in model.named_parameters():
        fallback = torch.float32 if ".mhla." in name else usual
        parameter.data = parameter.data.to(stored.get(name, fallback))
    with atomic_directory(destination) as temporary:
        for path in list_files(converted):
            own = (converted / path).parent == part.folder
            if own and (path.name == "config.json" or part.names.match(path)):
                continue
            (temporary / path).parent.mkdir(parents=True, exist_ok=True)
            link_or_copy(converted / path, temporary / path)
        folder = temporary / part.folder.relative_to(converted)
        saving: Any = model
        saving.save_pretrained(folder)
        conversion = read_json(converted / FILE_NAME, "the record")
        (temporary / FILE_NAME).unlink(missing_ok=True)
        write_json(temporary / FILE_NAME, {**conversion, **record})


def _component(directory: Path, name: str) -> Component:
    return read_source(directory).component(name)


def _stored_dtypes(folder: Path) -> dict[str, torch.dtype]:
    """The types of floating-point tensors in the weight files, by name."""
    known = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    headers = [read_header(path)[0] for path in sorted(folder.glob("*.safetensors"))]
    return {
        name: known[entry["dtype"]] for header in headers for name, entry in header.items() if entry["dtype"] in known
    }
