# SPDX-License-Identifier: Apache-2.0
"""Options and configurations of diffusers models: by component, over stored ones, in `config.json`, and their limits.

diffusers ignores entries and weights that a class does not know, with a warning. But it passes an unknown `dtype` on
to the class's constructor, which refuses it. So one is written, for programs that never import this package; the
warning before the error shows its text. MHLA classes drop it when they read the file. With this package imported, the
softmax classes hand MHLA checkpoints over (`mhla_hf.integrations.diffusers`).
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ..config import MHLAConfig, with_overrides
from ..utils.messages import shorten_value


UNREADABLE_FOR_SOFTMAX = {"dtype": "MHLA weights: import mhla_hf before you load them"}
"""The entry by which softmax classes fail."""

MAX_LAYERS = 1000
"""Published models have up to about two hundred."""

MAX_SIZE = 2**24
"""The largest width or count."""

MAX_POSITIONS = 2**16
"""Positions of a table that is computed when a model is built: the longest axis of a video, or an image's patches."""

LITTLE = 2**26
"""Parameters that any model may get: 256 MB of them."""

_POSITIONS = ("rope_max_seq_len", "sample_size")
_SAMPLE = ("sample_frames", "sample_height", "sample_width")
_LAYER = re.compile(r"(?:^|\.)(?:transformer_)?blocks\.([0-9]{1,9})\.")

_FIELDS = frozenset(field.name for field in dataclasses.fields(MHLAConfig))


def options_by_component(mhla: MHLAConfig | Mapping[str, Any] | None, components: Collection[str]) -> dict[str, Any]:
    """Return the options of each component that becomes MHLA.

    Args:
        mhla: Options for all components alike, or a dict of options by name of a component. In the latter, components
            that are not named, or named with `None`, stay as they are.
        components: Names of the components that have an MHLA version.

    Returns:
        The options of each component that becomes MHLA.

    Raises:
        ValueError: If a name is none of the components, or no component is left to become MHLA.
    """
    if not is_by_component(mhla, components):
        return dict.fromkeys(components, mhla)
    assert isinstance(mhla, Mapping)
    allowed = ", ".join(components)
    for name in mhla:
        if name not in components:
            what = "an option; give it to each component" if name in _FIELDS else "not a component that can be MHLA"
            raise ValueError(f"mhla names {shorten_value(name)}, which is {what}: {allowed}.")
    chosen = {name: mhla[name] for name in components if mhla.get(name) is not None}
    if not chosen:
        raise ValueError(f"mhla leaves every component as it is; give options for one of {allowed}.")
    return chosen


def is_by_component(mhla: MHLAConfig | Mapping[str, Any] | None, components: Collection[str]) -> bool:
    """Return whether options are by component: one key names a component, or is unknown and holds options.

    Args:
        mhla: Options of either kind.
        components: See [`options_by_component`].
    """
    if not isinstance(mhla, Mapping):
        return False
    return any(
        name in components or (name not in _FIELDS and isinstance(options, (Mapping, MHLAConfig)))
        for name, options in mhla.items()
    )


def with_given(mhla: MHLAConfig | Mapping[str, Any] | None, given: Mapping[str, Any]) -> Any:
    """Return options with those that were given as keywords, which win; what is no options is returned as it is."""
    if not given or not isinstance(mhla, (MHLAConfig, Mapping, type(None))):
        return mhla
    return merge_options(mhla.given_options() if isinstance(mhla, MHLAConfig) else mhla or {}, given)


def merge_options(stored: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Lay `given` options over `stored` ones; giving `blocks` drops a stored `block_size` and the other way round."""
    merged = with_overrides(stored, given)
    for name, other in (("blocks", "block_size"), ("block_size", "blocks")):
        if given.get(name) is not None and given.get(other) is None:
            merged[other] = None
    return merged


def to_stored(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's configuration as it is written."""
    return {**config, **UNREADABLE_FOR_SOFTMAX}


def from_stored(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without the entry of [`to_stored`], which files of earlier versions lack.

    Nor has it the entry by which a repository names code that comes with it (`mhla_hf.models.stub`).
    """
    return {
        name: value
        for name, value in config.items()
        if (name, value) not in UNREADABLE_FOR_SOFTMAX.items() and name != "auto_map"
    }


# Limits of configurations before a model is built, and of the parameters that options add.


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
        largest = MAX_LAYERS if name == "num_layers" else MAX_POSITIONS if name in _POSITIONS else MAX_SIZE
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


def check_layer_count(num_layers: int, names: Iterable[str], where: str) -> None:
    """Check the number of layers against the names of the weights.

    Args:
        num_layers: Number of layers in the configuration.
        names: Names of the tensors.
        where: Name of the configuration, for errors.

    Raises:
        ValueError: If the weights have more layers, or fewer.
    """
    found = {int(match[1]) for match in map(_LAYER.search, names) if match}
    if found and max(found) + 1 != num_layers:
        raise ValueError(
            f"{where}: num_layers={num_layers}, but the weights have layers up to {max(found)}: the two do not belong "
            "together."
        )


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
