# SPDX-License-Identifier: Apache-2.0
"""Parameters that train (those of MHLA, LoRA and those of MHLA, or all), and files of LoRA and MHLA parameters."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import nn

from ..utils.compat.diffusers import lora_metadata_key
from ..utils.destinations import atomic_directory


LORA_TARGETS = ("to_q", "to_k", "to_v", "to_out.0")
ADAPTER_NAME = "default"
_MHLA = re.compile(r"(^|\.)mhla\.")
_LORA = re.compile(r"\.lora_[AB]\.")
LORA_FILE = "pytorch_lora_weights.safetensors"
MHLA_FILE = "mhla.safetensors"


def is_mhla_parameter(name: str) -> bool:
    """True for the name of a parameter of an MHLA module, as in `blocks.3.attn1.mhla.mixing`."""
    return _MHLA.search(name) is not None


def is_lora_parameter(name: str) -> bool:
    """True for the name of a LoRA matrix."""
    return _LORA.search(name) is not None


def mhla_layers(model: nn.Module) -> list[int]:
    """Indices of the layers whose self-attention is MHLA; empty for an ordinary model."""
    return list(getattr(model, "mhla_layers", []))


def trainable_names(model: nn.Module, mode: str, within: Iterable[str] | None = None) -> list[str]:
    """Names of the parameters that train, in the model's own order.

    Args:
        model: The transformer, with LoRA already added in mode `lora`.
        mode: `mhla`, `lora` or `full`.
        within: If given, only parameters of the modules of these names train, as in the matching stage.

    Raises:
        ValueError: If nothing is left to train.
    """
    names = [
        name
        for name, _ in model.named_parameters()
        if mode == "full" or is_mhla_parameter(name) or (mode == "lora" and is_lora_parameter(name))
    ]
    if within is not None:
        prefixes = tuple(f"{name}." for name in within)
        names = [name for name in names if name.startswith(prefixes)]
    if not names:
        raise ValueError(f"train={mode!r} leaves nothing to train: the model has no MHLA layers")
    return names


def set_trainable(model: nn.Module, names: Iterable[str]) -> None:
    """Make exactly these parameters trainable."""
    names = set(names)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in names)


def check_takes_adapters(model_class: type) -> None:
    """Check that models of a diffusers class can have LoRA.

    Raises:
        ValueError: If diffusers gives them no `add_adapter`.
    """
    if not hasattr(model_class, "add_adapter"):
        raise ValueError(f"train='lora' is not possible: diffusers' {model_class.__name__} takes no adapters")


def add_lora(model: Any, rank: int, alpha: float | None, seed: int) -> None:
    """Add LoRA to the query, key, value and output projections through the model's own `add_adapter`.

    Args:
        model: The transformer.
        rank: Rank of the LoRA matrices.
        alpha: LoRA scale times rank; None takes the rank, a scale of 1.
        seed: Seed of the LoRA matrices; the global random state is left as it was.

    Raises:
        ValueError: If diffusers gives the model no `add_adapter`.
    """
    from peft import LoraConfig

    check_takes_adapters(type(model))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model.add_adapter(
            LoraConfig(
                r=rank,
                lora_alpha=rank if alpha is None else alpha,
                lora_dropout=0.0,
                target_modules=lora_targets(model),
            ),
            adapter_name=ADAPTER_NAME,
        )


def lora_targets(model: nn.Module) -> list[str]:
    """Names of the projections that LoRA is added to: those of self-attention in every layer, MHLA or not."""
    from .matching.layers import mhla_layers as attention_layers

    if any(name.endswith(LORA_TARGETS) for name, _ in model.named_modules()):
        return list(LORA_TARGETS)
    found: dict[str, None] = {}
    for layer in attention_layers(model):
        for name, module in layer.attention.named_modules():
            if (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D") and not name.startswith("mhla."):
                found[f"{layer.name.rpartition('.')[2]}.{name}"] = None
    return list(found)


def mhla_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """The MHLA parameters of a model, on the CPU."""
    return {
        name: parameter.detach().cpu().contiguous()
        for name, parameter in model.named_parameters()
        if is_mhla_parameter(name)
    }


def merge_lora(model: nn.Module) -> None:
    """Merge the LoRA matrices into the weights, in place."""
    if hasattr(model, "fuse_lora"):
        model.fuse_lora()  # type: ignore[operator]
        model.unload_lora()  # type: ignore[operator]
        return
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = {name: module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}
    for layer in layers.values():
        layer.merge()  # type: ignore[operator]
    model.delete_adapter(ADAPTER_NAME)  # type: ignore[operator]
    for name, layer in layers.items():
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, layer.get_base_layer())


def save_adapter(destination: Path, model: torch.nn.Module, component: str) -> None:
    """Save the LoRA matrices and their scale as diffusers reads them, and the MHLA parameters beside them.

    They load by `pipeline.load_lora_weights`, or by `load_lora_adapter` of the transformer where the pipeline has no
    such method, as DiT's.

    Args:
        destination: Directory to make.
        model: The transformer, before its LoRA is merged.
        component: Name of the transformer in the pipeline.
    """
    from peft.utils import get_peft_model_state_dict

    tensors = get_peft_model_state_dict(model, adapter_name=ADAPTER_NAME)
    adapter = {f"{component}.{name}": tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    # Without them diffusers takes the rank for alpha.
    options = {
        f"{component}.{name}": sorted(value) if isinstance(value, set) else value
        for name, value in cast(Any, model).peft_config[ADAPTER_NAME].to_dict().items()
    }
    metadata = {"format": "pt", lora_metadata_key(): json.dumps(options, indent=2, sort_keys=True)}
    ours = mhla_state_dict(model)
    with atomic_directory(destination) as temporary:
        save_file(adapter, temporary / LORA_FILE, metadata=metadata)
        if ours:
            save_file(ours, temporary / MHLA_FILE, metadata={"format": "pt"})
