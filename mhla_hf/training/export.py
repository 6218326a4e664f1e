# SPDX-License-Identifier: Apache-2.0
"""Parts of the result of a run: LoRA matrices beside the MHLA parameters, and versions for the record."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import save_file

from ..utils.compat.diffusers import lora_metadata_key
from ..utils.files import atomic_directory
from .parameters import lora_options, lora_state_dict, mhla_state_dict


LORA_FILE = "pytorch_lora_weights.safetensors"
MHLA_FILE = "mhla.safetensors"


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


def package_versions() -> dict[str, str]:
    """Versions of the packages that training depends on."""
    return {name: version(name) for name in ("torch", "diffusers", "accelerate", "safetensors")}
