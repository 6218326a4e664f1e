# SPDX-License-Identifier: Apache-2.0
"""Reading small safetensors files whole, with errors that name them."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from .messages import shorten_text


def read_tensors(path: Path, remedy: str, names: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    """Reads a safetensors file.

    Args:
        path: The file.
        remedy: What to do if it cannot be read, for the error.
        names: Tensors that it must hold.

    Raises:
        ValueError: If it is missing or damaged, or lacks a tensor.
    """
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read ({shorten_text(str(error), 200)}); {remedy}") from error
    missing = [name for name in names if name not in tensors]
    if missing:
        raise ValueError(f"{path} has no tensor {', '.join(missing)}; {remedy}")
    return tensors
