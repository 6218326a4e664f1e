# SPDX-License-Identifier: Apache-2.0
"""Families of diffusion models that can be trained, one file each.

Models of transformers share one objective, in `stages.transformers`.
"""

from __future__ import annotations

from typing import Any

from ...models.registry import FAMILIES as MODEL_FAMILIES
from ...models.registry import MHLA_CLASSES
from ..config import CacheConfig, TrainingConfig
from .base import Family, Objective, Tensors
from .dit import DiT, DiTObjective
from .sana import Sana, SanaObjective
from .wan import Wan, WanObjective


__all__ = [
    "FAMILIES",
    "TRANSFORMERS",
    "DiTObjective",
    "Family",
    "Objective",
    "SanaObjective",
    "Tensors",
    "WanObjective",
    "check_options",
    "family_of",
    "family_of_class",
    "option_families",
]

FAMILIES: dict[str, Family] = {family.name: family for family in (Wan(), Sana(), DiT())}
"""The families of diffusers, by name."""

TRANSFORMERS = "transformers"
"""Name of the models of transformers, which have no command."""

_TRANSFORMERS_OPTIONS = frozenset({"distill_target", "distill_temperature"})


def option_families(option: str) -> tuple[str, ...]:
    """Return the families that have an option of a run or its cache.

    Args:
        option: Name of a field of `TrainingConfig` or `CacheConfig`.
    """
    options = {**{name: family.options for name, family in FAMILIES.items()}, TRANSFORMERS: _TRANSFORMERS_OPTIONS}
    some = tuple(name for name, own in options.items() if option in own)
    return some or tuple(options)


def check_options(config: TrainingConfig | CacheConfig, family: str) -> None:
    """Check that every option that differs from its default is one of a family.

    Args:
        config: The options.
        family: A name in `FAMILIES`, or `TRANSFORMERS`.

    Raises:
        ValueError: If one is not; the message names it.
    """
    for name in config.changed():
        families = option_families(name)
        if family not in families:
            raise ValueError(f"{name} is not an option of {family} models, only of {', '.join(families)}")


def family_of_class(class_name: str, what: str = "model") -> Family:
    """Return the family of a transformer class, upstream or MHLA.

    Args:
        class_name: As in `_class_name` of a config.
        what: Name of the model in the error.

    Raises:
        ValueError: If such models cannot be trained here.
    """
    known = MODEL_FAMILIES.get(class_name) or MHLA_CLASSES.get(class_name)
    if known is None or known.name not in FAMILIES:
        classes = [family.objective.family() for family in FAMILIES.values()]
        supported = ", ".join(f"{each.upstream}, {each.mhla_class}" for each in classes)
        raise ValueError(f"{what} is a {class_name}, which cannot be trained here; supported: {supported}")
    return FAMILIES[known.name]


def family_of(model: Any) -> Family:
    """Return the family of a transformer; errors as in `family_of_class`."""
    # Sharding replaces the class of a model by a subclass.
    names = [cls.__name__ for cls in type(model).__mro__]
    known = [name for name in names if name in {*MODEL_FAMILIES, *MHLA_CLASSES}]
    return family_of_class((known or names)[0])
