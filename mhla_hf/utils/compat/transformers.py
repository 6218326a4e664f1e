# SPDX-License-Identifier: Apache-2.0
"""Private and fragile parts of transformers, checked with versions 5.17 and 5.23.

Attention modules of transformers declare nothing about themselves, so some functions read their code: its bytecode
names the globals that it uses, its source the conditions. Of code that is not written in Python nothing is known. All
other functions raise `UnsupportedVersionError` where transformers does not have the named part.
"""

from __future__ import annotations

import ast
import dis
import inspect
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from types import CodeType
from typing import Any, NamedTuple

from . import attribute, imported, wrap


Around = Callable[..., Any]


# Configurations and classes.


def attention_of(config: Any) -> Any:
    """Returns the attention implementation of a configuration, or `None` where it was left open."""
    return attribute("transformers", config, "_attn_implementation", "PreTrainedConfig")


def set_attention(config: Any, implementation: str | None) -> None:
    """Sets the attention implementation of a configuration, without those of the configurations inside it.

    Writes `_attn_implementation_internal`; the setter of `_attn_implementation` reaches into the inner ones.
    """
    attribute("transformers", config, "_attn_implementation_internal", "PreTrainedConfig")
    config._attn_implementation_internal = implementation


def can_choose_attention(model_class: Any) -> bool:
    """Returns whether transformers lets the attention implementation of a model class be chosen."""
    return bool(attribute("transformers", model_class, "_can_set_attn_implementation", "PreTrainedModel")())


def supports_sdpa(model: Any) -> bool:
    """Returns whether a model has SDPA attention."""
    return bool(attribute("transformers", model, "_supports_sdpa", "PreTrainedModel"))


def fp32_patterns(model: Any, is_float16: bool) -> set[str]:
    """Returns patterns of the parameters that stay in fp32 in a model of half precision, float16 or bfloat16."""
    names = ["_keep_in_fp32_modules_strict", *(["_keep_in_fp32_modules"] if is_float16 else [])]
    found = [attribute("transformers", model, name, "PreTrainedModel") or () for name in names]
    return {pattern for patterns in found for pattern in patterns}


def ignored_names(model: Any, step: str) -> list[str]:
    """Returns patterns of tensor names that transformers ignores.

    Args:
        model: A model of transformers.
        step: `"save"`, `"load_missing"` or `"load_unexpected"`.
    """
    return list(attribute("transformers", model, f"_keys_to_ignore_on_{step}", "PreTrainedModel") or ())


def task_classes() -> dict[str, set[str]]:
    """Returns the names of the model classes for each task, by the tasks that the Hub tags models with."""
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


# Building and loading models.


def hook_models(
    model_class: Any,
    *,
    build: Around,
    finish: Around,
    initialize: Around,
    place_missing: Around,
    report_names: Around,
    read: Around,
    plan: Around,
    choose: Around,
    save: Around,
) -> None:
    """Wraps the steps in which transformers builds, loads, switches and saves a model: all of them, or none.

    Each keyword argument is called as `around(original, model, *args, **kwargs)`, see
    [`wrap`][mhla_hf.utils.compat.wrap].

    Args:
        model_class: `PreTrainedModel`.
        build: Around the constructor, with the configuration.
        finish: Around `post_init`, which ends constructors.
        initialize: Around the initialisation of a module whose parameters no checkpoint gave.
        place_missing: Around making memory for missing parameters, with their names and the device map.
        report_names: Around the report of `missing_keys` and `unexpected_keys`, with an object that has both.
        read: Around reading weights, with the model, a state dict or `None`, the files, and the options of loading.
        plan: Around the parallel plan, with the distributed configuration; see [`has_parallel_plans`].
        choose: Around `set_attn_implementation`.
        save: Around `save_pretrained`, with all its arguments by name.
    """
    steps = {
        "__init__": build,
        "post_init": finish,
        "_initialize_weights": initialize,
        "_move_missing_keys_from_meta_to_device": place_missing,
        "_adjust_missing_and_unexpected_keys": report_names,
        "_load_pretrained_model": read,
        "set_attn_implementation": choose,
        "save_pretrained": lambda original, *args, **kwargs: save(original, **_by_name(original, args, kwargs)),
    }
    for name in steps:
        attribute("transformers", model_class, name, "PreTrainedModel")
    if has_parallel_plans(model_class):
        steps["_resolve_parallel_plans"] = plan
    for name, around in steps.items():
        wrap("transformers", model_class, name, around)


def _by_name(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {**inspect.signature(function).bind_partial(*args).arguments, **kwargs}


def initialize_once(module: Any, initialize: Callable[[Any], None]) -> None:
    """Calls `initialize(module)` unless transformers marked the module as initialised, and marks it."""
    if not getattr(module, "_is_hf_initialized", False):
        initialize(module)
        module._is_hf_initialized = True


def hook_uploads(model_class: Any, around: Around) -> None:
    """Wraps the upload of what was saved; a version that uploads in another way is left alone.

    Args:
        model_class: `PreTrainedModel`.
        around: Called as `around(original, model, directory, *args, **kwargs)`.
    """
    if hasattr(model_class, "_upload_modified_files"):
        wrap("transformers", model_class, "_upload_modified_files", around)


# Tensor parallelism.


class ParallelTools(NamedTuple):
    """Base class of parallel styles, their registry, and a function that replaces layer numbers by wildcards."""

    layer_class: Any
    styles: Any
    generic_name: Callable[[str], str]


def has_parallel_plans(model_class: Any) -> bool:
    """Returns whether rules can be added to the parallel plans of a model class, as since transformers 5.23."""
    return hasattr(model_class, "_resolve_parallel_plans")


def parallel_tools() -> ParallelTools:
    """Returns the tools for tensor parallelism of transformers 5.23."""
    module = "distributed.tensor_parallel"
    return ParallelTools(
        imported("transformers", module, "TensorParallelLayer"),
        imported("transformers", module, "ALL_PARALLEL_STYLES"),
        imported("transformers", "distributed.parallel_utils", "replace_layer_number_by_wildcard"),
    )


def add_parallel_rules(model: Any, rules: Mapping[str, str]) -> None:
    """Adds rules to the tensor-parallel plan of a model."""
    model._tp_plan = {**(attribute("transformers", model, "_tp_plan", "PreTrainedModel") or {}), **rules}


# Names of stored tensors: some families are renamed as they are loaded and saved.


def renaming_rules(model: Any) -> list[Any]:
    """Returns the rules by which transformers renames, joins and splits the stored tensors of a model."""
    return list(imported("transformers", "conversion_mapping", "get_model_conversion_mapping")(model))


def loaded_name(name: str, rules: Sequence[Any], prefix: str, state: Mapping[str, Any]) -> tuple[str, bool]:
    """Returns the name in the model of a stored tensor, and whether it is joined or split on the way.

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
    """Lets a model be saved by the rules that were used while its names were loaded, as `from_pretrained` does."""
    used = [(rule, attribute("transformers", rule, "was_used", "WeightTransform")()) for rule in rules]
    model._weight_conversions = [rule for rule, was_used in used if was_used]


def saved_tensors(model: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """Returns tensors of a model as they are stored.

    Args:
        model: The model, see [`keep_used_rules`].
        tensors: Tensors by their names in the model.
    """
    return imported("transformers", "core_model_loading", "revert_weight_conversion")(model, tensors)


def without_tied(model: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """Returns the tensors of a model that are saved, each tied one once."""
    return imported("transformers", "modeling_utils", "remove_tied_weights_from_state_dict")(dict(tensors), model)


# The code of modules.


def names_used(function: Callable[..., Any]) -> set[str]:
    """Returns the global names and attributes that a function and those inside it look up."""
    return _names(getattr(inspect.unwrap(function), "__code__", None))


def _names(code: Any) -> set[str]:
    if not isinstance(code, CodeType):
        return set()
    return set(code.co_names).union(*(_names(constant) for constant in code.co_consts))


def global_of(function: Callable[..., Any], name: str) -> Any:
    """Returns the value of a global name in the module of a function, or `None`."""
    return getattr(inspect.unwrap(function), "__globals__", {}).get(name)


def reads_keywords(function: Callable[..., Any]) -> bool:
    """Returns whether a function takes any keyword argument and reads those that it does not know."""
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    if code is None:
        return False
    parameters = inspect.signature(function).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind is inspect.Parameter.VAR_KEYWORD]
    return any(entry.argval in names and "LOAD" in entry.opname for entry in dis.get_instructions(code))


@lru_cache(maxsize=256)
def rotation_conditions(function: Callable[..., Any]) -> tuple[str, ...]:
    """Returns the conditions, as written, under which a function rotates queries and keys."""
    try:
        tree = ast.parse(textwrap.dedent(source_of(inspect.unwrap(function))))
    except SyntaxError:
        return ()
    return tuple(
        ast.unparse(branch.test)
        for branch in ast.walk(tree)
        if isinstance(branch, (ast.If, ast.IfExp))
        and any(isinstance(node, ast.Call) and "rotary" in ast.unparse(node.func) for node in ast.walk(branch))
    )


def source_of(thing: Any) -> str:
    """Returns the source of a module, class or function; empty where it is not known."""
    try:
        return inspect.getsource(thing)
    except (OSError, TypeError):
        return ""
