# SPDX-License-Identifier: Apache-2.0
"""Adapters with MHLA parameters: peft checks that their base has such layers, and diffusers' pipelines load them."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ..utils.compat import wrap
from .import_hooks import extend


MODULE = "mhla"


def register_with_peft() -> None:
    """Checks every adapter against its base model, now or as soon as peft is imported."""
    extend("peft", "peft.tuners.tuners_utils", _extend_tuners)


def _extend_tuners(module: ModuleType) -> None:
    wrap("peft", module.BaseTuner, "inject_adapter", _inject_adapter)


def _inject_adapter(original: Any, tuner: Any, model: Any, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
    """peft refuses an adapter with `modules_to_save=["mhla"]` on a model without MHLA layers.

    peft itself ignores names that it does not find, and weights that have no place: the adapter would run on softmax
    attention, and its MHLA parameters would be lost.
    """
    check_base(model, getattr(tuner.peft_config[adapter_name], "modules_to_save", None))
    return original(tuner, model, adapter_name, *args, **kwargs)


def extend_lora_loaders(module: ModuleType) -> None:
    """Lets `load_lora_weights` of diffusers' pipelines take files with MHLA parameters.

    Args:
        module: `diffusers.loaders.lora_pipeline`.
    """
    for name in ("WanLoraLoaderMixin", "SanaLoraLoaderMixin"):
        if hasattr(module, name):
            wrap("diffusers", getattr(module, name), "load_lora_weights", _load_lora_weights)


def _load_lora_weights(original: Any, pipeline: Any, source: Any, adapter_name: Any = None, **kwargs: Any) -> Any:
    """`load_lora_weights` of diffusers' pipelines takes files that hold MHLA parameters beside those of a LoRA.

    diffusers takes names with "lora" only there, although its models load other modules of an adapter.
    """
    into = "transformer_2" if kwargs.get("load_into_transformer_2") else "transformer"
    model = getattr(pipeline, into)
    if not hasattr(model, "mhla_modules"):
        return original(pipeline, source, adapter_name=adapter_name, **kwargs)
    taken = ("load_into_transformer_2", "low_cpu_mem_usage", "hotswap", "return_lora_metadata")
    where = {key: value for key, value in kwargs.items() if key not in taken}
    weights, metadata = pipeline.lora_state_dict(source, return_lora_metadata=True, **where)
    prefix = f"{pipeline.transformer_name}."
    carried = {key.removeprefix(prefix): value for key, value in weights.items() if f".{MODULE}." in key}
    if not carried:
        return original(pipeline, source, adapter_name=adapter_name, **kwargs)
    modules = (metadata or {}).get(f"{prefix}modules_to_save")
    if kwargs.get("hotswap") or MODULE not in (modules or ()):
        raise ValueError(
            f"This LoRA holds MHLA parameters, which need modules_to_save=['{MODULE}'] in its metadata, and "
            "cannot be hot-swapped. Save it with `save_lora_adapter` of the model, or give `save_lora_weights` "
            "transformer_lora_adapter_metadata=model.peft_config[...].to_dict()."
        )
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    wrong = [
        key
        for key, value in carried.items()
        if shapes.get(key, shapes.get(key.replace(f".{MODULE}.", f".{MODULE}.original_module."))) != value.shape
    ]
    if wrong:
        raise ValueError(
            f"The MHLA parameters of this LoRA are not those of the {into}: {len(wrong)} of them, such as "
            f"{min(wrong)}. Load it onto a model with the layers and options that it was trained with."
        )
    pipeline.load_lora_into_transformer(
        weights, transformer=model, adapter_name=adapter_name, metadata=metadata, _pipeline=pipeline
    )


def check_base(model: Any, modules_to_save: Any) -> None:
    """Compares an adapter's configuration with the model that it is put on.

    Raises:
        ValueError: If it names MHLA's parameters and the model has none.
    """
    wanted = [name for name in modules_to_save or () if name.rpartition(".")[2] == MODULE]
    if wanted and not any(name.rpartition(".")[2] == MODULE for name, _ in model.named_modules()):
        raise ValueError(
            f"modules_to_save={wanted} needs a base model with MHLA layers, but {type(model).__name__} has none. Load "
            "it with attn_implementation='mhla' (the adapter's own base if it was saved after conversion), or call "
            "mhla_hf.convert(model) with the options that the adapter was trained with."
        )
