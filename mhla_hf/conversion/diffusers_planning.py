# SPDX-License-Identifier: Apache-2.0
"""Plans of conversions of diffusers transformers, made from the configuration and headers alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..config import MHLAConfig, parse_layers
from ..layers.original import STATE_KEY, STATES
from ..models.bounds import check_layer_count, check_model_config, check_new_size
from ..models.options import to_stored
from ..models.registry import family_for
from ..models.source import Component
from ..utils.compat.diffusers import declared, fp32_parts
from ..utils.tensor_files import TensorEntry
from .planning import (
    ComponentPlan,
    PlanOptions,
    WeightsPlan,
    compare_tensors,
    dominant_dtype,
    initial_entry,
    plan_files,
)
from .report import ComponentReport


@dataclass(frozen=True)
class StoredWeights:
    """One complete set of a model's weights, whose values are read on demand.

    Attributes:
        variant: Part of the file names such as `fp16`; `None` for the main set.
        files: The files.
        groups: The tensors of each file, under the names of diffusers.
        where: Location of the weights, for errors.
        names: Names in the files by names of diffusers, where they differ.
    """

    variant: str | None
    files: tuple[Path, ...]
    groups: list[list[TensorEntry]]
    where: str
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes by the names of diffusers."""
        return {entry.name: entry.shape for group in self.groups for entry in group}


def plan_component(
    component: Component,
    mhla: MHLAConfig | Mapping[str, Any] | None,
    options: PlanOptions,
    weights: list[StoredWeights] | None = None,
    compression: tuple[int, int] | None = None,
) -> ComponentPlan:
    """Plans the conversion of one transformer of diffusers before anything is written.

    Options that `mhla` does not give are the model's defaults, at the size of its own samples or of those that its
    pipeline makes with a VAE of that `compression`, and weights by default those in its folder; errors are those of
    `convert_pretrained`.
    """
    import diffusers

    if component.is_mhla:
        raise ValueError(
            f"{component.folder} is a {component.class_name} already; convert the model it was made from."
        )
    family = family_for(component.class_name)
    target_class = family.load_class()
    weight_sets = component.weight_sets(options.variant) if weights is None else []
    # Before anything is built: a wrong size may ask for more memory than there is.
    upstream_class, where = getattr(diffusers, family.upstream), str(component.folder / "config.json")
    check_model_config(upstream_class, component.config, where)
    arguments = inspect.signature(upstream_class.__init__).parameters
    num_layers = component.config.get("num_layers", arguments["num_layers"].default)
    weights = weights or [
        StoredWeights(found.variant, found.files, [reader.entries() for reader in found.open()], str(component.folder))
        for found in weight_sets
    ]
    config = target_class.coerce_options(target_class.options_in_pipeline(mhla, component.config, compression))
    for stored in weights:
        check_layer_count(num_layers, stored.shapes, where)
    if options.layers is not None:
        config = config.replace(layers=parse_layers(options.layers, num_layers))
    model = empty_model(target_class, {**component.config, "mhla": config.given_options()})
    target = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    # The softmax model has the same tensors but those of MHLA.
    expected = {name: shape for name, shape in target.items() if ".mhla." not in name}
    check_new_size(expected, target)
    report = component_report(component.class_name, model)
    plans = [_plan_weights(stored, model, expected, target, report, options) for stored in weights]
    kept = component.config
    if kept["_class_name"] != component.class_name:
        # The configuration of a legacy checkpoint has entries for the other models that its class could be.
        kept = {name: value for name, value in kept.items() if name in arguments or name.startswith("_")}
    stored_config = to_stored({**kept, "_class_name": family.mhla_class, "mhla": report.mhla, STATE_KEY: STATES[0]})
    return ComponentPlan(component.name, stored_config, plans, report)


def _plan_weights(
    stored: StoredWeights,
    model: Any,
    expected: Mapping[str, tuple[int, ...]],
    target: Mapping[str, tuple[int, ...]],
    report: ComponentReport,
    options: PlanOptions,
) -> WeightsPlan:
    ignored = declared(model, "_keys_to_ignore_on_load_unexpected")
    names = stored.names
    compare_tensors(
        stored.shapes, expected, where=stored.where, ignored=ignored, called=lambda name: names.get(name, name)
    )
    kept = kept_in_fp32(model)
    groups = [[cast_entry(entry, options.dtype, kept) for entry in group] for group in stored.groups]
    copied = [entry for group in groups for entry in group]
    new_dtype = options.dtype or dominant_dtype(copied)
    new = [name for name in target if name not in expected]
    fresh = [initial_entry(model, name, new_dtype, kept, report) for name in new]
    return plan_files(stored.variant, stored.files, groups, fresh, options.max_bytes)


def empty_model(model_class: type, config: Mapping[str, Any]) -> Any:
    """Builds a diffusers model from the contents of its `config.json`, without memory for its parameters."""
    from accelerate import init_empty_weights

    with init_empty_weights():
        return model_class.from_config(dict(config))  # type: ignore[attr-defined]


def component_report(source_class: str, model: Any) -> ComponentReport:
    """Starts the report on a model of an MHLA class."""
    return ComponentReport(
        source_class=source_class,
        target_class=type(model).__name__,
        mhla=dict(model.config.mhla),
        mhla_layers=list(model.mhla_layers),
        num_layers=model.config.num_layers,
        warning=model.single_block_warning() or "",
    )


def kept_in_fp32(model: Any) -> Callable[[str], bool]:
    """Returns a test for parameters that diffusers keeps in fp32, by whole parts of the dotted name."""
    parts = fp32_parts(model)
    return lambda name: bool(parts & set(name.split(".")))


def cast_entry(entry: TensorEntry, dtype: torch.dtype | None, kept: Callable[[str], bool]) -> TensorEntry:
    """Sets the type an entry is written in: what the library keeps in fp32 is in fp32, whatever it was."""
    if dtype is None:
        return entry
    return TensorEntry(entry.name, entry.shape, torch.float32 if kept(entry.name) else dtype, entry.load)
