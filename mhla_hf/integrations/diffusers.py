# SPDX-License-Identifier: Apache-2.0
"""MHLA models in diffusers: as names of its namespace, in its loaders, in `from_pipe` and in saved pipelines.

A pipeline's `model_index.json` names each component as `[library, class]`, and diffusers refuses libraries that it
does not know for Hub repositories. So pipelines are saved with `diffusers` as the library of their MHLA models, and
`diffusers.MHLA…` resolves to the classes, whose own module is this package: pickles import it by that name. Nothing is
imported before it is asked for: importing diffusers takes seconds.

`WanTransformer3DModel.from_pretrained` of an MHLA directory would drop its trained weights with a warning, also where
modular pipelines and hand-edited indices name that class. Here it returns the MHLA model instead, as diffusers itself
does for classes that were renamed; subclasses and other models refuse.

Pipelines on the Hub name this package as the library of their MHLA models (`mhla_hf.models.stub`). It is registered as
a library that diffusers loads from, so that the file of that name in the repository is not run.

`Pipeline.from_pipe` takes over the models whose class is the very one of the new pipeline's type hints. An MHLA class
is a subclass of that, so it is handed over as if the caller had named it.

A pipeline notes the module and class of a component when it is given one. As the pipeline is saved, the index gets
`diffusers` in place of the module, and the present class where a model was converted since.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from ..models.registry import FAMILIES, MHLA_CLASSES, is_mhla_class
from ..utils.compat import after_import, extend, wrap
from ..utils.compat import diffusers as compat
from ..utils.locations import LOCATION_OPTIONS


# In names of weights: as this package saves them, and as the authors of MHLA do.
_MHLA_WEIGHTS = (".mhla.", ".block_attn.")


def register_with_diffusers() -> None:
    """Register the MHLA classes with diffusers, now or when it is imported; a second call is a no-op.

    Unsupported versions of diffusers only learn the names, which raise an error with the supported range.
    """
    after_import("diffusers", _extend_namespace)
    for module, owner, name, around in _METHODS:
        extend("diffusers", f"diffusers.{module}", partial(_wrap, owner, name, around))
    package = __name__.partition(".")[0]
    others: dict[str, Any] = {
        "loaders.single_file_model": partial(compat.hook_single_files, around=_should_convert),
        "utils.hub_utils": partial(compat.hook_uploads, around=_upload),
        "pipelines.pipeline_utils": lambda _: compat.register_library(package, sys.modules[package]),
    }
    for module, callback in others.items():
        extend("diffusers", f"diffusers.{module}", callback)


def _wrap(owner: str, name: str, around: Any, module: ModuleType) -> None:
    # Not every supported version has every loader of LoRAs.
    if hasattr(module, owner) or not owner.endswith("LoraLoaderMixin"):
        wrap("diffusers", getattr(module, owner), name, around)


# Names.


def _extend_namespace(module: ModuleType) -> None:
    base = type(module)
    if getattr(base, "_resolves_mhla_classes", False):
        return

    class DiffusersWithMHLA(base):  # type: ignore[misc, valid-type]
        _resolves_mhla_classes = True

        def __getattr__(self, name: str) -> Any:
            if name in MHLA_CLASSES:
                return MHLA_CLASSES[name].load_class()
            parent: Any = getattr(super(), "__getattr__", super().__getattribute__)
            return parent(name)

        def __dir__(self) -> list[str]:
            return sorted({*super().__dir__(), *MHLA_CLASSES})

    module.__class__ = DiffusersWithMHLA


# Loading.


def mhla_class_of(model_class: Any, config: Mapping[str, Any]) -> Any:
    """Return the MHLA class that has to load a configuration in place of a softmax class.

    Args:
        model_class: The class that was asked to load it.
        config: The configuration.

    Returns:
        The class; `None` if `model_class` may load it itself.

    Raises:
        ValueError: If it is an MHLA configuration and there is no such class for `model_class`.
    """
    name = config.get("_class_name")
    if name is None and isinstance(config.get("mhla"), Mapping) and model_class.__name__ in FAMILIES:
        # Of a model that was neither saved nor loaded.
        name = FAMILIES[model_class.__name__].mhla_class
    if not isinstance(name, str) or name not in MHLA_CLASSES:
        return None
    target = MHLA_CLASSES[name].load_class()
    if issubclass(model_class, target):
        return None
    if model_class.__name__ == MHLA_CLASSES[name].upstream and issubclass(target, model_class):
        return target
    raise ValueError(f"This is an MHLA checkpoint, which {model_class.__name__} would load without MHLA. Use {name}.")


def _mhla_class_at(model_class: Any, location: Any, options: Mapping[str, Any]) -> Any:
    """As [`mhla_class_of`], for the configuration at a location; `options` are those of the loading call."""
    where = {name: options[name] for name in LOCATION_OPTIONS if name in options}
    return mhla_class_of(model_class, model_class.load_config(location, **where))


def _from_config(original: Any, cls: Any, config: Any = None, *args: Any, **kwargs: Any) -> Any:
    """`from_config` of softmax classes returns MHLA models for MHLA configurations."""
    target = None
    if isinstance(config, Mapping):
        target = mhla_class_of(cls, config)
    elif config is not None and cls.__name__ in FAMILIES:
        target = _mhla_class_at(cls, config, kwargs)
    return original(cls, config, *args, **kwargs) if target is None else target.from_config(config, *args, **kwargs)


def _from_pretrained(
    original: Any, cls: Any, pretrained_model_name_or_path: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """`from_pretrained` of softmax classes returns MHLA models for MHLA checkpoints.

    Other classes need no look at the configuration beforehand: their `from_config` refuses it.
    """
    if cls.__name__ in FAMILIES:
        target = _mhla_class_at(cls, pretrained_model_name_or_path, kwargs)
        if target is not None:
            return target.from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
    return original(cls, pretrained_model_name_or_path, *args, **kwargs)


def _from_pretrained_auto(original: Any, cls: Any, location: Any = None, *args: Any, **kwargs: Any) -> Any:
    """`AutoModel.from_pretrained` asks for no trust in a repository's code that only imports this package."""
    try:
        return original(cls, location, *args, **kwargs)
    except ValueError:
        name = None
        if not kwargs.pop("trust_remote_code", None):
            where = {name: kwargs[name] for name in LOCATION_OPTIONS if name in kwargs}
            any_class = next(iter(MHLA_CLASSES.values())).load_class()
            name = any_class.load_config(location, **where).get("_class_name")
        if name not in MHLA_CLASSES:
            raise
        return MHLA_CLASSES[name].load_class().from_pretrained(location, *args, **kwargs)


def _should_convert(original: Any, model_state_dict: Any, checkpoint_state_dict: Any) -> Any:
    """`from_single_file` refuses files that hold MHLA weights, which it would leave out."""
    wanted, found = (
        {name for name in weights if any(part in name for part in _MHLA_WEIGHTS)}
        for weights in (model_state_dict, checkpoint_state_dict)
    )
    if wanted != found:
        example = min(wanted ^ found)
        kind = "MHLA weights" if found else "no MHLA weights"
        raise ValueError(
            f"This file has {kind}, and the model's configuration is of another kind ({example}). Load MHLA "
            "models from their directories, and the authors' checkpoints after mhla-hf import-official."
        )
    return original(model_state_dict, checkpoint_state_dict)


# Pipelines.


def _mhla_parts(pipeline: Any) -> dict[str, Any]:
    """The components that are MHLA, compiled or not, by name."""
    parts = {name: getattr(part, "_orig_mod", part) for name, part in pipeline.components.items()}
    return {name: part for name, part in parts.items() if is_mhla_class(type(part).__name__)}


def _from_pipe(original: Any, cls: Any, pipeline: Any, **kwargs: Any) -> Any:
    ours = {name: part for name, part in pipeline.components.items() if is_mhla_class(type(part).__name__)}
    if ours and kwargs.get("custom_pipeline") is None:
        expected = compat.component_types(cls)
        fitting = {name: part for name, part in ours.items() if isinstance(part, expected.get(name, ()))}
        kwargs = {**fitting, **kwargs}
    return original(cls, pipeline, **kwargs)


def _save_pipeline(original: Any, pipeline: Any, *args: Any, **kwargs: Any) -> Any:
    for name, part in _mhla_parts(pipeline).items():
        pipeline.register_to_config(**{name: ("diffusers", type(part).__name__)})
    return original(pipeline, *args, **kwargs)


def _save_modular_pipeline(original: Any, pipeline: Any, *args: Any, **kwargs: Any) -> Any:
    for name, part in _mhla_parts(pipeline).items():
        entry = pipeline.config.get(name)
        if isinstance(entry, (list, tuple)) and len(entry) == 3:
            compat.set_modular_component_type(pipeline, name, type(part))
            named = ("diffusers", type(part).__name__)
            pipeline.register_to_config(**{name: (*named, {**entry[2], "type_hint": named})})
    return original(pipeline, *args, **kwargs)


def _upload(original: Any, pushed: Any, working_dir: Any, *args: Any, **kwargs: Any) -> Any:
    """Add to models and pipelines that are pushed what loads them by `trust_remote_code=True`, and tags."""
    from ..models.stub import add_stub

    add_stub(Path(working_dir))
    return original(pushed, working_dir, *args, **kwargs)


# Adapters.


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
    carried = {key.removeprefix(prefix): value for key, value in weights.items() if ".mhla." in key}
    if not carried:
        return original(pipeline, source, adapter_name=adapter_name, **kwargs)
    modules = (metadata or {}).get(f"{prefix}modules_to_save")
    if kwargs.get("hotswap") or "mhla" not in (modules or ()):
        raise ValueError(
            "This LoRA holds MHLA parameters, which need modules_to_save=['mhla'] in its metadata, and "
            "cannot be hot-swapped. Save it with `save_lora_adapter` of the model, or give `save_lora_weights` "
            "transformer_lora_adapter_metadata=model.peft_config[...].to_dict()."
        )
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    wrong = [
        key
        for key, value in carried.items()
        if shapes.get(key, shapes.get(key.replace(".mhla.", ".mhla.original_module."))) != value.shape
    ]
    if wrong:
        raise ValueError(
            f"The MHLA parameters of this LoRA are not those of the {into}: {len(wrong)} of them, such as "
            f"{min(wrong)}. Load it onto a model with the layers and options that it was trained with."
        )
    pipeline.load_lora_into_transformer(
        weights, transformer=model, adapter_name=adapter_name, metadata=metadata, _pipeline=pipeline
    )


_METHODS: tuple[tuple[str, str, str, Any], ...] = (
    ("configuration_utils", "ConfigMixin", "from_config", _from_config),
    ("models.modeling_utils", "ModelMixin", "from_pretrained", _from_pretrained),
    ("models.auto_model", "AutoModel", "from_pretrained", _from_pretrained_auto),
    ("loaders.lora_pipeline", "WanLoraLoaderMixin", "load_lora_weights", _load_lora_weights),
    ("loaders.lora_pipeline", "LTXVideoLoraLoaderMixin", "load_lora_weights", _load_lora_weights),
    ("loaders.lora_pipeline", "LTX2LoraLoaderMixin", "load_lora_weights", _load_lora_weights),
    ("loaders.lora_pipeline", "SkyReelsV2LoraLoaderMixin", "load_lora_weights", _load_lora_weights),
    ("loaders.lora_pipeline", "HunyuanVideoLoraLoaderMixin", "load_lora_weights", _load_lora_weights),
    ("loaders.lora_pipeline", "QwenImageLoraLoaderMixin", "load_lora_weights", _load_lora_weights),
    ("loaders.lora_pipeline", "SanaLoraLoaderMixin", "load_lora_weights", _load_lora_weights),
    ("pipelines.pipeline_utils", "DiffusionPipeline", "from_pipe", _from_pipe),
    ("pipelines.pipeline_utils", "DiffusionPipeline", "save_pretrained", _save_pipeline),
    ("modular_pipelines.modular_pipeline", "ModularPipeline", "save_pretrained", _save_modular_pipeline),
)
"""Modules, classes and methods of diffusers, and what runs around these."""
