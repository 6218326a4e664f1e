# SPDX-License-Identifier: Apache-2.0
"""Plans of conversions of transformers models, made from configurations and headers."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..config import MHLAConfig, parse_layers
from ..integrations.transformers.attaching import convert_transformers_model
from ..integrations.transformers.configuration import check_layers, check_new_parameters, check_sizes
from ..integrations.transformers.modules import dispatches, is_cross_attention, window_reason
from ..layers.mhla import MHLA
from ..layers.original import STATE_KEY, STATES
from ..models.source import Component
from ..models.weight_files import TRANSFORMERS_FILES, WeightSet
from ..utils.compat.transformers import (
    fp32_patterns,
    ignored_names,
    keep_used_rules,
    loaded_name,
    renaming_rules,
    saved_tensors,
    without_tied,
)
from ..utils.files import read_json
from ..utils.messages import shorten_text
from ..utils.tensor_files import TensorEntry, check_floats
from .planning import (
    ComponentPlan,
    PlanOptions,
    WeightsPlan,
    cast_entry,
    compare_tensors,
    dominant_dtype,
    initial_entry,
    plan_files,
)
from .report import ComponentReport


# Heads that published checkpoints often lack, since nothing that they were made for uses them. transformers
# initialises them on loading, before a conversion as after it.
_OPTIONAL = re.compile(r"(^|\.)pooler\.")


def plan_transformers_model(
    component: Component,
    mhla: MHLAConfig | Mapping[str, Any] | None,
    options: PlanOptions,
) -> ComponentPlan:
    """Plan the conversion of one model of transformers.

    Options that `mhla` does not give are the defaults for such a model, as in
    `from_pretrained(..., attn_implementation="mhla", mhla=...)`; errors are those of `convert_pretrained`.
    """
    if component.is_mhla:
        raise ValueError(f"{component.folder} is MHLA already; convert the model it was made from.")
    weight_sets = component.weight_sets(options.variant)
    # Before anything is built: a wrong size may ask for more memory than there is.
    check_sizes(component.config, str(component.folder / "config.json"))
    model = empty_mhla_model(component, mhla, options.layers)
    report = _report(component, model)
    weights = [_plan_weights(weight_set, model, report, options) for weight_set in weight_sets]
    main = next((plan for plan in weights if plan.report.variant is None), weights[0])
    _set_dtype(model.config, options.dtype, dominant_dtype(entry for shard in main.shards.values() for entry in shard))
    return ComponentPlan(component.name, _saved_config(model), weights, report, TRANSFORMERS_FILES)


def empty_mhla_model(
    component: Component, mhla: MHLAConfig | Mapping[str, Any] | None, layers: str | Iterable[int] | None = None
) -> Any:
    """Build the MHLA version of a softmax model without memory for its parameters.

    Layers that are given replace those in `mhla`.

    Raises:
        ValueError: If the configuration does not describe a model, or the model cannot be MHLA with these options.
    """
    model_class, config = component.load_class(), component.load_config()
    try:
        with torch.device("meta"):
            model = model_class(config)
            options = mhla if layers is None else _without_layers(mhla)
            convert_transformers_model(model, options, without_weights=True)
            if layers is not None:
                _keep_layers(model, layers)
    except ValueError as error:
        # Errors of transformers may have several lines.
        raise ValueError(shorten_text(str(error), 500)) from error
    # The error for sizes that do not fit each other depends on the model.
    except Exception as error:
        reason = shorten_text(f"{type(error).__name__}: {error}", 300)
        raise ValueError(f"{component.folder / 'config.json'} does not describe a model ({reason}).") from error
    check_new_parameters(model, model.state_dict())
    return model


def _attentions(model: Any) -> list[Any]:
    """Return the self-attention modules that could be MHLA, in order."""
    return [
        module for name, module in model.named_modules() if dispatches(module) and not is_cross_attention(name, module)
    ]


def _without_layers(mhla: MHLAConfig | Mapping[str, Any] | None) -> Any:
    """Remove the choice of layers from options, including those of each tower."""
    if isinstance(mhla, MHLAConfig):
        return mhla.replace(layers=None)
    options = {name: value for name, value in (mhla or {}).items() if name != "layers"}
    return {
        name: _without_layers(value) if isinstance(value, (MHLAConfig, Mapping)) else value
        for name, value in options.items()
    }


def _keep_layers(model: Any, layers: str | Iterable[int]) -> None:
    """Keep MHLA in some layers of each tower that has it."""
    towers: dict[int, list[Any]] = {}
    for module in _attentions(model):
        towers.setdefault(id(module.config), []).append(module)
    wanted = layers if isinstance(layers, str) else list(layers)
    for modules in towers.values():
        if not any(hasattr(module, "mhla") for module in modules):
            continue
        chosen = _chosen(wanted, modules)
        modules[0].config.mhla["layers"] = chosen
        for index, module in enumerate(modules):
            kept = chosen is None or index in chosen
            reason = window_reason(module, index) if kept and chosen is not None else None
            if reason is not None:
                raise ValueError(f"Layer {index} of {type(model).__name__} cannot be MHLA: {reason}.")
            if not kept and hasattr(module, "mhla"):
                del module.mhla


def _chosen(layers: str | list[int], modules: list[Any]) -> list[int] | None:
    indices = parse_layers(layers, len(modules))
    if indices is not None and isinstance(layers, str) and "/" in layers:
        # A fraction is of all layers; those with a sliding window always stay softmax.
        indices = [index for index in indices if window_reason(modules[index], index) is None]
        if not indices:
            raise ValueError(f"layers={layers} selects sliding-window layers only, which stay softmax; name layers.")
    return indices


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


def _plan_weights(weight_set: WeightSet, model: Any, report: ComponentReport, options: PlanOptions) -> WeightsPlan:
    dtype = options.dtype
    where = str(weight_set.files[0].parent)
    stored = {entry.name: entry for entry in weight_set.entries()}
    if any(".mhla." in name for name in stored):
        raise ValueError(f"{where} has MHLA weights already; convert the model they were made from.")
    names = StoredNames(model, list(stored))
    check_layers(model, (), _unknown(names, model, stored), where)
    repeated = _equal_copies(names, stored)
    written = {name: target for name, target in names.written.items() if name not in repeated}
    found = {target: stored[name].shape for name, target in written.items()}
    extra = {target: shape for target, shape in found.items() if target not in names.expected}
    left_out = names.may_be_missing | {name for name in names.expected if _OPTIONAL.search(name)}
    expected = {name: shape for name, shape in names.expected.items() if name in found or name not in left_out}
    compare_tensors(found, {**expected, **extra}, where=where)
    report.dropped = sorted({*report.dropped, *(name for name in stored if name not in written)})
    kept = _kept_in_fp32(model, dtype)
    copied = []
    # Integers in place of parameters are quantised weights; buffers may be integers.
    check_floats((stored[name] for name in written if names.is_float(name)), where)
    for name, target in written.items():
        copied.append(cast_entry(replace(stored[name], name=target), dtype, kept(names.loaded[name])))
    new_dtype = dtype or dominant_dtype(copied)
    fresh = [
        initial_entry(model, name, new_dtype, kept, report, stored_name) for name, stored_name in names.fresh.items()
    ]
    stem = TRANSFORMERS_FILES.stem
    return plan_files(weight_set.variant, weight_set.files, copied, fresh, options.max_bytes, stem)


def _unknown(names: StoredNames, model: Any, stored: Iterable[str]) -> list[str]:
    """Return tensors that the model does not know and its class does not list as ignored."""
    ignored = ignored_names(model, "load_unexpected")
    return [
        names.renamed[name]
        for name in stored
        if name not in names.loaded and not any(re.search(pattern, name) for pattern in ignored)
    ]


def _equal_copies(names: StoredNames, stored: Mapping[str, TensorEntry]) -> set[str]:
    """Return tensors that equal the one they are tied to; transformers ties only equal ones."""
    return {
        name
        for name, original in names.tied_copies.items()
        if torch.equal(stored[name].load(), stored[original].load())
    }


def _kept_in_fp32(model: Any, dtype: torch.dtype | None) -> Callable[[str], bool]:
    """Returns a test by name for parameters that transformers keeps in fp32 in a model of a type."""
    half = dtype in (torch.float16, torch.bfloat16)
    patterns = fp32_patterns(model, dtype == torch.float16) if half else set()
    if not patterns:
        return lambda name: False
    expression = re.compile("|".join(pattern.replace("*", ".*") for pattern in sorted(patterns)))
    return lambda name: expression.search(name) is not None


def _set_dtype(config: Any, dtype: torch.dtype | None, found: torch.dtype) -> None:
    """Set the dtype: the one cast to, or the one found where the configuration names none."""
    configs = [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", {}))]
    for part in configs:
        if part is not None and (dtype is not None or config.dtype is None or part is not config):
            part.dtype = dtype or config.dtype or found


def _saved_config(model: Any) -> dict[str, Any]:
    """Return `config.json` as `save_pretrained` writes it."""
    model.config.architectures = [type(model).__name__]
    setattr(model.config, STATE_KEY, STATES[0])
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        return read_json(Path(folder) / "config.json", "the configuration")


class StoredNames:
    """Names of the tensors that a conversion reads and writes, with transformers' own rules.

    They are those that `save_pretrained` writes after `from_pretrained` has read the source: a checkpoint with names
    of an older kind keeps them, one without the prefix of its base model gets it.

    Args:
        model: The MHLA model on the meta device.
        stored: Names of the tensors in the source.

    Attributes:
        expected: Shapes of what a complete source has, by the name in the files written. Tied tensors occur once.
        loaded: Names of the source's tensors in the model; what the model does not know is left out.
        renamed: Name in the model for each tensor of the source, known to the model or not.
        written: Names of the same tensors in the files written.
        tied_copies: Tensors of the source that the model ties to another one of the source, with that one.
        fresh: Names of the MHLA parameters in the model, with those in the files written.
        may_be_missing: Names among `expected` that transformers does without.
    """

    def __init__(self, model: Any, stored: Sequence[str]) -> None:
        self._model = model
        self._state = model.state_dict()
        self._renaming = renaming_rules(model)
        self.loaded, merged = self._load_names(stored)
        # What `from_pretrained` does: rules that were not used on the way in are not used on the way out.
        keep_used_rules(model, self._renaming)
        state = {name: tensor for name, tensor in self._state.items() if ".mhla." not in name}
        unique = without_tied(model, state)
        ignored = set(ignored_names(model, "save"))
        unique = {name: tensor for name, tensor in unique.items() if name not in ignored}
        reverted = saved_tensors(model, dict(unique))
        self.expected = {name: tuple(tensor.shape) for name, tensor in reverted.items()}
        self.fresh = self._file_names([name for name in self._state if ".mhla." in name])
        self._main_name = self._tied_names(state, unique)
        self._plan(merged)
        patterns = ignored_names(model, "load_missing")
        self.may_be_missing = {name for name in self.expected if any(re.search(part, name) for part in patterns)}

    def is_float(self, name: str) -> bool:
        """True where the model has floating-point numbers in the place of a tensor of the source."""
        return self._state[self.loaded[name]].is_floating_point()

    def _load_names(self, stored: Sequence[str]) -> tuple[dict[str, str], set[str]]:
        """Names in the model by names in the source, and which of the latter are joined or split on the way."""
        prefix = self._model.base_model_prefix
        loaded, merged = {}, set()
        self.renamed: dict[str, str] = {}
        for name in stored:
            target, is_merged = loaded_name(name, self._renaming, prefix, self._state)
            if target not in self._state and name in self._state:
                target, is_merged = loaded_name(name, [], prefix, self._state)
            self.renamed[name] = target
            if target in self._state:
                loaded[name] = target
                if is_merged:
                    merged.add(name)
        return loaded, merged

    def _file_names(self, names: Sequence[str]) -> dict[str, str]:
        """Names in the files of tensors that are renamed only. Their shapes tell which became which."""
        with torch.device("meta"):
            numbered = {name: torch.empty(index) for index, name in enumerate(names)}
        renamed = saved_tensors(self._model, numbered) if numbered else {}
        found = {tensor.shape[0]: name for name, tensor in renamed.items()}
        return {name: found[index] for index, name in enumerate(names)}

    def _tied_names(self, state: dict[str, torch.Tensor], unique: dict[str, torch.Tensor]) -> dict[str, str]:
        """For each tensor of the model that is tied to one that is saved, that one."""
        owners = {id(self._model.get_parameter_or_buffer(name)): name for name in unique}
        others = {name: id(self._model.get_parameter_or_buffer(name)) for name in state if name not in unique}
        return {name: owners[tensor] for name, tensor in others.items() if tensor in owners}

    def _plan(self, merged: set[str]) -> None:
        by_loaded = {target: name for name, target in self.loaded.items() if name not in merged}
        self.tied_copies: dict[str, str] = {}
        targets = {}
        for name, target in self.loaded.items():
            if name in merged:
                continue
            main = self._main_name.get(target)
            if main is not None and main in by_loaded:
                self.tied_copies[name] = by_loaded[main]
            targets[name] = target if main is None or main in by_loaded else main
        file_names = self._file_names(sorted(set(targets.values())))
        # Tensors that are joined in the model only stay what they are in the files.
        self.written = {name: name if name in merged else file_names[targets[name]] for name in self.loaded}
