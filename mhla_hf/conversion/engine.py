# SPDX-License-Identifier: Apache-2.0
"""`convert_pretrained`: an ordinary diffusers directory becomes an MHLA one, tensor by tensor."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch

from ..config import MHLAConfig
from ..files import atomic_directory
from ..models.registry import FAMILIES, MHLA_CLASSES, family_for, is_mhla_class
from .options import parse_dtype, parse_layers, parse_size
from .provenance import ComponentReport, ConversionReport, describe_file
from .source import Component, Source, WeightSet, download_or_find, read_source
from .staging import byte_progress, check_destination, check_space, copy_file, list_files
from .tensors import TensorEntry, split_into_shards, write_json, write_shards


# How many names an error message lists before it only counts.
_NAMES_SHOWN = 6


@dataclass
class WeightsPlan:
    """One set of weight files that will be written: the variant, the tensors of each shard, the files read for it."""

    variant: str | None
    shards: list[list[TensorEntry]]
    sources: tuple[Path, ...]

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for shard in self.shards for entry in shard)


@dataclass
class ComponentPlan:
    """One transformer that will be written: its `config.json` and weights, and the report filled meanwhile."""

    name: str
    config: dict[str, Any]
    weights: list[WeightsPlan]
    report: ComponentReport


def convert_pretrained(
    source: str | Path,
    destination: str | Path,
    mhla: MHLAConfig | Mapping[str, Any] | None = None,
    *,
    layers: str | Iterable[int] | None = None,
    dtype: str | torch.dtype | None = None,
    variant: str | None = None,
    subfolder: str | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    max_shard_size: int | str | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> ConversionReport:
    """Converts a diffusers pipeline or transformer directory, or Hub repository, to MHLA.

    Weights stream from the source's files to new ones, so memory stays at one tensor whatever the size of the model.
    Projections, norms and feed-forward layers are taken over; the MHLA parameters start from their initial values, so
    the result needs fine-tuning. Everything else of a pipeline is copied. `destination` appears when it is complete.

    Args:
        source: A pipeline directory, a transformer directory, or a Hub id `owner/name`. A pipeline's `transformer_2`
            (Wan 2.2) is converted as well.
        destination: The directory to write.
        mhla: The options; the model's defaults for what is not given.
        layers: Which layers become MHLA, in place of `mhla.layers`: `"all"`, indices (`"1,2,4"` or integers), or a
            fraction such as `"2/3"`; see [`parse_layers`][mhla_hf.conversion.options.parse_layers].
        dtype: Cast the transformer's weights: float32, bfloat16 or float16. Modules that diffusers keeps in fp32 keep
            their type. By default nothing is cast, and new parameters get the type most weights have.
        variant: Convert only the weights of this variant (`"fp16"`); by default all sets of weights found, each under
            the name it had.
        subfolder: Convert only this folder of `source`.
        revision: Branch, tag or commit of a Hub repository.
        token: Access token for the Hub.
        cache_dir: Where downloads go.
        local_files_only: Do not use the network.
        max_shard_size: Largest weight file, in bytes or as `"5GB"`. By default the source's files keep their sizes;
            where there are several, the new parameters get one of their own.
        overwrite: Replace an existing destination.
        progress: Show a progress bar on standard error.

    Returns:
        What was done; the same is written as `conversion.json`.

    Raises:
        ValueError: If the source cannot be read or converted (not supported, converted already, quantised, pickles
            only, damaged or incomplete weights), an option is wrong, or the destination is taken or too small.
    """
    started = time.monotonic()
    destination = Path(destination).expanduser()
    dtype, max_bytes = parse_dtype(dtype), parse_size(max_shard_size)
    options = MHLAConfig.coerce(mhla)
    local = Path(source).expanduser()
    check_destination(destination, overwrite, [local if local.exists() else None])
    root, origin = download_or_find(
        source,
        revision=revision,
        token=token,
        cache_dir=cache_dir,
        subfolder=subfolder,
        local_files_only=local_files_only,
    )
    found = read_source(root, str(source), origin, {**FAMILIES, **MHLA_CLASSES})
    plans = [plan_component(component, options, layers, dtype, variant, max_bytes) for component in found.components]
    report = ConversionReport("convert", destination, found.origin)
    write_result(found, plans, report, progress=progress, started=started)
    return report


def plan_component(
    component: Component,
    options: MHLAConfig,
    layers: str | Iterable[int] | None,
    dtype: torch.dtype | None,
    variant: str | None,
    max_bytes: int | None,
) -> ComponentPlan:
    """Decides everything about one transformer before anything is written; errors as in [`convert_pretrained`]."""
    if is_mhla_class(component.class_name):
        raise ValueError(
            f"{component.folder} is a {component.class_name} already; convert the model it was made from."
        )
    family = family_for(component.class_name)
    upstream = empty_model(getattr(diffusers, family.upstream), component.config)
    if layers is not None:
        options = options.replace(layers=parse_layers(layers, upstream.config.num_layers))
    model = empty_model(family.load_class(), {**component.config, "mhla": options.to_dict()})
    expected = {name: tuple(tensor.shape) for name, tensor in upstream.state_dict().items()}
    target = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    report = component_report(component.class_name, model)
    weights = [
        _plan_weights(weight_set, model, expected, target, report, dtype, max_bytes)
        for weight_set in component.weight_sets(variant)
    ]
    config = {**component.config, "_class_name": family.mhla_class, "mhla": report.mhla}
    return ComponentPlan(component.name, config, weights, report)


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


def _plan_weights(
    weight_set: WeightSet,
    model: Any,
    expected: Mapping[str, tuple[int, ...]],
    target: Mapping[str, tuple[int, ...]],
    report: ComponentReport,
    dtype: torch.dtype | None,
    max_bytes: int | None,
) -> WeightsPlan:
    readers = weight_set.open()
    found = {name: shape for reader in readers for name, shape in reader.shapes.items()}
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or []
    compare_tensors(found, expected, where=str(weight_set.files[0].parent), ignored=ignored)
    kept = kept_in_fp32(model)
    groups = [[cast_entry(entry, dtype, kept) for entry in reader.entries()] for reader in readers]
    copied = [entry for group in groups for entry in group]
    new_dtype = dtype or dominant_dtype(copied)
    new = [name for name in target if name not in expected]
    fresh = [initial_entry(model, name, new_dtype, kept, report) for name in new]
    report.copied_tensors = len(copied)
    report.copied_parameters = sum(entry.nbytes // entry.dtype.itemsize for entry in copied)
    report.dtypes = count_dtypes(copied + fresh)
    # One file stays one file; several get one more.
    groups = [groups[0] + fresh] if len(groups) == 1 else [*groups, fresh]
    return WeightsPlan(weight_set.variant, split_into_shards(groups, max_bytes), weight_set.files)


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
        where: What holds them, for the error.
        ignored: Parts of names that may be left over.
        called: How a name reads in the error, where the file calls it something else.

    Raises:
        ValueError: If tensors are missing, left over or of another shape; the message names them.
    """
    missing = [called(name) for name in expected if name not in found]
    surplus = [called(name) for name in found if name not in expected and not any(part in name for part in ignored)]
    shapes = [
        f"{called(name)} {found[name]} instead of {expected[name]}"
        for name in expected
        if name in found and found[name] != expected[name]
    ]
    problems = []
    if missing:
        problems.append(f"lacks {shorten(missing)}")
    if surplus:
        problems.append(f"has tensors that the model does not know: {shorten(surplus)}")
    if shapes:
        problems.append(f"has tensors of another shape: {shorten(shapes)}")
    if problems:
        raise ValueError(f"{where} {'; '.join(problems)}.")


def shorten(names: list[str]) -> str:
    """Joins names, the first few of many."""
    names = sorted(names)
    rest = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def kept_in_fp32(model: Any) -> Callable[[str], bool]:
    """Tells by name which parameters diffusers keeps in fp32: it matches whole parts of the dotted name."""
    parts = set(getattr(model, "_keep_in_fp32_modules", None) or [])
    return lambda name: bool(parts & set(name.split(".")))


def cast_entry(entry: TensorEntry, dtype: torch.dtype | None, kept: Callable[[str], bool]) -> TensorEntry:
    """Sets the type an entry is written in. Nothing that is kept in fp32 loses precision it still has."""
    if dtype is None or (kept(entry.name) and dtype != torch.float32):
        return entry
    return TensorEntry(entry.name, entry.shape, dtype, entry.load)


def dominant_dtype(entries: Iterable[TensorEntry]) -> torch.dtype:
    """The type that most of the numbers have."""
    sizes: Counter[torch.dtype] = Counter()
    for entry in entries:
        sizes[entry.dtype] += entry.nbytes // entry.dtype.itemsize
    return sizes.most_common(1)[0][0]


def count_dtypes(entries: Iterable[TensorEntry]) -> dict[str, int]:
    """How many tensors have each type."""
    return dict(Counter(str(entry.dtype).removeprefix("torch.") for entry in entries))


def initial_entry(
    model: Any, name: str, dtype: torch.dtype, kept: Callable[[str], bool], report: ComponentReport
) -> TensorEntry:
    """A new MHLA parameter with its initial values, noted in the report."""
    module_name, _, relative = name.rpartition(".mhla.")
    module = model.get_submodule(f"{module_name}.mhla")
    shape = tuple(model.get_parameter(name).shape)
    dtype = torch.float32 if kept(name) else dtype
    note = {"shape": list(shape), "dtype": str(dtype).removeprefix("torch."), "values": ""}
    report.initialised[name] = note

    def load() -> torch.Tensor:
        tensor = module.initial_tensor(relative)
        constant = bool((tensor == tensor.flatten()[0]).all())
        if relative == "mixing":
            note["values"] = f"mixing_init={module.config.mixing_init}"
        else:
            note["values"] = f"constant {tensor.flatten()[0].item():.6g}" if constant else "identity"
        return tensor

    return TensorEntry(name, shape, dtype, load)


def write_result(
    source: Source | None,
    plans: list[ComponentPlan],
    report: ConversionReport,
    *,
    progress: bool,
    started: float,
) -> None:
    """Writes converted transformers and, for a pipeline, everything else of it.

    Args:
        source: Where the other files come from; `None` writes a transformer directory with nothing else.
        plans: The transformers. In a pipeline each goes to its folder, otherwise the only one to the root.
        report: Completed here, and written as `conversion.json`.
        progress: Show a progress bar.
        started: `time.monotonic()` of the beginning.

    Raises:
        ValueError: If the disk is too small.
    """
    is_pipeline = source is not None and source.pipeline is not None
    others = [] if source is None else other_files(source, {plan.name for plan in plans})
    copied_bytes = sum((source.root / path).stat().st_size for path in others) if source is not None else 0
    written_bytes = sum(weights.nbytes for plan in plans for weights in plan.weights)
    check_space(report.destination, copied_bytes + written_bytes)
    hashed_bytes = sum(path.stat().st_size for plan in plans for weights in plan.weights for path in weights.sources)
    total = copied_bytes + written_bytes + hashed_bytes
    with atomic_directory(report.destination) as staging, byte_progress(total, progress) as (describe, advance):
        for path in others:
            assert source is not None
            describe(f"copying {path.parts[0]}")
            copy_file(source.root / path, staging / path, advance)
        report.copied_files = [path.as_posix() for path in others]
        for plan in plans:
            folder = staging / plan.name if is_pipeline else staging
            describe(f"converting {plan.name}")
            for weights in plan.weights:
                plan.report.weights += write_shards(folder, weights.shards, variant=weights.variant, on_bytes=advance)
            write_json(folder / "config.json", plan.config)
            describe(f"hashing {plan.name}")
            for path in (path for weights in plan.weights for path in weights.sources):
                plan.report.source_files[path.name] = describe_file(path, advance)
            report.components[plan.name] = plan.report
        if source is not None and source.pipeline is not None:
            replaced = {plan.name: ["diffusers", plan.config["_class_name"]] for plan in plans}
            write_json(staging / "model_index.json", {**source.pipeline, **replaced})
        describe("done")
        report.bytes_written = copied_bytes + written_bytes
        report.seconds = time.monotonic() - started
        report.save(staging)


def other_files(source: Source, replaced: set[str]) -> list[Path]:
    """Files of a source to copy as they are: all but what is written anew.

    Args:
        source: The pipeline or model directory.
        replaced: Names of the components whose weights and configuration are written anew.
    """
    components = [component for component in source.components if component.name in replaced]
    files = []
    for path in list_files(source.root):
        if path.name in ("model_index.json", "conversion.json") and len(path.parts) == 1:
            continue
        owner = next((item for item in components if item.folder == (source.root / path).parent), None)
        if owner is not None and (path.name == "config.json" or owner.is_weight_file(path)):
            continue
        files.append(path)
    return files
