# SPDX-License-Identifier: Apache-2.0
"""Keeps diffusers' softmax classes from loading MHLA checkpoints without MHLA.

`WanTransformer3DModel.from_pretrained` of an MHLA directory would drop its trained weights with a warning, also where
modular pipelines and hand-edited indices name that class. Here it returns the MHLA model instead, as diffusers itself
does for classes that were renamed; subclasses and other models refuse. [`uninstall`] takes everything back.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType, ModuleType
from typing import Any

from ...models.registry import FAMILIES, MHLA_CLASSES
from ..import_hooks import after_import


# Where a configuration is looked for.
_LOCATION_OPTIONS = (
    "cache_dir",
    "force_download",
    "local_files_only",
    "proxies",
    "revision",
    "subfolder",
    "token",
)
# In names of weights: as this package saves them, and as the authors of MHLA do.
_MHLA_WEIGHTS = (".mhla.", ".block_attn.")

# Directories that are loaded as MHLA whatever class is asked to, with arguments for `from_pretrained`.
_as_mhla: ContextVar[Mapping[str, Mapping[str, Any]]] = ContextVar("as_mhla", default=MappingProxyType({}))

_originals: list[tuple[Any, str, Any]] = []


def guard_softmax_classes() -> None:
    """Changes how diffusers' models are loaded, now or as soon as its modules are imported."""
    after_import("diffusers.configuration_utils", guard_configurations)
    after_import("diffusers.models.modeling_utils", guard_models)
    after_import("diffusers.loaders.single_file_model", guard_single_files)


def uninstall() -> None:
    """Takes back all changes to classes and modules of diffusers that are imported."""
    while _originals:
        owner, name, original = _originals.pop()
        setattr(owner, name, original)


@contextmanager
def loading_as_mhla(directories: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """Makes `from_pretrained` load these directories as MHLA, so that diffusers loads a pipeline's parts as it does.

    Args:
        directories: Arguments for the MHLA class by model directory, as diffusers will name it.
    """
    token = _as_mhla.set(directories)
    try:
        yield
    finally:
        _as_mhla.reset(token)


def mhla_class_of(model_class: Any, config: Mapping[str, Any]) -> Any:
    """The MHLA class that has to load a configuration in place of a softmax class.

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
    where = {name: options[name] for name in _LOCATION_OPTIONS if name in options}
    return mhla_class_of(model_class, model_class.load_config(location, **where))


def guard_configurations(module: ModuleType) -> None:
    """Makes `from_config` of softmax classes return MHLA models for MHLA configurations.

    Args:
        module: `diffusers.configuration_utils`.
    """
    original = module.ConfigMixin.__dict__["from_config"]

    @functools.wraps(original.__func__)
    def from_config(cls: Any, config: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(config, Mapping):
            target = mhla_class_of(cls, config)
            if target is not None:
                return target.from_config(config, *args, **kwargs)
        elif config is not None and cls.__name__ in FAMILIES:
            target = _mhla_class_at(cls, config, kwargs)
            if target is not None:
                return target.from_config(config, *args, **kwargs)
        return original.__func__(cls, config, *args, **kwargs)

    _replace(module.ConfigMixin, "from_config", classmethod(from_config))


def guard_models(module: ModuleType) -> None:
    """Makes `from_pretrained` of softmax classes return MHLA models for MHLA checkpoints.

    Other classes need no look at the configuration beforehand: their `from_config` refuses it.

    Args:
        module: `diffusers.models.modeling_utils`.
    """
    original = module.ModelMixin.__dict__["from_pretrained"]

    @functools.wraps(original.__func__)
    def from_pretrained(cls: Any, pretrained_model_name_or_path: Any = None, *args: Any, **kwargs: Any) -> Any:
        options = _as_mhla.get().get(str(pretrained_model_name_or_path))
        kwargs.update(options or {})
        if cls.__name__ in FAMILIES:
            target = FAMILIES[cls.__name__].load_class() if options is not None else None
            if target is None:
                target = _mhla_class_at(cls, pretrained_model_name_or_path, kwargs)
            if target is not None:
                return target.from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        return original.__func__(cls, pretrained_model_name_or_path, *args, **kwargs)

    _replace(module.ModelMixin, "from_pretrained", classmethod(from_pretrained))


def guard_single_files(module: ModuleType) -> None:
    """Makes `from_single_file` refuse files that hold MHLA weights, which it would leave out.

    Args:
        module: `diffusers.loaders.single_file_model`.
    """
    original = getattr(module, "_should_convert_state_dict_to_diffusers", None)
    if original is None:
        return

    @functools.wraps(original)
    def should_convert(model_state_dict: Any, checkpoint_state_dict: Any) -> Any:
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

    _replace(module, "_should_convert_state_dict_to_diffusers", should_convert)


def _replace(owner: Any, name: str, replacement: Any) -> None:
    current = owner.__dict__[name]
    function = getattr(current, "__func__", current)
    if getattr(function, "guards_mhla", False):
        return
    getattr(replacement, "__func__", replacement).guards_mhla = True
    _originals.append((owner, name, current))
    setattr(owner, name, replacement)
