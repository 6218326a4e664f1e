# SPDX-License-Identifier: Apache-2.0
"""Shared by the nodes: their place in the menu, and errors as one line."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


CATEGORY = "MHLA"
MAX_MESSAGE = 500


def one_line(function: Callable[..., Any]) -> Callable[..., Any]:
    """Turn user errors into one line, which ComfyUI shows on the node."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except ModuleNotFoundError as error:
            if error.name != "mhla_hf":
                raise
            raise ValueError(
                "The package mhla_hf is not installed in ComfyUI's Python: pip install -e '.[video]' in a clone of it."
            ) from error
        except (ValueError, OSError) as error:
            message = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(message[:MAX_MESSAGE] + "..." * (len(message) > MAX_MESSAGE)) from error

    return call
