# SPDX-License-Identifier: Apache-2.0
"""Private and fragile parts of diffusers, checked with versions 0.40 and 0.42.

Functions raise `UnsupportedVersionError` where diffusers does not have the named part.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from . import attribute, imported, unknown_shape, wrap


# Declarations of model classes.


def declared(model_class: Any, name: str, *more: Any) -> list[Any]:
    """Return a list that a model class of diffusers declares for its loaders and hooks, with more entries.

    Args:
        model_class: The class, or a model of it.
        name: `"_keep_in_fp32_modules"`, `"_no_split_modules"`, `"_skip_layerwise_casting_patterns"` or
            `"_keys_to_ignore_on_load_unexpected"`; `None` stands for an empty list.
        *more: Entries of a subclass.
    """
    return [*(attribute("diffusers", model_class, name, "ModelMixin") or ()), *more]


def kept_in_fp32(model_class: Any) -> Callable[[str], bool]:
    """Return a test for names of parameters that a model class keeps in fp32, by complete parts of the dotted name."""
    parts = set(declared(model_class, "_keep_in_fp32_modules"))
    return lambda name: not parts.isdisjoint(name.split("."))


def context_parallel_plan(model_class: Any, *without: str) -> dict[str, Any]:
    """Return the plan by which a model class splits sequences over processes, without that of some modules."""
    plan = attribute("diffusers", model_class, "_cp_plan", model_class.__name__)
    return {name: rule for name, rule in plan.items() if name not in without}


# Loading.


def loading_call(load: Callable[..., Any], *args: Any, **kwargs: Any) -> inspect.BoundArguments:
    """Return the arguments of a call of `ModelMixin._load_pretrained_model`, which may be changed by name.

    Args:
        load: The method of diffusers, bound to a class.
        *args: Its positional arguments.
        **kwargs: Its keyword arguments.

    Returns:
        Arguments with `model`, `pretrained_model_name_or_path` and `loaded_keys` at least.
    """
    try:
        call = inspect.signature(load).bind(*args, **kwargs)
    except TypeError:
        call = None
    if call is None or not {"model", "pretrained_model_name_or_path", "loaded_keys"} <= set(call.arguments):
        raise unknown_shape("diffusers", "ModelMixin._load_pretrained_model")
    return call


def load_weights(load: Callable[..., Any], call: inspect.BoundArguments) -> tuple[Any, ...]:
    """Call `ModelMixin._load_pretrained_model` with the arguments of [`loading_call`].

    Returns:
        The model, names of missing, unexpected and mismatched weights, index of offloaded ones, messages of errors.
    """
    result = load(*call.args, **call.kwargs)
    if not isinstance(result, tuple) or len(result) != 6:
        raise unknown_shape("diffusers", "result of ModelMixin._load_pretrained_model")
    return result


def without_quantized(quantizer: Any, model: Any, missing: Iterable[str]) -> Iterable[str]:
    """Return the names of missing weights without those that a quantiser makes, such as the scales of quanto.

    Args:
        quantizer: The quantiser that a model is loaded with, or `None`.
        model: The model, prepared by it.
        missing: Names of weights that the checkpoint lacks.
    """
    if quantizer is None:
        return missing
    return attribute("diffusers", quantizer, "update_missing_keys", "DiffusersQuantizer")(model, [*missing], prefix="")


def loads_single_files(model_class: Any) -> bool:
    """Return whether diffusers knows the names in single files of a model class."""
    return model_class.__name__ in imported("diffusers", "loaders.single_file_model", "SINGLE_FILE_LOADABLE_CLASSES")


def single_file_names(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> Collection[str]:
    """Return the names of diffusers for the weights of a file, as `from_single_file` makes them.

    Args:
        model: The model that the file was loaded into.
        shapes: Shapes by the names in the file.

    Raises:
        RuntimeError: If diffusers has no such conversion any more.
    """
    if shapes.keys() == model.state_dict().keys():
        return shapes.keys()
    import torch

    classes = imported("diffusers", "loaders.single_file_model", "SINGLE_FILE_LOADABLE_CLASSES")
    # Names are made of tensors that are cut and joined; these have no values.
    empty = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    return classes[type(model).__name__]["checkpoint_mapping_fn"](config=dict(model.config), checkpoint=empty).keys()


def rename_wan_weights(names: Iterable[str]) -> dict[str, str]:
    """Return the original name of each weight of Wan by its name in diffusers."""
    rename = imported("diffusers", "loaders.single_file_utils", "convert_wan_transformer_to_diffusers")
    # The table works on names alone and hands the values through, so the values may be the original names.
    return rename({name: name for name in names})


def takes_lora(pipeline_class: Any, names: Collection[str]) -> bool:
    """Return whether `load_lora_weights` of a pipeline takes a LoRA's names, among them those of whole weights.

    That of Flux takes all; others refuse names without "lora", unless MHLA's are among them, which models load.

    Args:
        pipeline_class: The class.
        names: Names as `lora_state_dict` returns them.
    """
    takes_all = hasattr(pipeline_class, "_control_lora_supported_norm_keys")
    return takes_all or any(".mhla." in name for name in names) or all("lora" in name for name in names)


# Pipelines.


def component_types(pipeline_class: Any) -> dict[str, Any]:
    """Return the types of a pipeline's components by name, as its constructor is annotated."""
    return attribute("diffusers", pipeline_class, "_get_signature_types", "DiffusionPipeline")()


def vae_factor(pipeline: Any, axis: str) -> int | None:
    """Return the frames or pixels that one latent stands for; `None` where a pipeline does not say.

    Args:
        pipeline: The pipeline.
        axis: `"temporal"` or `"spatial"`.
    """
    names = [f"vae_scale_factor_{axis}", f"vae_{axis}_compression_ratio"]
    names += ["vae_scale_factor"] if axis == "spatial" else []
    return next((getattr(pipeline, name) for name in names if getattr(pipeline, name, None)), None)


def set_modular_component_type(pipeline: Any, name: str, component_class: type) -> None:
    """Set the class of a component in the specifications of a modular pipeline, and keeps where it came from."""
    attribute("diffusers", pipeline, "_component_specs", "ModularPipeline")[name].type_hint = component_class


def register_library(name: str, module: Any) -> None:
    """Let the index of a pipeline name classes of a module as `[name, class]`, even beside files of that name.

    Diffusers takes them for those of a pipeline of its own, which it looks for before files in a repository. Of models
    that the caller passes in, it would print that it does not know their classes.
    """
    pipelines = importlib.import_module("diffusers.pipelines")
    setattr(pipelines, name, module)

    def check(original: Any, library: str, *args: Any) -> None:
        original(*(("diffusers", *args[:-1], False) if library == name else (library, *args)))

    wrap("diffusers", importlib.import_module("diffusers.pipelines.pipeline_utils"), "maybe_raise_or_warn", check)


def hook_uploads(module: Any, around: Callable[..., Any]) -> None:
    """Wrap the upload of what was saved; a version that uploads in another way is left alone.

    Args:
        module: `diffusers.utils.hub_utils`.
        around: Called as `around(original, pushed, directory, *args, **kwargs)`.
    """
    mixin = getattr(module, "PushToHubMixin", None)
    if hasattr(mixin, "_upload_folder"):
        wrap("diffusers", mixin, "_upload_folder", around)


def call_default(pipeline: Any, name: str) -> Any:
    """Return the default of an argument of a pipeline's call."""
    parameters = inspect.signature(type(pipeline).__call__).parameters
    if name not in parameters:
        raise unknown_shape("diffusers", f"{type(pipeline).__name__}.__call__({name}=...)")
    return parameters[name].default


def progress_bar_options(pipeline: Any) -> dict[str, Any]:
    """Return the options that were given to `set_progress_bar_config`; none where there were none."""
    return dict(getattr(pipeline, "_progress_bar_config", None) or {})


# Guiders and caches.


def skip_attention_in(*processor_classes: type, is_joint: bool = False) -> None:
    """Let guiders and caches of diffusers skip the attention that processors compute.

    Args:
        *processor_classes: Processor classes; known ones are left alone.
        is_joint: Whether they return the text besides the hidden states where they are given it.
    """
    registry = imported("diffusers", "hooks._helpers", "AttentionProcessorRegistry")
    known = attribute("diffusers", registry, "_registry", "AttentionProcessorRegistry")
    skipping = registry.get(imported("diffusers", "models.attention_processor", "AttnProcessor2_0"))
    if is_joint:
        skipping = dataclasses.replace(skipping, skip_processor_output_fn=_joint_inputs)
    for cls in processor_classes:
        if cls not in known:
            registry.register(cls, skipping)


def _joint_inputs(module: Any, hidden_states: Any, encoder_hidden_states: Any = None, **unused: Any) -> Any:
    return hidden_states if encoder_hidden_states is None else (hidden_states, encoder_hidden_states)


def skip_layers_in(*layer_classes: type, is_joint: bool = False) -> None:
    """Let guiders and caches of diffusers skip whole layers.

    Args:
        *layer_classes: Layer classes; known ones are left alone.
        is_joint: Whether they return the text after the hidden states.
    """
    registry = imported("diffusers", "hooks._helpers", "TransformerBlockRegistry")
    metadata = imported("diffusers", "hooks._helpers", "TransformerBlockMetadata")
    known = attribute("diffusers", registry, "_registry", "TransformerBlockRegistry")
    # Diffusers' own layers are registered on first use, and would replace these.
    attribute("diffusers", registry, "_register", "TransformerBlockRegistry")()
    for cls in layer_classes:
        if cls not in known:
            text = 1 if is_joint else None
            registry.register(cls, metadata(return_hidden_states_index=0, return_encoder_hidden_states_index=text))


def is_attention_skipped(attention: Any) -> bool:
    """Return whether a guider asks for identities in place of a module's attention map."""
    registry = getattr(attention, "_diffusers_hook", None)
    if registry is None:
        return False
    hooks = attribute("diffusers", registry, "hooks", "HookRegistry").values()
    return any(getattr(hook, "skip_attention_scores", False) for hook in hooks)


def checkpointed(model: Any, block: Any, *args: Any) -> Any:
    """Call a block of a model under its gradient checkpointing."""
    return attribute("diffusers", model, "_gradient_checkpointing_func", "ModelMixin")(block, *args)


def with_checkpoint_function(model: Any, function: Callable[..., Any]) -> Any:
    """Return a shallow copy of a model under gradient checkpointing that calls its blocks by another function.

    Args:
        model: The model, which is left alone.
        function: Called as `function(block, *args)`.
    """
    attribute("diffusers", model, "_gradient_checkpointing_func", "ModelMixin")
    shared = copy.copy(model)
    shared._gradient_checkpointing_func = function
    return shared


# Context parallelism.


def parallel_config_of(processor: Any) -> Any:
    """Return the configuration that `enable_parallelism` notes on a processor, or `None`."""
    return getattr(processor, "_parallel_config", None)


def context_parallel_group(config: Any) -> Any:
    """Return the process group of a `ContextParallelConfig` that was set up."""
    return attribute("diffusers", config, "_flattened_mesh", "ContextParallelConfig").get_group()
