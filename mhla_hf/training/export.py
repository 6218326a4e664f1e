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

from ..utils.files import atomic_directory, write_json
from ..utils.locations import PIPELINE_INDEX
from ..utils.source_files import list_files
from . import zero3
from .checkpoints import full_tensor
from .parameters import lora_options, lora_state_dict, mhla_state_dict
from .pipeline_files import read_index


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
    from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY

    adapter = {f"{component}.{name}": tensor for name, tensor in lora_state_dict(model).items()}
    # Without them diffusers takes the rank for alpha.
    options = {f"{component}.{name}": value for name, value in lora_options(model).items()}
    metadata = {"format": "pt", LORA_ADAPTER_METADATA_KEY: json.dumps(options, indent=2, sort_keys=True)}
    ours = mhla_state_dict(model)
    with atomic_directory(destination) as temporary:
        save_file(adapter, temporary / LORA_FILE, metadata=metadata)
        if ours:
            save_file(ours, temporary / MHLA_FILE, metadata={"format": "pt"})


def unsharded(model: torch.nn.Module) -> torch.nn.Module:
    """The model itself, or a whole copy on the CPU if its parameters are sharded. Every process must call it."""
    sharded = (hasattr(each, "full_tensor") or zero3.is_sliced(each) for each in model.parameters())
    if not any(sharded):
        return model
    # The entries of a state dict are no parameters any more, which DeepSpeed needs to gather them.
    tensors = {**model.state_dict(), **dict(model.named_parameters())}
    state = {name: full_tensor(tensor) for name, tensor in tensors.items()}
    # fully_shard gives the model a class of its own; the one to save as is the first of its bases with a config.
    cls: Any = next(base for base in type(model).__mro__ if not base.__name__.startswith("FSDP"))
    copy = cls.from_config(model.config)
    copy.load_state_dict(state)
    return copy


def export_pipeline(
    source: Path, destination: Path, component: str, model: torch.nn.Module, record: dict[str, Any]
) -> None:
    """Writes a pipeline directory: everything of the source, with one transformer replaced.

    Args:
        source: The pipeline that training started from.
        destination: Directory to make; written under a temporary name, then moved.
        component: Name of the trained transformer.
        model: The trained transformer, without LoRA.
        record: What to say about the training in `training.json`.

    Raises:
        ValueError: If links in the source lead out of it, see `list_files`.
    """
    index = read_index(source)
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
