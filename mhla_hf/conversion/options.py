# SPDX-License-Identifier: Apache-2.0
"""Parse options such as `bf16` and `5GB`, with errors that name the option."""

from __future__ import annotations

import re

import torch

from ..utils.messages import shorten_value


DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}
"""The names `--dtype` takes."""

MAX_SHARD_BYTES = 5 * 10**9
"""Largest weight file by default, as in `huggingface_hub`."""

_SIZE_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """Read a floating-point type from its name.

    Raises:
        ValueError: If it is not float32, bfloat16 or float16.
    """
    if dtype is None or dtype in DTYPES.values():
        return dtype  # type: ignore[return-value]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"dtype={shorten_value(str(dtype))} must be one of {', '.join(DTYPES)}.")
    return DTYPES[dtype]  # type: ignore[index]


def parse_size(size: int | str | None, name: str = "max_shard_size") -> int | None:
    """Read a number of bytes: an integer, or text such as `"5GB"` or `"512MiB"`.

    Raises:
        ValueError: If it is not a positive size.
    """
    if size is None:
        return None
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([A-Za-z]*)\s*", str(size))
    unit = _SIZE_UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or float(match[1]) * unit < 1:
        raise ValueError(f"{name}={size!r:.100} must be a size such as 5GB or 512MiB.")
    return int(float(match[1]) * unit)


def format_bytes(count: float) -> str:
    """Writes a number of bytes for people: `1.5 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
