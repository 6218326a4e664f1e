# SPDX-License-Identifier: Apache-2.0
"""Safetensors files: headers that are checked, and small files read whole."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from .messages import shorten_text


def read_header(path: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """Reads the header of a safetensors file, checked against the file's length.

    Returns:
        `dtype`, `shape` and `data_offsets` of each tensor, sorted by name, and where in the file the data begin.

    Raises:
        OSError: If the file cannot be read.
        SafetensorError: If it is truncated or no safetensors file.
    """
    # For torch it would be mapped to be written to, which systems refuse for files larger than their memory.
    with safe_open(str(path), framework="np"), path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    return {name: header[name] for name in sorted(header) if name != "__metadata__"}, 8 + length


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
