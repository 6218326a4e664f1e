# SPDX-License-Identifier: Apache-2.0
"""Private and fragile parts of diffusers, checked with version 0.42."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from . import unknown_shape, wrap


# Declarations of model classes.


def declared(model_class: Any, name: str, *more: Any) -> list[Any]:
    """Returns a list that a model class of diffusers declares for its loaders and hooks, with more entries.

    Args:
        model_class: The class, or a model of it.
        name: `"_keep_in_fp32_modules"`, `"_no_split_modules"`, `"_available_processors"`,
            `"_skip_layerwise_casting_patterns"` or `"_keys_to_ignore_on_load_unexpected"`; `None` stands for an empty
            list.
        *more: Entries of a subclass.

    Raises:
        UnsupportedVersionError: If the classes of diffusers have no such declaration.
    """
    if not hasattr(model_class, name):
        raise unknown_shape("diffusers", f"declaration {name} of its models")
    return [*(getattr(model_class, name) or ()), *more]


def fp32_parts(model_class: Any) -> set[str]:
    """Returns the parts of dotted names by which a model class keeps parameters in fp32.

    Raises:
        UnsupportedVersionError: See [`declared`].
    """
    return set(declared(model_class, "_keep_in_fp32_modules"))


def context_parallel_plan(model_class: Any, *without: str) -> dict[str, Any]:
    """Returns the plan by which a model class splits sequences over processes, in `_cp_plan`.

    Args:
        model_class: The class.
        *without: Modules that the plan of a subclass leaves out.

    Raises:
        UnsupportedVersionError: If the class has no plan.
    """
    plan = getattr(model_class, "_cp_plan", None)
    if not isinstance(plan, Mapping):
        raise unknown_shape("diffusers", f"{model_class.__name__}._cp_plan")
    return {name: rule for name, rule in plan.items() if name not in without}


# Loading.


class LoadedWeights(NamedTuple):
    """Result of `ModelMixin._load_pretrained_model`."""

    model: Any
    missing_keys: list[str]
    unexpected_keys: list[str]
    mismatched_keys: list[Any]
    offload_index: Any
    error_messages: list[str]


def loading_call(load: Callable[..., Any], *args: Any, **kwargs: Any) -> inspect.BoundArguments:
    """Returns the arguments of a call of `ModelMixin._load_pretrained_model`, which may be changed by name.

    Args:
        load: The method of diffusers, bound to a class.
        *args: Its positional arguments.
        **kwargs: Its keyword arguments.

    Returns:
        Arguments with `model`, `pretrained_model_name_or_path` and `loaded_keys` at least.

    Raises:
        UnsupportedVersionError: If the method takes other arguments.
    """
    try:
        call = inspect.signature(load).bind(*args, **kwargs)
    except TypeError:
        call = None
    if call is None or not {"model", "pretrained_model_name_or_path", "loaded_keys"} <= set(call.arguments):
        raise unknown_shape("diffusers", "ModelMixin._load_pretrained_model")
    return call


def load_weights(load: Callable[..., Any], call: inspect.BoundArguments) -> LoadedWeights:
    """Calls `ModelMixin._load_pretrained_model` with the arguments of [`loading_call`].

    Raises:
        UnsupportedVersionError: If its result is not like [`LoadedWeights`].
    """
    result = load(*call.args, **call.kwargs)
    if not isinstance(result, tuple) or len(result) != len(LoadedWeights._fields):
        raise unknown_shape("diffusers", "result of ModelMixin._load_pretrained_model")
    return LoadedWeights(*result)


def hook_single_files(module: Any, around: Callable[..., bool]) -> None:
    """Wraps the question of `from_single_file` whether a file's weights need conversion.

    Args:
        module: `diffusers.loaders.single_file_model`.
        around: Called as `around(original, model_state_dict, checkpoint_state_dict)`.

    Raises:
        UnsupportedVersionError: If the module does not ask it.
    """
    wrap("diffusers", module, "_should_convert_state_dict_to_diffusers", around)


def loads_single_files(class_name: str) -> bool:
    """Returns whether diffusers converts original weights for a model class.

    Raises:
        UnsupportedVersionError: If `diffusers.loaders.single_file_model` has no such table.
    """
    try:
        from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES
    except ImportError:
        raise unknown_shape("diffusers", "loaders.single_file_model.SINGLE_FILE_LOADABLE_CLASSES") from None
    return class_name in SINGLE_FILE_LOADABLE_CLASSES


def read_single_file(path: Path, disable_mmap: bool) -> dict[str, Any]:
    """Reads a file of weights as `from_single_file` does: safetensors, or a torch file of tensors alone.

    Raises:
        UnsupportedVersionError: If `diffusers.loaders.single_file_utils` has no such reader.
        OSError: If the file cannot be read.
        ValueError: If it is neither.
    """
    try:
        from diffusers.loaders.single_file_utils import load_single_file_checkpoint
    except ImportError:
        raise unknown_shape("diffusers", "loaders.single_file_utils.load_single_file_checkpoint") from None
    return dict(load_single_file_checkpoint(str(path), disable_mmap=disable_mmap))


def rename_wan_weights(names: Iterable[str]) -> dict[str, str]:
    """Returns the original name of each weight of Wan by its name in diffusers.

    Raises:
        UnsupportedVersionError: If `diffusers.loaders.single_file_utils` has no such table.
    """
    try:
        from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers
    except ImportError:
        raise unknown_shape("diffusers", "loaders.single_file_utils.convert_wan_transformer_to_diffusers") from None
    # The table works on names alone and hands the values through, so the values may be the original names.
    return convert_wan_transformer_to_diffusers({name: name for name in names})


def lora_metadata_key() -> str:
    """Returns the key of a LoRA's options in the metadata of its file.

    Raises:
        UnsupportedVersionError: If `diffusers.loaders.lora_base` has no such constant.
    """
    try:
        from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
    except ImportError:
        raise unknown_shape("diffusers", "loaders.lora_base.LORA_ADAPTER_METADATA_KEY") from None
    return LORA_ADAPTER_METADATA_KEY


# Pipelines.


def component_types(pipeline_class: Any) -> dict[str, Any]:
    """Returns the types of a pipeline's components by name, as its constructor is annotated.

    Raises:
        UnsupportedVersionError: If `DiffusionPipeline` has no `_get_signature_types`.
    """
    if not hasattr(pipeline_class, "_get_signature_types"):
        raise unknown_shape("diffusers", "DiffusionPipeline._get_signature_types")
    return pipeline_class._get_signature_types()


def set_modular_component_type(pipeline: Any, name: str, component_class: type) -> None:
    """Sets the class of a component in the specifications of a modular pipeline, and keeps where it came from.

    Raises:
        UnsupportedVersionError: If `ModularPipeline` has no `_component_specs`.
    """
    specifications = getattr(pipeline, "_component_specs", None)
    if specifications is None or name not in specifications:
        raise unknown_shape("diffusers", "ModularPipeline._component_specs")
    specifications[name].type_hint = component_class


def call_default(pipeline: Any, name: str) -> Any:
    """Returns the default of an argument of a pipeline's call.

    Raises:
        UnsupportedVersionError: If the call takes no such argument.
    """
    parameters = inspect.signature(type(pipeline).__call__).parameters
    if name not in parameters:
        raise unknown_shape("diffusers", f"{type(pipeline).__name__}.__call__({name}=...)")
    return parameters[name].default


def progress_bar_options(pipeline: Any) -> dict[str, Any]:
    """Returns the options that were given to `set_progress_bar_config`; none where there were none."""
    return dict(getattr(pipeline, "_progress_bar_config", None) or {})


# Guiders and caches.


def skip_attention_in(*processor_classes: type) -> None:
    """Lets guiders and caches of diffusers skip the attention that processors compute.

    Args:
        *processor_classes: Processor classes that return the hidden states alone; known ones are left alone.

    Raises:
        UnsupportedVersionError: If `diffusers.hooks._helpers` has no such registry.
    """
    registry, _, _ = _hook_registries()
    from diffusers.models.attention_processor import AttnProcessor2_0

    skipping = registry.get(AttnProcessor2_0)
    for cls in processor_classes:
        if cls not in registry._registry:
            registry.register(cls, skipping)


def skip_layers_in(*layer_classes: type) -> None:
    """Lets guiders and caches of diffusers skip whole layers.

    Args:
        *layer_classes: Layer classes that return the hidden states alone; known ones are left alone.

    Raises:
        UnsupportedVersionError: If `diffusers.hooks._helpers` has no such registry.
    """
    _, registry, metadata = _hook_registries()
    registry._register()
    for cls in layer_classes:
        if cls not in registry._registry:
            registry.register(cls, metadata(return_hidden_states_index=0, return_encoder_hidden_states_index=None))


def _hook_registries() -> tuple[Any, Any, Any]:
    try:
        from diffusers.hooks import _helpers as helpers

        registries = helpers.AttentionProcessorRegistry, helpers.TransformerBlockRegistry
        if all(hasattr(registry, name) for registry in registries for name in ("_registry", "_register", "get")):
            return (*registries, helpers.TransformerBlockMetadata)
    except (ImportError, AttributeError):
        pass
    raise unknown_shape("diffusers", "registries of attention processors and layers in hooks._helpers")


def is_attention_skipped(attention: Any) -> bool:
    """Returns whether a guider asks for identities in place of a module's attention map, by its `_diffusers_hook`.

    False where there is no hook at all.

    Raises:
        UnsupportedVersionError: If the registry of hooks has no `hooks`.
    """
    registry = getattr(attention, "_diffusers_hook", None)
    if registry is None:
        return False
    if not hasattr(registry, "hooks"):
        raise unknown_shape("diffusers", "HookRegistry.hooks")
    return any(getattr(hook, "skip_attention_scores", False) for hook in registry.hooks.values())


def checkpointed(model: Any, block: Any, *args: Any) -> Any:
    """Calls a block of a model under its gradient checkpointing, by `_gradient_checkpointing_func`.

    Raises:
        UnsupportedVersionError: If models have no such function.
    """
    if not hasattr(model, "_gradient_checkpointing_func"):
        raise unknown_shape("diffusers", "ModelMixin._gradient_checkpointing_func")
    return model._gradient_checkpointing_func(block, *args)


# Context parallelism.


def check_parallel_setup() -> None:
    """Checks that `enable_parallelism` asks `_resolve_parallel_config`, which MHLA models override.

    Raises:
        UnsupportedVersionError: If diffusers' models do not have it.
    """
    from diffusers import ModelMixin

    if not hasattr(ModelMixin, "_resolve_parallel_config"):
        raise unknown_shape("diffusers", "ModelMixin._resolve_parallel_config")


def set_parallel_config(model: Any, config: Any) -> None:
    """Notes the configuration of context parallelism on a model, in `_parallel_config`.

    Raises:
        UnsupportedVersionError: If models have no such attribute.
    """
    if not hasattr(model, "_parallel_config"):
        raise unknown_shape("diffusers", "ModelMixin._parallel_config")
    model._parallel_config = config


def parallel_config_of(processor: Any) -> Any:
    """Returns the configuration that `enable_parallelism` notes on a processor, or `None`."""
    return getattr(processor, "_parallel_config", None)


def context_parallel_group(config: Any) -> Any:
    """Returns the process group of a `ContextParallelConfig` that was set up.

    Raises:
        UnsupportedVersionError: If it has no `_flattened_mesh`.
    """
    if not hasattr(config, "_flattened_mesh"):
        raise unknown_shape("diffusers", "ContextParallelConfig._flattened_mesh")
    return config._flattened_mesh.get_group()
