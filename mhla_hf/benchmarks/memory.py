# SPDX-License-Identifier: Apache-2.0
"""The most memory that a computation holds at any time beyond what it was given and what it returns."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from .timing import free_memory


# Of torch's profiler, which otherwise writes lines of its own to standard error; above its last level.
_PROFILER_LOG = ("KINETO_LOG_LEVEL", "99")


def peak_memory(run: Callable[[], Any], device: torch.device) -> int:
    """Bytes that a call holds at most beyond what was there before and the tensors that it returns.

    The allocator tells it on a GPU, torch's profiler on a CPU. Memory that libraries take past both is not seen.

    Args:
        run: Returns a tensor or several.
        device: What it runs on.
    """
    if device.type == "cuda":
        free_memory(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        kept = run()
        peak = torch.cuda.max_memory_allocated(device) - before
    else:
        peak, kept = _profiled_peak(run)
    return max(0, peak - held_bytes(kept))


def held_bytes(tensors: torch.Tensor | Iterable[torch.Tensor | None] | None) -> int:
    """Bytes of all tensors' storages, each counted once."""
    tensors = (tensors,) if tensors is None or isinstance(tensors, torch.Tensor) else tensors
    storages = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _profiled_peak(run: Callable[[], Any]) -> tuple[int, Any]:
    os.environ.setdefault(*_PROFILER_LOG)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = run()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    changes = [(event["ts"], event["args"]["Bytes"]) for event in events if event.get("name") == "[memory]"]
    held = accumulate((change for _, change in sorted(changes, key=lambda pair: pair[0])), initial=0)
    return max(held), kept
