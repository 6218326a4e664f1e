# SPDX-License-Identifier: Apache-2.0
"""Plans of conversions of transformers models, made from configurations and headers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..config import MHLAConfig
from ..integrations.transformers.attaching import convert_transformers_model
from ..integrations.transformers.limits import check_layers, check_new_parameters, check_sizes
from ..integrations.transformers.modules import self_attentions
from ..integrations.transformers.towers import towers_of
from ..layers.mhla import MHLA
from ..layers.weight_record import STATE_KEY, STATES
from ..models.directory import ModelDirectory
from ..models.weight_files import TRANSFORMERS_FILES, WeightSet
from ..utils.compat import transformers as compat
from ..utils.messages import shorten_text
from ..utils.tensor_files import check_floats
from . import planning


# Heads that published checkpoints often lack, since nothing that they were made for uses them. transformers
# initialises them on loading, before a conversion as after it.
_POOLER = r"(^|\.)pooler\."


def plan_transformers_model(
    component: ModelDirectory, mhla: MHLAConfig | Mapping[str, Any] | None, options: planning.PlanOptions
) -> planning.ComponentPlan:
    """Plan the conversion of one model of transformers.

    Options that `mhla` does not give are the defaults for such a model, as in
    `from_pretrained(..., attn_implementation="mhla", mhla=...)`; errors are those of `convert_pretrained`.
    """
    found = component.weight_sets(options.variant)
    # Before anything is built: a wrong size may ask for more memory than there is.
    check_sizes(component.config, str(component.folder / "config.json"))
    model = _empty_mhla_model(component, mhla if options.layers is None else _with_layers(mhla, options.layers))
    report = _report(component, model)
    plans = [_plan_weights(weights, model, report, options) for weights in found]
    main = next((plan for plan in plans if plan.report.variant is None), plans[0])
    main_dtype = planning.dominant_dtype(entry for shard in main.shards.values() for entry in shard)
    config = model.config
    for part in (config, *towers_of(config).values()):
        if options.dtype is not None or config.dtype is None or part is not config:
            part.dtype = options.dtype or config.dtype or main_dtype
    config.architectures = [type(model).__name__]
    setattr(config, STATE_KEY, STATES[0])
    # As `save_pretrained` writes it.
    content = json.loads(config.to_json_string())
    return planning.ComponentPlan(component.component, content, plans, report, component.names)


def _empty_mhla_model(component: ModelDirectory, mhla: MHLAConfig | Mapping[str, Any] | None) -> Any:
    """Build the MHLA version of a softmax model without memory for its parameters."""
    model_class, config = component.load_class(), component.load_config()
    try:
        with torch.device("meta"):
            model = convert_transformers_model(model_class(config), mhla, without_weights=True)
    # The error for sizes that do not fit each other depends on the model; those of transformers have several lines.
    except Exception as error:
        raise ValueError(f"{component.folder}: {shorten_text(str(error) or type(error).__name__, 500)}") from error
    check_new_parameters(model, model.state_dict())
    return model


def _with_layers(mhla: MHLAConfig | Mapping[str, Any] | None, layers: str | Iterable[int]) -> dict[str, Any]:
    """Replace the choice of layers in options, including those of each tower."""
    options = mhla.given_options() if isinstance(mhla, MHLAConfig) else dict(mhla or {})
    towers = {name: value for name, value in options.items() if isinstance(value, (MHLAConfig, Mapping))}
    if towers:
        return {**options, **{name: _with_layers(value, layers) for name, value in towers.items()}}
    return {**options, "layers": layers if isinstance(layers, str) else list(layers)}


def _report(component: ModelDirectory, model: Any) -> planning.ComponentReport:
    config, attentions = model.config, self_attentions(model)
    options = {name: dict(tower.mhla) for name, tower in towers_of(config).items() if tower.mhla is not None}
    return planning.ComponentReport(
        source_class=component.class_name,
        target_class=type(model).__name__,
        mhla=options if config.mhla is None else dict(config.mhla),
        mhla_layers=[
            index for index, (_, module) in enumerate(attentions) if isinstance(getattr(module, "mhla", None), MHLA)
        ],
        num_layers=len(attentions),
    )


def _plan_weights(
    found: WeightSet, model: Any, report: planning.ComponentReport, options: planning.PlanOptions
) -> planning.WeightsPlan:
    entries, where = {entry.name: entry for entry in found.entries()}, str(found.files[0].parent)
    if any(".mhla." in name for name in entries):
        raise ValueError(f"{where} has MHLA weights already; convert the model they were made from.")
    names = StoredNames(model, list(entries))
    check_layers(model, (), [names.renamed[name] for name in names.unknown], where)
    # By the names that the model looks for; tensors that nothing they were made for uses may be missing.
    known = [replace(entries[name], name=key) for name, key in names.keys.items() if key in names.expected]
    given = {entry.name for entry in known}
    optional = names.optional - given
    expected = {name: shape for name, shape in names.expected.items() if ".mhla." not in name and name not in optional}
    planning.compare_tensors(planning.StoredWeights(found.variant, known, where), expected)
    report.dropped = sorted({*report.dropped, *(name for name in entries if name not in names.keys)})
    # Integers in place of parameters are quantised weights; buffers may be integers.
    check_floats((entries[name] for name in names.keys if names.is_float(name)), where)
    kept = compat.kept_in_fp32(model, options.dtype)
    copied = [planning.cast_entry(entries[name], options.dtype, kept(names.loaded[name])) for name in names.keys]
    dtype = options.dtype or planning.dominant_dtype(copied)
    fresh = [
        planning.initial_entry(model, name, dtype, kept, report, *compat.saved_tensors(model, {name: tensor}))
        for name, tensor in model.state_dict().items()
        if ".mhla." in name
    ]
    return planning.plan_files(found.variant, copied, options.max_bytes, fresh, TRANSFORMERS_FILES)


class StoredNames:
    """What stored tensors become in a model as transformers loads it: renamed, joined, tied.

    Args:
        model: The model on the meta device.
        stored: Names of the tensors in the files.

    Attributes:
        loaded: Names in the model; what the model does not know is left out.
        renamed: Name in the model for each tensor, known to the model or not.
        unknown: Tensors that the model does not know and its class does not list as ignored.
        expected: Shapes of what complete weights have. Tied tensors occur once, and those that are joined in the model
            under their names in the files.
        keys: Which of `expected` each known tensor is.
        optional: Names among `expected` that a checkpoint may lack.
    """

    def __init__(self, model: Any, stored: Sequence[str]) -> None:
        self._state = model.state_dict()
        rules, prefix = compat.renaming_rules(model), model.base_model_prefix
        self.loaded: dict[str, str] = {}
        self.renamed: dict[str, str] = {}
        joined = set()
        for name in stored:
            target, is_joined = compat.loaded_name(name, rules, prefix, self._state)
            if target not in self._state and name in self._state:
                target, is_joined = compat.loaded_name(name, [], prefix, self._state)
            self.renamed[name] = target
            if target in self._state:
                self.loaded[name] = target
                if is_joined:
                    joined.add(name)
        ignored = compat.ignored_names(model, "load_unexpected")
        self.unknown = [
            name for name in stored if name not in self.loaded and not any(re.search(part, name) for part in ignored)
        ]
        # Rules that were not used on the way in are not used on the way out.
        compat.keep_used_rules(model, rules)
        unsaved = set(compat.ignored_names(model, "save"))
        untied = compat.without_tied(model, self._state)
        unique = {name: tensor for name, tensor in untied.items() if name not in unsaved}
        joint = {self.loaded[name] for name in joined}
        split = compat.saved_tensors(model, {name: unique.pop(name) for name in joint & set(unique)}) if joint else {}
        self.expected = {name: tuple(tensor.shape) for name, tensor in {**unique, **split}.items()}
        owners = {id(model.get_parameter_or_buffer(name)): name for name in unique}
        # A tensor that repeats the one it is tied to counts as that one.
        self.keys = {
            name: name if name in joined else owners.get(id(model.get_parameter_or_buffer(target)), target)
            for name, target in self.loaded.items()
        }
        patterns = [*compat.ignored_names(model, "load_missing"), _POOLER]
        self.optional = {name for name in self.expected if any(re.search(part, name) for part in patterns)}

    def is_float(self, name: str) -> bool:
        """True where the model has floating-point numbers in the place of a tensor of the source."""
        return self._state[self.loaded[name]].is_floating_point()
