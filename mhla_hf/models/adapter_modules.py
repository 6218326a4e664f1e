# SPDX-License-Identifier: Apache-2.0
"""Modules that an adapter carries whole (`modules_to_save`), where diffusers only handles those of LoRA itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn as nn


def wrapped_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules that adapters bring copies of, with their names.

    Args:
        model: A model with adapters of peft.
    """
    from peft.utils.other import ModulesToSaveWrapper

    return [(name, module) for name, module in model.named_modules() if isinstance(module, ModulesToSaveWrapper)]


def switch(model: nn.Module, enabled: bool) -> None:
    """Turns to the adapter's modules, or back to the model's own.

    Args:
        model: The model.
        enabled: Whether the adapter's modules compute.
    """
    for _, wrapper in wrapped_modules(model):
        wrapper.enable_adapters(enabled)  # type: ignore[operator]


def activate(model: nn.Module, adapter_names: Sequence[str], weights: Sequence[Any]) -> None:
    """Turns to the modules of the one adapter among these that carries some; without one, back to the model's own.

    Args:
        model: The model.
        adapter_names: The active adapters.
        weights: Their weights; an adapter with the weight 0 is not active.

    Raises:
        ValueError: If several of them carry modules, which cannot be added up.
    """
    wanted = [name for name, weight in zip(adapter_names, weights) if weight is None or weight]
    for path, wrapper in wrapped_modules(model):
        carrying = [name for name in wanted if name in wrapper.modules_to_save]  # type: ignore[operator]
        if len(carrying) > 1:
            raise ValueError(
                f"The adapters {', '.join(carrying)} each carry {path} whole, so only one of them can be active."
            )
        wrapper.enable_adapters(bool(carrying))  # type: ignore[operator]
        if carrying:
            wrapper.set_adapter(carrying)  # type: ignore[operator]


def unwrap(model: nn.Module) -> None:
    """Puts the model's own modules back in place of wrappers.

    Args:
        model: The model.
    """
    for name, wrapper in wrapped_modules(model):
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, wrapper.original_module)


def delete(model: nn.Module, adapter_names: list[str]) -> None:
    """Drops the modules of adapters.

    Args:
        model: The model.
        adapter_names: The adapters.
    """
    for _, wrapper in wrapped_modules(model):
        for name in adapter_names:
            left = [other for other in wrapper.active_adapters if other not in adapter_names]  # type: ignore[union-attr]
            wrapper.delete_adapter(name, left)  # type: ignore[operator]
