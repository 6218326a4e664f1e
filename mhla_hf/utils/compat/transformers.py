# SPDX-License-Identifier: Apache-2.0
"""Private and fragile parts of transformers, checked with versions 5.17 and 5.23.

Attention modules of transformers declare nothing about themselves, so some functions read their code: its bytecode
names the globals that it uses, its source the conditions.
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

from . import unknown_shape, wrap


Around = Callable[..., Any]


# Configurations and classes.


def attention_of(config: Any) -> Any:
    """Returns the attention implementation of a configuration, or `None` where it was left open.

    Reads `PreTrainedConfig._attn_implementation`.

    Raises:
        UnsupportedVersionError: If configurations have no such attribute.
    """
    try:
        return config._attn_implementation
    except AttributeError:
        raise unknown_shape("transformers", "PreTrainedConfig._attn_implementation") from None


def set_attention(config: Any, implementation: str | None) -> None:
    """Sets the attention implementation of a configuration, and leaves the configurations inside it alone.

    Writes `PreTrainedConfig._attn_implementation_internal`; the property's own setter reaches into the inner ones.

    Raises:
        UnsupportedVersionError: If configurations have no such attribute.
    """
    if not hasattr(config, "_attn_implementation_internal"):
        raise unknown_shape("transformers", "PreTrainedConfig._attn_implementation_internal")
    config._attn_implementation_internal = implementation


def can_choose_attention(model_class: Any) -> bool:
    """Returns whether transformers lets the attention implementation of a model class be chosen.

    Asks `PreTrainedModel._can_set_attn_implementation`.

    Raises:
        UnsupportedVersionError: If there is no such method.
    """
    try:
        return bool(model_class._can_set_attn_implementation())
    except AttributeError:
        raise unknown_shape("transformers", "PreTrainedModel._can_set_attn_implementation") from None


def supports_sdpa(model: Any) -> bool:
    """Returns whether a model has SDPA attention, by `PreTrainedModel._supports_sdpa`.

    Raises:
        UnsupportedVersionError: If there is no such attribute.
    """
    return bool(_class_attribute(model, "_supports_sdpa"))


def fp32_patterns(model: Any, half: bool) -> set[str]:
    """Returns patterns of the parameters that stay in fp32 in bfloat16 models, and those in float16 models besides.

    Reads `_keep_in_fp32_modules_strict` and `_keep_in_fp32_modules`.

    Args:
        model: A model of transformers.
        half: Include the patterns for float16 alone.

    Raises:
        UnsupportedVersionError: If there are no such attributes.
    """
    patterns = set(_class_attribute(model, "_keep_in_fp32_modules_strict") or ())
    return patterns | set(_class_attribute(model, "_keep_in_fp32_modules") or ()) if half else patterns


def ignored_names(model: Any, step: str) -> list[str]:
    """Returns patterns of tensor names that transformers ignores.

    Reads `_keys_to_ignore_on_save`, `_keys_to_ignore_on_load_missing` and `_keys_to_ignore_on_load_unexpected`.

    Args:
        model: A model of transformers.
        step: `"save"`, `"load_missing"` or `"load_unexpected"`.

    Raises:
        UnsupportedVersionError: If there are no such attributes.
    """
    return list(_class_attribute(model, f"_keys_to_ignore_on_{step}") or ())


def _class_attribute(model: Any, name: str) -> Any:
    if not hasattr(model, name):
        raise unknown_shape("transformers", f"PreTrainedModel.{name}")
    return getattr(model, name)


# Building and loading models.


def hook_models(
    model_class: Any,
    *,
    build: Around,
    finish: Around,
    initialize: Around,
    place_missing: Around,
    report_names: Around,
    plan: Around,
) -> None:
    """Wraps the steps in which transformers builds and loads a model.

    Each keyword argument is called as `around(original, model, *args, **kwargs)`, see
    [`wrap`][mhla_hf.utils.compat.wrap].

    Args:
        model_class: `PreTrainedModel`.
        build: Around the constructor of `PreTrainedModel`, with the configuration.
        finish: Around `post_init`, which ends constructors.
        initialize: Around `_initialize_weights`, with a module whose parameters no checkpoint gave.
        place_missing: Around `_move_missing_keys_from_meta_to_device`, with the missing names and the device map.
        report_names: Around `_adjust_missing_and_unexpected_keys`, with an object that has `missing_keys` and
            `unexpected_keys`.
        plan: Around `_resolve_parallel_plans`, with the distributed configuration. Versions before 5.23 do not have
            it, see [`has_parallel_plans`].

    Raises:
        UnsupportedVersionError: If one of them is missing; none is wrapped then.
    """
    steps = {
        "__init__": build,
        "post_init": finish,
        "_initialize_weights": initialize,
        "_move_missing_keys_from_meta_to_device": place_missing,
        "_adjust_missing_and_unexpected_keys": report_names,
    }
    for name in steps:
        if not callable(getattr(model_class, name, None)):
            raise unknown_shape("transformers", f"PreTrainedModel.{name}")
    if has_parallel_plans(model_class):
        steps["_resolve_parallel_plans"] = plan
    for name, around in steps.items():
        wrap("transformers", model_class, name, around)


def initialize_once(module: Any, initialize: Callable[[Any], None]) -> None:
    """Calls `initialize(module)` unless transformers initialised the module before, and marks it.

    The mark is `_is_hf_initialized`, which transformers reads and sets; where it is absent the module is fresh.
    """
    if not getattr(module, "_is_hf_initialized", False):
        initialize(module)
        module._is_hf_initialized = True


# Tensor parallelism.


class ParallelTools(NamedTuple):
    """Tools of transformers for tensor parallelism.

    Attributes:
        layer_class: Base class of parallel styles.
        styles: Registry of the styles, by name.
        generic_name: Replaces the numbers in a module's name by wildcards.
    """

    layer_class: Any
    styles: Any
    generic_name: Callable[[str], str]


def has_parallel_plans(model_class: Any) -> bool:
    """Returns whether transformers lets rules be added to the parallel plans of a model class, as since 5.23."""
    return hasattr(model_class, "_resolve_parallel_plans")


def parallel_tools() -> ParallelTools:
    """Returns the tools for tensor parallelism in `transformers.distributed`.

    Raises:
        UnsupportedVersionError: If they are not where 5.23 has them.
    """
    try:
        from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard
        from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer
    except ImportError:
        raise unknown_shape("transformers", "tensor parallelism (transformers.distributed, from 5.23 on)") from None
    return ParallelTools(TensorParallelLayer, ALL_PARALLEL_STYLES, replace_layer_number_by_wildcard)


def add_parallel_rules(model: Any, rules: Mapping[str, str]) -> None:
    """Adds rules to the tensor-parallel plan of a model, in `PreTrainedModel._tp_plan`.

    Raises:
        UnsupportedVersionError: If models have no such plan.
    """
    model._tp_plan = {**(_class_attribute(model, "_tp_plan") or {}), **rules}


# Names of stored tensors: some families are renamed as they are loaded and saved.


def renaming_rules(model: Any) -> list[Any]:
    """Returns the rules by which transformers renames, joins and splits the stored tensors of a model.

    Asks `transformers.conversion_mapping.get_model_conversion_mapping`.

    Raises:
        UnsupportedVersionError: If there is no such function.
    """
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:
        raise unknown_shape("transformers", "conversion_mapping.get_model_conversion_mapping") from None
    return list(get_model_conversion_mapping(model))


def loaded_name(name: str, rules: Sequence[Any], prefix: str, state: Mapping[str, Any]) -> tuple[str, bool]:
    """Returns the name in the model of a stored tensor, and whether it is joined or split on the way.

    Asks `transformers.core_model_loading.rename_source_key`.

    Args:
        name: Name in the file.
        rules: Rules of [`renaming_rules`]. Those that apply note that they were used.
        prefix: `base_model_prefix` of the model.
        state: The model's tensors by name.

    Raises:
        UnsupportedVersionError: If there is no such function.
    """
    try:
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    except ImportError:
        raise unknown_shape("transformers", "core_model_loading.rename_source_key") from None
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    target, converter = rename_source_key(name, renamings, converters, prefix, state)
    return target, converter is not None


def keep_used_rules(model: Any, rules: Iterable[Any]) -> None:
    """Lets a model be saved by the rules that were used while its names were loaded, as `from_pretrained` does.

    Writes `_weight_conversions`.

    Raises:
        UnsupportedVersionError: If rules do not tell whether they were used.
    """
    rules = list(rules)
    if not all(hasattr(rule, "was_used") for rule in rules):
        raise unknown_shape("transformers", "core_model_loading.WeightTransform.was_used")
    model._weight_conversions = [rule for rule in rules if rule.was_used()]


def saved_tensors(model: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """Returns tensors of a model as they are stored, by `transformers.core_model_loading.revert_weight_conversion`.

    Args:
        model: The model, see [`keep_used_rules`].
        tensors: Tensors by their names in the model.

    Raises:
        UnsupportedVersionError: If there is no such function.
    """
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        raise unknown_shape("transformers", "core_model_loading.revert_weight_conversion") from None
    return revert_weight_conversion(model, tensors)


def without_tied(model: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """Returns the tensors of a model that are saved, each tied one once.

    Asks `transformers.modeling_utils.remove_tied_weights_from_state_dict`.

    Raises:
        UnsupportedVersionError: If there is no such function.
    """
    try:
        from transformers.modeling_utils import remove_tied_weights_from_state_dict
    except ImportError:
        raise unknown_shape("transformers", "modeling_utils.remove_tied_weights_from_state_dict") from None
    return remove_tied_weights_from_state_dict(dict(tensors), model)


# The code of modules.


def names_used(function: Callable[..., Any]) -> set[str]:
    """Returns the global names and attributes that a function and those inside it look up, by its bytecode.

    Empty for functions that are not written in Python, of which nothing is known.
    """
    return _names(getattr(inspect.unwrap(function), "__code__", None))


def _names(code: Any) -> set[str]:
    if not isinstance(code, CodeType):
        return set()
    return set(code.co_names).union(*(_names(constant) for constant in code.co_consts))


def global_of(function: Callable[..., Any], name: str) -> Any:
    """Returns the value of a global name in the module of a function, or `None`."""
    return getattr(inspect.unwrap(function), "__globals__", {}).get(name)


def reads_keywords(function: Callable[..., Any]) -> bool:
    """Returns whether a function takes any keyword argument and reads those that it does not know, by its bytecode.

    False for functions that are not written in Python.
    """
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    if code is None:
        return False
    parameters = inspect.signature(function).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind is inspect.Parameter.VAR_KEYWORD]
    return any(entry.argval in names and "LOAD" in entry.opname for entry in dis.get_instructions(code))


@lru_cache(maxsize=256)
def rotation_conditions(function: Callable[..., Any]) -> tuple[str, ...]:
    """Returns the conditions under which a function rotates queries and keys, as they are written in its source.

    Empty where it always does, never does, or its source is not known.
    """
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
