# SPDX-License-Identifier: Apache-2.0
"""Short hashes that identify weights and data without reading all of them.

Small files are read completely. Of larger safetensors files the header (names, types, shapes) is read and a
few kilobytes at the beginning, middle and end of every tensor: training changes every part of a tensor, so a
few megabytes identify a text encoder of eleven gigabytes. Other large files are sampled evenly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ...utils.files import parse_json


_READ_WHOLE = 4 * 2**20
_PIECE = 4096
_PIECES = 1024
_LARGEST_HEADER = 100 * 2**20


def file_fingerprint(path: Path) -> str:
    """Hash a file's size and its content, which is sampled if the file is large."""
    size = path.stat().st_size
    digest = hashlib.sha256(f"{size};".encode())
    with path.open("rb") as file:
        if size <= _READ_WHOLE:
            digest.update(file.read())
            return digest.hexdigest()[:16]
        header_size = int.from_bytes(file.read(8), "little")
        header = file.read(header_size) if header_size <= min(size, _LARGEST_HEADER) else b""
        digest.update(header)
        begins = _begins_of_tensors(header, 8 + header_size, size) if path.suffix == ".safetensors" else []
        for begin in (*(begins or range(0, size, max(size // _PIECES, _PIECE))), size - _PIECE):
            file.seek(begin)
            digest.update(file.read(_PIECE))
    return digest.hexdigest()[:16]


def folder_fingerprint(folder: Path) -> str:
    """Hash the names and contents of a component's files; hidden ones do not count."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder)
        if not any(part.startswith(".") for part in name.parts):
            digest.update(f"{name.as_posix()}:{file_fingerprint(path)};".encode())
    return digest.hexdigest()[:16]


def model_fingerprint(model: Any, without: Collection[str] = ()) -> str:
    """Hash the names, shapes and some values of a model's parameters.

    Args:
        model: Object with `named_parameters`.
        without: Names of parameters that do not count.
    """
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if name not in without:
            digest.update(f"{name}:{tuple(parameter.shape)};".encode())
            # The shards of other processes cannot be read from one alone.
            if not hasattr(parameter, "device_mesh"):
                add_tensor(digest, parameter, samples=64)
    return digest.hexdigest()[:16]


def samples_fingerprint(dataset: Any, samples: int = 8) -> str:
    """Hash the size of a data set and some of its samples.

    Of tensors that differ each time they are read, as augmented ones do, the shapes alone count.

    Args:
        dataset: See `LatentSamples`.
        samples: Number of samples to read.
    """
    digest = hashlib.sha256(f"{len(dataset)};".encode())
    for index in evenly_spaced(range(len(dataset)), samples):
        again = dataset[index]
        for name, tensor in sorted(dataset[index].items()):
            digest.update(f"{name}:{tuple(tensor.shape)};".encode())
            if torch.equal(tensor, again[name]):
                add_tensor(digest, tensor, samples=1024)
    return digest.hexdigest()[:16]


def evenly_spaced(items: Sequence[Any], count: int) -> list[Any]:
    """Pick up to `count` evenly spaced items, including both ends."""
    if len(items) <= count:
        return list(items)
    return [items[round(number * (len(items) - 1) / (count - 1))] for number in range(count)]


def _begins_of_tensors(header: bytes, offset: int, size: int) -> list[int]:
    """Offsets of the parts of a safetensors file to read, in file order; empty for an invalid header."""
    try:
        entries = parse_json(header.decode("utf-8"), "header")
        spans = sorted(entry["data_offsets"] for name, entry in entries.items() if name != "__metadata__")
        begins = [begin for first, last in spans for begin in _begins(offset + first, offset + last)]
        return [begin for begin in begins if 0 <= begin < size]
    except (ValueError, TypeError, KeyError, AttributeError):
        return []


def _begins(first: int, last: int) -> Iterator[int]:
    yield first
    if last - first > _PIECE:
        yield (first + last - _PIECE) // 2
        yield last - _PIECE


def add_tensor(digest: Any, tensor: torch.Tensor, samples: int) -> None:
    values = tensor.detach().reshape(-1)
    chosen = values[:: max(1, len(values) // samples)]
    digest.update(chosen.cpu().contiguous().view(torch.uint8).numpy().tobytes())
