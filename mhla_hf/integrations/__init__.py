# SPDX-License-Identifier: Apache-2.0
"""MHLA in transformers, diffusers and peft: each is extended right after its own import, which is never forced."""

from __future__ import annotations

from typing import Any

from ..utils.compat import extend_method


def register_with_peft() -> None:
    """Check the base model of every adapter, now or as soon as peft is imported."""
    for name, around in (("inject_adapter", _inject), ("_inject_parameters", _inject_parameters)):
        extend_method("peft", "tuners.tuners_utils", "BaseTuner", name, around)


def _inject(original: Any, tuner: Any, model: Any, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
    """Refuse adapters with `modules_to_save=["mhla"]` on models without MHLA layers, and MHLA parameters without it.

    peft ignores names that it does not find, and weights that have no place: the adapter would run on softmax
    attention, and its MHLA parameters would be lost.
    """
    carried = any(".mhla." in name and ".lora_" not in name for name in kwargs.get("state_dict") or ())
    given = getattr(tuner.peft_config[adapter_name], "modules_to_save", None)
    wanted = [name for name in given or () if name.rpartition(".")[2] == "mhla"]
    if wanted and not any(name.rpartition(".")[2] == "mhla" for name, _ in model.named_modules()):
        raise ValueError(
            f"modules_to_save={wanted} needs a base model with MHLA layers, but {type(model).__name__} has none. Load "
            "it with attn_implementation='mhla' (the adapter's own base if it was saved after conversion), or call "
            "mhla_hf.convert(model) with the options that the adapter was trained with."
        )
    if carried and not wanted:
        raise ValueError(
            "This LoRA holds MHLA parameters, which need modules_to_save=['mhla'] in its metadata. Save it with "
            "`save_lora_adapter` of the model, or give `save_lora_weights` "
            "transformer_lora_adapter_metadata=model.peft_config[...].to_dict()."
        )
    return original(tuner, model, adapter_name, *args, **kwargs)


def _inject_parameters(original: Any, tuner: Any, peft_config: Any, model: Any, **kwargs: Any) -> Any:
    """Leave MHLA out of target parameters that do not name it.

    peft takes the end of a name, and on models with experts turns the target modules `gate` and `all-linear` into the
    parameter `gate.weight` of the router, which MHLA's output gate is called too.
    """
    if any("mhla" in name.split(".") for name in peft_config.target_parameters):
        return original(tuner, peft_config=peft_config, model=model, **kwargs)
    names = model.named_modules
    # peft replaces modules while it goes through them.
    model.named_modules = lambda *given, **more: (
        item for item in names(*given, **more) if "mhla" not in item[0].split(".")
    )
    try:
        return original(tuner, peft_config=peft_config, model=model, **kwargs)
    finally:
        del model.named_modules
