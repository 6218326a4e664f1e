# SPDX-License-Identifier: Apache-2.0
"""Changes to transformers: methods of models and pipelines, two attributes of configurations, and three registries.

Models that do not ask for MHLA pass through unchanged.
"""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from ...config import MHLAConfig, with_overrides
from ...models.registry import check_attention
from ...utils.compat import attribute, has_mhla, is_mhla, wrap
from ...utils.compat.transformers import initialize_once, reported_names
from ...utils.messages import check_choice
from ..diffusers import upload


# Attributes of models: whether those that were asked for MHLA were saved as such, and which names a checkpoint lacked.
_STORED, _MISSING = "_was_stored_as_mhla", "_missing_in_checkpoint"


class _MHLAOptions:
    """The attribute `mhla` of every configuration: None or plain JSON types, kept in the instance like any other.

    A dict of some options is laid over the options of a model that was made already; set None first to drop those.
    """

    def __get__(self, config: Any, owner: Any = None) -> Any:
        return self if config is None else config.__dict__.get("mhla")

    def __set__(self, config: Any, value: Any) -> None:
        if isinstance(value, MHLAConfig):
            value = value.given_options()
        stored = config.__dict__.get("mhla")
        if isinstance(stored, Mapping) and isinstance(value, Mapping):
            from .configuration import is_complete, warn_of_changes

            if is_complete(stored) and not is_complete(value):
                # Single options given over a checkpoint's own, as `from_pretrained(..., mhla={...})` does.
                warn_of_changes(stored, value)
                value = with_overrides(stored, value)
        config.__dict__["mhla"] = value


class _WeightsFile:
    """The attribute `transformers_weights` of every configuration, which hides the entry that refuses MHLA models."""

    def __get__(self, config: Any, owner: Any = None) -> Any:
        if config is None:
            return self
        try:
            value = config.__dict__["transformers_weights"]
        except KeyError:
            raise AttributeError("transformers_weights") from None
        return None if _is_refusal(value) else value

    def __set__(self, config: Any, value: Any) -> None:
        if not _is_refusal(value):
            config.__dict__["transformers_weights"] = value

    def __delete__(self, config: Any) -> None:
        # transformers removes the entry before it saves a configuration; that refusal has to stay.
        if not _is_refusal(config.__dict__["transformers_weights"]):
            del config.__dict__["transformers_weights"]


def _is_refusal(value: Any) -> bool:
    from ...models.stub import is_refusal

    return is_refusal(value)


def install_configuration(module: ModuleType) -> None:
    """Let `from_pretrained(..., mhla={...})` land on the configuration.

    Args:
        module: `transformers.configuration_utils`.
    """
    if not hasattr(module.PreTrainedConfig, "mhla"):
        # Without an annotation: configurations are dataclasses, and this must not become one of their fields.
        module.PreTrainedConfig.mhla = _MHLAOptions()
        module.PreTrainedConfig.transformers_weights = _WeightsFile()


def install(module: ModuleType) -> None:
    """Register the attention and let models that ask for MHLA be built with their parameters.

    Args:
        module: `transformers.modeling_utils`.

    Raises:
        UnsupportedVersionError: If transformers builds models in an unknown way; nothing is changed then.
    """
    from transformers import configuration_utils

    for name in _METHODS:
        attribute("transformers", module.PreTrainedModel, name, "PreTrainedModel")
    for name, around in _METHODS.items():
        wrap("transformers", module.PreTrainedModel, name, around)
    install_configuration(configuration_utils)
    # Registers itself; by name, since it may be what is importing transformers just now.
    importlib.import_module(".functions", __package__)


def refuse(module: ModuleType, reason: ImportError) -> None:
    """Let an unsupported version of transformers refuse MHLA with the reason, in place of an error of its own.

    Args:
        module: `transformers.modeling_utils`.
        reason: The error to raise.
    """
    from transformers import configuration_utils

    def build(original: Any, model: Any, config: Any = None, *args: Any, **kwargs: Any) -> None:
        asked = [getattr(config, name, None) for name in ("_attn_implementation", "attn_implementation")]
        names = [name for one in asked for name in (one.values() if isinstance(one, dict) else [one])]
        if "mhla" in names or getattr(config, "mhla", None) is not None:
            raise reason
        original(model, config, *args, **kwargs)

    install_configuration(configuration_utils)
    wrap("transformers", module.PreTrainedModel, "__init__", build)


def _asks(config: Any) -> bool:
    """Return whether a configuration, or that of a tower, asks for MHLA."""
    towers = (getattr(config, name, None) for name in getattr(config, "sub_configs", ()))
    is_asked = getattr(config, "mhla", None) is not None or getattr(config, "_attn_implementation", None) == "mhla"
    return is_asked or any(_asks(tower) for tower in towers if tower is not None)


def _build(original: Any, model: Any, config: Any, *args: Any, **kwargs: Any) -> None:
    from transformers import PreTrainedConfig

    if isinstance(config, PreTrainedConfig) and _asks(config):
        from .attaching import prepare

        stored = prepare(model, config)
        original(model, config, *args, **kwargs)
        vars(model)[_STORED] = stored
    else:
        original(model, config, *args, **kwargs)


def _finish(original: Any, model: Any) -> None:
    if _asks(model.config):
        from .attaching import attach

        attach(model)
    original(model)
    if has_mhla(model):
        from .attaching import record

        distributed = getattr(model.config, "distributed_config", None)
        if getattr(distributed, "tp_plan", None) is not None or (getattr(distributed, "tp_size", None) or 1) > 1:
            from .tensor_parallel import plan_heads

            plan_heads(model, distributed)
        # Weights that are loaded later cannot be recorded yet.
        record(model)


def _initialize(original: Any, model: Any, module: Any, *args: Any, **kwargs: Any) -> None:
    if is_mhla(module):
        from .attaching import initialize

        initialize_once(module, initialize)
    else:
        original(model, module, *args, **kwargs)
    # The model itself comes last, when every parameter has its value.
    if module is model and _MISSING in vars(model):
        from .attaching import record

        record(model, vars(model).pop(_MISSING))


def _load(
    original: Any, model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *args: Any, **kwargs: Any
) -> Any:
    if not has_mhla(model):
        if vars(model).pop(_STORED, None) is not None:
            raise ValueError(
                f"{type(model).__name__} cannot use attn_implementation='mhla': none of its attention can be MHLA. "
                "mhla_hf.supported_models() lists models that were tested."
            )
        return original(model, state_dict, checkpoint_files, load_config, *args, **kwargs)
    from ...models.weight_files import check_loaded_files, check_no_adapters
    from .attaching import warn_of_fresh
    from .limits import check_layers, check_new_parameters, check_shapes

    # Without a name, the weights are a dictionary that was given.
    location = load_config.pretrained_model_name_or_path or "state_dict"
    pickles = load_config.use_safetensors is False or not vars(model).pop(_STORED, False)
    check_loaded_files(checkpoint_files or (), location, pickles=pickles)
    info, offloaded = original(model, state_dict, checkpoint_files, load_config, *args, **kwargs)
    if not (args or kwargs):
        # Names are given where an adapter is loaded.
        check_no_adapters(info.unexpected_keys, location)
        check_shapes(info.mismatched_keys, load_config.ignore_mismatched_sizes, location)
        check_new_parameters(model, info.missing_keys)
        check_layers(model, *reported_names(model, info), str(model.config.name_or_path))
        setattr(model, _MISSING, set(info.missing_keys))
        warn_of_fresh(model, info.missing_keys)
    return info, offloaded


def _choose(original: Any, model: Any, attn_implementation: Any, *args: Any, **kwargs: Any) -> Any:
    asked = _asked_parts(attn_implementation)
    if asked is None and not has_mhla(model):
        return original(model, attn_implementation, *args, **kwargs)
    from .attaching import convert_transformers_model, switching
    from .towers import implementations

    parts = model.config.sub_configs
    if not has_mhla(model):
        for name in asked or ():
            if name and not parts:
                raise ValueError(f"{type(model).__name__} has no parts to name: set_attn_implementation('mhla').")
            check_choice("the name of a part in attn_implementation", name, parts or ("",))
        if isinstance(attn_implementation, Mapping):
            # What else is asked, and may be wrong.
            others = {name: one for name, one in attn_implementation.items() if _asked_parts(one) is None}
            original(model, others, *args, **kwargs)
        convert_transformers_model(model, asked if parts else None, copy_config=False)
    if attn_implementation == "mhla" and parts:
        # Parts that keep softmax are not meant.
        attn_implementation = implementations(model.config)
    with switching(model):
        return original(model, attn_implementation, *args, **kwargs)


def _asked_parts(attn_implementation: Any) -> dict[str, Any] | None:
    """The parts that are asked to be MHLA, each with empty options: `{}` for a whole model, `None` if nothing is."""
    if not isinstance(attn_implementation, Mapping):
        return {} if attn_implementation == "mhla" else None
    parts = {name: _asked_parts(one) for name, one in attn_implementation.items()}
    return {name: part for name, part in parts.items() if part is not None} or None


def build_pipeline(original: Any, pipeline: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    """Run in place of `Pipeline.__init__`, which gets the arguments that `pipeline(...)` does not know itself."""
    attn_implementation, mhla = kwargs.pop("attn_implementation", None), kwargs.pop("mhla", None)
    if mhla is not None:
        check_attention("mhla" if attn_implementation is None else attn_implementation, mhla)
        from .attaching import convert_transformers_model

        convert_transformers_model(model, mhla)
    elif attn_implementation is not None:
        model.set_attn_implementation(attn_implementation)
    original(pipeline, model, *args, **kwargs)


def prefill(original: Any, model: Any, input_ids: Any, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
    """Run in place of `GenerationMixin._prefill`, so that a prompt in parts is not compiled.

    The first part makes the state. Made within a CUDA graph, it would be overwritten as soon as that runs again.
    """
    if generation_config.prefill_chunk_size is not None and has_mhla(model):
        generation_config = copy.copy(generation_config)
        generation_config.disable_compile = True
    return original(model, input_ids, generation_config, *args, **kwargs)


def _save(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    if not has_mhla(model):
        if _asks(model.config):
            raise ValueError(
                f"This {type(model).__name__} has no MHLA layers, but its configuration, shared by a converted model, "
                "asks for them. Build models from configurations of their own (copy.deepcopy), or convert it too."
            )
        return original(model, *args, **kwargs)
    from .attaching import saving

    given = {**inspect.signature(original).bind_partial(model, *args).arguments, **kwargs}
    with saving(model, given.get("state_dict")) as state_dict:
        return original(**{**given, "state_dict": state_dict})


_METHODS: dict[str, Callable[..., Any]] = {
    # Options go to the towers that they are for, and sizes are checked, before anything is built.
    "__init__": _build,
    # The model is complete, and its weights are neither initialised nor read: the time to attach MHLA.
    "post_init": _finish,
    # Models initialise modules that they know; parameters of MHLA would keep uninitialised memory.
    "_initialize_weights": _initialize,
    # transformers reads every file that an index names, and only reports missing layers.
    "_load_pretrained_model": _load,
    # Weights that were fitted for MHLA are wrong for softmax: each attention gets its own back.
    "set_attn_implementation": _choose,
    # A checkpoint says what was done to its weights, and transformers alone must refuse it, not load it as softmax.
    "save_pretrained": _save,
    # What is pushed can be loaded by `trust_remote_code=True`, and has no NaN.
    "_upload_modified_files": upload,
}
