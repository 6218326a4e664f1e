# SPDX-License-Identifier: Apache-2.0
"""Tensors that are made once and remembered: tables that follow from sizes alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch


@lru_cache(maxsize=256)
def _remembered(function: Callable[..., torch.Tensor], in_inference_mode: bool, *arguments: Any) -> torch.Tensor:
    result = function(*arguments)
    if result.is_cuda:
        # Whoever asks for it next may do so on another stream.
        torch.cuda.current_stream(result.device).synchronize()
    return result


def cached(function: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
    """`function(*arguments)`, remembered: tables are made once for their sizes and device, not once for each layer.

    Tensors made in inference mode cannot take part in training later, so the mode is part of the key. torch.compile
    traces the function itself, and a CUDA graph that is being captured keeps what it makes to itself.
    """
    if torch.compiler.is_compiling():
        return function(*arguments)
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return function(*arguments)
    return _remembered(function, torch.is_inference_mode_enabled(), *arguments)
