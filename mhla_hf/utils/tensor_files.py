# SPDX-License-Identifier: Apache-2.0
"""Safetensors and GGUF files: headers read without values, tensors read on demand, weights written shard by shard."""

from __future__ import annotations

import json
import math
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from .files import atomic_file, write_staged_json
from .messages import how_to_install, shorten_text


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
_TYPES = {**FLOAT_TYPES, **_OTHER_TYPES}
_TYPE_NAMES = {dtype: name for name, dtype in _TYPES.items()}


def read_header(path: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """Read the header of a safetensors file, checked against the file's length.

    Returns:
        `dtype`, `shape` and `data_offsets` of each tensor, sorted by name, and the offset of the data in the file.

    Raises:
        OSError: If the file cannot be read.
        SafetensorError: If it is truncated or no safetensors file.
    """
    with safe_open(str(path), framework="np"), path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    return {name: header[name] for name in sorted(header) if name != "__metadata__"}, 8 + length


def check_safetensors(path: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """Read the header of a safetensors file; see [`read_header`].

    Raises:
        ValueError: If the file is truncated or not in the safetensors format.
    """
    try:
        return read_header(path)
    except (SafetensorError, OSError) as error:
        reason = shorten_text(str(error), 200)
        raise ValueError(f"{path} is truncated or not a safetensors file ({reason}).") from error


def read_tensors(path: Path, remedy: str, names: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    """Read a safetensors file.

    Args:
        path: The file.
        remedy: Advice for the error if it cannot be read.
        names: Tensors that it must hold.

    Raises:
        ValueError: If it is missing or damaged, or lacks a tensor.
    """
    try:
        tensors = load_file(path)
        return {**{name: tensors[name] for name in names}, **tensors}
    except (OSError, SafetensorError, KeyError) as error:
        reason = f"it has no tensor {error}" if isinstance(error, KeyError) else shorten_text(str(error), 200)
        raise ValueError(f"{path} cannot be read ({reason}); {remedy}") from error


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file atomically."""
    with atomic_file(path) as temporary:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary, metadata)


@dataclass(frozen=True)
class TensorEntry:
    """A tensor to be written: name, shape and dtype, without its values.

    Attributes:
        name: Its key in the file.
        shape: Its shape.
        dtype: The dtype it is written in.
        load: Returns the values in any floating-point dtype; called once.
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
        total: All values.
        nans: NaN values.
        infinities: Infinite values.
        nbytes: Size of the tensor in the file, in bytes.
    """

    name: str
    total: int
    nans: int
    infinities: int
    nbytes: int


def count_values(path: Path) -> Iterator[ValueCounts]:
    """Count the NaN and infinite values of each tensor in a safetensors file.

    Integers and 8-bit floats are skipped.

    Args:
        path: The file.

    Yields:
        The counts of each tensor, by name.

    Raises:
        ValueError: If the file is truncated or not in the safetensors format.
    """
    header, begin = check_safetensors(path)
    for name, entry in header.items():
        nans = infinities = 0
        start, end = entry["data_offsets"]
        if entry["dtype"] in FLOAT_TYPES and end > start:
            values = _read_tensor(path, begin + start, entry["shape"], FLOAT_TYPES[entry["dtype"]])
            # Both bounds are NaN if one value is, and this is many times as fast as looking at each.
            if not all(bound.isfinite() for bound in torch.aminmax(values)):
                nans, infinities = int(values.isnan().sum()), int(values.isinf().sum())
        yield ValueCounts(name, math.prod(entry["shape"]), nans, infinities, end - start)


def _read_tensor(path: Path, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    # `safe_open` maps the file as writable memory for torch, which systems refuse for files larger than their memory.
    tensor = torch.empty(tuple(shape), dtype=dtype)
    stored: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    with path.open("rb") as file:
        file.seek(offset)
        if file.readinto(stored) != stored.size:
            raise ValueError(f"{path} is truncated: a tensor reaches past its end.")
    return tensor


class SafetensorsReader:
    """A safetensors file whose tensors are read on demand.

    Args:
        path: The file.
        floats_only: Refuse dtypes other than plain floats, which mean quantised weights in models without integer
            buffers.

    Attributes:
        shapes: Shape of every tensor by name.
        dtypes: Dtype of every tensor by name.

    Raises:
        ValueError: If the file is missing, truncated or not safetensors, or holds an unexpected dtype (a quantised
            checkpoint).
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
        """Raise `ValueError` unless these tensors are plain floats: quantised weights cannot be converted."""
        self._refuse({_TYPE_NAMES[self.dtypes[name]] for name in names} - set(FLOAT_TYPES))

    def _refuse(self, quantised: set[str]) -> None:
        if quantised:
            raise ValueError(
                f"{self.path} holds {', '.join(sorted(quantised))} tensors: quantised weights cannot be converted. "
                "Convert the original weights, then quantise."
            )

    def load(self, name: str) -> torch.Tensor:
        """Read one tensor."""
        return _read_tensor(self.path, self._offsets[name], self.shapes[name], self.dtypes[name])

    def entries(self) -> list[TensorEntry]:
        """Return every tensor, to be written as it is stored."""
        return [
            TensorEntry(name, shape, self.dtypes[name], partial(self.load, name))
            for name, shape in self.shapes.items()
        ]


def gguf_entries(path: Path) -> tuple[list[TensorEntry], dict[str, int]]:
    """Read the tensors of a GGUF file, dequantised to float32 on demand.

    Returns:
        The tensors, to be written in their own dtype if they are plain floats and in bfloat16 if they are quantised,
        and the number of tensors by GGUF type, such as `Q4_K`.

    Raises:
        ValueError: If the file is damaged, has a type that cannot be dequantised, or `gguf` is not installed.
    """
    try:
        import numpy as np
        from gguf import GGML_QUANT_SIZES, GGUFReader
        from gguf.quants import dequantize
    except ImportError as error:
        raise ValueError(f"GGUF files need the gguf package: {how_to_install('gguf')}") from error

    def load(tensor: Any, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor(dequantize(tensor.data, tensor.tensor_type)).reshape(shape)

    entries, kinds = [], Counter[str]()
    try:
        for tensor in GGUFReader(path).tensors:
            if tensor.tensor_type.name not in kinds:
                # Raises for a type that it does not know.
                dequantize(np.zeros((1, GGML_QUANT_SIZES[tensor.tensor_type][1]), np.uint8), tensor.tensor_type)
            kinds[tensor.tensor_type.name] += 1
            # The innermost axis comes first in the file.
            shape = tuple(reversed(tensor.shape.tolist()))
            dtype = FLOAT_TYPES.get(tensor.tensor_type.name, torch.bfloat16)
            entries.append(TensorEntry(tensor.name, shape, dtype, partial(load, tensor, shape)))
    # A damaged header ends in any kind of error.
    except Exception as error:
        reason = shorten_text(str(error) or type(error).__name__, 200)
        raise ValueError(f"{path} is damaged, truncated or not a GGUF file ({reason}).") from error
    return entries, dict(kinds)


def write_safetensors(
    path: Path, entries: Sequence[TensorEntry], on_bytes: Callable[[int], None] = lambda count: None
) -> None:
    """Write a safetensors file in place. Its tensors are held in memory together.

    Args:
        path: The file to write; its folder exists.
        entries: The tensors.
        on_bytes: Called with the size of each tensor after it was read.
    """
    tensors = {}
    for entry in entries:
        tensor = entry.load().detach().to("cpu", entry.dtype).contiguous()
        # The tensors of a torch file may share one storage.
        tensors[entry.name] = tensor if tensor.nbytes == tensor.untyped_storage().nbytes() else tensor.clone()
        on_bytes(entry.nbytes)
    save_file(tensors, path, {"format": "pt"})


def plan_shards(
    entries: Iterable[TensorEntry],
    max_bytes: int,
    *,
    stem: str = "diffusion_pytorch_model",
    variant: str | None = None,
) -> dict[str, list[TensorEntry]]:
    """Distribute tensors over files, by the rules of `huggingface_hub`.

    Args:
        entries: The tensors.
        max_bytes: Largest file. A larger tensor gets its own file.
        stem: File name without suffix and variant.
        variant: The variant in the file names, such as `fp16`.

    Returns:
        The tensors of each file by its name.
    """
    by_name = {entry.name: entry for entry in entries}
    pattern = f"{stem}{f'.{variant}' if variant else ''}{{suffix}}.safetensors"
    split = split_state_dict_into_shards_factory(
        by_name, get_storage_size=lambda entry: entry.nbytes, filename_pattern=pattern, max_shard_size=max_bytes
    )
    return {file: [by_name[name] for name in names] for file, names in split.filename_to_tensors.items()}


def write_shards(
    folder: Path,
    shards: Mapping[str, Sequence[TensorEntry]],
    on_bytes: Callable[[int], None] = lambda count: None,
) -> None:
    """Write shards one at a time, and their index if there are several.

    Args:
        folder: The folder to write to; created if needed.
        shards: The result of [`plan_shards`].
        on_bytes: See [`write_safetensors`].
    """
    folder.mkdir(parents=True, exist_ok=True)
    for file, entries in shards.items():
        write_safetensors(folder / file, entries, on_bytes)
    if len(shards) > 1:
        stem, _, variant = re.sub(r"-\d{5}-of-\d{5}\.safetensors$", "", next(iter(shards))).partition(".")
        weight_map = {entry.name: file for file, entries in shards.items() for entry in entries}
        total = sum(entry.nbytes for entries in shards.values() for entry in entries)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        name = f"{stem}.safetensors.index.{variant}.json" if variant else f"{stem}.safetensors.index.json"
        write_staged_json(folder / name, index, sort_keys=True)
