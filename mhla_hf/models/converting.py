# SPDX-License-Identifier: Apache-2.0
"""Conversion of loaded diffusers models to MHLA and back, in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..config import MHLAConfig
from ..layers.fused import has_own_forward
from ..layers.weight_record import STATE_KEY, check_adapters, original_values
from ..utils.compat.diffusers import kept_in_fp32
from ..utils.tensor_files import FLOATS
from .loading import warn_of_fresh
from .registry import mhla_class_for


def convert_model(
    model: Any, mhla: MHLAConfig | Mapping[str, Any] | None = None, source: str = "the softmax model"
) -> Any:
    """Turn a loaded softmax model into its MHLA version, in place.

    Every weight is kept; the new parameters are initialised in the model's dtype and on its device (float32 where
    the class keeps them so).

    Args:
        model: A supported diffusers model, see [`supported_models`].
        mhla: The options.
        source: Name of the softmax model, for the warning that there are new parameters.

    Returns:
        The same object, now of the MHLA class.

    Raises:
        ValueError: If the model is not supported, is MHLA already, or is compiled, offloaded, hooked or quantised, or
            an option is wrong; the model is left as it was.
    """
    options = check_convertible(model, mhla)
    for module in model.modules():
        # Hooks that were taken off again leave the old class's method behind, which would go before the new one's.
        module.__dict__.pop("forward", None)
    model.__class__ = mhla_class_for(type(model).__name__)
    model._install_mhla(options)
    kept = kept_in_fp32(model)
    attentions = model._self_attentions()
    for layer, module in model.mhla_modules().items():
        weight = attentions[layer].to_q.weight
        module.train(model.training)
        for name, parameter in module.named_parameters():
            dtype = torch.float32 if kept(f"mhla.{name}") else weight.dtype
            parameter.data = parameter.data.to(weight.device, dtype)
    warn_of_fresh(model, [name for name, _ in model.named_parameters() if ".mhla." in name], source)
    return model


def check_convertible(
    model: Any,
    mhla: MHLAConfig | Mapping[str, Any] | None,
    called: str = "model",
    compression: tuple[int, int] | None = None,
) -> MHLAConfig:
    """Check that a diffusers model can be converted in place as it stands, and return the options that it would keep.

    Args:
        model: The model.
        mhla: The options.
        called: Its name in errors.
        compression: See [`MHLAModelMixin.reference_grid`], for a model in a pipeline.

    Raises:
        ValueError: See [`convert_model`].
    """
    original = getattr(model, "_orig_mod", model)
    name, is_mhla = type(original).__name__, hasattr(original, "mhla_modules")
    if is_mhla:
        raise ValueError(f"This {called} ({name}) is MHLA already; load its softmax original to convert it again.")
    if original is not model or any(module._compiled_call_impl is not None for module in model.modules()):
        raise ValueError(
            f"This {called} ({name}) is compiled, and would go on running the code of its softmax layers. Convert the "
            "model as it was loaded, and compile it afterwards."
        )
    if getattr(model, "original_attn_processors", None) is not None:
        raise ValueError(f"This {called} ({name}) has fused projections: call unfuse_qkv_projections() first.")
    target = mhla_class_for(name)
    _check_plain(model, called)
    options = target.resolve_options(mhla, model.config, compression)
    options.mhla_layers(len(target._self_attentions(model)))
    return options


def unconvert_model(model: Any) -> Any:
    """Turn an MHLA model of diffusers that [`check_unconvertible`] accepts back into its softmax original, in place.

    Args:
        model: The model.

    Returns:
        The same object, now of the softmax class.

    Raises:
        ValueError: If its pretrained weights are not known; it is left as it was.
    """
    from accelerate import init_empty_weights

    values, target = original_values(model, "restore softmax attention"), model._upstream_class()
    config = {name: value for name, value in model.config.items() if name not in ("mhla", STATE_KEY)}
    with init_empty_weights(include_buffers=False):
        restored = target.from_config({**config, "_class_name": target.__name__})
    tensors = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if ".mhla." not in name}
    # Refuses fused projections, before anything changes.
    restored.load_state_dict(tensors, assign=True)
    with torch.no_grad():
        for name, value in values.items():
            tensors[name].copy_(value)
    for name, buffer in model.named_buffers():
        owner, _, own = name.rpartition(".")
        restored.get_submodule(owner)._buffers[own] = buffer
    restored.train(model.training)
    if model.is_gradient_checkpointing:
        restored.enable_gradient_checkpointing()
    model.__class__ = target
    vars(model).clear()
    vars(model).update(vars(restored))
    return model


def check_unconvertible(model: Any) -> None:
    """Check that [`unconvert_model`] can turn a model back as it stands, with any weights.

    Raises:
        ValueError: If it is no MHLA model, is compiled, offloaded, hooked or quantised, or has adapters or fused
            projections.
    """
    if not hasattr(model, "mhla_modules"):
        raise ValueError(f"A {type(model).__name__} is no MHLA model of diffusers: take the one inside.")
    _check_plain(model, "model")
    check_adapters(model)


def _check_plain(model: Any, called: str) -> None:
    """Check that a model's weights are all there as plain floats, and that no hook has its class's methods."""
    name = type(model).__name__
    for key, parameter in model.named_parameters():
        if parameter.is_meta or parameter.dtype not in FLOATS or type(parameter.data) is not torch.Tensor:
            raise ValueError(
                f"This {called} ({name}) has weights that are offloaded, quantised, sharded or stored in 8 bits "
                f"({key}: {parameter.dtype} on {parameter.device}). Convert the original weights; offload, quantise, "
                "shard or cast afterwards."
            )
    for key, module in model.named_modules():
        if has_own_forward(module):
            raise ValueError(
                f"This {called} ({name}) has hooks{f' on {key}' if key else ''} (offloading, device_map, layer-wise "
                "casting, caching) that would go on calling the methods of its class. Convert it before they are put "
                "on, or take them off: remove_all_hooks() of the pipeline, or accelerate's "
                "remove_hook_from_module(model, recurse=True)."
            )
