# SPDX-License-Identifier: Apache-2.0
"""Private and fragile parts of transformers, checked with versions 5.17, 5.23 and 5.24.

The functions raise `UnsupportedVersionError` where transformers does not have the named part.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

from packaging.version import Version

from . import UnsupportedVersionError, attribute, imported


# Configurations and classes.

_STRICT = ("_keep_in_fp32_modules_strict",)


def attention_of(config: Any) -> Any:
    """Return the attention implementation of a configuration, or `None` where it was left open."""
    return attribute("transformers", config, "_attn_implementation", "PreTrainedConfig")


def set_attention(config: Any, implementation: str | None) -> None:
    """Set the attention implementation of a configuration, without those of the configurations inside it.

    Writes `_attn_implementation_internal`; the setter of `_attn_implementation` reaches into the inner ones.
    """
    attribute("transformers", config, "_attn_implementation_internal", "PreTrainedConfig")
    config._attn_implementation_internal = implementation


def can_choose_attention(model_class: Any) -> bool:
    """Return whether transformers lets the attention implementation of a model class be chosen."""
    return bool(attribute("transformers", model_class, "_can_set_attn_implementation", "PreTrainedModel")())


def supports_sdpa(model: Any) -> bool:
    """Return whether a model has SDPA attention."""
    return bool(attribute("transformers", model, "_supports_sdpa", "PreTrainedModel"))


def kept_in_fp32(model: Any, dtype: Any) -> Callable[[str], bool]:
    """Return a test for names of parameters that stay in fp32 when a model is cast to a dtype."""
    names = {"torch.bfloat16": _STRICT, "torch.float16": (*_STRICT, "_keep_in_fp32_modules")}.get(str(dtype), ())
    found = [attribute("transformers", model, name, "PreTrainedModel") or () for name in names]
    patterns = [pattern.replace("*", ".*") for each in found for pattern in each]
    return lambda name: any(re.search(pattern, name) for pattern in patterns)


def saves_adapters_aside(model: Any) -> bool:
    """Return whether a model saves its adapters in files of their own, as after transformers' `add_adapter`."""
    # diffusers, whose models have the attribute too, saves all in one.
    return hasattr(model, "config_class") and getattr(model, "_hf_peft_config_loaded", False)


def ignored_names(model: Any, step: str) -> list[str]:
    """Return patterns of tensor names that transformers ignores.

    Args:
        model: A model of transformers.
        step: `"save"`, `"load_missing"` or `"load_unexpected"`.
    """
    return list(attribute("transformers", model, f"_keys_to_ignore_on_{step}", "PreTrainedModel") or ())


def task_classes() -> dict[str, set[str]]:
    """Return the names of the model classes for each task, by the tasks that the Hub tags models with."""
    tables = {
        **imported("transformers", "modelcard", "TASK_MAPPING"),
        "image-feature-extraction": imported(
            "transformers", "models.auto.modeling_auto", "MODEL_FOR_IMAGE_MAPPING_NAMES"
        ),
        "feature-extraction": imported("transformers", "models.auto.modeling_auto", "MODEL_MAPPING_NAMES"),
    }
    return {
        task: {name for entry in table.values() for name in (entry if isinstance(entry, (list, tuple)) else [entry])}
        for task, table in tables.items()
    }


# Masks.


def adds_to_mask(function: Any) -> bool:
    """Return whether a mask function of transformers shows more tokens than another, by itself or inside others.

    They are closures, known by the names of the functions that make them: `or_masks` from 5.24 on inside `and_masks`
    where documents are packed.
    """
    if getattr(function, "__qualname__", "").startswith("or_masks"):
        return True
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    inner = [one for cell in cells for one in (cell if isinstance(cell, tuple) else (cell,))]
    return any(adds_to_mask(one) for one in inner if callable(one))


# Caches.

CACHE_NAMES = ("cache", "past_key_values")
"""Names of the argument and of the output that is the cache: from 5.24 on, and before."""


def cache_names() -> tuple[str, ...]:
    """Return those of [`CACHE_NAMES`] that the installed version takes, the one that it uses itself first.

    5.24 and newer take either for the other. Before, an argument `cache` was handed on to attention functions as the
    pages of continuous batching, and is none of ours.
    """
    output = imported("transformers", "modeling_outputs", "BaseModelOutputWithPast")
    names = {field.name for field in dataclasses.fields(output)}
    return CACHE_NAMES if "cache" in names else CACHE_NAMES[1:]


def cache_of_output(output: Any) -> Any:
    """Return the cache that a model or `generate` returned, or `None`."""
    return getattr(output, cache_names()[0], None)


# Building and loading models.


def check_peft_for_adapters() -> None:
    """Check that `add_adapter` of transformers takes the installed peft (transformers 5.24 asks for 0.22).

    Raises:
        UnsupportedVersionError: If it does not.
    """
    lowest, installed = imported("transformers", "integrations.peft", "MIN_PEFT_VERSION"), version("peft")
    if Version(installed) < Version(lowest):
        raise UnsupportedVersionError(
            f"transformers {version('transformers')} adds LoRA with peft {lowest} or newer, and {installed} is "
            f"installed: pip install 'peft>={lowest}', or 'transformers<5.24' while there is no such release."
        )


def initialize_once(module: Any, initialize: Callable[[Any], None]) -> None:
    """Call `initialize(module)` unless transformers marked the module as initialised, and marks it."""
    if not getattr(module, "_is_hf_initialized", False):
        initialize(module)
        module._is_hf_initialized = True


def reported_names(model: Any, info: Any) -> tuple[set[str], set[str]]:
    """Return the missing and the unexpected names of a checkpoint that transformers would report.

    Args:
        model: The model.
        info: What transformers found, with `missing_keys` and `unexpected_keys`.
    """
    reported = copy.copy(info)
    reported.missing_keys = info.missing_keys - model.all_tied_weights_keys.keys()
    attribute("transformers", model, "_adjust_missing_and_unexpected_keys", "PreTrainedModel")(reported)
    return reported.missing_keys, reported.unexpected_keys


# Tensor parallelism.


def parallel_tools() -> tuple[Any, Any, Callable[[str], str]]:
    """Return the base class of parallel styles, their registry, and what replaces layer numbers by wildcards."""
    module = "distributed.tensor_parallel"
    return (
        imported("transformers", module, "TensorParallelLayer"),
        imported("transformers", module, "ALL_PARALLEL_STYLES"),
        imported("transformers", "distributed.parallel_utils", "replace_layer_number_by_wildcard"),
    )


def add_parallel_rules(model: Any, rules: Mapping[str, str]) -> None:
    """Add rules to the tensor-parallel plan of a model."""
    model._tp_plan = {**(attribute("transformers", model, "_tp_plan", "PreTrainedModel") or {}), **rules}


# Names of stored tensors: some families are renamed as they are loaded and saved.


def renaming_rules(model: Any) -> list[Any]:
    """Return the rules by which transformers renames, joins and splits the stored tensors of a model."""
    return list(imported("transformers", "conversion_mapping", "get_model_conversion_mapping")(model))


def loaded_name(name: str, rules: Sequence[Any], prefix: str, state: Mapping[str, Any]) -> tuple[str, bool]:
    """Return the name in the model of a stored tensor, and whether it is joined or split on the way.

    Args:
        name: Name in the file.
        rules: Rules of [`renaming_rules`]. Those that apply note that they were used.
        prefix: `base_model_prefix` of the model.
        state: The model's tensors by name.
    """
    kinds = (imported("transformers", "core_model_loading", kind) for kind in ("WeightRenaming", "WeightConverter"))
    renamings, converters = ([rule for rule in rules if isinstance(rule, kind)] for kind in kinds)
    rename = imported("transformers", "core_model_loading", "rename_source_key")
    target, converter = rename(name, renamings, converters, prefix, state)
    return target, converter is not None


def keep_used_rules(model: Any, rules: Iterable[Any]) -> None:
    """Let a model be saved by the rules that were used while its names were loaded, as `from_pretrained` does."""
    used = [(rule, attribute("transformers", rule, "was_used", "WeightTransform")()) for rule in rules]
    model._weight_conversions = [rule for rule, was_used in used if was_used]


def saved_tensors(model: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """Return tensors of a model as they are stored.

    Args:
        model: The model, see [`keep_used_rules`].
        tensors: Tensors by their names in the model.
    """
    return imported("transformers", "core_model_loading", "revert_weight_conversion")(model, tensors)


def without_tied(model: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """Return the tensors of a model that are saved, each tied one once."""
    return imported("transformers", "modeling_utils", "remove_tied_weights_from_state_dict")(dict(tensors), model)
