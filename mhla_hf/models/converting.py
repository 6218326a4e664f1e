# SPDX-License-Identifier: Apache-2.0
"""Turning a loaded diffusers model into its MHLA version, in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn as nn

from ..config import MHLAConfig
from ..layers.original import STATE_KEY, check_adapters, original_values
from ..utils.compat.diffusers import fp32_parts
from ..utils.tensor_files import FLOATS
from .loading import warn_of_fresh
from .registry import mhla_class_for


def convert_model(
    model: Any, mhla: MHLAConfig | Mapping[str, Any] | None = None, source: str = "the softmax model"
) -> Any:
    """Turns a loaded softmax model into its MHLA version, in place.

    Every weight is kept; the new parameters are initialised in the model's dtype and on its device (float32 where
    the class keeps them so).

    Args:
        model: A supported diffusers model, see [`supported_models`].
        mhla: The options.
        source: Name of the softmax model, for the warning that there are new parameters.

    Returns:
        The same object, now of the MHLA class.

    Raises:
        ValueError: If the model is not supported, is MHLA already, or is compiled, offloaded, hooked or quantised; it
            is left as it was.
    """
    check_convertible(model)
    target = mhla_class_for(type(model).__name__)
    options = check_options(model, mhla)
    for module in model.modules():
        # Hooks that were taken off again leave the old class's method behind, which would go before the new one's.
        module.__dict__.pop("forward", None)
    model.__class__ = target
    model._install_mhla(options)
    kept = fp32_parts(target)
    attentions = model._self_attentions()
    for layer, module in model.mhla_modules().items():
        weight = attentions[layer].to_q.weight
        module.train(model.training)
        for name, parameter in module.named_parameters():
            dtype = torch.float32 if kept & {"mhla", *name.split(".")} else weight.dtype
            parameter.data = parameter.data.to(weight.device, dtype)
    warn_of_fresh(model, [name for name, _ in model.named_parameters() if ".mhla." in name], source)
    return model


def unconvert_model(model: Any) -> Any:
    """Turns an MHLA model of diffusers back into its softmax original, in place.

    Args:
        model: The model.

    Returns:
        The same object, now of the softmax class.

    Raises:
        ValueError: If its pretrained weights are not known, it is compiled, offloaded, hooked or quantised, or has
            adapters or fused projections; it is left as it was.
    """
    from accelerate import init_empty_weights

    check_unconvertible(model)
    values, target = original_values(model, "restore softmax attention"), model._upstream_class()
    config = {name: value for name, value in model.config.items() if name not in ("mhla", STATE_KEY)}
    with init_empty_weights(include_buffers=False):
        restored = target.from_config({**config, "_class_name": target.__name__})
    tensors = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if ".mhla." not in name}
    with torch.no_grad():
        for name, value in values.items():
            tensors[name].copy_(value)
    restored.load_state_dict(tensors, assign=True)
    for name, buffer in model.named_buffers():
        owner = restored.get_submodule(name.rpartition(".")[0])
        owner._buffers[name.rpartition(".")[2]] = buffer
    restored.train(model.training)
    if model.is_gradient_checkpointing:
        restored.enable_gradient_checkpointing()
    model.__class__ = target
    vars(model).clear()
    vars(model).update(vars(restored))
    return model


def check_unconvertible(model: Any) -> None:
    """Checks that [`unconvert_model`] can turn a model back as it stands, whatever its weights.

    Raises:
        ValueError: See there.
    """
    if not hasattr(model, "mhla_modules"):
        raise ValueError(f"A {type(model).__name__} is no MHLA model of diffusers: take the one inside.")
    _check_bare(model, "model")
    check_adapters(model, "restore softmax attention")
    if any("to_qkv" in name for name, _ in model.named_parameters()):
        raise ValueError(f"This {type(model).__name__} has fused projections: take them apart first.")


def check_convertible(model: Any, called: str = "model") -> None:
    """Checks that a diffusers model can be converted in place as it stands.

    Args:
        model: The model.
        called: Its name in errors.

    Raises:
        ValueError: If the model is not supported, is MHLA already or compiled, its weights are not all there as plain
            floats, or hooks hold on to the methods of its class.
    """
    original = getattr(model, "_orig_mod", model)
    name, is_mhla = type(original).__name__, hasattr(original, "mhla_modules")
    compiled = original is not model or any(module._compiled_call_impl is not None for module in model.modules())
    if compiled and not is_mhla:
        raise ValueError(
            f"This {called} ({name}) is compiled, and would go on running the code of its softmax layers. Convert the "
            "model as it was loaded, and compile it afterwards."
        )
    if is_mhla:
        raise ValueError(f"This {called} ({name}) is MHLA already; load its softmax original to convert it again.")
    mhla_class_for(name)
    _check_bare(model, called)


def _check_bare(model: Any, called: str) -> None:
    """Checks that a model's weights are all there as plain floats, and that no hook has its class's methods."""
    name = type(model).__name__
    for key, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(
                f"Parts of this {called} ({name}) are offloaded or have no weights ({key}). Load it without "
                "offloading to convert it, or convert its directory."
            )
        if parameter.dtype not in FLOATS or type(parameter.data) is not torch.Tensor:
            raise ValueError(
                f"This {called} ({name}) has weights that are quantised, sharded or stored in 8 bits ({key}: "
                f"{parameter.dtype}). Convert the original weights; quantise, shard or cast afterwards."
            )
    hooked = next((key for key, module in model.named_modules() if _has_other_forward(module)), None)
    if hooked is not None:
        raise ValueError(
            f"This {called} ({name}) has hooks{f' on {hooked}' if hooked else ''} (offloading, device_map, layer-wise "
            "casting, caching) that would go on calling the methods of its class. Convert it before they are put on, "
            "or take them off: remove_all_hooks() of the pipeline, or accelerate's remove_hook_from_module(model, "
            "recurse=True)."
        )


def check_options(model: Any, mhla: MHLAConfig | Mapping[str, Any] | None) -> MHLAConfig:
    """Returns options as the converted model would keep them.

    Raises:
        ValueError: If an option is wrong or does not fit the model.
    """
    target = mhla_class_for(type(model).__name__)
    options = target.resolve_options(mhla, model.config)
    options.mhla_layers(len(target._self_attentions(model)))
    return options


def _has_other_forward(module: nn.Module) -> bool:
    """Returns whether a module's `forward` was replaced by anything but the method of its own class."""
    forward = module.__dict__.get("forward")
    return forward is not None and getattr(forward, "__func__", None) is not type(module).forward
