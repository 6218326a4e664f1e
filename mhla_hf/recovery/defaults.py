# SPDX-License-Identifier: Apache-2.0
"""The recipe of each family where none is given, and other settings by name, from `defaults.yaml`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .recipe_files import read_yaml
from .recipes import Recipe, parse_recipe


_TABLES: dict[str, Any] = read_yaml(Path(__file__).with_name("defaults.yaml"))

DEFAULTS: dict[str, dict[str, Any]] = _TABLES["defaults"]
"""By family."""

PRESETS: dict[str, dict[str, dict[str, Any]]] = _TABLES["presets"]
"""By name, then by family: recipes of their own, and in `FAST` changes to the default recipe."""

FAST = "fast"
"""The preset that starts from the default recipe."""


def default_recipe(family: str, preset: str | None = None, window: str | None = None) -> Recipe:
    """The recipe of a family.

    Args:
        family: See `recipes.FAMILIES`.
        preset: `paper` for the settings of arXiv 2601.07832, `fast` for ReLU, which is faster than the default
            and recovers less; `None` for the settings that measured best here.
        window: Softmax window beside MHLA; see [`MHLAConfig`].

    Raises:
        ValueError: If there is no such preset, or it has nothing for the family.
    """
    if preset is not None and preset not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}, got {preset!r:.100}")
    if preset is not None and family not in PRESETS[preset]:
        raise ValueError(
            f"preset {preset!r} has no setting for models of the family {family}, only for "
            f"{', '.join(PRESETS[preset])}"
        )
    content = {} if preset not in (None, FAST) else DEFAULTS[family]
    if preset is not None:
        content = _merged(content, PRESETS[preset][family])
    if window is not None:
        if preset in (None, FAST) and family in _TABLES["window"]["families"]:
            # Of the stages that there are.
            changes = _TABLES["window"]["changes"]
            content = _merged(content, {name: changes[name] for name in changes if name in content})
        content = _merged(content, {"mhla": {"window": window}})
    name = "default recipe" if preset is None else f"preset {preset}"
    return parse_recipe({"family": family, **content}, f"the {name} of {family}")


def _merged(content: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Changes laid over the content of a recipe, key by key."""
    merged = dict(content)
    for name, value in changes.items():
        merged[name] = {**merged.get(name, {}), **value} if isinstance(value, dict) else value
    return merged
