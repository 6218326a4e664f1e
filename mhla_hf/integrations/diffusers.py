# SPDX-License-Identifier: Apache-2.0
"""MHLA models in diffusers: as names of its namespace, in its loaders, in `from_pipe` and in saved pipelines.

A pipeline's `model_index.json` names each component as `[library, class]`. Pipelines are saved with this package as
the library of their MHLA models, so that diffusers' own error names it where it is not imported. It is registered as a
library that diffusers loads from, so that a file of that name in a repository (`mhla_hf.models.stub`) is not run.
Indices of earlier versions name `diffusers`, and so do configurations of models: `diffusers.MHLA…` resolves to the
classes, whose own module is this package: pickles import it by that name. Nothing is imported before it is asked for:
importing diffusers takes seconds.

`attn_implementation="mhla"`, or options as `mhla`, load a softmax model or pipeline as MHLA; `None` loads it as it
was saved, `"softmax"` refuses MHLA checkpoints.

`WanTransformer3DModel.from_pretrained` of an MHLA directory would drop its trained weights with a warning, also where
modular pipelines and hand-edited indices name that class. Here it returns the MHLA model instead, as diffusers itself
does for classes that were renamed; subclasses and other models refuse.

`Pipeline.from_pipe` takes over the models whose class is the very one of the new pipeline's type hints. An MHLA class
is a subclass of that, so it is handed over as if the caller had named it.

A pipeline notes the class of a component when it is given one. As the pipeline is saved, the index gets the present
class where a model was converted since.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Collection, Mapping
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from ..config import MHLAConfig
from ..models import registry
from ..models.registry import FAMILIES, LIBRARY, MHLA_CLASSES, is_mhla_class
from ..models.single_file import own_weights
from ..utils.compat import after_import, extend, extend_method, wrap
from ..utils.compat import diffusers as compat
from ..utils.locations import LOCATION_OPTIONS, PIPELINE_INDEX
from ..utils.messages import shorten_value


# In names of weights: as this package saves them, and as the authors of MHLA do.
_MHLA_WEIGHTS = (".mhla.", ".block_attn.")
_OPTIONS = frozenset(field.name for field in dataclasses.fields(MHLAConfig))
NO_VERSION = f"has an MHLA version. Supported: {', '.join(sorted(FAMILIES))}."
"""End of the error for a pipeline without a model that can be MHLA."""

_NO_SOFTMAX = (
    "is an MHLA checkpoint; attn_implementation='softmax' would drop its trained weights. Load the softmax original "
    "that it was converted from, or use None."
)

# Arguments of `DiffusionPipeline.download` that locate the files of a Hub repository.
_DOWNLOAD_OPTIONS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "token")
# Options of the models that a pipeline that is being loaded wants as MHLA, by their folders.
_wanted: ContextVar[Mapping[str, Any]] = ContextVar("_wanted", default=MappingProxyType({}))


def register_with_diffusers() -> None:
    """Register the MHLA classes with diffusers, now or when it is imported; a second call is a no-op.

    Unsupported versions of diffusers only learn the names, which raise an error with the supported range.
    """
    after_import("diffusers", _extend_namespace)
    for method in _METHODS:
        extend_method("diffusers", *method)
    others: dict[str, Any] = {
        "loaders.lora_pipeline": _wrap_lora_loaders,
        "utils.hub_utils": partial(compat.hook_uploads, around=upload),
        "pipelines.pipeline_utils": lambda _: compat.register_library(LIBRARY, sys.modules[LIBRARY]),
    }
    for module, callback in others.items():
        extend("diffusers", f"diffusers.{module}", callback)


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
        # The model was neither saved nor loaded.
        name = FAMILIES[model_class.__name__].mhla_class
    if not isinstance(name, str) or name not in MHLA_CLASSES:
        return None
    target = MHLA_CLASSES[name].load_class()
    if issubclass(model_class, target):
        return None
    if model_class.__name__ == MHLA_CLASSES[name].upstream and issubclass(target, model_class):
        return target
    raise ValueError(f"This is an MHLA checkpoint, which {model_class.__name__} would load without MHLA. Use {name}.")


def _load_model(original: Any, cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Loaders of softmax classes return MHLA models for MHLA checkpoints, and where the caller asks for them.

    `from_pretrained` of other classes needs no look at the configuration: their `from_config` refuses it.
    """
    method, target = original.__name__, None
    location = next(iter(args), kwargs.get("pretrained_model_name_or_path", kwargs.get("config")))
    is_wanted = method == "from_pretrained" and str(location) in _wanted.get()
    if is_wanted:
        kwargs["mhla"] = _wanted.get()[str(location)]
    asked = registry.attention_request(cls.__name__, kwargs)
    if isinstance(location, Mapping):
        target = mhla_class_of(cls, location)
    elif cls.__name__ in FAMILIES and location is not None and method != "from_single_file" and not is_wanted:
        where = {name: kwargs[name] for name in LOCATION_OPTIONS if name in kwargs}
        target = mhla_class_of(cls, cls.load_config(location, **where))
    if target is not None and asked == "softmax":
        raise ValueError(f"This {_NO_SOFTMAX}")
    if target is None and asked == "mhla" and cls.__name__ in FAMILIES:
        target = FAMILIES[cls.__name__].load_class()
    return original(cls, *args, **kwargs) if target is None else getattr(target, method)(*args, **kwargs)


def _load_auto(original: Any, cls: Any, *args: Any, **kwargs: Any) -> Any:
    """`AutoModel` asks for no trust in a repository's code that only imports this package."""
    try:
        return original(cls, *args, **kwargs)
    except ValueError:
        # The two methods name their first argument differently.
        first = next((name for name in kwargs if name.startswith("pretrained_model_")), "")
        location, *rest = args or [kwargs.pop(first, None)]
        name = None
        if not kwargs.pop("trust_remote_code", None):
            where = {name: kwargs[name] for name in LOCATION_OPTIONS if name in kwargs}
            any_class = next(iter(MHLA_CLASSES.values())).load_class()
            config = location if isinstance(location, Mapping) else any_class.load_config(location, **where)
            name = config.get("_class_name")
            location = config if original.__name__ == "from_config" else location
        if name not in MHLA_CLASSES:
            raise
        return getattr(MHLA_CLASSES[name].load_class(), original.__name__)(location, *rest, **kwargs)


def _should_convert(original: Any, model_state_dict: Any, checkpoint_state_dict: Any) -> Any:
    """`from_single_file` reads all files of ComfyUI, and refuses those with MHLA weights, which it would leave out."""
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
    own = own_weights(checkpoint_state_dict)
    if model_state_dict.keys() <= own.keys() and own is not checkpoint_state_dict:
        # Names of diffusers behind ComfyUI's prefix, which diffusers takes off other names alone.
        checkpoint_state_dict.clear()
        checkpoint_state_dict.update(own)
    return original(model_state_dict, checkpoint_state_dict)


# Pipelines.


def _load_pipeline(original: Any, cls: Any, *args: Any, **kwargs: Any) -> Any:
    """`from_pretrained` of pipelines takes `attn_implementation` and `mhla`; see `mhla_hf.load_pipeline`.

    MHLA models that are handed over take part too: the general class drops optional components, of any kind.
    """
    are_ours = any(is_mhla_class(type(part).__name__) for part in kwargs.values())
    if not (are_ours or {"attn_implementation", "mhla"} & kwargs.keys()):
        return original(cls, *args, **kwargs)
    import diffusers

    from ..models.directory import ModelDirectory, find_pipeline, read_pipeline
    from ..models.weight_files import check_weights

    given, mhla = dict(kwargs), kwargs.pop("mhla", None)
    asked = kwargs.pop("attn_implementation", None if mhla is None else "mhla")
    location, *rest = args or [kwargs.pop("pretrained_model_name_or_path", None)]
    options = {name: kwargs.pop(name) for name in _DOWNLOAD_OPTIONS if name in kwargs}
    options.update({name: kwargs[name] for name in ("use_safetensors", "variant") if name in kwargs})
    root = find_pipeline(location, **options)
    if not (root / PIPELINE_INDEX).is_file() and (root / "config.json").is_file():
        raise ValueError(
            f"{location} is a model without a pipeline: load it with from_pretrained of its class, with "
            "attn_implementation='mhla'."
        )
    index, configs = read_pipeline(root, kwargs)
    models = {name: ModelDirectory(str(location), root, index, configs, name) for name in configs}
    if not models and asked != "mhla":
        # Nothing of this package's: diffusers knows what other values mean to it.
        return original(cls, *args, **given)
    registry.check_attention(asked, mhla)
    # Pipelines with code of their own name a file and a class.
    class_name = index["_class_name"] if isinstance(index["_class_name"], str) else index["_class_name"][-1]
    # The class that the index names: the general one drops the optional components of a pipeline that it is given.
    pipeline_class = cls if cls is not diffusers.DiffusionPipeline else getattr(diffusers, class_name, None)
    if pipeline_class is None:
        raise ValueError(f"{location} is a {class_name}, which diffusers {diffusers.__version__} does not have.")
    if not models:
        raise ValueError(f"No component of {class_name} in {location} {NO_VERSION}")
    chosen = {}
    if asked == "mhla":
        # Where one expert was converted and the other was not, that choice stays until the other is named.
        converted = {name: model for name, model in models.items() if model.is_mhla}
        chosen = options_by_component(mhla, models if is_by_component(mhla, models) else converted or models)
    for name, model in models.items():
        if name in kwargs and (name in chosen or asked == "softmax"):
            _check_given_component(name, kwargs[name], asked, chosen.pop(name, None))
        elif asked == "softmax" and model.is_mhla:
            raise ValueError(f"The {name} of {location} {_NO_SOFTMAX}")
    for name, own in chosen.items():
        # Wrong options fail before weights are loaded.
        target = registry.mhla_class_for(models[name].class_name)
        chosen[name] = target.options_for(configs[name], own, models[name].vae_compression)
        chosen[name].mhla_layers(target.layer_count(configs[name]))
    for name, entry in index.items():
        if isinstance(entry, list) and name not in kwargs:
            check_weights(root / name)
    token = _wanted.set({str(root / name): own for name, own in chosen.items()})
    try:
        pipeline = original(pipeline_class, root, *rest, **kwargs)
    finally:
        _wanted.reset(token)
    left = [name for name in chosen if not is_mhla_class(type(getattr(pipeline, name)).__name__)]
    if left:
        raise RuntimeError(f"This version of diffusers loads components in another way: {', '.join(left)} is softmax.")
    return pipeline


def options_by_component(mhla: MHLAConfig | Mapping[str, Any] | None, components: Collection[str]) -> dict[str, Any]:
    """Return the options of each component that becomes MHLA.

    Args:
        mhla: Options for all components alike, or a dict of options by name of a component. In the latter, components
            that are not named, or named with `None`, stay as they are.
        components: Names of the components that have an MHLA version.

    Returns:
        The options of each component that becomes MHLA.

    Raises:
        ValueError: If a name is none of the components, or no component is left to become MHLA.
    """
    if not is_by_component(mhla, components):
        return dict.fromkeys(components, mhla)
    assert isinstance(mhla, Mapping)
    allowed = ", ".join(components)
    for name in mhla:
        if name not in components:
            what = "an option; give it to each component" if name in _OPTIONS else "not a component that can be MHLA"
            raise ValueError(f"mhla names {shorten_value(name)}, which is {what}: {allowed}.")
    chosen = {name: mhla[name] for name in components if mhla.get(name) is not None}
    if not chosen:
        raise ValueError(f"mhla leaves every component as it is; give options for one of {allowed}.")
    return chosen


def is_by_component(mhla: MHLAConfig | Mapping[str, Any] | None, components: Collection[str]) -> bool:
    """Return whether options are by component: one key names a component, or is unknown and holds options.

    Args:
        mhla: Options of either kind.
        components: See [`options_by_component`].
    """
    if not isinstance(mhla, Mapping):
        return False
    return any(
        name in components or (name not in _OPTIONS and isinstance(options, (Mapping, MHLAConfig)))
        for name, options in mhla.items()
    )


def _check_given_component(name: str, component: Any, attn_implementation: str | None, mhla: Any) -> None:
    """Refuse a component passed in that contradicts the other arguments."""
    contradicts = mhla is not None or is_mhla_class(type(component).__name__) != (attn_implementation == "mhla")
    if component is not None and contradicts:
        raise ValueError(
            f"attn_implementation={attn_implementation!r} and mhla options have no effect on {name}, which is passed "
            f"in as a {type(component).__name__}; convert it before."
        )


def _refuse_request(original: Any, owner: Any, *args: Any, **kwargs: Any) -> Any:
    """Loaders of pipelines that cannot be asked for MHLA refuse."""
    if kwargs.get("attn_implementation") == "mhla" or kwargs.get("mhla") is not None:
        raise ValueError(
            f"{original.__qualname__} takes no attn_implementation='mhla' and no mhla: leave them out, and convert "
            "the model afterwards by mhla_hf.convert(pipeline.transformer)."
        )
    return original(owner, *args, **kwargs)


def _attention_backend(original: Any, *args: Any, **kwargs: Any) -> Any:
    """`set_attention_backend` and `attention_backend` refuse MHLA: they choose how softmax attention is computed."""
    if any(isinstance(name, str) and name.lower() == "mhla" for name in (*args, *kwargs.values())):
        raise ValueError("MHLA is no attention backend: load with attn_implementation='mhla', or use mhla_hf.convert.")
    return original(*args, **kwargs)


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
    return _refuse_request(original, cls, pipeline, **kwargs)


def _save_pipeline(original: Any, pipeline: Any, *args: Any, **kwargs: Any) -> Any:
    from ..models.weight_files import check_saved

    parts = _mhla_parts(pipeline)
    for part in pipeline.components.values() if parts else ():
        # Before the first of them is written.
        check_saved(part)
    for name, part in parts.items():
        pipeline.register_to_config(**{name: (LIBRARY, type(part).__name__)})
    return original(pipeline, *args, **kwargs)


def _save_modular_pipeline(original: Any, pipeline: Any, *args: Any, **kwargs: Any) -> Any:
    for name, part in _mhla_parts(pipeline).items():
        entry = pipeline.config.get(name)
        if isinstance(entry, (list, tuple)) and len(entry) == 3:
            compat.set_modular_component_type(pipeline, name, type(part))
            named = (LIBRARY, type(part).__name__)
            pipeline.register_to_config(**{name: (*named, {**entry[2], "type_hint": named})})
    return original(pipeline, *args, **kwargs)


def upload(original: Any, pushed: Any, working_dir: Any, *args: Any, **kwargs: Any) -> Any:
    """Add what loads them by `trust_remote_code=True`, and tags, to pushed models and pipelines of both libraries."""
    from ..models.stub import add_stub

    add_stub(Path(working_dir))
    return original(pushed, working_dir, *args, **kwargs)


# Adapters.


def _wrap_lora_loaders(module: ModuleType) -> None:
    for owner in list(vars(module).values()):
        if isinstance(owner, type) and "load_lora_weights" in vars(owner):
            wrap("diffusers", owner, "load_lora_weights", _load_lora_weights)


def _load_lora_weights(
    original: Any,
    pipeline: Any,
    pretrained_model_name_or_path_or_dict: Any,
    adapter_name: Any = None,
    hotswap: bool = False,
    **kwargs: Any,
) -> Any:
    """`load_lora_weights` of diffusers' pipelines takes files that hold MHLA parameters beside those of a LoRA.

    diffusers takes names with "lora" only there, although its models load other modules of an adapter.
    """
    source, options = pretrained_model_name_or_path_or_dict, {**kwargs, "adapter_name": adapter_name}
    into = "transformer_2" if kwargs.get("load_into_transformer_2") else "transformer"
    model: Any = getattr(pipeline, into, None)
    if not hasattr(model, "mhla_modules"):
        return original(pipeline, source, hotswap=hotswap, **options)
    taken = ("load_into_transformer_2", "low_cpu_mem_usage", "return_lora_metadata")
    where = {key: value for key, value in kwargs.items() if key not in taken}
    # Conversions of names empty the dict that they are given.
    weights, metadata = pipeline.lora_state_dict(
        dict(source) if isinstance(source, Mapping) else source, return_lora_metadata=True, **where
    )
    prefix = f"{pipeline.transformer_name}."
    carried = {
        key.removeprefix(prefix): value for key, value in weights.items() if ".mhla." in key and ".lora_" not in key
    }
    if not carried:
        return original(pipeline, source, hotswap=hotswap, **options)
    others = [key for key in weights if not key.startswith(prefix)]
    if hotswap or others:
        why = f"come with weights for other models here ({min(others)})" if others else "cannot be hot-swapped"
        raise ValueError(f"This LoRA holds MHLA parameters, which {why}: load a file with the {into}'s weights alone.")
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
    # Past the pipeline's own method, which some families give more arguments.
    model.load_lora_adapter(
        weights, prefix=pipeline.transformer_name, adapter_name=adapter_name, metadata=metadata, _pipeline=pipeline
    )


_METHODS: tuple[tuple[str, str, str, Any], ...] = (
    ("configuration_utils", "ConfigMixin", "from_config", _load_model),
    ("models.modeling_utils", "ModelMixin", "from_pretrained", _load_model),
    ("models.modeling_utils", "ModelMixin", "set_attention_backend", _attention_backend),
    ("models.attention_dispatch", "", "attention_backend", _attention_backend),
    ("models.auto_model", "AutoModel", "from_pretrained", _load_auto),
    ("models.auto_model", "AutoModel", "from_config", _load_auto),
    ("loaders.single_file_model", "FromOriginalModelMixin", "from_single_file", _load_model),
    ("loaders.single_file_model", "", "_should_convert_state_dict_to_diffusers", _should_convert),
    ("loaders.single_file", "FromSingleFileMixin", "from_single_file", _refuse_request),
    ("pipelines.pipeline_utils", "DiffusionPipeline", "from_pretrained", _load_pipeline),
    ("pipelines.pipeline_utils", "DiffusionPipeline", "from_pipe", _from_pipe),
    ("pipelines.pipeline_utils", "DiffusionPipeline", "save_pretrained", _save_pipeline),
    ("modular_pipelines.modular_pipeline", "ModularPipeline", "from_pretrained", _refuse_request),
    ("modular_pipelines.modular_pipeline", "ModularPipeline", "load_components", _refuse_request),
    ("modular_pipelines.modular_pipeline", "ModularPipeline", "save_pretrained", _save_modular_pipeline),
)
"""Modules, classes and methods of diffusers, and what runs around these."""
