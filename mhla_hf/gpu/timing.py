# SPDX-License-Identifier: Apache-2.0
"""Times of calls and of the kernels that they launch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from ..utils import machine
from .cases import DEVICE, ON_GPU


# Twice the L2 cache of any GPU so far.
_COPIED_BYTES = 256 << 20
_MOST_COPIES = 64
# Bytes per second of copies on an H200, an upper bound; it decides only how many of them fill the queue.
_COPY_RATE = 4e12
# Two of them fit into the cache of an H100, and take longer to copy than to launch.
_CACHED_BYTES, _MEMORY_BYTES, _COPIES = 16 << 20, 1 << 30, 200


synchronize = partial(machine.synchronize, DEVICE)
"""Waits for the GPU, if there is one."""


@cache
def _buffers() -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.ones(_COPIED_BYTES, dtype=torch.uint8, device=DEVICE)
    return torch.empty_like(source), source


def empty_cache() -> None:
    """Overwrites the GPU's L2 cache."""
    target, source = _buffers()
    target.copy_(source)


def device_milliseconds(call: Callable[[], Any], rounds: int = 25) -> float:
    """Median time of a call's kernels on the GPU, from an empty cache and with its launches already waiting.

    `triton.testing.do_bench` starts its clock before the launches, which would count the host's time where it takes
    longer than the kernels. Without a GPU, the time of one call.
    """
    host = host_milliseconds(call, 1)
    if not ON_GPU:
        return host
    # Copies keep the GPU busy until all kernels of the call are in its queue.
    copy = 2e3 * _COPIED_BYTES / _COPY_RATE
    copies = min(_MOST_COPIES, 3 + int(2 * host / copy))
    pairs = []
    for _ in range(rounds):
        for _ in range(copies):
            empty_cache()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        call()
        last.record()
        pairs.append((first, last))
    synchronize()
    return statistics.median(first.elapsed_time(last) for first, last in pairs)


def host_milliseconds(call: Callable[[], Any], rounds: int = 30) -> float:
    """Median time until a call returns, the GPU being idle before."""
    times = []
    for _ in range(rounds + 1):
        synchronize()
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
        if not ON_GPU:
            break
    # The first one warms up.
    return statistics.median(times[1:] or times)


def copy_rates() -> dict[str, float]:
    """Bytes that copies read and write in a second: of memory, and of a tensor that stays in the L2 cache."""
    if not ON_GPU:
        return {}
    rates = {}
    for name, size in (("memory", _MEMORY_BYTES), ("l2_cache", _CACHED_BYTES)):
        source = torch.ones(size, dtype=torch.uint8, device=DEVICE)
        target, first, last = torch.empty_like(source), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
        target.copy_(source)
        empty_cache()
        target.copy_(source)
        first.record()
        for _ in range(_COPIES):
            target.copy_(source)
        last.record()
        synchronize()
        rates[name] = 2 * size * _COPIES / (1e-3 * first.elapsed_time(last))
    return rates
