# SPDX-License-Identifier: Apache-2.0
"""MHLA options of diffusers models: by component of a pipeline, over stored ones, and in `config.json`.

diffusers ignores entries and weights that a class does not know, with a warning. But it passes an unknown `dtype` on
to the class's constructor, which refuses it. So one is written, for programs that never import this package; the
warning before the error shows its text. MHLA classes drop it when they read the file. With this package imported, the
softmax classes hand MHLA checkpoints over (`mhla_hf.integrations.diffusers`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from ..config import MHLAConfig, with_overrides
from ..utils.messages import shorten_value


UNREADABLE_FOR_SOFTMAX = {"dtype": "MHLA weights: import mhla_hf before you load them"}
"""The entry by which softmax classes fail."""

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
