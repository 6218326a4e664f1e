# SPDX-License-Identifier: Apache-2.0
"""Plans of conversions, made from headers alone: name, shape, type and origin of every tensor that is written."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..models.weight_files import DIFFUSERS_FILES, FileNames
from ..utils.messages import shorten_list, shorten_value
from ..utils.tensor_files import TensorEntry, split_into_shards
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


def plan_files(
    variant: str | None,
    sources: tuple[Path, ...],
    groups: list[list[TensorEntry]],
    fresh: list[TensorEntry],
    max_bytes: int | None,
) -> WeightsPlan:
    """Distributes the copied tensors of each file, and new ones: one file stays one file; several get one more."""
    copied = [entry for group in groups for entry in group]
    report = WeightSetReport(
        variant=variant,
        copied_tensors=len(copied),
        copied_parameters=sum(math.prod(entry.shape) for entry in copied),
        dtypes=_count_dtypes([*copied, *fresh]),
        initialised_dtypes=_count_dtypes(fresh),
    )
    if fresh:
        groups = [groups[0] + fresh] if len(groups) == 1 else [*groups, fresh]
    return WeightsPlan(split_into_shards(groups, max_bytes), sources, report)


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


def dominant_dtype(entries: Iterable[TensorEntry]) -> torch.dtype:
    """Type of most values."""
    sizes: Counter[torch.dtype] = Counter()
    for entry in entries:
        sizes[entry.dtype] += entry.nbytes // entry.dtype.itemsize
    return sizes.most_common(1)[0][0]


def _count_dtypes(entries: Iterable[TensorEntry]) -> dict[str, int]:
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
        dtype: The dtype to write.
        kept: Test for parameters that are written in fp32 instead.
        report: Report of the model.
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
