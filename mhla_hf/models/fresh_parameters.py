# SPDX-License-Identifier: Apache-2.0
"""MHLA parameters that a checkpoint does not have: their values while it is loaded, and what to tell the user."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn as nn
from accelerate.utils import offload_weight, save_offload_index


# Parts of an MHLA layer that leave its output as it is when they are fresh.
_STARTS_AS_IDENTITY = ("gate", "lepe", "window_gain")


def advice(model: Any, fresh: list[str]) -> str:
    """What a warning says to do about fresh parameters.

    Args:
        model: A model of an MHLA class.
        fresh: Names of its parameters that were newly initialised.
    """
    identity = all(key.partition(".mhla.")[2].partition(".")[0] in _STARTS_AS_IDENTITY for key in fresh)
    if identity or model.starts_as_upstream(model.mhla_config):
        return "They leave its output as it was until they are fine-tuned."
    return "Fine-tune the model before you use it."


def initialize_fresh(model: nn.Module, keys: list[str], load_options: Mapping[str, Any]) -> bool:
    """Gives parameters that the checkpoint lacks their initial values; returns whether some went to the disk.

    Args:
        model: The model, whose weights are loaded.
        keys: Names of the parameters.
        load_options: What the loader was told: `dtype`, `keep_in_fp32_modules`, `device_map`, `offload_folder`.
    """
    dtype = load_options.get("dtype") or torch.get_default_dtype()
    kept = set(load_options.get("keep_in_fp32_modules") or [])
    device_map = load_options.get("device_map") or {}
    offload_index: dict[str, Any] = {}
    for key in keys:
        prefix, _, name = key.partition(".mhla.")
        owner = model.get_submodule(key.rpartition(".")[0])
        target = torch.float32 if kept & set(key.split(".")) else dtype
        value = model.get_submodule(f"{prefix}.mhla").initial_tensor(name).to(target)
        device = _mapped_device(key, device_map)
        if device == "disk":
            # Hooks read it from there; the parameter itself stays on the meta device like all offloaded ones.
            offload_weight(value, key, load_options["offload_folder"], offload_index)
        else:
            setattr(owner, key.rpartition(".")[2], nn.Parameter(value.to(device)))
    if offload_index:
        save_offload_index(offload_index, load_options["offload_folder"])
    return bool(offload_index)


def _mapped_device(key: str, device_map: Mapping[str, Any]) -> Any:
    """Device of the longest entry of `device_map` that `key` falls under."""
    matches = [prefix for prefix in device_map if prefix == "" or key == prefix or key.startswith(f"{prefix}.")]
    return device_map[max(matches, key=len)] if matches else "cpu"
