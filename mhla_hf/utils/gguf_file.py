# SPDX-License-Identifier: Apache-2.0
"""GGUF files, dequantised one tensor at a time.

The header is walked here, within the bounds of the file: the reader of the `gguf` package believes every count and
length that it finds, so that a few bytes keep it busy, or filling memory, for hours. Values are dequantised by that
package, exactly and in float32.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from .messages import LIST_LENGTH, how_to_install, shorten_text
from .tensor_files import TensorEntry


SUFFIX = ".gguf"

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
# Sizes of the scalar types of metadata, in bytes.
_SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
# Fewest bytes that a metadata entry, a tensor's description and an array within an array take.
_ENTRY, _DESCRIPTION, _NESTED = 13, 24, 12
_MAX_DEPTH, _MAX_AXES, _MAX_NAME = 8, 8, 1024
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class _Tensor(NamedTuple):
    kind: Any
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class GGUFFile:
    """A GGUF file opened once, its tensors read on demand.

    Args:
        path: The file.

    Attributes:
        path: The file.
        shapes: Shape of every tensor by name.
        dtypes: Type to keep every tensor in, by name: its own for plain floats, bfloat16 for quantised ones.
        kinds: Number of tensors stored in each of GGUF's types, such as `Q4_K`.

    Raises:
        ValueError: If the file is missing, damaged or truncated, has tensors of a type that cannot be dequantised, or
            the `gguf` package is not installed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._gguf = _import_gguf()
        if not path.is_file():
            raise ValueError(f"{path} does not exist or is not a regular file.")
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._tensors = self._read_header()
        except (struct.error, ValueError, UnicodeDecodeError) as error:
            # Reading past the end is what struct calls an error, and mmap refuses empty files.
            reason = "it ends too early" if isinstance(error, struct.error) else shorten_text(str(error), LIST_LENGTH)
            raise ValueError(f"{path} is damaged, truncated or not a GGUF file ({reason}).") from error
        self._check_kinds()
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        self.dtypes = {name: _FLOATS.get(tensor.kind.name, torch.bfloat16) for name, tensor in self._tensors.items()}
        self.kinds = dict(Counter(tensor.kind.name for tensor in self._tensors.values()))

    def load(self, name: str) -> torch.Tensor:
        """Reads one tensor: plain floats as they are, quantised ones as float32."""
        kind, shape, offset, nbytes = self._tensors[name]
        stored = np.frombuffer(self._data, dtype=np.uint8, count=nbytes, offset=offset)
        dtype = _FLOATS.get(kind.name)
        if dtype is not None:
            return torch.from_numpy(stored.copy()).view(dtype).reshape(shape)
        rows = stored.reshape(-1, self._gguf.GGML_QUANT_SIZES[kind][1])
        return torch.from_numpy(self._gguf.quants.dequantize(rows, kind)).reshape(shape)

    def entries(self) -> list[TensorEntry]:
        """Returns every tensor, to be written in the type of `dtypes`."""
        return [
            TensorEntry(name, shape, self.dtypes[name], lambda name=name: self.load(name))  # type: ignore[misc]
            for name, shape in self.shapes.items()
        ]

    def _read_header(self) -> dict[str, _Tensor]:
        if self._data[:4] != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        version, num_tensors, num_entries = struct.unpack_from("<IQQ", self._data, 4)
        if version not in _VERSIONS:
            raise ValueError(f"version {version} is not one of {', '.join(map(str, _VERSIONS))}, little-endian")
        self._position, alignment = 24, 32
        self._check_count(num_entries, _ENTRY)
        for _ in range(num_entries):
            key = self._read_string()
            (kind,) = self._read("<I")
            if key == "general.alignment" and kind == 4:
                (alignment,) = struct.unpack_from("<I", self._data, self._position)
            self._skip(kind)
        if alignment < 1:
            raise ValueError("its alignment is 0")
        self._check_count(num_tensors, _DESCRIPTION)
        found = {}
        for _ in range(num_tensors):
            name, tensor = self._read_description()
            if name in found:
                raise ValueError(f"{name} occurs twice")
            found[name] = tensor
        start, offset = _padded(self._position, alignment), 0
        for name, tensor in found.items():
            # As llama.cpp has it: one after the other. A wrong type or size shows here.
            if tensor.offset != offset:
                raise ValueError(f"{name} begins at {tensor.offset} and not at {offset}, after the tensor before it")
            offset += _padded(tensor.nbytes, alignment)
            if start + tensor.offset + tensor.nbytes > len(self._data):
                raise ValueError(f"{name} reaches past its end")
        return {name: tensor._replace(offset=start + tensor.offset) for name, tensor in found.items()}

    def _read_description(self) -> tuple[str, _Tensor]:
        name = self._read_string(_MAX_NAME)
        (num_axes,) = self._read("<I")
        if num_axes > _MAX_AXES:
            raise ValueError(f"a tensor has {num_axes} axes")
        sizes = self._read(f"<{num_axes}Q")
        kind_number, offset = self._read("<IQ")
        kind = self._gguf.GGMLQuantizationType(kind_number)
        block, block_bytes = self._gguf.GGML_QUANT_SIZES[kind]
        if 0 in sizes:
            raise ValueError(f"{name} has an axis of no elements")
        if (sizes[0] if sizes else 1) % block:
            raise ValueError(f"rows of {name} are not whole blocks of {kind.name}")
        # The innermost axis comes first in the file.
        return name, _Tensor(kind, tuple(reversed(sizes)), offset, math.prod(sizes) // block * block_bytes)

    def _read(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(layout, self._data, self._position)
        self._position += struct.calcsize(layout)
        return values

    def _read_string(self, longest: int | None = None) -> str:
        (length,) = self._read("<Q")
        if longest is not None and length > longest:
            raise ValueError(f"a name has {length} bytes")
        start = self._position
        self._advance(length)
        return self._data[start : start + length].decode()

    def _skip(self, kind: int, depth: int = 0) -> None:
        """Goes past a value of the metadata."""
        if kind in _SCALARS:
            self._advance(_SCALARS[kind])
        elif kind == _STRING:
            (length,) = self._read("<Q")
            self._advance(length)
        elif kind == _ARRAY and depth < _MAX_DEPTH:
            inner, count = self._read("<IQ")
            if inner in _SCALARS:
                self._advance(count * _SCALARS[inner])
                return
            self._check_count(count, _NESTED if inner == _ARRAY else 8)
            for _ in range(count):
                self._skip(inner, depth + 1)
        else:
            raise ValueError(f"metadata of type {kind} is unknown or nested too deeply")

    def _advance(self, count: int) -> None:
        if count > len(self._data) - self._position:
            raise ValueError("it ends too early")
        self._position += count

    def _check_count(self, count: int, smallest: int) -> None:
        if count * smallest > len(self._data) - self._position:
            raise ValueError(f"it is too short for the {count} entries that it announces")

    def _check_kinds(self) -> None:
        examples = {tensor.kind: name for name, tensor in self._tensors.items() if tensor.kind.name not in _FLOATS}
        for kind, name in examples.items():
            block = np.zeros((1, self._gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
            try:
                self._gguf.quants.dequantize(block, kind)
            except NotImplementedError:
                raise ValueError(
                    f"{self.path} holds {kind.name} under {shorten_text(name)}, which the gguf package does not "
                    "dequantise."
                ) from None


def _padded(count: int, alignment: int) -> int:
    return -(-count // alignment) * alignment


def _import_gguf() -> Any:
    try:
        import gguf
        import gguf.quants
    except ImportError as error:
        raise ValueError(f"GGUF files need the gguf package: {how_to_install('gguf')}") from error
    return gguf
