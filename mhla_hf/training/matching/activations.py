# SPDX-License-Identifier: Apache-2.0
"""Recorded calls of attention layers, kept in memory or as safetensors files.

A record is what one batch was for every layer: hidden states and outputs, in a type of their own, and the other
arguments as they were. Tensors that layers share, such as rotary tables and masks, are kept once. Nothing is pickled:
what is no tensor is kept as JSON.
"""

from __future__ import annotations

import dataclasses
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ...utils.files import atomic_file, remove_directory, write_json
from ...utils.json_files import check_fields, parse_json, read_json
from ...utils.messages import shorten_text
from .layers import CallArguments, LayerCall


FORMAT_VERSION = 1
_INFORMATION = "activations.json"
_PLAIN = (type(None), bool, int, float, str)


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
    """Takes the calls of one batch apart.

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
    """Puts the call of one layer together again.

    Args:
        structure: See [`Record`].
        name: The layer.
        read: Gives the tensor of a name.
    """
    entry = structure[name]
    arguments = CallArguments(_decode(entry["args"], read), _decode(entry["kwargs"], read), entry["place"])
    return LayerCall(arguments, read(f"hidden_states.{name}"), read(f"output.{name}"), _decode(entry["valid"], read))


def moved(call: LayerCall, device: torch.device, dtype: torch.dtype | None = None) -> LayerCall:
    """A call on another device.

    Args:
        call: The call.
        device: The device.
        dtype: Type of the hidden states; `None` leaves them as they are.
    """
    # Through the parts of a record, so that one place knows what arguments are made of.
    there: dict[str, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> str:
        name = str(id(tensor))
        if name not in there:
            there[name] = tensor.to(device, non_blocking=True)
        return name

    def move(value: Any) -> Any:
        return _decode(_encode(value, keep, "a layer"), there.__getitem__)

    arguments = call.arguments
    return LayerCall(
        CallArguments(move(arguments.args), move(arguments.kwargs), arguments.place),
        call.hidden_states.to(device, dtype or call.hidden_states.dtype, non_blocking=True),
        call.output.to(device, non_blocking=True),
        move(call.valid),
    )


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


class ActivationCache(ABC):
    """Records by their number."""

    @abstractmethod
    def missing(self, indices: Collection[int]) -> list[int]:
        """Those of some numbers that there is no record of."""

    @abstractmethod
    def put(self, index: int, record: Record) -> None:
        """Keeps a record."""

    @abstractmethod
    def call(self, index: int, name: str) -> LayerCall:
        """The call of one layer, on the CPU.

        Args:
            index: Number of the record.
            name: The layer.

        Raises:
            ValueError: If it cannot be read.
        """

    @abstractmethod
    def close(self) -> None:
        """Lets go of all records."""


class MemoryCache(ActivationCache):
    """Records in memory."""

    def __init__(self) -> None:
        self.records: dict[int, Record] = {}

    def missing(self, indices: Collection[int]) -> list[int]:
        """See the base class."""
        return [index for index in indices if index not in self.records]

    def put(self, index: int, record: Record) -> None:
        """See the base class."""
        self.records[index] = record

    def call(self, index: int, name: str) -> LayerCall:
        """See the base class."""
        record = self.records[index]
        return unpack(record.structure, name, record.tensors.__getitem__)

    def close(self) -> None:
        """See the base class."""
        self.records.clear()


class DiskCache(ActivationCache):
    """Records as files of one directory, each of which is there whole or not at all.

    Args:
        directory: The directory; one that exists is gone on with.
        fingerprint: What the records follow from: model, data, type.

    Raises:
        ValueError: If the directory holds records of something else.
    """

    def __init__(self, directory: Path, fingerprint: str) -> None:
        self.directory, self.fingerprint = directory, fingerprint
        information = directory / _INFORMATION
        if information.is_file():
            stored = read_json(information, "the cache's", required={"format_version": int, "fingerprint": str})
            if (stored["format_version"], stored["fingerprint"]) != (FORMAT_VERSION, fingerprint):
                raise ValueError(
                    f"{directory} holds activations of another model, data or type; remove it, or choose another "
                    "output."
                )
        elif directory.is_dir() and any(not path.name.startswith(".") for path in directory.iterdir()):
            raise ValueError(f"{directory} is no cache of activations; choose another output.")
        else:
            directory.mkdir(parents=True, exist_ok=True)
            write_json(information, {"format_version": FORMAT_VERSION, "fingerprint": fingerprint})

    def missing(self, indices: Collection[int]) -> list[int]:
        """See the base class; a file that is damaged counts as missing."""
        return [index for index in indices if not self._is_whole(self._path(index))]

    def put(self, index: int, record: Record) -> None:
        """See the base class.

        Raises:
            OSError: If there is no room for it.
        """
        metadata = {"calls": json.dumps(record.structure), "fingerprint": self.fingerprint}
        with atomic_file(self._path(index)) as temporary:
            save_file({name: tensor.contiguous() for name, tensor in record.tensors.items()}, temporary, metadata)

    def call(self, index: int, name: str) -> LayerCall:
        """See the base class."""
        path = self._path(index)
        try:
            with safe_open(str(path), framework="pt") as file:
                where = f"the calls of {path}"
                structure = check_fields(parse_json((file.metadata() or {}).get("calls", ""), where), where)
                return unpack(structure, name, file.get_tensor)
        except (OSError, SafetensorError, KeyError) as error:
            raise ValueError(
                f"{path} cannot be read ({shorten_text(str(error), 200)}); remove it and run the same command again."
            ) from error

    def close(self) -> None:
        """See the base class: removes the directory."""
        remove_directory(self.directory)

    def _path(self, index: int) -> Path:
        return self.directory / f"record-{index:08d}.safetensors"

    def _is_whole(self, path: Path) -> bool:
        if not path.is_file():
            return False
        try:
            # Opening it compares the header with the length of the file.
            with safe_open(str(path), framework="pt") as file:
                return (file.metadata() or {}).get("fingerprint") == self.fingerprint
        except (OSError, SafetensorError):
            return False
