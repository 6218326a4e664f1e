# SPDX-License-Identifier: Apache-2.0
"""Safetensors and GGUF files: headers read without values, tensors read on demand, weights written shard by shard."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .files import write_staged_json
from .messages import how_to_install, shorten_text, shorten_value


FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Types of weights that a conversion takes; integers and 8-bit floats mean quantised weights."""

# By their names in the headers of safetensors.
_TYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


@dataclass(frozen=True)
class TensorEntry:
    """A tensor to be written: name, shape and dtype, without its values.

    Attributes:
        name: Its key in the file.
        shape: Its shape.
        dtype: The dtype it is written in.
        load: Returns the values in any floating-point dtype; called once.
        stored_as: Type in the GGUF file that it was read from, such as `Q4_K`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[], torch.Tensor]
    stored_as: str = ""

    @property
    def nbytes(self) -> int:
        """Size in the file, in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def check_safetensors(path: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """Read the header of a safetensors file, which the library checks against the file's length.

    Returns:
        `dtype`, `shape` and `data_offsets` of each tensor, sorted by name, and the offset of the data in the file.

    Raises:
        ValueError: If the file is missing, truncated or not in the safetensors format.
    """
    if not path.is_file():
        raise ValueError(f"{path} is missing, although the checkpoint needs it.")
    try:
        with safe_open(str(path), framework="np"), path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
    except (SafetensorError, OSError) as error:
        reason = shorten_text(str(error), 200)
        raise ValueError(f"{path} is truncated or not a safetensors file ({reason}).") from error
    return {name: header[name] for name in sorted(header) if name != "__metadata__"}, 8 + length


def read_entries(path: Path) -> list[TensorEntry]:
    """Read the tensors of a safetensors or GGUF file, values on demand.

    Those of a safetensors file are written as they are stored. Those of a GGUF file are dequantised to float32, and
    written in bfloat16, plain floats in their own dtype.

    Raises:
        ValueError: If the file is missing or damaged, has a type that is not known, or `gguf` is not installed.
    """
    if path.suffix == ".gguf":
        return _read_gguf(path)
    header, begin = check_safetensors(path)
    _refuse_quantized(path, {entry["dtype"] for entry in header.values()} - set(_TYPES))
    return [
        TensorEntry(
            name,
            shape := tuple(entry["shape"]),
            dtype := _TYPES[entry["dtype"]],
            partial(_read_tensor, path, begin + entry["data_offsets"][0], shape, dtype),
        )
        for name, entry in header.items()
    ]


def compare(
    expected: Mapping[str, Any], found: Mapping[str, Any], ignored: Iterable[str] = ()
) -> tuple[list[str], list[str], dict[str, str]]:
    """Compare the shapes of tensors with those that a model expects.

    Args:
        expected: The model's shapes by name.
        found: Those of the tensors.
        ignored: Parts of names that may be left over.

    Returns:
        Names of missing tensors, names that the model does not know, and by name what differs in shape, as text.
    """
    missing = [name for name in expected if name not in found]
    surplus = [name for name in found if name not in expected and not any(part in name for part in ignored)]
    wrong = {name: shape for name, shape in expected.items() if found.get(name, shape) != shape}
    return missing, surplus, {name: f"{shorten_value(found[name])} instead of {wrong[name]}" for name in wrong}


def check_floats(entries: Iterable[TensorEntry | torch.Tensor], where: Any) -> None:
    """Refuse quantised weights.

    Args:
        entries: Tensors that must be plain floats.
        where: Their file or folder, for the error.

    Raises:
        ValueError: If one of them has another type.
    """
    types = {str(entry.dtype) for entry in entries if entry.dtype not in FLOATS}
    _refuse_quantized(where, {name.removeprefix("torch.") for name in types})


def _refuse_quantized(where: Any, types: set[str]) -> None:
    if types:
        raise ValueError(
            f"{where} holds {', '.join(sorted(types))} tensors: quantised weights cannot be converted. Convert the "
            "original weights, then quantise."
        )


def count_values(path: Path) -> Iterator[tuple[TensorEntry, int, int]]:
    """Count the NaN and infinite values of each tensor in a safetensors file.

    Integers and 8-bit floats have none.

    Yields:
        Each tensor with both counts, by name.

    Raises:
        ValueError: See [`read_entries`].
    """
    for entry in read_entries(path):
        nans = infinities = 0
        if entry.dtype in FLOATS and entry.nbytes:
            values = entry.load()
            # Both bounds are NaN if one value is, and this is many times as fast as looking at each.
            if not all(bound.isfinite() for bound in torch.aminmax(values)):
                nans, infinities = int(values.isnan().sum()), int(values.isinf().sum())
        yield entry, nans, infinities


def _read_tensor(path: Path, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    # `safe_open` maps the file as writable memory for torch, which systems refuse for files larger than their memory.
    tensor = torch.empty(shape, dtype=dtype)
    stored: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    with path.open("rb") as file:
        file.seek(offset)
        if file.readinto(stored) != stored.size:
            raise ValueError(f"{path} is truncated: a tensor reaches past its end.")
    return tensor


def _read_gguf(path: Path) -> list[TensorEntry]:
    try:
        import numpy as np
        from gguf import GGML_QUANT_SIZES, GGUFReader
        from gguf.quants import dequantize
    except ImportError as error:
        raise ValueError(f"GGUF files need the gguf package: {how_to_install('gguf')}") from error

    def load(tensor: Any, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor(dequantize(tensor.data, tensor.tensor_type)).reshape(shape)

    entries = []
    try:
        tensors = GGUFReader(path).tensors
        for kind in {tensor.tensor_type for tensor in tensors}:
            # Raises for a type that it does not know.
            dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        for tensor in tensors:
            kind = tensor.tensor_type.name
            # The innermost axis comes first in the file.
            shape = tuple(reversed(tensor.shape.tolist()))
            dtype = _TYPES.get(kind, torch.bfloat16)
            entries.append(TensorEntry(tensor.name, shape, dtype, partial(load, tensor, shape), kind))
    # A damaged header ends in any kind of error.
    except Exception as error:
        reason = shorten_text(str(error) or type(error).__name__, 200)
        raise ValueError(f"{path} is damaged, truncated or not a GGUF file ({reason}).") from error
    return entries


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
    folder: Path, shards: Mapping[str, Sequence[TensorEntry]], on_bytes: Callable[[int], None] = lambda count: None
) -> None:
    """Write shards one at a time, and their index if there are several.

    Args:
        folder: The folder to write to; created if needed.
        shards: The result of [`plan_shards`].
        on_bytes: Called with the size of each tensor after it was read.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for file, entries in shards.items():
        tensors = {}
        for entry in entries:
            tensor = entry.load().detach().to("cpu", entry.dtype).contiguous()
            # The tensors of a torch file may share one storage.
            tensors[entry.name] = tensor if tensor.nbytes == tensor.untyped_storage().nbytes() else tensor.clone()
            on_bytes(entry.nbytes)
        save_file(tensors, folder / file, {"format": "pt"})
    if len(shards) > 1:
        stem, _, variant = re.sub(r"-\d{5}-of-\d{5}\.safetensors$", "", next(iter(shards))).partition(".")
        weight_map = {entry.name: file for file, entries in shards.items() for entry in entries}
        total = sum(entry.nbytes for entries in shards.values() for entry in entries)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        name = f"{stem}.safetensors.index.{variant}.json" if variant else f"{stem}.safetensors.index.json"
        write_staged_json(folder / name, index, sort_keys=True)
