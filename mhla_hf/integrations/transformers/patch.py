# SPDX-License-Identifier: Apache-2.0
"""What is changed in transformers: six methods of `PreTrainedModel`, one constructor, one attribute, three registries.

Models that do not ask for MHLA pass through unchanged. [`uninstall`] takes everything back.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from ...config import MHLAConfig, laid_over
from .options import is_complete, warn_of_changes


_originals: dict[str, Any] = {}


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
        if is_complete(stored) and isinstance(value, Mapping) and not is_complete(value):
            # Single options given over a checkpoint's own, as `from_pretrained(..., mhla={...})` does.
            warn_of_changes(stored, value)
            value = laid_over(stored, value)
        config.__dict__["mhla"] = value


def install_configuration(module: ModuleType) -> None:
    """Lets `from_pretrained(..., mhla={...})` land on the configuration.

    Args:
        module: `transformers.configuration_utils`.
    """
    if not hasattr(module.PreTrainedConfig, "mhla"):
        # Without an annotation: configurations are dataclasses, and this must not become one of their fields.
        module.PreTrainedConfig.mhla = _MHLAOptions()


def install_models(module: ModuleType) -> None:
    """Registers the attention and lets models that ask for MHLA be built with their parameters.

    Args:
        module: `transformers.modeling_utils`.
    """
    from transformers import configuration_utils

    model_class = module.PreTrainedModel
    if _originals or hasattr(model_class, "_has_mhla_patch"):
        return
    install_configuration(configuration_utils)
    # Registers itself; by name, since it may be what is importing transformers just now.
    importlib.import_module(".attention", __package__)
    names = ["__init__", "post_init", "_initialize_weights", "_move_missing_keys_from_meta_to_device"]
    for name in (*names, "_adjust_missing_and_unexpected_keys"):
        _originals[name] = getattr(model_class, name)

    @functools.wraps(_originals["__init__"])
    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(config, configuration_utils.PreTrainedConfig):
            from .attaching import check_class
            from .layer_count import check_configuration
            from .towers import prepare_config, wants_mhla

            prepare_config(config)
            check_class(self, config)
            if wants_mhla(config):
                check_configuration(config)
        _originals["__init__"](self, config, *args, **kwargs)

    @functools.wraps(_originals["post_init"])
    def post_init(self: Any) -> None:
        from .attaching import attach, refuse_split_heads, warn_of_softmax
        from .towers import mark_implementation, wants_mhla

        # Before the original, which initialises weights: parameters must exist by then.
        if wants_mhla(self.config) or getattr(self.config, "sub_configs", None):
            attach(self)
            refuse_split_heads(self)
            mark_implementation(self.config)
            warn_of_softmax(self)
        _originals["post_init"](self)

    @functools.wraps(_originals["_initialize_weights"])
    def _initialize_weights(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        from .attaching import MHLA, initialize

        if not isinstance(module, MHLA):
            _originals["_initialize_weights"](self, module, *args, **kwargs)
        elif not getattr(module, "_is_hf_initialized", False):
            initialize(module)
            module._is_hf_initialized = True

    @functools.wraps(_originals["_move_missing_keys_from_meta_to_device"])
    def _move_missing_keys(self: Any, missing_keys: Any, device_map: Any = None, *args: Any, **kwargs: Any) -> None:
        from .attaching import check_new_parameters, refuse_on_disk

        check_new_parameters(self, missing_keys)
        refuse_on_disk(missing_keys, device_map)
        _originals["_move_missing_keys_from_meta_to_device"](self, missing_keys, device_map, *args, **kwargs)

    @functools.wraps(_originals["_adjust_missing_and_unexpected_keys"])
    def _adjust_keys(self: Any, loading_info: Any, *args: Any, **kwargs: Any) -> None:
        from .attaching import MHLA
        from .layer_count import check_layers

        _originals["_adjust_missing_and_unexpected_keys"](self, loading_info, *args, **kwargs)
        if any(isinstance(module, MHLA) for module in self.modules()):
            # transformers only reports them.
            missing, surplus = loading_info.missing_keys, loading_info.unexpected_keys
            check_layers(self, missing, surplus, str(self.config.name_or_path))

    def _resolve_parallel_plans(self: Any, distributed_config: Any) -> Any:
        from .attaching import MHLA

        if any(isinstance(module, MHLA) for module in self.modules()):
            from .tensor_parallel import plan_heads

            plan_heads(self, distributed_config)
        return _originals["_resolve_parallel_plans"](self, distributed_config)

    # Older versions of transformers distribute models in another way.
    if hasattr(model_class, "_resolve_parallel_plans"):
        _originals["_resolve_parallel_plans"] = model_class._resolve_parallel_plans
        model_class._resolve_parallel_plans = _resolve_parallel_plans
    _install_cache()
    model_class.__init__ = __init__
    model_class.post_init = post_init
    model_class._initialize_weights = _initialize_weights
    model_class._move_missing_keys_from_meta_to_device = _move_missing_keys
    model_class._adjust_missing_and_unexpected_keys = _adjust_keys
    model_class._has_mhla_patch = True


def _install_cache() -> None:
    """Refuses quantised caches for MHLA models as they are made, before anything has to be installed for them."""
    from transformers.cache_utils import QuantizedCache

    original = QuantizedCache.__init__

    @functools.wraps(original)
    def __init__(self: Any, backend: str, config: Any, *args: Any, **kwargs: Any) -> None:
        from .cache import QUANTISED

        text = config.get_text_config(decoder=True)
        if getattr(text, "mhla", None) is not None and text._attn_implementation == "mhla":
            raise ValueError(QUANTISED)
        original(self, backend, config, *args, **kwargs)

    QuantizedCache.__init__ = __init__


def uninstall() -> None:
    """Takes back what [`install_models`] changed in the classes of transformers; the registered names stay."""
    if not _originals:
        return
    from transformers import PreTrainedModel
    from transformers.cache_utils import QuantizedCache

    QuantizedCache.__init__ = QuantizedCache.__init__.__wrapped__
    for name, original in _originals.items():
        setattr(PreTrainedModel, name, original)
    del PreTrainedModel._has_mhla_patch
    _originals.clear()
