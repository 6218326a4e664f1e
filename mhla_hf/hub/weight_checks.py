# SPDX-License-Identifier: Apache-2.0
"""Checks of weight files: headers, indices, types, and values read one piece at a time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..models.weight_files import PICKLES, FileNames, WeightSet
from ..utils.files import read_weight_map
from ..utils.json_files import read_json
from ..utils.messages import shorten_list, shorten_text
from ..utils.tensor_files import check_safetensors, count_values
from .problems import Findings


_PICKLE_ADVICE = "which can run code when read; remove what is not needed, and keep tensors as safetensors."

# Tensors of a file whose NaN and infinite values are reported one by one.
_MOST_TENSORS = 5

Header = Mapping[str, Mapping[str, Any]]
"""`dtype`, `shape` and `data_offsets` of each tensor of a file by name."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        file: The file.
        dtype: Its type, as safetensors names it.
        shape: Its shape.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]


def read_headers(paths: Iterable[Path], findings: Findings) -> dict[Path, Header]:
    """Reads the headers of safetensors files; damaged files are noted, and left out."""
    headers: dict[Path, Header] = {}
    for path in paths:
        with findings.noting(path):
            try:
                headers[path] = check_safetensors(path)[0]
            except ValueError as error:
                raise ValueError(f"{error} Copy or download the file again.") from error
    return headers


def check_pickles(files: Iterable[Path], findings: Findings) -> None:
    """Warns of files that may run code when read, once for each folder."""
    folders: dict[Path, list[Path]] = {}
    for path in files:
        if path.suffix in PICKLES:
            folders.setdefault(path.parent, []).append(path)
    for folder, paths in folders.items():
        if len(paths) == 1:
            findings.warning(paths[0], f"is a pickle, {_PICKLE_ADVICE}")
        else:
            findings.warning(folder, f"has pickles ({shorten_list(path.name for path in paths)}), {_PICKLE_ADVICE}")


def check_weight_sets(
    folder: Path, names: FileNames, files: Collection[Path], headers: Mapping[Path, Header], findings: Findings
) -> list[tuple[Path, dict[str, StoredTensor]]]:
    """Checks the weight files of a model: indices, shards that they list, and tensors that occur twice.

    Args:
        folder: The model's folder.
        names: Names of the library for weight files.
        files: The files that are checked; a directory may hold others, which are not uploaded.
        headers: Headers of the undamaged files.
        findings: Where problems are noted.

    Returns:
        For each set of which no file is missing or damaged, the file that stands for it and its tensors.
    """
    try:
        sets = names.find(folder)
    except (ValueError, OSError) as error:
        findings.error(_blamed(folder, names), str(error))
        return []
    complete = []
    variants = Counter(weights.variant for weights in sets)
    if None not in variants:
        findings.warning(
            folder,
            f"has weights of {shorten_list(f'variant={name!r}' for name in variants)} alone, which from_pretrained "
            "reads where that is given; write them without a variant for others to load.",
        )
    for weights in sets:
        owner = weights.index or weights.files[0]
        if weights.index is not None and variants[weights.variant] > 1:
            findings.warning(owner, "lists shards beside a single file of the same weights; remove one of the two.")
        for are_there, problem in (
            (False, "lists files that are missing: {}; download or write them again."),
            (True, "lists files that are left out of an upload: {}; write the weights under their usual names."),
        ):
            absent = [path for path in weights.files if path not in files and path.is_file() == are_there]
            if absent:
                listed = shorten_list(path.relative_to(folder).as_posix() for path in absent)
                findings.error(owner, problem.format(listed))
        tensors = _merge(weights, headers, findings)
        if weights.index is not None:
            with findings.noting(weights.index):
                _check_index(weights.index, tensors, headers, findings)
        if all(path in headers for path in weights.files):
            complete.append((owner, tensors))
    return complete


def _blamed(folder: Path, names: FileNames) -> Path:
    """The index that cannot be read, or the folder."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if names.index.fullmatch(path.name):
            try:
                read_weight_map(path)
            except ValueError:
                return path
    return folder


def _merge(weights: WeightSet, headers: Mapping[Path, Header], findings: Findings) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for path in weights.files:
        header = headers.get(path, {})
        repeated = [f"{shorten_text(name)} (in {tensors[name].file.name})" for name in header if name in tensors]
        if repeated:
            findings.error(
                path, f"holds tensors that another file has too: {shorten_list(repeated)}; write the weights again."
            )
        tensors.update(
            {name: StoredTensor(path, entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}
        )
    return tensors


def _check_index(
    index: Path, tensors: Mapping[str, StoredTensor], headers: Mapping[Path, Header], findings: Findings
) -> None:
    content = read_json(index, "the index")
    weight_map = content["weight_map"]
    files = read_weight_map(index)
    absent = [
        f"{shorten_text(name)} ({file})"
        for name, file in weight_map.items()
        if name not in headers.get(index.parent / file, {name: None})
    ]
    if absent:
        findings.error(index, f"lists tensors that are not in their file: {shorten_list(absent)}; write it again.")
    unlisted = [name for name in tensors if name not in weight_map]
    if unlisted:
        findings.warning(index, f"does not list {shorten_list(unlisted)}; write it again.")
    metadata = content.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if total is not None and all(path in headers for path in files):
        begin_end = (entry["data_offsets"] for path in files for entry in headers[path].values())
        actual = sum(end - begin for begin, end in begin_end)
        if total != actual:
            findings.warning(
                index, f"says total_size={shorten_text(repr(total))}, but the tensors have {actual} bytes."
            )


def check_dtypes(owner: Path, tensors: Mapping[str, StoredTensor], findings: Findings) -> None:
    """Warns of types that no model is trained in, and of both halves of 16 bits in one set of weights."""
    by_type: dict[str, list[str]] = {}
    for name, tensor in tensors.items():
        if math.prod(tensor.shape) > 1:
            by_type.setdefault(tensor.dtype, []).append(name)
    if "F64" in by_type:
        findings.warning(owner, f"holds float64 tensors: {shorten_list(by_type['F64'])}; float32 is enough.")
    if "F16" in by_type and "BF16" in by_type:
        rarer = min("F16", "BF16", key=lambda name: len(by_type[name]))
        findings.warning(
            owner,
            f"mixes float16 and bfloat16; of the rarer type are {shorten_list(by_type[rarer])}. Use one of them.",
        )


def check_values(paths: Iterable[Path], findings: Findings, on_bytes: Callable[[int], None]) -> None:
    """Notes tensors with NaN or infinite values.

    Args:
        paths: Undamaged safetensors files.
        findings: Where problems are noted.
        on_bytes: Called with the number of bytes after each tensor, those of headers included.
    """
    for path in paths:
        rest = path.stat().st_size
        broken = 0
        with findings.noting(path):
            for counts in count_values(path):
                rest -= counts.nbytes
                found = [f"{counts.nans} NaN"] * bool(counts.nans)
                found += [f"{counts.infinities} infinite"] * bool(counts.infinities)
                broken += bool(found)
                if found and broken <= _MOST_TENSORS:
                    name, number = shorten_text(counts.name), " and ".join(found)
                    findings.error(
                        path, f"{name} has {number} of {counts.total} values; take weights from before they appeared."
                    )
                on_bytes(counts.nbytes)
        if broken > _MOST_TENSORS:
            findings.error(path, f"has {broken - _MOST_TENSORS} more tensors with NaN or infinite values.")
        on_bytes(rest)
