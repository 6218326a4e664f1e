# SPDX-License-Identifier: Apache-2.0
"""The recipe of each family where none is given, and the paper's own settings by name, from `defaults.yaml`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .recipe_files import read_yaml
from .recipes import Recipe, parse_recipe


_TABLES: dict[str, Any] = read_yaml(Path(__file__).with_name("defaults.yaml"))

DEFAULTS: dict[str, dict[str, Any]] = _TABLES["defaults"]
"""By family."""

PRESETS: dict[str, dict[str, dict[str, Any]]] = _TABLES["presets"]
"""By name, then by family."""


def default_recipe(family: str, preset: str | None = None, window: str | None = None) -> Recipe:
    """The recipe of a family.

    Args:
        family: See `recipes.FAMILIES`.
        preset: `paper` for the settings of arXiv 2601.07832; `None` for the settings that measured best here.
        window: Softmax window beside MHLA; see [`MHLAConfig`].

    Raises:
        ValueError: If there is no such preset, or it has nothing for the family.
    """
    given = {} if window is None else {"mhla": {"window": window}}
    if preset is None:
        sections = [DEFAULTS[family], given]
        if window is not None and family in _TABLES["window"]["families"]:
            sections.append(_TABLES["window"]["changes"])
        return parse_recipe({"family": family, **_merged(sections)}, f"the default recipe of {family}")
    if preset not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}, got {preset!r:.100}")
    if family not in PRESETS[preset]:
        raise ValueError(
            f"preset {preset!r} has no setting for models of the family {family}, only for "
            f"{', '.join(PRESETS[preset])}"
        )
    content = _merged([PRESETS[preset][family], given])
    return parse_recipe({"family": family, **content}, f"the preset {preset} of {family}")


def _merged(sections: list[dict[str, Any]]) -> dict[str, Any]:
    """Later sections laid over earlier ones, key by key."""
    merged: dict[str, Any] = {}
    for section in sections:
        for name, value in section.items():
            merged[name] = {**merged.get(name, {}), **value} if isinstance(value, dict) else value
    return merged
