# SPDX-License-Identifier: Apache-2.0
"""Parses options such as `3,5,10`, `2/3`, `bf16` and `5GB`, with errors that name the option."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from fractions import Fraction
from numbers import Integral

import torch

from ..utils.messages import shorten_list, shorten_value


DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}
"""The names `--dtype` takes."""

_SIZE_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_axes(text: str | None, name: str, axes: int | None = 3) -> tuple[int, ...] | None:
    """Reads `"3,5,10"` (or `"3x5x10"`) as one positive integer an axis.

    Args:
        text: Text of the option; `None` stays `None`.
        name: Name of the option, for the error.
        axes: Number of values; `None` for one to three.

    Raises:
        ValueError: If it is anything else.
    """
    if text is None:
        return None
    parts = [part.strip() for part in re.split(r"[,x]", text)]
    allowed = (1, 2, 3) if axes is None else (axes,)
    if len(parts) not in allowed or not all(_is_count(part) and int(part) > 0 for part in parts):
        count = "one to three" if axes is None else axes
        raise ValueError(
            f"{name}={text!r:.100} must be {count} positive integers separated by commas, such as 3,5,10."
        )
    return tuple(int(part) for part in parts)


def parse_layers(layers: str | Iterable[int] | None, num_layers: int) -> list[int] | None:
    """Reads the choice of layers that become MHLA.

    Args:
        layers: `None` or `"all"` for every layer; indices as `"1,2,4"` or as integers; or a fraction `"p/q"`: of each
            q layers in a row the first q - p stay softmax, so `"2/3"` keeps 0, 3, 6, … as the authors' hybrid does.
        num_layers: Number of layers of the model.

    Returns:
        Sorted indices, or `None` for every layer.

    Raises:
        ValueError: If the text is none of these, names a layer twice or one that is not there, or selects none.
    """
    if layers is None or layers == "all":
        return None
    if isinstance(layers, str):
        fraction = re.fullmatch(r"\s*(\d{1,9})\s*/\s*(\d{1,9})\s*", layers)
        if fraction:
            return _fraction_of_layers(int(fraction[1]), int(fraction[2]), num_layers)
        parts = [part.strip() for part in layers.split(",")]
        if not all(_is_count(part) for part in parts):
            raise ValueError(
                f"layers={layers!r:.100} must be all, layer indices such as 1,2,4, or a fraction such as 2/3."
            )
        layers = [int(part) for part in parts]
    layers = list(layers)
    if any(isinstance(index, bool) or not isinstance(index, Integral) for index in layers):
        raise ValueError(f"layers={shorten_value(layers)} must hold integers.")
    indices = sorted(layers)
    repeated = [index for index, count in Counter(indices).items() if count > 1]
    if repeated:
        raise ValueError(f"layers names {shorten_list(repeated)} twice.")
    outside = [index for index in indices if not 0 <= index < num_layers]
    if outside:
        raise ValueError(f"layers names {shorten_list(outside)}, but the model has layers 0 to {num_layers - 1}.")
    if not indices:
        raise ValueError("layers is empty: no layer would become MHLA.")
    return indices


def automatic_share(layers: str) -> Fraction | None:
    """Reads `auto:p/q`: the share p/q of the layers becomes MHLA, and the others are those worst to replace.

    Returns:
        The share, or `None` for a choice that names the layers.

    Raises:
        ValueError: If it begins with `auto:`, and the rest is not a fraction above 0 and at most 1.
    """
    text = layers.strip()
    if not text.startswith("auto:"):
        return None
    match = re.fullmatch(r"auto:\s*(\d{1,9})\s*/\s*(\d{1,9})", text)
    if match is None or not 0 < int(match[1]) <= int(match[2]):
        raise ValueError(
            f"layers={layers!r:.100} must be a fraction above 0 and at most 1 after auto:, such as auto:2/3."
        )
    return Fraction(int(match[1]), int(match[2]))


def _fraction_of_layers(part: int, whole: int, num_layers: int) -> list[int] | None:
    if not 0 < part <= whole:
        raise ValueError(f"layers={part}/{whole} must be a fraction above 0 and at most 1.")
    indices = [index for index in range(num_layers) if index % whole >= whole - part]
    if not indices:
        raise ValueError(f"layers={part}/{whole} selects none of the model's {num_layers} layers.")
    return None if len(indices) == num_layers else indices


def _is_count(text: str) -> bool:
    # Python refuses to convert thousands of digits.
    return text.isdecimal() and len(text) < 10


def parse_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """Reads a floating-point type from its name.

    Raises:
        ValueError: If it is not float32, bfloat16 or float16.
    """
    if dtype is None or dtype in DTYPES.values():
        return dtype  # type: ignore[return-value]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"dtype={shorten_value(str(dtype))} must be one of {', '.join(DTYPES)}.")
    return DTYPES[dtype]  # type: ignore[index]


def parse_size(size: int | str | None, name: str = "max_shard_size") -> int | None:
    """Reads a number of bytes: an integer, or text such as `"5GB"` or `"512MiB"`.

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
