# SPDX-License-Identifier: Apache-2.0
"""Where recorded activations go: their size, stated before any is written, and what there is room for."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch

from ...conversion.options import format_bytes


CACHES = ("auto", "memory", "disk", "none")
# Inputs with an entry for every token of every sample, in the order they are looked for.
_TOKEN_INPUTS = ("input_ids", "inputs_embeds", "hidden_states", "pixel_values")
# Left free on the disk for checkpoints and everyone else.
_DISK_RESERVE = 2**30


class Batches(Protocol):
    """Batches by their number."""

    def __getitem__(self, index: int) -> Mapping[str, Any]: ...


def total_size(first: int, batches: Batches, indices: Sequence[int]) -> int:
    """Size of the records of some batches, in bytes.

    Args:
        first: Size of the record of the first of them.
        batches: The batches.
        indices: Their numbers. A record is as large as its batch has tokens.
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
    """Where records are kept.

    Args:
        cache: What was asked for, one of `CACHES` but `"none"`.
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
        f"activations of {format_bytes(size)} do not fit; they are made anew for every step. cache_limit"
        f"{'' if directory is not None else ' and output'} would change that"
    )
