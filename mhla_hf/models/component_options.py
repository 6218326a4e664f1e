# SPDX-License-Identifier: Apache-2.0
"""Options for each denoiser of a pipeline that has several, such as the two experts of Wan 2.2."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from ..config import MHLAConfig
from ..utils.messages import shorten_value


_FIELDS = frozenset(field.name for field in dataclasses.fields(MHLAConfig))


def options_by_component(
    mhla: MHLAConfig | Mapping[str, Any] | None, components: Collection[str], called: str = "mhla"
) -> dict[str, Any]:
    """Tells which components become MHLA, and with which options.

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
        if name in _FIELDS:
            raise ValueError(
                f"{called} has the option {name!r} beside options by component; give it to each component ({allowed})."
            )
        if name not in components:
            raise ValueError(
                f"{called} names {shorten_value(name)}, which is not a component that can be MHLA: {allowed}."
            )
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
    """Whether options are by component: one key is a component's name, or unknown with options of its own.

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
