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
_LAYER = re.compile(r"(?:^|\.)(?:transformer_)?blocks\.([0-9]{1,9})\.")

_FIELDS = frozenset(field.name for field in dataclasses.fields(MHLAConfig))


def options_by_component(
    mhla: MHLAConfig | Mapping[str, Any] | None, components: Collection[str], called: str = "mhla"
) -> dict[str, Any]:
    """Returns the options of each component that becomes MHLA.

    Args:
        mhla: Options for all components alike, or a dict of options by name of a component. In the latter, components
            that are not named, or named with `None`, stay as they are.
        components: Names of the components that have an MHLA version.
        called: Name of the argument, for errors.

    Returns:
        The options of each component that becomes MHLA.

    Raises:
        ValueError: If a name is none of the components, a value is neither options nor `None`, or no component is
            left to become MHLA.
    """
    if not is_by_component(mhla, components):
        return dict.fromkeys(components, mhla)
    assert isinstance(mhla, Mapping)
    allowed = ", ".join(components)
    for name, options in mhla.items():
        if name not in components:
            what = "an option; give it to each component" if name in _FIELDS else "not a component that can be MHLA"
            raise ValueError(f"{called} names {shorten_value(name)}, which is {what}: {allowed}.")
        if options is not None and not isinstance(options, (Mapping, MHLAConfig)):
            raise ValueError(
                f"{called}[{name!r}]={shorten_value(options)} must be options (a dict or an MHLAConfig), or "
                "None, which leaves the component as it is."
            )
    chosen = {name: mhla[name] for name in components if mhla.get(name) is not None}
    if not chosen:
        raise ValueError(f"{called} leaves every component as it is; give options for one of {allowed}.")
    return chosen


def is_by_component(mhla: MHLAConfig | Mapping[str, Any] | None, components: Collection[str]) -> bool:
    """Returns whether options are by component: one key names a component, or is unknown and holds options.

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
    """Returns options with those that were given as keywords, which win.

    Raises:
        ValueError: If `mhla` is neither options nor `None`.
    """
    if not given:
        return mhla
    if mhla is not None and not isinstance(mhla, (MHLAConfig, Mapping)):
        raise ValueError(f"mhla={shorten_value(mhla)} must be options (a dict or an MHLAConfig), or None.")
    return merge_options(mhla.given_options() if isinstance(mhla, MHLAConfig) else mhla or {}, given)


def merge_options(stored: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Lays `given` options over `stored` ones; giving `blocks` drops a stored `block_size` and the other way round."""
    merged = with_overrides(stored, given)
    for name, other in (("blocks", "block_size"), ("block_size", "blocks")):
        if given.get(name) is not None and given.get(other) is None:
            merged[other] = None
    return merged


def to_stored(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a model's configuration as it is written."""
    return {**config, **UNREADABLE_FOR_SOFTMAX}


def from_stored(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a configuration without the entry of [`to_stored`], which files of earlier versions lack.

    Nor has it the entry by which a repository names code that comes with it (`mhla_hf.models.stub`).
    """
    return {
        name: value
        for name, value in config.items()
        if (name, value) not in UNREADABLE_FOR_SOFTMAX.items() and name != "auto_map"
    }


# Limits of configurations before a model is built, and of the parameters that options add.


def check_model_config(model_class: Any, config: Mapping[str, Any], where: str) -> None:
    """Checks the arguments that a model's configuration holds for its constructor.

    Args:
        model_class: A class of diffusers. Its constructor's defaults and annotations tell the types.
        config: Contents of `config.json`; entries that the constructor does not know are left alone.
        where: Name of the file, for errors.

    Raises:
        ValueError: If an entry has a wrong type, is no positive number where one is needed, or is a size that no
            model has.
    """
    for name, parameter in inspect.signature(model_class.__init__).parameters.items():
        if name in config and parameter.default is not inspect.Parameter.empty:
            _check_entry(name, config[name], parameter, where)
    image, patch = config.get("sample_size"), config.get("patch_size")
    if isinstance(image, int) and isinstance(patch, int) and (image // patch) ** 2 > MAX_POSITIONS:
        raise ValueError(
            f"{where}: sample_size={image} in patches of {patch} gives more than {MAX_POSITIONS} positions."
        )
    sample_size(config, where)
    if "num_layers" in config and config["num_layers"] > MAX_LAYERS:
        raise ValueError(f"{where}: num_layers={config['num_layers']} is more than {MAX_LAYERS}.")


def sample_size(config: Mapping[str, Any], where: str = "the configuration") -> tuple[int, ...] | None:
    """Returns frames, height and width of the latents that a video model was made for.

    Args:
        config: Contents of `config.json`.
        where: Name of the file, for errors.

    Returns:
        `sample_frames`, `sample_height` and `sample_width`, with or without an underscore before them; `None` unless
        the configuration has all three.

    Raises:
        ValueError: If one is no positive integer, or larger than any model takes.
    """
    found = []
    for axis in ("frames", "height", "width"):
        name = next((name for name in (f"sample_{axis}", f"_sample_{axis}") if config.get(name) is not None), None)
        if name is None:
            continue
        if not _is_size(config[name]) or config[name] > MAX_POSITIONS:
            raise ValueError(
                f"{where}: {name}={shorten_value(config[name])} must be an integer from 1 to {MAX_POSITIONS}."
            )
        found.append(config[name])
    return tuple(found) if len(found) == 3 else None


def check_layer_count(num_layers: int, names: Iterable[str], where: str) -> None:
    """Checks the number of layers against the names of the weights.

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
    """Checks that options do not add more to a model than it has already.

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


def _check_entry(name: str, value: Any, parameter: inspect.Parameter, where: str) -> None:
    default, annotation = parameter.default, str(parameter.annotation)
    if value is None:
        expected = default is None or "None" in annotation or "Optional" in annotation
    elif isinstance(default, bool) or annotation.startswith("bool"):
        expected = isinstance(value, bool)
    elif isinstance(default, float):
        expected = _is_number(value)
    elif isinstance(default, str):
        expected = isinstance(value, str)
    elif isinstance(default, tuple):
        expected = isinstance(value, (list, tuple)) and len(value) == len(default) and all(map(_is_size, value))
    elif isinstance(default, int):
        expected = _is_size(value)
    elif annotation.startswith("int"):
        # Some published configurations have such a number with a decimal point.
        expected = _is_number(value) and value > 0
    else:
        return
    if not expected:
        kind = {bool: "true or false", float: "a finite number", str: "text", tuple: "a list of positive integers"}
        wanted = kind.get(bool if annotation.startswith("bool") else type(default), "a positive integer")
        raise ValueError(f"{where}: {name}={shorten_value(value)} must be {wanted}.")
    largest = MAX_POSITIONS if name in _POSITIONS else MAX_SIZE
    numbers = value if isinstance(value, (list, tuple)) else [value]
    if any(_is_number(number) and number > largest for number in numbers):
        raise ValueError(f"{where}: {name}={shorten_value(value)} is more than {largest}.")


def _is_number(value: Any) -> bool:
    # Not math.isfinite, which integers of hundreds of digits overflow.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -math.inf < value < math.inf


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
