# SPDX-License-Identifier: Apache-2.0
"""Safetensors files, read and written one tensor at a time.

`safetensors.torch.save_file` wants a whole shard in memory, and shards of published video models reach 10 GB. The
format is simple (8 bytes of header length, a JSON header, the data), so the header can be written first from shapes
and types alone, and each tensor read, cast and appended after it: memory stays at one tensor.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from .files import atomic_file, write_staged_json
from .messages import shorten_text


FLOAT_TYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}
"""Types in a safetensors header that a conversion takes; integers and 8-bit floats mean quantised weights."""

_OTHER_TYPES: dict[str, torch.dtype] = {
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
# Pieces in which values are looked at: whole numbers of every type.
_PIECE_BYTES = 64 * 2**20
_TYPES = {**FLOAT_TYPES, **_OTHER_TYPES}
_TYPE_NAMES = {dtype: name for name, dtype in _TYPES.items()}


def read_header(path: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """Reads the header of a safetensors file, checked against the file's length.

    Returns:
        `dtype`, `shape` and `data_offsets` of each tensor, sorted by name, and where in the file the data begin.

    Raises:
        OSError: If the file cannot be read.
        SafetensorError: If it is truncated or no safetensors file.
    """
    # For torch it would be mapped to be written to, which systems refuse for files larger than their memory.
    with safe_open(str(path), framework="np"), path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    return {name: header[name] for name in sorted(header) if name != "__metadata__"}, 8 + length


def read_tensors(path: Path, remedy: str, names: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    """Reads a safetensors file.

    Args:
        path: The file.
        remedy: Advice for the error if it cannot be read.
        names: Tensors that it must hold.

    Raises:
        ValueError: If it is missing or damaged, or lacks a tensor.
    """
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read ({shorten_text(str(error), 200)}); {remedy}") from error
    missing = [name for name in names if name not in tensors]
    if missing:
        raise ValueError(f"{path} has no tensor {', '.join(missing)}; {remedy}")
    return tensors


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    """Writes a safetensors file atomically."""
    with atomic_file(path) as temporary:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary, metadata)


@dataclass(frozen=True)
class TensorEntry:
    """A tensor that will be written: everything about it but its values.

    Attributes:
        name: Its key in the file.
        shape: Its shape.
        dtype: The type it is written in.
        load: Returns the values in any floating-point type; called once, when its turn comes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[], torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Size in the file, in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class ValueCounts:
    """Numbers of values in a tensor.

    Attributes:
        name: The tensor.
        total: All of them.
        nans: Those that are NaN.
        infinities: Those that are infinite.
        nbytes: Size of the tensor in the file, in bytes.
    """

    name: str
    total: int
    nans: int
    infinities: int
    nbytes: int


def count_values(path: Path) -> Iterator[ValueCounts]:
    """Counts the NaN and the infinite values of each tensor in a safetensors file.

    Memory stays at a piece of one tensor. Integers and 8-bit floats are not looked at.

    Args:
        path: The file.

    Yields:
        The counts of each tensor, by name.

    Raises:
        ValueError: If the file is truncated or not in the safetensors format.
    """
    header, begin = check_safetensors(path)
    with path.open("rb") as file:
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            nans = infinities = 0
            if entry["dtype"] in FLOAT_TYPES:
                file.seek(begin + start)
                for position in range(start, end, _PIECE_BYTES):
                    content = bytearray(min(_PIECE_BYTES, end - position))
                    if file.readinto(content) != len(content):
                        raise ValueError(f"{path} is truncated: {shorten_text(name)} reaches past its end.")
                    values = torch.frombuffer(content, dtype=FLOAT_TYPES[entry["dtype"]])
                    # Both are NaN if one value is, and this is many times as fast as looking at each.
                    if not all(bound.isfinite() for bound in torch.aminmax(values)):
                        nans += int(values.isnan().sum())
                        infinities += int(values.isinf().sum())
            yield ValueCounts(name, math.prod(entry["shape"]), nans, infinities, end - start)


def check_safetensors(path: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """Reads the header of a safetensors file, checked against the file's length; see [`read_header`].

    Raises:
        ValueError: If the file is truncated or not in the safetensors format.
    """
    try:
        return read_header(path)
    except (SafetensorError, OSError) as error:
        reason = shorten_text(str(error), 200)
        raise ValueError(f"{path} is truncated or not a safetensors file ({reason}).") from error


class SafetensorsReader:
    """A safetensors file opened once, its tensors read on demand.

    Args:
        path: The file.
        floats_only: Refuse types that are not plain floats: quantised weights, for models without integer buffers.

    Attributes:
        shapes: Shape of every tensor by name.
        dtypes: Type of every tensor by name.

    Raises:
        ValueError: If the file is missing, truncated or not safetensors, or holds a type that is not expected
            (a quantised checkpoint).
    """

    def __init__(self, path: Path, *, floats_only: bool = True) -> None:
        self.path = path
        if not path.is_file():
            raise ValueError(f"{path} is missing, although the checkpoint needs it.")
        header, begin = check_safetensors(path)
        self._refuse({entry["dtype"] for entry in header.values()} - set(FLOAT_TYPES if floats_only else _TYPES))
        self.shapes = {name: tuple(entry["shape"]) for name, entry in header.items()}
        self.dtypes = {name: _TYPES[entry["dtype"]] for name, entry in header.items()}
        self._offsets = {name: begin + entry["data_offsets"][0] for name, entry in header.items()}

    def check_floats(self, names: Iterable[str]) -> None:
        """Raises `ValueError` unless these tensors have plain floats: quantised weights cannot be converted."""
        self._refuse({_TYPE_NAMES[self.dtypes[name]] for name in names} - set(FLOAT_TYPES))

    def _refuse(self, quantised: set[str]) -> None:
        if quantised:
            raise ValueError(
                f"{self.path} holds {', '.join(sorted(quantised))} tensors: quantised weights cannot be converted. "
                "Convert the original weights, then quantise."
            )

    def load(self, name: str) -> torch.Tensor:
        """Reads one tensor.

        Raises:
            ValueError: If the file has become shorter since it was opened.
        """
        tensor = torch.empty(self.shapes[name], dtype=self.dtypes[name])
        stored: Any = tensor.reshape(-1).view(torch.uint8).numpy()
        with self.path.open("rb") as file:
            file.seek(self._offsets[name])
            if file.readinto(stored) != stored.size:
                raise ValueError(f"{self.path} is truncated: {shorten_text(name)} reaches past its end.")
        return tensor

    def entries(self) -> list[TensorEntry]:
        """Every tensor as it is."""
        return [
            TensorEntry(name, shape, self.dtypes[name], lambda name=name: self.load(name))  # type: ignore[misc]
            for name, shape in self.shapes.items()
        ]


def write_safetensors(
    path: Path, entries: Sequence[TensorEntry], on_bytes: Callable[[int], None] | None = None
) -> None:
    """Writes a safetensors file tensor by tensor.

    Args:
        path: The file to write; its folder exists.
        entries: The tensors. Tensors of wide types go first, as the format's own writer does, to keep all aligned.
        on_bytes: Told the number of bytes after each tensor.

    Raises:
        ValueError: If an entry's values do not have the shape it announced, or a name occurs twice.
    """
    ordered = sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in ordered:
        if entry.name in header:
            raise ValueError(f"{entry.name} occurs twice in {path.name}.")
        span = [offset, offset + entry.nbytes]
        header[entry.name] = {"dtype": _TYPE_NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": span}
        offset = span[1]
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)))
        file.write(encoded)
        for entry in ordered:
            tensor = entry.load().detach()
            if tuple(tensor.shape) != entry.shape:
                raise ValueError(f"{entry.name} has shape {tuple(tensor.shape)}, not {entry.shape} as announced.")
            tensor = tensor.to(device="cpu", dtype=entry.dtype).contiguous()
            stored: Any = tensor.reshape(-1).view(torch.uint8).numpy()
            file.write(memoryview(stored))
            if on_bytes is not None:
                on_bytes(entry.nbytes)


def split_into_shards(groups: Iterable[Sequence[TensorEntry]], max_bytes: int | None) -> list[list[TensorEntry]]:
    """Distributes tensors over files.

    Args:
        groups: Tensors that come from one file each.
        max_bytes: Largest file; `None` keeps the groups as they are.

    Returns:
        The tensors of each file, none of them empty. A tensor larger than `max_bytes` gets a file of its own.
    """
    kept = [list(group) for group in groups if group]
    if max_bytes is None:
        return kept
    shards: list[list[TensorEntry]] = []
    used = 0
    for entry in (entry for group in kept for entry in group):
        if not shards or used + entry.nbytes > max_bytes:
            shards.append([])
            used = 0
        shards[-1].append(entry)
        used += entry.nbytes
    return shards


def shard_names(count: int, stem: str, variant: str | None = None) -> list[str]:
    """File names of `count` shards as diffusers writes them."""
    suffix = f".{variant}" if variant else ""
    if count == 1:
        return [f"{stem}{suffix}.safetensors"]
    return [f"{stem}{suffix}-{index:05d}-of-{count:05d}.safetensors" for index in range(1, count + 1)]


def write_shards(
    folder: Path,
    shards: Sequence[Sequence[TensorEntry]],
    *,
    stem: str = "diffusion_pytorch_model",
    variant: str | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> list[str]:
    """Writes shards, and their index when there are several.

    Args:
        folder: Where to; created.
        shards: The tensors of each file.
        stem: File name without type and variant.
        variant: The variant that goes into the file names, such as `fp16`.
        on_bytes: See [`write_safetensors`].

    Returns:
        The names of the weight files written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = shard_names(len(shards), stem, variant)
    for name, entries in zip(names, shards):
        write_safetensors(folder / name, entries, on_bytes)
    if len(names) > 1:
        weight_map = {entry.name: name for name, entries in zip(names, shards) for entry in entries}
        total = sum(entry.nbytes for entries in shards for entry in entries)
        index_name = f"{stem}.safetensors.index.{variant}.json" if variant else f"{stem}.safetensors.index.json"
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_staged_json(folder / index_name, index, sort_keys=True)
    return names
