# SPDX-License-Identifier: Apache-2.0
"""Recorded calls of attention layers, kept in memory or as safetensors files."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import recursively_apply
from safetensors import safe_open
from safetensors.torch import save_file

from ..training.layers import LayerCall
from ..training.processes import available_memory
from ..utils.files import atomic_file
from ..utils.messages import format_bytes


Record = dict[str, LayerCall]
"""The calls of all layers on one batch, by layer."""

# Left free on the disk for checkpoints and everyone else.
_DISK_RESERVE = 2**30


class _Stored(str):
    """Name of a tensor in the file of its record, in the tensor's place."""


class Records:
    """The calls of layers by the number of their batch.

    What layers share, such as rotary tables, is kept once. Files have the tensors alone and last as long as the run:
    one that was killed records again.

    Args:
        folder: Where the files are; None keeps the tensors in memory.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self.calls: dict[int, Record] = {}

    def put(self, number: int, calls: Record) -> None:
        """Keep the calls of a batch, whose hidden states and outputs are copies on the CPU already.

        Raises:
            OSError: If there is no room for them.
        """
        copies = {id(tensor): tensor for call in calls.values() for tensor in (call.hidden_states, call.output)}
        names: dict[int, _Stored] = {}

        def keep(tensor: torch.Tensor) -> Any:
            if id(tensor) not in copies:
                copies[id(tensor)] = tensor.detach().to("cpu", copy=True).contiguous()
            if self.folder is None:
                return copies[id(tensor)]
            return names.setdefault(id(tensor), _Stored(len(names)))

        self.calls[number] = recursively_apply(keep, calls)
        if self.folder is not None:
            with atomic_file(self._file(number)) as temporary:
                save_file({name: copies[number] for number, name in names.items()}, temporary)

    def call(self, number: int, name: str) -> LayerCall:
        """Return the call of a layer in a record."""
        call = self.calls[number][name]
        if self.folder is None:
            return call
        with safe_open(str(self._file(number)), framework="pt") as file:
            return recursively_apply(file.get_tensor, call, test_type=lambda value: isinstance(value, _Stored))

    def _file(self, number: int) -> Path:
        assert self.folder is not None
        return self.folder / f"{number:08d}.safetensors"


def tensor_bytes(value: Any) -> int:
    """Return the bytes of the tensors in nested dicts and sequences, each counted once, as `Records` keep them."""
    found: dict[int, torch.Tensor] = {}
    recursively_apply(lambda tensor: found.setdefault(id(tensor), tensor), value)
    return sum(tensor.nbytes for tensor in found.values())


def free_room(output: Path | None) -> tuple[int, int]:
    """Bytes that records of this process may take in memory, and on the disk of a directory; -1 for none."""
    disk = -1 if output is None else max(0, shutil.disk_usage(output).free - _DISK_RESERVE)
    return available_memory() // 2, disk


def choose_cache(cache: str, needed: Sequence[int], rooms: Sequence[tuple[int, int]]) -> str:
    """Choose where records are kept, for all processes alike.

    Args:
        cache: What the user chose: `"memory"`, `"disk"`, or `"auto"` for the first of these that has room.
        needed: Bytes of the records of each process.
        rooms: `free_room` of each.

    Returns:
        `"memory"`, `"disk"`, or `"none"` where `"auto"` finds no room.

    Raises:
        ValueError: If there is no room where the user chose to keep them.
    """
    memory, disk = zip(*rooms, strict=True)
    # Decide by the process with the least room to spare.
    tightest = min(zip(needed, memory, strict=True), key=lambda pair: pair[1] - pair[0])
    places = {
        "memory": (*tightest, "half of the free memory"),
        "disk": (sum(needed), min(disk), "the room on the disk of the output"),
    }
    for place in places if cache == "auto" else (cache,):
        size, room, what = places[place]
        if size <= room:
            return place
        if cache != "auto":
            other = "memory" if cache == "disk" else "disk"
            raise ValueError(
                f"cache={cache!r} needs {format_bytes(size)}, more than {what}, {format_bytes(room)}: use fewer "
                f"batches, cache={other!r}, or cache='none', which keeps none."
            )
    return "none"
