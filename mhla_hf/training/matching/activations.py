# SPDX-License-Identifier: Apache-2.0
"""Recorded calls of attention layers, kept in memory or as safetensors files, or recorded again on demand.

A record holds the calls of every layer for one batch: hidden states and outputs in the type of the cache, and the
other arguments unchanged. Tensors that layers share, such as rotary tables and masks, are kept once. No pickles:
other arguments are kept as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate.utils import send_to_device
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ...conversion.options import format_bytes
from ...utils.destinations import remove_directory
from ...utils.files import atomic_file, read_json, write_json
from .layers import CallArguments, LayerCall


FORMAT_VERSION = 1
_INFORMATION = "activations.json"
_PLAIN = (type(None), bool, int, float, str)

CACHES = ("auto", "memory", "disk", "none")
# Inputs with an entry for every token of every sample, in the order they are looked for.
_TOKEN_INPUTS = ("input_ids", "inputs_embeds", "hidden_states", "pixel_values")
# Left free on the disk for checkpoints and everyone else.
_DISK_RESERVE = 2**30


@dataclasses.dataclass(frozen=True)
class Record:
    """The calls of one batch.

    Attributes:
        tensors: Tensors by name.
        structure: For every layer its other arguments as JSON, with the names of tensors in their places.
    """

    tensors: dict[str, torch.Tensor]
    structure: dict[str, Any]

    @property
    def bytes(self) -> int:
        """Size of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def pack(calls: Mapping[str, LayerCall]) -> Record:
    """Pack the calls of one batch into a record.

    Args:
        calls: By layer.

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
        tensors[f"hidden_states.{name}"] = call.hidden_states
        tensors[f"output.{name}"] = call.output
        arguments = call.arguments
        structure[name] = {
            "args": _encode(arguments.args, keep, name),
            "kwargs": _encode(arguments.kwargs, keep, name),
            "place": arguments.place,
            "valid": _encode(call.valid, keep, name),
        }
    return Record(tensors, structure)


def unpack(structure: Mapping[str, Any], name: str, read: Callable[[str], torch.Tensor]) -> LayerCall:
    """Restore the call of one layer.

    Args:
        structure: See [`Record`].
        name: The layer.
        read: Gives the tensor of a name.
    """
    entry = structure[name]
    arguments = CallArguments(_decode(entry["args"], read), _decode(entry["kwargs"], read), entry["place"])
    return LayerCall(arguments, read(f"hidden_states.{name}"), read(f"output.{name}"), _decode(entry["valid"], read))


def moved(call: LayerCall, device: torch.device, dtype: torch.dtype) -> LayerCall:
    """Move a call to a device.

    Args:
        call: The call.
        device: The device.
        dtype: Type of the hidden states.
    """
    call = send_to_device(call, device, non_blocking=True)
    return call._replace(hidden_states=call.hidden_states.to(dtype))


def _encode(value: Any, keep: Callable[[torch.Tensor], str], where: str) -> Any:
    from ...integrations.transformers.inputs import ModelInputs

    if isinstance(value, torch.Tensor):
        return {"tensor": keep(value)}
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, tuple):
        return {"tuple": [_encode(entry, keep, where) for entry in value]}
    if isinstance(value, list):
        return [_encode(entry, keep, where) for entry in value]
    if isinstance(value, ModelInputs):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {"ModelInputs": {name: _encode(entry, keep, where) for name, entry in fields.items()}}
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return {"dict": {name: _encode(entry, keep, where) for name, entry in value.items()}}
    raise ValueError(
        f"{where} is called with a {type(value).__name__}, which cannot be kept among its activations; match it with "
        "cache='none'."
    )


def _decode(value: Any, read: Callable[[str], torch.Tensor]) -> Any:
    from ...integrations.transformers.inputs import ModelInputs

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
    """Records by their number, in memory; the base of the other caches."""

    kind = "memory"

    def __init__(self) -> None:
        self.records: dict[int, Record] = {}

    def missing(self, indices: Collection[int]) -> list[int]:
        """Return the numbers whose record is missing or damaged."""
        return [index for index in indices if index not in self.records]

    def put(self, index: int, record: Record) -> None:
        """Keep a record.

        Raises:
            OSError: If there is no room for it.
        """
        self.records[index] = record

    def call(self, index: int, name: str) -> LayerCall:
        """Return the call of one layer.

        Args:
            index: Number of the record.
            name: The layer.
        """
        record = self.records[index]
        return unpack(record.structure, name, record.tensors.__getitem__)

    def close(self) -> None:
        """Release all records, and remove their files."""
        self.records.clear()


class OnlineCache(MemoryCache):
    """Records made on demand; the latest are kept for the other layers of a step.

    Args:
        make: Makes the calls of all layers for a number.
        size: Number of records to keep.
    """

    kind = "none"

    def __init__(self, make: Callable[[int], Mapping[str, LayerCall]], size: int) -> None:
        self.make, self.size = make, size
        self.calls: dict[int, Mapping[str, LayerCall]] = {}

    def missing(self, indices: Collection[int]) -> list[int]:
        return []

    def call(self, index: int, name: str) -> LayerCall:
        if index not in self.calls:
            while len(self.calls) >= self.size:
                del self.calls[next(iter(self.calls))]
            self.calls[index] = self.make(index)
        return self.calls[index][name]

    def close(self) -> None:
        self.calls.clear()


class DiskCache(MemoryCache):
    """Records as files of one directory, each written atomically.

    Args:
        directory: The directory; the records of an existing one are used.
        fingerprint: Identity of the model, data and type that the records follow from.

    Raises:
        ValueError: If the directory holds records of something else.
    """

    kind = "disk"

    def __init__(self, directory: Path, fingerprint: str) -> None:
        self.directory, self.fingerprint = directory, fingerprint
        information = directory / _INFORMATION
        # Listed first: another process may write the information at the same time.
        holds_files = directory.is_dir() and any(not path.name.startswith(".") for path in directory.iterdir())
        if information.is_file():
            stored = read_json(information, "the cache's", required={"format_version": int, "fingerprint": str})
            if (stored["format_version"], stored["fingerprint"]) != (FORMAT_VERSION, fingerprint):
                raise ValueError(
                    f"{directory} holds activations of another model, data or type; remove it, or choose another "
                    "output."
                )
        elif holds_files:
            raise ValueError(f"{directory} is no cache of activations; choose another output.")
        else:
            directory.mkdir(parents=True, exist_ok=True)
            write_json(information, {"format_version": FORMAT_VERSION, "fingerprint": fingerprint})

    def missing(self, indices: Collection[int]) -> list[int]:
        return [index for index in indices if not self._is_complete(self._path(index))]

    def put(self, index: int, record: Record) -> None:
        metadata = {"calls": json.dumps(record.structure), "fingerprint": self.fingerprint}
        with atomic_file(self._path(index)) as temporary:
            save_file({name: tensor.contiguous() for name, tensor in record.tensors.items()}, temporary, metadata)

    def call(self, index: int, name: str) -> LayerCall:
        with safe_open(str(self._path(index)), framework="pt") as file:
            return unpack(json.loads(file.metadata()["calls"]), name, file.get_tensor)

    def close(self) -> None:
        remove_directory(self.directory)

    def _path(self, index: int) -> Path:
        return self.directory / f"record-{index:08d}.safetensors"

    def _is_complete(self, path: Path) -> bool:
        if not path.is_file():
            return False
        try:
            # Opening it compares the header with the length of the file.
            with safe_open(str(path), framework="pt") as file:
                return (file.metadata() or {}).get("fingerprint") == self.fingerprint
        except (OSError, SafetensorError):
            return False


def total_size(first: int, batches: Any, indices: Sequence[int]) -> int:
    """Size of the records of some batches, in bytes.

    Args:
        first: Size of the record of the first of them.
        batches: The batches, by number.
        indices: Their numbers. The size of a record is proportional to the tokens of its batch.
    """
    tokens = [_elements(batches[index]) for index in indices]
    return sum(first * count // tokens[0] for count in tokens)


def _elements(batch: Mapping[str, Any]) -> int:
    """A number that grows with the tokens of a batch."""
    named = next((batch[name] for name in _TOKEN_INPUTS if isinstance(batch.get(name), torch.Tensor)), None)
    if named is not None:
        return max(1, named.numel())
    return max(1, *(value.numel() for value in batch.values() if isinstance(value, torch.Tensor)))


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
    for kind in ("memory", "disk") if cache == "auto" else (cache,):
        if kind not in rooms:
            continue
        room, needed, what = rooms[kind]
        if limit is not None and limit < room:
            room, what = limit, "cache_limit"
        if needed <= room:
            return (
                kind,
                f"activations of {format_bytes(needed)} are kept in {'memory' if kind == 'memory' else 'files'}",
            )
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
