# SPDX-License-Identifier: Apache-2.0
"""Limits of diffusers models: sizes that a configuration may ask for, and parameters that options may add."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

from ..utils.messages import shorten_value


MAX_LAYERS = 1000
"""Published models have up to about two hundred."""

MAX_SIZE = 2**24
"""The largest width or count."""

MAX_POSITIONS = 2**16
"""Positions of a table that is computed when a model is built: the longest axis of a video, or an image's patches."""

LITTLE = 2**26
"""Parameters that any model may get: 256 MB of them."""

_LAYER_COUNTS = ("num_layers", "num_single_layers")
_POSITIONS = ("rope_max_seq_len", "sample_size")
_SAMPLE = ("sample_frames", "sample_height", "sample_width")


def check_model_config(model_class: Any, config: Mapping[str, Any], where: str) -> None:
    """Check the arguments that a model's configuration holds for its constructor, and the sizes of its samples.

    Args:
        model_class: A class of diffusers. Its constructor's defaults and annotations tell the types.
        config: Contents of `config.json`; entries that the constructor does not know are left alone.
        where: Name of the file, for errors.

    Raises:
        ValueError: If an entry has a wrong type, is no positive number where one is needed, or is a size that no
            model has.
    """
    parameters = inspect.signature(model_class.__init__).parameters
    for name, value in config.items():
        largest = MAX_LAYERS if name in _LAYER_COUNTS else MAX_POSITIONS if name in _POSITIONS else MAX_SIZE
        if name.lstrip("_") in _SAMPLE:
            wanted, largest = "int | None", MAX_POSITIONS
            fits = value is None or _is_size(value, largest)
        elif name in parameters and parameters[name].default is not inspect.Parameter.empty:
            wanted = str(parameters[name].annotation)
            fits = _fits(value, parameters[name].default, wanted, largest)
        else:
            continue
        if not fits:
            raise ValueError(f"{where}: {name}={shorten_value(value)} must be {wanted}, of at most {largest:,}.")
    image, patch = config.get("sample_size"), config.get("patch_size")
    if isinstance(image, int) and isinstance(patch, int) and (image // patch) ** 2 > MAX_POSITIONS:
        raise ValueError(
            f"{where}: sample_size={image} in patches of {patch} gives more than {MAX_POSITIONS} positions."
        )


def sample_size(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return frames, height and width of the latents that a video model was made for.

    Args:
        config: Contents of `config.json`.

    Returns:
        `sample_frames`, `sample_height` and `sample_width`, with or without an underscore before them; `None` unless
        the configuration has all three.
    """
    found = [config.get(name, config.get(f"_{name}")) for name in _SAMPLE]
    return None if None in found else tuple(found)


def check_new_size(old: Mapping[str, tuple[int, ...]], new: Mapping[str, tuple[int, ...]]) -> None:
    """Check that options do not add more to a model than it has already.

    Args:
        old: Shapes of the source's tensors by name.
        new: Shapes of those to be written.

    Raises:
        ValueError: If they do, unless it is little in any case.
    """
    added = sum(math.prod(shape) for name, shape in new.items() if name not in old)
    had = sum(map(math.prod, old.values()))
    if added > max(had, LITTLE):
        raise ValueError(
            f"The mhla options add {added:,} parameters to a model of {had:,}: choose fewer blocks (blocks), "
            "larger ones (block_size) or a smaller convolution (lepe_kernel)."
        )


def _fits(value: Any, default: Any, annotation: str, largest: int) -> bool:
    """Return whether a value is of the type of an argument, and a number that models have."""
    if value is None:
        return default is None or "None" in annotation or "Optional" in annotation
    if isinstance(default, bool) or annotation.startswith("bool"):
        return isinstance(value, bool)
    if isinstance(default, str):
        return isinstance(value, str)
    if isinstance(default, list):
        # Numbers of layers.
        return isinstance(value, list) and all(type(each) is int and 0 <= each < MAX_LAYERS for each in value)
    if isinstance(default, tuple):
        sizes = value if isinstance(value, (list, tuple)) else ()
        return len(sizes) == len(default) and all(_is_size(size, largest) for size in sizes)
    if isinstance(default, int):
        return _is_size(value, largest)
    is_count = annotation.startswith("int")
    if not is_count and not isinstance(default, float):
        return True
    # Some published configurations have counts with a decimal point.
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and (0 if is_count else -math.inf) < value <= largest


def _is_size(value: Any, largest: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= largest
