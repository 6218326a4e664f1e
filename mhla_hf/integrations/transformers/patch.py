# SPDX-License-Identifier: Apache-2.0
"""Changes to transformers: twelve methods, one constructor, two attributes, three registries.

Models that do not ask for MHLA pass through unchanged. [`uninstall`] restores everything.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from types import ModuleType
from typing import Any

from ...config import MHLAConfig, with_overrides
from ...utils.compat import unwrap, wrap
from ...utils.compat.transformers import attention_of, hook_models, hook_uploads, initialize_once
from .options import STORED, is_complete, warn_of_changes


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
            value = with_overrides(stored, value)
        config.__dict__["mhla"] = value


class _WeightsFile:
    """The attribute `transformers_weights` of every configuration, without the entry that refuses MHLA models."""

    def __get__(self, config: Any, owner: Any = None) -> Any:
        if config is None:
            return self
        try:
            return config.__dict__["transformers_weights"]
        except KeyError:
            raise AttributeError("transformers_weights") from None

    def __set__(self, config: Any, value: Any) -> None:
        from ...models.stub import is_refusal

        if not is_refusal(value):
            config.__dict__["transformers_weights"] = value

    def __delete__(self, config: Any) -> None:
        del config.__dict__["transformers_weights"]


def install_configuration(module: ModuleType) -> None:
    """Lets `from_pretrained(..., mhla={...})` land on the configuration, and saves with MHLA models what refuses them.

    Args:
        module: `transformers.configuration_utils`.
    """
    if not hasattr(module.PreTrainedConfig, "mhla"):
        # Without an annotation: configurations are dataclasses, and this must not become one of their fields.
        module.PreTrainedConfig.mhla = _MHLAOptions()
        module.PreTrainedConfig.transformers_weights = _WeightsFile()
    wrap("transformers", module.PreTrainedConfig, "to_json_file", _write_configuration)


def install_models(module: ModuleType) -> None:
    """Registers the attention and lets models that ask for MHLA be built with their parameters.

    Args:
        module: `transformers.modeling_utils`.

    Raises:
        UnsupportedVersionError: If transformers builds models in an unknown way; nothing is changed then.
    """
    from transformers import configuration_utils
    from transformers.cache_utils import QuantizedCache

    hook_models(
        module.PreTrainedModel, build=_build, finish=_finish, initialize=_initialize, place_missing=_place_missing,
        report_names=_report_names, read=_read, plan=_plan, choose=_choose, save=_save,
    )  # fmt: skip
    hook_uploads(module.PreTrainedModel, _upload)
    wrap("transformers", QuantizedCache, "__init__", _make_quantized_cache)
    install_configuration(configuration_utils)
    # Registers itself; by name, since it may be what is importing transformers just now.
    importlib.import_module(".attention", __package__)


def install_batching(module: ModuleType) -> None:
    """Lets MHLA models refuse continuous batching.

    Args:
        module: `transformers.generation.continuous_batching.continuous_api`.
    """
    wrap("transformers", module.ContinuousMixin, "init_continuous_batching", _batch_continuously)


def uninstall() -> None:
    """Restores the classes of transformers; the registered names stay."""
    unwrap("transformers")


def refuse_models(module: ModuleType, reason: ImportError) -> None:
    """Lets an unsupported version of transformers refuse MHLA with the reason, in place of an error of its own.

    Args:
        module: `transformers.modeling_utils`.
        reason: The error to raise.
    """

    def check(config: Any, options: dict[str, Any]) -> None:
        implementations = [options.get("attn_implementation"), getattr(config, "_attn_implementation", None)]
        implementations += [getattr(config, "attn_implementation", None)]
        named = [name for one in implementations for name in (one.values() if isinstance(one, dict) else [one])]
        if "mhla" in named or getattr(config, "mhla", None) is not None or options.get("mhla") is not None:
            raise reason

    def build(original: Any, model: Any, config: Any = None, *args: Any, **kwargs: Any) -> None:
        check(config, kwargs)
        original(model, config, *args, **kwargs)

    def load(original: Any, cls: Any, *args: Any, **kwargs: Any) -> Any:
        check(kwargs.get("config"), kwargs)
        return original(cls, *args, **kwargs)

    wrap("transformers", module.PreTrainedModel, "__init__", build)
    wrap("transformers", module.PreTrainedModel, "from_pretrained", load)


def _write_configuration(original: Any, config: Any, json_file_path: Any, *args: Any, **kwargs: Any) -> None:
    """Adds to saved configurations the entry by which transformers without this package refuses MHLA models."""
    from ...models.stub import save_refusal

    original(config, json_file_path, *args, **kwargs)
    save_refusal(Path(json_file_path))


def _build(original: Any, model: Any, config: Any, *args: Any, **kwargs: Any) -> None:
    from transformers import PreTrainedConfig

    stored = False
    if isinstance(config, PreTrainedConfig):
        from ...models.stub import forget_stub
        from .attaching import check_class, check_text
        from .checks import check_configuration
        from .towers import prepare_config, towers_of, wants_mhla

        forget_stub(config)
        stored = any(is_complete(getattr(part, "mhla", None)) for part in (config, *towers_of(config).values()))
        prepare_config(config)
        check_class(model, config)
        check_text(model, config)
        if wants_mhla(config):
            check_configuration(config)
    original(model, config, *args, **kwargs)
    if stored:
        setattr(model, STORED, True)


def _finish(original: Any, model: Any) -> None:
    from .attaching import attach, has_mhla, record, refuse_split_heads
    from .towers import mark_implementation, wants_mhla

    # Before the original, which initialises weights: parameters must exist by then.
    if wants_mhla(model.config) or getattr(model.config, "sub_configs", None):
        attach(model)
        refuse_split_heads(model)
        mark_implementation(model.config)
    original(model)
    if has_mhla(model):
        # Of weights that are loaded later there is nothing to record yet.
        record(model)


def _initialize(original: Any, model: Any, module: Any, *args: Any, **kwargs: Any) -> None:
    from .attaching import MHLA, initialize

    if isinstance(module, MHLA):
        initialize_once(module, initialize)
    else:
        original(model, module, *args, **kwargs)


def _place_missing(
    original: Any, model: Any, missing_keys: Any, device_map: Any = None, *args: Any, **kwargs: Any
) -> None:
    from .checks import check_new_parameters, refuse_on_disk

    check_new_parameters(model, missing_keys)
    refuse_on_disk(missing_keys, device_map)
    original(model, missing_keys, device_map, *args, **kwargs)


def _report_names(original: Any, model: Any, loading_info: Any, *args: Any, **kwargs: Any) -> None:
    from .attaching import has_mhla, record
    from .checks import check_layers

    original(model, loading_info, *args, **kwargs)
    if has_mhla(model):
        # transformers only reports them.
        missing, surplus = loading_info.missing_keys, loading_info.unexpected_keys
        check_layers(model, missing, surplus, str(model.config.name_or_path))
        record(model, missing)


def _read(
    original: Any, model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *args: Any, **kwargs: Any
) -> Any:
    """Looks at the files of MHLA models before they are read: transformers follows its index wherever it leads."""
    from .attaching import has_mhla

    if not checkpoint_files or not has_mhla(model):
        return original(model, state_dict, checkpoint_files, load_config, *args, **kwargs)
    from ...models.weight_files import check_loaded_files

    location = load_config.pretrained_model_name_or_path
    allowed = load_config.use_safetensors is False or not getattr(model, STORED, False)
    check_loaded_files(checkpoint_files, location, pickles=allowed)
    try:
        return original(model, state_dict, checkpoint_files, load_config, *args, **kwargs)
    except UnpicklingError as error:
        raise ValueError(
            f"The weights of {location} hold more than tensors and could run code when read; save them as safetensors."
        ) from error


def _plan(original: Any, model: Any, distributed_config: Any) -> Any:
    from .attaching import has_mhla

    if has_mhla(model):
        from .tensor_parallel import plan_heads

        plan_heads(model, distributed_config)
    return original(model, distributed_config)


def _choose(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Softmax layers get the pretrained weights back, and MHLA layers those that were fitted to them."""
    from .attaching import has_mhla, switching

    if not has_mhla(model):
        return original(model, *args, **kwargs)
    with switching(model, args[0] if args else kwargs.get("attn_implementation")):
        return original(model, *args, **kwargs)


def _save(original: Any, self: Any, **kwargs: Any) -> Any:
    from .attaching import has_mhla, saving

    if not has_mhla(self):
        return original(self, **kwargs)
    with saving(self, kwargs.get("state_dict")) as state_dict:
        return original(self, **{**kwargs, "state_dict": state_dict})


def _make_quantized_cache(original: Any, cache: Any, backend: str, config: Any, *args: Any, **kwargs: Any) -> None:
    """Refuses quantised caches for MHLA models as they are made, before anything has to be installed for them."""
    from .cache import QUANTISED

    if _has_mhla_text(config):
        raise ValueError(QUANTISED)
    original(cache, backend, config, *args, **kwargs)


def _batch_continuously(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuses continuous batching for MHLA models: where flash attention is installed, transformers switches to it."""
    from .cache import PAGED

    if _has_mhla_text(model.config):
        raise ValueError(PAGED)
    return original(model, *args, **kwargs)


def _has_mhla_text(config: Any) -> bool:
    text = config.get_text_config(decoder=True)
    return getattr(text, "mhla", None) is not None and attention_of(text) == "mhla"


def _upload(original: Any, model: Any, working_dir: Any, *args: Any, **kwargs: Any) -> Any:
    """Adds to models that are pushed what loads them by `trust_remote_code=True`, and tags."""
    from ...models.stub import add_stub

    add_stub(Path(working_dir))
    return original(model, working_dir, *args, **kwargs)
