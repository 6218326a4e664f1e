# SPDX-License-Identifier: Apache-2.0
"""Recorded calls of attention layers, kept in memory or as safetensors files.

A record holds the calls of every layer for one batch: hidden states and outputs in the type of the cache, and the
other arguments unchanged. Tensors that layers share, such as rotary tables and masks, are kept once. No pickles:
other arguments are kept as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from accelerate.utils import send_to_device
from safetensors import safe_open
from safetensors.torch import save_file

from ...utils.destinations import remove_directory
from ...utils.files import atomic_file
from ...utils.messages import format_bytes
from .layers import CallArguments, LayerCall


_PLAIN = (type(None), bool, int, float, str)

CACHES = ("auto", "memory", "disk", "none")
# Inputs with an entry for every token of every sample, in the order they are looked for.
_TOKEN_INPUTS = ("input_ids", "inputs_embeds", "hidden_states", "pixel_values")
# Left free on the disk for checkpoints and everyone else.
_DISK_RESERVE = 2**30


class Record(NamedTuple):
    """The calls of one batch.

    Attributes:
        tensors: Tensors by name.
        structure: The other arguments of each layer as JSON, with the names of tensors in their places.
    """

    tensors: dict[str, torch.Tensor]
    structure: dict[str, Any]

    @property
    def nbytes(self) -> int:
        """Size of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def pack(calls: Mapping[str, LayerCall]) -> Record:
    """Pack the calls of one batch, by layer, into a record.

    Raises:
        ValueError: If an argument is neither a tensor nor a plain value; the message names it.
    """
    tensors: dict[str, torch.Tensor] = {}
    shared: dict[int, str] = {}

    def keep(tensor: torch.Tensor) -> str:
        if id(tensor) not in shared:
            shared[id(tensor)] = f"shared.{len(shared)}"
            # Safetensors takes no two tensors of one storage.
            tensors[shared[id(tensor)]] = tensor.detach().to("cpu", copy=True).contiguous()
        return shared[id(tensor)]

    structure = {}
    for name, call in calls.items():
        tensors[f"hidden_states.{name}"], tensors[f"output.{name}"] = call.hidden_states, call.output
        structure[name] = [_encode(value, keep, name) for value in (*call.arguments, call.valid)]
    return Record(tensors, structure)


def _unpack(structure: Mapping[str, Any], name: str, read: Callable[[str], torch.Tensor]) -> LayerCall:
    """Restore the call of one layer; `read` returns the tensor of a name."""
    args, kwargs, place, valid = (_decode(value, read) for value in structure[name])
    return LayerCall(CallArguments(args, kwargs, place), read(f"hidden_states.{name}"), read(f"output.{name}"), valid)


def move_call(call: LayerCall, device: torch.device, dtype: torch.dtype) -> LayerCall:
    """Move a call to a device, and cast its hidden states."""
    call = send_to_device(call, device, non_blocking=True)
    return call._replace(hidden_states=call.hidden_states.to(dtype))


def _encode(value: Any, keep: Callable[[torch.Tensor], str], where: str) -> Any:
    from ...integrations.transformers.attention import ModelInputs

    if isinstance(value, torch.Tensor):
        return {"tensor": keep(value)}
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, tuple):
        return {"tuple": [_encode(entry, keep, where) for entry in value]}
    if isinstance(value, list):
        return [_encode(entry, keep, where) for entry in value]
    kind = "ModelInputs" if isinstance(value, ModelInputs) else "dict"
    if kind == "ModelInputs":
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return {kind: {name: _encode(entry, keep, where) for name, entry in value.items()}}
    raise ValueError(
        f"{where} is called with a {type(value).__name__}, which cannot be kept among its activations; match it with "
        "cache='none'."
    )


def _decode(value: Any, read: Callable[[str], torch.Tensor]) -> Any:
    from ...integrations.transformers.attention import ModelInputs

    if isinstance(value, list):
        return [_decode(entry, read) for entry in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return read(content)
    if kind == "tuple":
        return tuple(_decode(entry, read) for entry in content)
    entries = {name: _decode(entry, read) for name, entry in content.items()}
    return ModelInputs(**entries) if kind == "ModelInputs" else entries


class MemoryCache:
    """Records by their number, in memory."""

    def __init__(self) -> None:
        self.records: dict[int, Record] = {}

    def __contains__(self, index: int) -> bool:
        """Return whether a record is there."""
        return index in self.records

    def put(self, index: int, record: Record) -> None:
        """Keep a record.

        Raises:
            OSError: If there is no room for it.
        """
        self.records[index] = record

    def call(self, index: int, name: str) -> LayerCall:
        """Return the call of a layer in a record."""
        record = self.records[index]
        return _unpack(record.structure, name, record.tensors.__getitem__)

    def close(self) -> None:
        """Release all records, and remove their files."""
        self.records.clear()


class DiskCache(MemoryCache):
    """Records as files, each written atomically, in a directory that belongs to one run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def __contains__(self, index: int) -> bool:
        return self._path(index).is_file()

    def put(self, index: int, record: Record) -> None:
        with atomic_file(self._path(index)) as temporary:
            save_file(record.tensors, temporary, {"calls": json.dumps(record.structure)})

    def call(self, index: int, name: str) -> LayerCall:
        with safe_open(str(self._path(index)), framework="pt") as file:
            return _unpack(json.loads(file.metadata()["calls"]), name, file.get_tensor)

    def close(self) -> None:
        remove_directory(self.directory)

    def _path(self, index: int) -> Path:
        return self.directory / f"record-{index:08d}.safetensors"


def total_size(first: int, batches: Any, indices: Sequence[int]) -> int:
    """Size of the records of some batches, in bytes.

    Args:
        first: Size of the record of the first of them.
        batches: The batches, by number.
        indices: Their numbers. The size of a record is proportional to the tokens of its batch.
    """
    tokens = [_count_tokens(batches[index]) for index in indices]
    return sum(first * count // tokens[0] for count in tokens)


def _count_tokens(batch: Mapping[str, Any]) -> int:
    """A number that grows with the tokens of a batch."""
    tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
    named = [tensors[name] for name in _TOKEN_INPUTS if name in tensors]
    return max(1, *(value.numel() for value in named[:1] or tensors.values()))


def choose_cache(
    cache: str, size: int, limit: int | None, directory: Path | None, share: float = 1.0
) -> tuple[str, str]:
    """Choose the place of the records by the free space.

    Args:
        cache: The user's choice, one of `CACHES` but `"none"`.
        size: Of all records, in bytes.
        limit: Most bytes; `None` for half of the free memory, or the free disk.
        directory: Where records on disk would be; `None` for nowhere.
        share: Share of the layers that this process keeps, in memory.

    Returns:
        `"memory"`, `"disk"` or `"none"`, and a sentence that says why.

    Raises:
        ValueError: If they do not fit where they were asked for.
    """
    rooms = {"memory": (psutil.virtual_memory().available // 2, int(size * share), "half of the free memory")}
    if directory is not None:
        existing = next(path for path in (directory, *directory.parents) if path.exists())
        rooms["disk"] = (max(0, shutil.disk_usage(existing).free - _DISK_RESERVE), size, "room on the disk")
    for kind in rooms if cache == "auto" else (cache,):
        room, needed, what = rooms[kind]
        if limit is not None and limit < room:
            room, what = limit, "cache_limit"
        if needed <= room:
            place = "memory" if kind == "memory" else "files"
            return kind, f"activations of {format_bytes(needed)} are kept in {place}"
        if cache != "auto":
            others = "'memory'" if kind == "disk" else "'disk'"
            raise ValueError(
                f"cache={cache!r} needs {format_bytes(needed)}, more than {what}, {format_bytes(room)}: use fewer "
                f"batches, cache={others}, or cache='none', which keeps none."
            )
    return "none", (
        f"activations of {format_bytes(size)} do not fit; they are recorded again in every step. cache_limit"
        f"{'' if directory is not None else ' and output'} would change that"
    )
