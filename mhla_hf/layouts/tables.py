# SPDX-License-Identifier: Apache-2.0
"""Tensors and layouts that follow from sizes alone: made once and remembered."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import Any, TypeVar

import torch


MAX_TABLES = 256

Made = TypeVar("Made")

_tables: OrderedDict[tuple[Any, ...], Any] = OrderedDict()
# Tables that a CUDA graph reads, which are kept for as long as the process runs: the graph knows their addresses only.
_captured: dict[tuple[Any, ...], Any] = {}
_lock = Lock()


def cached(function: Callable[..., Made], *arguments: Any) -> Made:
    """`function(*arguments)`, remembered: tables are made once for their sizes and device, not once for each layer.

    The function returns a tensor, a tuple of tensors, or an object without tensors. torch.compile traces the function
    itself. A CUDA graph that is being captured uses what is remembered; what is not, it makes for itself, as its
    memory is the graph's.
    """
    if torch.compiler.is_compiling():
        return function(*arguments)
    key = function, *arguments
    capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    with _lock:
        found = _captured.get(key)
        if found is None and (found := _tables.get(key)) is not None:
            if capturing:
                _captured[key] = _tables.pop(key)
            else:
                _tables.move_to_end(key)
    if found is not None:
        return found
    if capturing:
        return function(*arguments)
    # Tensors made in inference mode could not take part in training later.
    with torch.inference_mode(False):
        made = function(*arguments)
    for tensor in made if isinstance(made, tuple) else (made,):
        if isinstance(tensor, torch.Tensor) and type(tensor) is not torch.Tensor:
            # Such as those of FakeTensorMode, which have no values for whoever asks for them next.
            return made
        if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
            # Whoever asks for it next may do so on another stream.
            torch.cuda.current_stream(tensor.device).synchronize()
    with _lock:
        made = _tables.setdefault(key, made)
        if len(_tables) > MAX_TABLES:
            _tables.popitem(last=False)
    return made


def indices(count: int, device: torch.device) -> torch.Tensor:
    """The numbers from 0 to `count` - 1, LongTensor, remembered."""
    return cached(_indices, count, device)


def _indices(count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(count, device=device)
