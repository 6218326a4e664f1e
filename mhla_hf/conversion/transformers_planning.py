# SPDX-License-Identifier: Apache-2.0
"""What the conversion of a transformers model will write, decided from its configuration and headers alone."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedModel

from ..config import MHLAConfig
from ..integrations.transformers.checks import check_layers, check_new_parameters, check_sizes
from ..integrations.transformers.geometry import dispatches, is_cross_attention, window_reason
from ..layers.mhla import MHLA
from ..models.source import Component
from ..models.weight_files import TRANSFORMERS_FILES, WeightSet
from ..utils.json_files import read_json
from ..utils.messages import shorten_text
from ..utils.tensor_files import FLOAT_TYPES, SafetensorsReader, TensorEntry
from .options import parse_layers
from .planning import (
    ComponentPlan,
    WeightsPlan,
    compare_tensors,
    dominant_dtype,
    initial_entry,
    plan_files,
)
from .provenance import ComponentReport
from .transformers_names import StoredNames


# Heads that published checkpoints often lack, since nothing that they were made for uses them. transformers
# initialises them on loading, before a conversion as after it.
_OPTIONAL = re.compile(r"(^|\.)pooler\.")


def plan_transformers_model(
    component: Component,
    options: MHLAConfig | Mapping[str, Any] | None,
    layers: str | Iterable[int] | None,
    dtype: torch.dtype | None,
    variant: str | None,
    max_bytes: int | None,
) -> ComponentPlan:
    """Decides everything about one model of transformers before anything is written.

    Args:
        component: What to convert.
        options: The options. Those that a dict does not give are the defaults for such a model, as in
            `from_pretrained(..., attn_implementation="mhla", mhla=...)`.
        layers: As for `convert_pretrained`, as are all others; so are the errors.
        dtype: Type to cast to.
        variant: The only variant to convert.
        max_bytes: Largest weight file.
    """
    if _asks_for_mhla(component.config):
        raise ValueError(f"{component.folder} is MHLA already; convert the model it was made from.")
    weight_sets = component.weight_sets(variant)
    # Before anything is built: a wrong size may ask for more memory than there is.
    check_sizes(component.config, str(component.folder / "config.json"))
    model_class = _model_class(component)
    model = _empty_mhla_model(component, model_class, options)
    if layers is not None:
        model = _empty_mhla_model(component, model_class, _with_layers(model, options, layers))
    check_new_parameters(model, model.state_dict())
    report = _report(component, model)
    weights = [_plan_weights(weight_set, model, report, dtype, max_bytes) for weight_set in weight_sets]
    main = next((plan for plan in weights if plan.report.variant is None), weights[0])
    _set_dtype(model.config, dtype, dominant_dtype(entry for shard in main.shards for entry in shard))
    return ComponentPlan(component.name, _saved_config(model), weights, report, TRANSFORMERS_FILES)


def _asks_for_mhla(config: Mapping[str, Any]) -> bool:
    parts = [config, *(entry for entry in config.values() if isinstance(entry, Mapping))]
    return any(part.get("mhla") is not None or part.get("attn_implementation") == "mhla" for part in parts)


def _model_class(component: Component) -> Any:
    """The class that the weights were saved from.

    Raises:
        ValueError: If transformers does not have it.
    """
    found = getattr(transformers, component.class_name, None)
    if found is None and not component.config.get("architectures"):
        config = _load_config(component)
        found = transformers.MODEL_MAPPING.get(type(config), None)
    if not (isinstance(found, type) and issubclass(found, PreTrainedModel)):
        raise ValueError(
            f"{component.folder} is a {shorten_text(component.class_name)}, which transformers "
            f"{transformers.__version__} does not have; code that comes with a model is not run."
        )
    return found


def _load_config(component: Component, **changes: Any) -> Any:
    try:
        return AutoConfig.from_pretrained(component.folder, trust_remote_code=False, **changes)
    # What a wrong entry ends in depends on the model's configuration class.
    except Exception as error:
        reason = shorten_text(str(error) or type(error).__name__, 300)
        raise ValueError(f"{component.folder / 'config.json'} cannot be read: {reason}") from error


def _empty_model(component: Component, model_class: Any, **changes: Any) -> Any:
    """Builds the model without memory for its parameters, its configuration changed."""
    config = _load_config(component, **changes)
    try:
        with torch.device("meta"):
            return model_class(config)
    except ValueError as error:
        # Errors of transformers may have several lines.
        raise ValueError(shorten_text(str(error), 500)) from error
    # Sizes that do not fit each other end in errors of all kinds.
    except Exception as error:
        reason = shorten_text(f"{type(error).__name__}: {error}", 300)
        raise ValueError(f"{component.folder / 'config.json'} does not describe a model ({reason}).") from error


def _empty_mhla_model(component: Component, model_class: Any, options: MHLAConfig | Mapping[str, Any] | None) -> Any:
    options = {} if options is None else options
    towers = _towers(model_class.config_class, options)
    # Options for some towers alone leave the others softmax.
    implementation = dict.fromkeys(towers, "mhla") if towers else "mhla"
    return _empty_model(component, model_class, attn_implementation=implementation, mhla=options)


def _attentions(model: Any) -> list[Any]:
    """The self-attention modules that could be MHLA, in order."""
    return [
        module for name, module in model.named_modules() if dispatches(module) and not is_cross_attention(name, module)
    ]


def _with_layers(model: Any, options: MHLAConfig | Mapping[str, Any] | None, layers: str | Iterable[int]) -> Any:
    """Puts the choice of layers into the options; for a model of several towers, into those of each."""
    towers: dict[int, list[Any]] = {}
    for module in _attentions(model):
        towers.setdefault(id(module.config), []).append(module)
    names = {id(getattr(model.config, name, None)): name for name in getattr(model.config, "sub_configs", {})}
    wanted = layers if isinstance(layers, str) else list(layers)
    if not any(key in names for key in towers):
        modules = next(iter(towers.values()), [])
        return _replace_layers(options, _chosen(wanted, modules))
    given = _towers(model.config, options)
    chosen = {}
    for key, modules in towers.items():
        name = names.get(key)
        # Towers that cannot be MHLA keep softmax, whatever their layers.
        if name is not None and (not given or name in given) and any(hasattr(module, "mhla") for module in modules):
            chosen[name] = _replace_layers(given.get(name, options), _chosen(wanted, modules))
    return chosen


def _towers(config: Any, options: MHLAConfig | Mapping[str, Any] | None) -> dict[str, Any]:
    """The options of each tower of a configuration or its class where they are given so, otherwise nothing."""
    names = getattr(config, "sub_configs", {})
    if isinstance(options, Mapping) and all(name in names for name in options):
        return dict(options)
    return {}


def _chosen(layers: str | list[int], modules: list[Any]) -> list[int] | None:
    indices = parse_layers(layers, len(modules))
    if indices is not None and isinstance(layers, str) and "/" in layers:
        # A fraction is of all layers; those within a sliding window stay softmax in any case.
        indices = [index for index in indices if window_reason(modules[index], index) is None]
        if not indices:
            raise ValueError(f"layers={layers} selects sliding-window layers only, which stay softmax; name layers.")
    return indices


def _replace_layers(options: MHLAConfig | Mapping[str, Any] | None, layers: list[int] | None) -> Any:
    if isinstance(options, MHLAConfig):
        return options.replace(layers=layers)
    return {**(options or {}), "layers": layers}


def _report(component: Component, model: Any) -> ComponentReport:
    attentions = _attentions(model)
    config = model.config
    towers = {name: getattr(getattr(config, name, None), "mhla", None) for name in getattr(config, "sub_configs", {})}
    options = {name: dict(given) for name, given in towers.items() if given is not None}
    return ComponentReport(
        source_class=component.class_name,
        target_class=type(model).__name__,
        mhla=dict(config.mhla) if getattr(config, "mhla", None) is not None else options,
        mhla_layers=[
            index for index, module in enumerate(attentions) if isinstance(getattr(module, "mhla", None), MHLA)
        ],
        num_layers=len(attentions),
    )


def _plan_weights(
    weight_set: WeightSet, model: Any, report: ComponentReport, dtype: torch.dtype | None, max_bytes: int | None
) -> WeightsPlan:
    readers = weight_set.open(floats_only=False)
    where = str(weight_set.files[0].parent)
    stored = {name: reader for reader in readers for name in reader.shapes}
    if any(".mhla." in name for name in stored):
        raise ValueError(f"{where} has MHLA weights already; convert the model they were made from.")
    names = StoredNames(model, list(stored))
    check_layers(model, (), _unknown(names, model, stored), where)
    repeated = _equal_copies(names, stored)
    written = {name: target for name, target in names.written.items() if name not in repeated}
    found = {target: stored[name].shapes[name] for name, target in written.items()}
    extra = {target: shape for target, shape in found.items() if target not in names.expected}
    left_out = names.may_be_missing | {name for name in names.expected if _OPTIONAL.search(name)}
    expected = {name: shape for name, shape in names.expected.items() if name in found or name not in left_out}
    compare_tensors(found, {**expected, **extra}, where=where)
    report.dropped = sorted({*report.dropped, *(name for name in stored if name not in written)})
    kept = _kept_in_fp32(model, dtype)
    groups = []
    for reader in readers:
        own = [name for name in reader.shapes if name in written]
        # Integers are what they are in buffers, and quantised in place of parameters.
        reader.check_floats(name for name in own if names.is_float(name))
        groups.append([_copied_entry(reader, name, written[name], dtype, kept(names.loaded[name])) for name in own])
    new_dtype = dtype or dominant_dtype(entry for group in groups for entry in group)
    fresh = [
        initial_entry(model, name, new_dtype, kept, report, stored_name) for name, stored_name in names.fresh.items()
    ]
    return plan_files(weight_set, [group for group in groups if group], fresh, max_bytes)


def _unknown(names: StoredNames, model: Any, stored: Iterable[str]) -> list[str]:
    """Tensors of the source that the model does not know, and that its class does not expect to be left over."""
    ignored = list(model._keys_to_ignore_on_load_unexpected or [])
    return [
        names.renamed[name]
        for name in stored
        if name not in names.loaded and not any(re.search(pattern, name) for pattern in ignored)
    ]


def _copied_entry(
    reader: SafetensorsReader, name: str, target: str, dtype: torch.dtype | None, kept: bool
) -> TensorEntry:
    stored = reader.dtypes[name]
    cast = dtype if dtype is not None and stored in FLOAT_TYPES.values() and not kept else stored
    return TensorEntry(target, reader.shapes[name], cast, lambda: reader.load(name))


def _equal_copies(names: StoredNames, stored: Mapping[str, SafetensorsReader]) -> set[str]:
    """Tensors that repeat another one they are tied to; transformers ties them only where they are equal."""
    repeated = set()
    for name, original in names.tied_copies.items():
        if torch.equal(stored[name].load(name), stored[original].load(original)):
            repeated.add(name)
    return repeated


def _kept_in_fp32(model: Any, dtype: torch.dtype | None) -> Callable[[str], bool]:
    """Tells by their name in the model which parameters transformers keeps in fp32 in a model of a type."""
    patterns = set(model._keep_in_fp32_modules_strict or []) if dtype in (torch.float16, torch.bfloat16) else set()
    if dtype == torch.float16:
        patterns |= set(model._keep_in_fp32_modules or [])
    if not patterns:
        return lambda name: False
    expression = re.compile("|".join(pattern.replace("*", ".*") for pattern in sorted(patterns)))
    return lambda name: expression.search(name) is not None


def _set_dtype(config: Any, dtype: torch.dtype | None, found: torch.dtype) -> None:
    """Notes the type of the weights: the one cast to, or the one found where the configuration names none."""
    configs = [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", {}))]
    for part in configs:
        if part is not None and (dtype is not None or config.dtype is None or part is not config):
            part.dtype = dtype or config.dtype or found


def _saved_config(model: Any) -> dict[str, Any]:
    """`config.json` as `save_pretrained` writes it."""
    model.config.architectures = [type(model).__name__]
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        return read_json(Path(folder) / "config.json", "the configuration")
