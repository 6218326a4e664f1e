# SPDX-License-Identifier: Apache-2.0
"""Plans of conversions, made from configurations and headers, and what is recorded of each model."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from ..config import MHLAConfig, parse_layers
from ..layers.weight_record import STATE_KEY, STATES
from ..models import limits, weight_files
from ..models.directory import ModelDirectory
from ..models.registry import family_for
from ..utils.compat.diffusers import declared, kept_in_fp32
from ..utils.messages import shorten_list
from ..utils.tensor_files import FLOATS, TensorEntry, check_floats, compare, plan_shards


MAX_SHARD_BYTES = 5 * 10**9
"""Largest weight file by default, as in `huggingface_hub`."""


@dataclass
class WeightSetReport:
    """One set of a model's weights: the only one, or a variant's.

    Attributes:
        variant: Part of the file names such as `fp16`; `None` for the main set.
        files: Weight files written.
        copied_tensors: Number of tensors taken from the source.
        copied_parameters: Number of values in them.
        dtypes: Number of tensors written in each dtype.
    """

    variant: str | None = None
    files: list[str] = field(default_factory=list)
    copied_tensors: int = 0
    copied_parameters: int = 0
    dtypes: dict[str, int] = field(default_factory=dict)


@dataclass
class ComponentReport:
    """Conversion of one model.

    Attributes:
        source_class: Class that the source's weights were for.
        target_class: Class that the written weights are for.
        weight_sets: Weights read and written, by variant.
        initialised: Shapes of new tensors by name.
        mhla: The complete MHLA options.
        mhla_layers: Indices of the MHLA layers.
        num_layers: Number of layers. In a model with several towers the layers are counted through all of them, and
            `mhla` holds the options of each.
        dropped: Tensors of the source that were not taken over: the model does not know them, or they repeat a tensor
            they are tied to.
        warning: What the options make of the model that is rarely meant, such as a single block; empty without.
    """

    source_class: str
    target_class: str
    weight_sets: list[WeightSetReport] = field(default_factory=list)
    initialised: dict[str, tuple[int, ...]] = field(default_factory=dict)
    mhla: dict[str, Any] = field(default_factory=dict)
    mhla_layers: list[int] = field(default_factory=list)
    num_layers: int = 0
    dropped: list[str] = field(default_factory=list)
    warning: str = ""

    @property
    def initialised_parameters(self) -> int:
        """Number of new values."""
        return sum(math.prod(shape) for shape in self.initialised.values())


@dataclass
class WeightsPlan:
    """One set of weight files to write.

    Attributes:
        shards: The tensors of each file by its name.
        report: Its part of `conversion.json`.
    """

    shards: dict[str, list[TensorEntry]]
    report: WeightSetReport

    @property
    def nbytes(self) -> int:
        """Size of the tensors, in bytes."""
        return sum(entry.nbytes for shard in self.shards.values() for entry in shard)


@dataclass
class ComponentPlan:
    """One model to write.

    Attributes:
        name: Name of the component.
        config: Contents of `config.json`.
        weights: The sets of weight files.
        report: Its part of `conversion.json`, completed while it is written.
        names: Names of the weight files.
    """

    name: str
    config: dict[str, Any]
    weights: list[WeightsPlan]
    report: ComponentReport
    names: weight_files.FileNames = weight_files.DIFFUSERS_FILES


@dataclass(frozen=True)
class PlanOptions:
    """Options of `convert_pretrained` that every plan takes.

    Attributes:
        max_bytes: Largest weight file, by default as in `convert_pretrained`.
        layers: Layers that become MHLA.
        dtype: Dtype to cast to.
        variant: The only variant to convert.
    """

    max_bytes: int = MAX_SHARD_BYTES
    layers: str | Iterable[int] | None = None
    dtype: torch.dtype | None = None
    variant: str | None = None


@dataclass(frozen=True)
class StoredWeights:
    """One complete set of a model's weights, whose values are read on demand.

    Attributes:
        variant: Part of the file names such as `fp16`; `None` for the main set.
        entries: The tensors, under the names of the library.
        where: Location of the weights, for errors.
        names: Names in the files by those of the library, where they differ.
    """

    variant: str | None
    entries: list[TensorEntry]
    where: str
    names: Mapping[str, str] = field(default_factory=dict)


def plan_component(
    component: ModelDirectory,
    mhla: MHLAConfig | Mapping[str, Any] | None,
    options: PlanOptions,
    stored: list[StoredWeights] | None = None,
    compression: tuple[int, int] | None = None,
) -> ComponentPlan:
    """Plan the conversion of one diffusers transformer.

    Options missing from `mhla` take the model's defaults, at its sample size or at that of a pipeline with a VAE of
    this `compression`. Weights are by default those in the component's folder. Errors are those of
    `convert_pretrained`.
    """
    import diffusers

    family = family_for(component.class_name)
    target_class, upstream_class = family.load_class(), getattr(diffusers, family.upstream)
    if stored is None:
        found = component.weight_sets(options.variant)
        stored = [StoredWeights(one.variant, one.entries(), str(component.folder)) for one in found]
    # Before the model is built: a wrong size may ask for more memory than there is.
    where = str(component.folder / "config.json")
    limits.check_model_config(upstream_class, component.config, where)
    arguments = inspect.signature(upstream_class.__init__).parameters
    num_layers = target_class.layer_count(component.config)
    for weights in stored:
        check_floats(weights.entries, weights.where)
        weight_files.check_layer_count(num_layers, [entry.name for entry in weights.entries], where)
    config = target_class.resolve_options(mhla, component.config, compression)
    if options.layers is not None:
        config = config.replace(layers=parse_layers(options.layers, num_layers))
    model = empty_model(target_class, {**component.config, "mhla": config.given_options()})
    target = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    # The softmax model has the same tensors but those of MHLA.
    expected = {name: shape for name, shape in target.items() if ".mhla." not in name}
    limits.check_new_size(expected, target)
    report, kept = component_report(component.class_name, model), kept_in_fp32(model)
    plans = []
    for weights in stored:
        compare_tensors(weights, expected, declared(model, "_keys_to_ignore_on_load_unexpected"))
        copied = [cast_entry(entry, options.dtype, kept(entry.name)) for entry in weights.entries]
        dtype = options.dtype or dominant_dtype(copied)
        fresh = [initial_entry(model, name, dtype, kept, report) for name in target if name not in expected]
        plans.append(plan_files(weights.variant, copied, options.max_bytes, fresh))
    stored_config = component.config
    if stored_config["_class_name"] != component.class_name:
        # The configuration of a legacy checkpoint has entries for the other models that its class could be.
        stored_config = {k: value for k, value in stored_config.items() if k in arguments or k.startswith("_")}
    made = {"_class_name": family.mhla_class, "mhla": report.mhla, STATE_KEY: STATES[0]}
    return ComponentPlan(component.component, weight_files.to_stored({**stored_config, **made}), plans, report)


def plan_files(
    variant: str | None,
    copied: list[TensorEntry],
    max_bytes: int,
    fresh: Sequence[TensorEntry] = (),
    names: weight_files.FileNames = weight_files.DIFFUSERS_FILES,
) -> WeightsPlan:
    """Plan the files of tensors copied from a set of weights, and of new ones."""
    entries = [*copied, *fresh]
    report = WeightSetReport(
        variant=variant,
        copied_tensors=len(copied),
        copied_parameters=sum(math.prod(entry.shape) for entry in copied),
        dtypes=dict(Counter(str(entry.dtype).removeprefix("torch.") for entry in entries)),
    )
    return WeightsPlan(plan_shards(entries, max_bytes, stem=names.stem, variant=variant), report)


def compare_tensors(
    stored: StoredWeights, expected: Mapping[str, tuple[int, ...]], ignored: Iterable[str] = ()
) -> None:
    """Check that weights are exactly those of a model.

    Args:
        stored: The weights.
        expected: The model's shapes by name.
        ignored: Parts of names that may be left over.

    Raises:
        ValueError: If tensors are missing, left over or of another shape; the message names them.
    """
    missing, surplus, shapes = compare(expected, {entry.name: entry.shape for entry in stored.entries}, ignored)
    named = {
        "lacks": missing,
        "has tensors that the model does not know:": [stored.names.get(name, name) for name in surplus],
        "has tensors of another shape:": [f"{stored.names.get(name, name)} {x}" for name, x in shapes.items()],
    }
    problems = [f"{kind} {shorten_list(names)}" for kind, names in named.items() if names]
    if problems:
        raise ValueError(f"{stored.where} {'; '.join(problems)}.")


def empty_model(model_class: type, config: Mapping[str, Any]) -> Any:
    """Build a diffusers model from the contents of its `config.json`, without memory for its parameters."""
    from accelerate import init_empty_weights

    with init_empty_weights():
        return model_class.from_config(dict(config))  # type: ignore[attr-defined]


def component_report(source_class: str, model: Any) -> ComponentReport:
    """Start the report on a model of an MHLA class."""
    return ComponentReport(
        source_class=source_class,
        target_class=type(model).__name__,
        mhla=dict(model.config.mhla),
        mhla_layers=list(model.mhla_layers),
        num_layers=model.layer_count(model.config),
        warning=model.single_block_warning() or "",
    )


def cast_entry(entry: TensorEntry, dtype: torch.dtype | None, kept: bool) -> TensorEntry:
    """Set the dtype to write floats in: fp32 for parameters that the library keeps so, else `dtype` if given."""
    if dtype is None or entry.dtype not in FLOATS:
        return entry
    return replace(entry, dtype=torch.float32 if kept else dtype)


def dominant_dtype(entries: Iterable[TensorEntry]) -> torch.dtype:
    """Return the dtype of most values."""
    sizes: Counter[torch.dtype] = Counter()
    for entry in entries:
        sizes[entry.dtype] += entry.nbytes // entry.dtype.itemsize
    return sizes.most_common(1)[0][0]


def initial_entry(
    model: Any,
    name: str,
    dtype: torch.dtype,
    kept: Callable[[str], bool],
    report: ComponentReport,
    stored_name: str | None = None,
) -> TensorEntry:
    """Return a new MHLA parameter with its initial values, and note it in the report.

    Args:
        model: The model that has it, on the meta device.
        name: Its name in the model.
        dtype: The dtype to write.
        kept: Test for parameters that are written in fp32 instead.
        report: Report of the model.
        stored_name: Its name in the file, if different.
    """
    module_name, _, relative = name.rpartition(".mhla.")
    module = model.get_submodule(f"{module_name}.mhla")
    shape = tuple(model.get_parameter(name).shape)
    report.initialised[stored_name or name] = shape
    load = partial(module.initial_tensor, relative)
    return TensorEntry(stored_name or name, shape, torch.float32 if kept(name) else dtype, load)
