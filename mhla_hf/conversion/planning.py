# SPDX-License-Identifier: Apache-2.0
"""Plans of conversions, made from headers alone: name, shape, type and origin of every tensor that is written."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..config import MHLAConfig
from ..models.bounds import check_layer_count, check_model_config, check_new_size
from ..models.options import to_stored
from ..models.registry import family_for
from ..models.source import Component
from ..models.weight_files import DIFFUSERS_FILES, FileNames, WeightSet
from ..utils.compat.diffusers import declared, fp32_parts
from ..utils.messages import shorten_list, shorten_value
from ..utils.tensor_files import SafetensorsReader, TensorEntry, split_into_shards
from .options import parse_layers
from .report import ComponentReport, WeightSetReport


@dataclass
class WeightsPlan:
    """One set of weight files that will be written: the tensors of each shard, the files read, and the report."""

    shards: list[list[TensorEntry]]
    sources: tuple[Path, ...]
    report: WeightSetReport

    @property
    def nbytes(self) -> int:
        """Size of the tensors, in bytes."""
        return sum(entry.nbytes for shard in self.shards for entry in shard)


@dataclass
class ComponentPlan:
    """One model that will be written: its `config.json` and weights, and the report filled meanwhile.

    Attributes:
        name: Name of the component.
        config: Contents of `config.json`.
        weights: The sets of weight files.
        report: Its part of `conversion.json`.
        names: Names of the weight files.
    """

    name: str
    config: dict[str, Any]
    weights: list[WeightsPlan]
    report: ComponentReport
    names: FileNames = DIFFUSERS_FILES


@dataclass(frozen=True)
class PlanOptions:
    """Options of `convert_pretrained` that every plan takes.

    Attributes:
        layers: Layers that become MHLA.
        dtype: Type to cast to.
        variant: The only variant to convert.
        max_bytes: Largest weight file.
    """

    layers: str | Iterable[int] | None = None
    dtype: torch.dtype | None = None
    variant: str | None = None
    max_bytes: int | None = None


def plan_component(
    component: Component, mhla: MHLAConfig | Mapping[str, Any] | None, options: PlanOptions
) -> ComponentPlan:
    """Plans the conversion of one transformer of diffusers before anything is written.

    Args:
        component: The model to convert.
        mhla: The options; the model's defaults for what is not given.
        options: The other options; errors are those of `convert_pretrained`.
    """
    import diffusers

    if component.is_mhla:
        raise ValueError(
            f"{component.folder} is a {component.class_name} already; convert the model it was made from."
        )
    family = family_for(component.class_name)
    target_class = family.load_class()
    config = target_class.coerce_options(mhla)
    weight_sets = component.weight_sets(options.variant)
    # Before anything is built: a wrong size may ask for more memory than there is.
    upstream_class, where = getattr(diffusers, family.upstream), str(component.folder / "config.json")
    check_model_config(upstream_class, component.config, where)
    arguments = inspect.signature(upstream_class.__init__).parameters
    num_layers = component.config.get("num_layers", arguments["num_layers"].default)
    opened = [weight_set.open() for weight_set in weight_sets]
    for readers in opened:
        check_layer_count(num_layers, [name for reader in readers for name in reader.shapes], where)
    if options.layers is not None:
        config = config.replace(layers=parse_layers(options.layers, num_layers))
    model = empty_model(target_class, {**component.config, "mhla": config.given_options()})
    target = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    # The softmax model has the same tensors but those of MHLA.
    expected = {name: shape for name, shape in target.items() if ".mhla." not in name}
    check_new_size(expected, target)
    report = component_report(component.class_name, model)
    weights = [
        _plan_weights(weight_set, readers, model, expected, target, report, options)
        for weight_set, readers in zip(weight_sets, opened)
    ]
    kept = component.config
    if kept["_class_name"] != component.class_name:
        # The configuration of a legacy checkpoint has entries for the other models that its class could be.
        kept = {name: value for name, value in kept.items() if name in arguments or name.startswith("_")}
    stored = to_stored({**kept, "_class_name": family.mhla_class, "mhla": report.mhla})
    return ComponentPlan(component.name, stored, weights, report)


def empty_model(model_class: type, config: Mapping[str, Any]) -> Any:
    """Builds a model without memory for its parameters.

    Args:
        model_class: A diffusers model class.
        config: Contents of its `config.json`.
    """
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
    )


def weight_set_report(
    variant: str | None, copied: Sequence[TensorEntry], fresh: Sequence[TensorEntry] = ()
) -> WeightSetReport:
    """Starts the report on a set of weights.

    Args:
        variant: Its variant.
        copied: The tensors taken from the source, as they are written.
        fresh: The new ones.
    """
    return WeightSetReport(
        variant=variant,
        copied_tensors=len(copied),
        copied_parameters=sum(math.prod(entry.shape) for entry in copied),
        dtypes=count_dtypes([*copied, *fresh]),
        initialised_dtypes=count_dtypes(fresh),
    )


def _plan_weights(
    weight_set: WeightSet,
    readers: list[SafetensorsReader],
    model: Any,
    expected: Mapping[str, tuple[int, ...]],
    target: Mapping[str, tuple[int, ...]],
    report: ComponentReport,
    options: PlanOptions,
) -> WeightsPlan:
    found = {name: shape for reader in readers for name, shape in reader.shapes.items()}
    ignored = declared(model, "_keys_to_ignore_on_load_unexpected")
    compare_tensors(found, expected, where=weight_set.where, ignored=ignored, called=weight_set.called)
    kept = kept_in_fp32(model)
    groups = [[cast_entry(entry, options.dtype, kept) for entry in reader.entries()] for reader in readers]
    copied = [entry for group in groups for entry in group]
    new_dtype = options.dtype or dominant_dtype(copied)
    new = [name for name in target if name not in expected]
    fresh = [initial_entry(model, name, new_dtype, kept, report) for name in new]
    return plan_files(weight_set, groups, fresh, options.max_bytes)


def plan_files(
    weight_set: WeightSet, groups: list[list[TensorEntry]], fresh: list[TensorEntry], max_bytes: int | None
) -> WeightsPlan:
    """Distributes copied and new tensors over files: one file stays one file; several get one more.

    Args:
        weight_set: The files that are read.
        groups: The copied tensors of each file.
        fresh: The new ones.
        max_bytes: Largest file.
    """
    copied = [entry for group in groups for entry in group]
    groups = [groups[0] + fresh] if len(groups) == 1 else [*groups, fresh]
    return WeightsPlan(
        split_into_shards(groups, max_bytes), weight_set.files, weight_set_report(weight_set.variant, copied, fresh)
    )


def compare_tensors(
    found: Mapping[str, tuple[int, ...]],
    expected: Mapping[str, tuple[int, ...]],
    *,
    where: str,
    ignored: Iterable[str] = (),
    called: Callable[[str], str] = lambda name: name,
) -> None:
    """Checks that weights are exactly those of a model.

    Args:
        found: Shapes by name.
        expected: The model's shapes by name.
        where: Location of the weights, for the error.
        ignored: Parts of names that may be left over.
        called: Returns the name for the error, where the file has another one.

    Raises:
        ValueError: If tensors are missing, left over or of another shape; the message names them.
    """
    missing = [called(name) for name in expected if name not in found]
    surplus = [called(name) for name in found if name not in expected and not any(part in name for part in ignored)]
    shapes = [
        f"{called(name)} {shorten_value(found[name])} instead of {expected[name]}"
        for name in expected
        if name in found and found[name] != expected[name]
    ]
    problems = []
    if missing:
        problems.append(f"lacks {shorten_list(missing)}")
    if surplus:
        problems.append(f"has tensors that the model does not know: {shorten_list(surplus)}")
    if shapes:
        problems.append(f"has tensors of another shape: {shorten_list(shapes)}")
    if problems:
        raise ValueError(f"{where} {'; '.join(problems)}.")


def kept_in_fp32(model: Any) -> Callable[[str], bool]:
    """Returns a test for parameters that diffusers keeps in fp32, by whole parts of the dotted name."""
    parts = fp32_parts(model)
    return lambda name: bool(parts & set(name.split(".")))


def cast_entry(entry: TensorEntry, dtype: torch.dtype | None, kept: Callable[[str], bool]) -> TensorEntry:
    """Sets the type an entry is written in. Nothing that is kept in fp32 loses precision it still has."""
    if dtype is None or (kept(entry.name) and dtype != torch.float32):
        return entry
    return TensorEntry(entry.name, entry.shape, dtype, entry.load)


def dominant_dtype(entries: Iterable[TensorEntry]) -> torch.dtype:
    """Type of most values."""
    sizes: Counter[torch.dtype] = Counter()
    for entry in entries:
        sizes[entry.dtype] += entry.nbytes // entry.dtype.itemsize
    return sizes.most_common(1)[0][0]


def count_dtypes(entries: Iterable[TensorEntry]) -> dict[str, int]:
    """Number of tensors of each type."""
    return dict(Counter(str(entry.dtype).removeprefix("torch.") for entry in entries))


def initial_entry(
    model: Any,
    name: str,
    dtype: torch.dtype,
    kept: Callable[[str], bool],
    report: ComponentReport,
    stored_name: str | None = None,
) -> TensorEntry:
    """A new MHLA parameter with its initial values, noted in the report.

    Args:
        model: The model that has it, on the meta device.
        name: Its name in the model.
        dtype: The type to write.
        kept: Test for parameters that are written in fp32 instead.
        report: Report of the model, which lists it.
        stored_name: Its name in the file, if different.
    """
    module_name, _, relative = name.rpartition(".mhla.")
    module = model.get_submodule(f"{module_name}.mhla")
    shape = tuple(model.get_parameter(name).shape)
    dtype = torch.float32 if kept(name) else dtype
    note = {"shape": list(shape), "values": ""}
    report.initialised[stored_name or name] = note

    def load() -> torch.Tensor:
        tensor = module.initial_tensor(relative)
        constant = bool((tensor == tensor.flatten()[0]).all())
        if relative == "mixing":
            note["values"] = f"mixing_init={module.config.mixing_init}"
        elif relative == "window_gain":
            note["values"] = "1 for MHLA, 0 for the window"
        else:
            note["values"] = f"constant {tensor.flatten()[0].item():.6g}" if constant else "identity"
        return tensor

    return TensorEntry(stored_name or name, shape, dtype, load)
