# SPDX-License-Identifier: Apache-2.0
"""Writing the trained pipeline: a copy of the source with the transformer replaced."""

from __future__ import annotations

import json
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ..utils.compat.diffusers import lora_metadata_key
from ..utils.files import atomic_directory, write_json
from ..utils.json_files import read_json
from ..utils.locations import PIPELINE_INDEX
from ..utils.source_files import list_files
from .parameters import lora_options, lora_state_dict, mhla_state_dict


LORA_FILE = "pytorch_lora_weights.safetensors"
MHLA_FILE = "mhla.safetensors"
RECORD = "training.json"


def save_adapter(destination: Path, model: torch.nn.Module, component: str) -> None:
    """Saves the LoRA matrices and their scale as diffusers reads them, and the MHLA parameters beside them.

    They load by `pipeline.load_lora_weights`, or by `load_lora_adapter` of the transformer where the pipeline has no
    such method, as DiT's.

    Args:
        destination: Directory to make.
        model: The transformer, before its LoRA is merged.
        component: Which transformer of the pipeline it is.
    """
    adapter = {f"{component}.{name}": tensor for name, tensor in lora_state_dict(model).items()}
    # Without them diffusers takes the rank for alpha.
    options = {f"{component}.{name}": value for name, value in lora_options(model).items()}
    metadata = {"format": "pt", lora_metadata_key(): json.dumps(options, indent=2, sort_keys=True)}
    ours = mhla_state_dict(model)
    with atomic_directory(destination) as temporary:
        save_file(adapter, temporary / LORA_FILE, metadata=metadata)
        if ours:
            save_file(ours, temporary / MHLA_FILE, metadata={"format": "pt"})


def export_pipeline(source: Path, destination: Path, component: str, model: Any, record: dict[str, Any]) -> None:
    """Writes a pipeline directory: everything of the source, with one transformer replaced.

    Args:
        source: The pipeline that training started from.
        destination: Directory to make; written under a temporary name, then moved.
        component: Name of the trained transformer.
        model: The trained transformer, without LoRA.
        record: Record of the training for `training.json`.

    Raises:
        ValueError: If links in the source lead out of it, see `list_files`.
    """
    index = read_json(source / PIPELINE_INDEX, "the pipeline's index")
    index[component] = ["diffusers", type(model).__name__]
    with atomic_directory(destination) as temporary:
        for path in list_files(source):
            # Version-control and download bookkeeping of the source is none of the new pipeline's.
            if path.parts[0] in (component, PIPELINE_INDEX, RECORD) or path.parts[0].startswith("."):
                continue
            (temporary / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / path, temporary / path)
        model.save_pretrained(temporary / component)
        (temporary / PIPELINE_INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        write_json(temporary / RECORD, record)


def package_versions() -> dict[str, str]:
    """Versions of the packages that training depends on."""
    return {name: version(name) for name in ("torch", "diffusers", "accelerate", "safetensors")}
