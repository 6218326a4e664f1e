# SPDX-License-Identifier: Apache-2.0
"""Options as fields of dataclasses: each declares its help, choices and limits once, and one check enforces them.

The command line is generated from the same fields.
"""

from __future__ import annotations

import dataclasses
import json
import operator
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, ClassVar, TypeVar

from .messages import check_choice, did_you_mean, shorten_text, shorten_value


Self = TypeVar("Self", bound="Options")

_LIMITS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "minimum": ("at least", operator.ge),
    "maximum": ("at most", operator.le),
    "above": ("greater than", operator.gt),
    "below": ("less than", operator.lt),
}
_NOUNS = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a finite number",
    "str": "a text",
    "dict": "a mapping",
    "tuple[int, ...]": "whole numbers",
    "tuple[str, ...]": "texts",
}
_MISFIT = object()
_SIZE_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
DEVICE_HELP = "cpu, cuda, one of several GPUs such as cuda:1, or auto: a GPU if there is one."
"""Help of every option called `device`."""


def option(default: Any, help: str, *, advanced: bool = False, **rules: Any) -> Any:
    """Declare an option: a dataclass field whose metadata holds its help and its rules.

    Args:
        default: Default value.
        help: One or two sentences, shown by `--help`.
        advanced: Whether few users need it; help lists such options last.
        **rules: Allowed values, each rule optional: `choices` (strings), `minimum`, `maximum` (inclusive), `above`,
            `below` (exclusive), and `families`, the kinds of models that have the option.
    """
    return dataclasses.field(default=default, metadata={"help": help, "advanced": advanced, **rules})


class Options:
    """Base of keyword-only, frozen dataclasses whose fields are made by [`option`].

    Values are checked when the dataclass is built and stored in the type of their field: lists become tuples,
    integers become floats, paths become strings.
    """

    # What errors call the options, in place of the name of the class.
    _kind: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):  # type: ignore[arg-type]
            object.__setattr__(self, item.name, check_option(item, getattr(self, item.name)))

    def changed(self) -> list[str]:
        """Return the names of the options that differ from their defaults."""
        return [item.name for item in dataclasses.fields(self) if getattr(self, item.name) != item.default]  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, Any]:
        """Return every option as plain JSON types (tuples become lists)."""
        return json.loads(json.dumps({item.name: getattr(self, item.name) for item in dataclasses.fields(self)}))  # type: ignore[arg-type]

    @classmethod
    def from_dict(cls: type[Self], options: Mapping[str, Any]) -> Self:
        """Build the options from plain JSON types; those not given take their defaults.

        Raises:
            ValueError: If a key is unknown (the message lists the known ones) or a value is not allowed.
        """
        check_names(cls._kind or cls.__name__, options, [item.name for item in dataclasses.fields(cls)])  # type: ignore[arg-type]
        return cls(**options)

    def replace(self: Self, **changes: Any) -> Self:
        """Return a copy with some options changed; the copy is checked like new options."""
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]


def check_names(kind: str, options: Any, known: Collection[str]) -> None:
    """Raise `ValueError` unless options are a mapping whose keys are all known.

    Args:
        kind: What the options belong to.
        options: The options.
        known: The names of the options that there are.
    """
    if not isinstance(options, Mapping):
        raise ValueError(f"{kind} options must be a dict or an object of options, got {shorten_value(options)}.")
    unknown = next((name for name in options if name not in known), None)
    if unknown is not None:
        hint = did_you_mean(unknown, known)
        raise ValueError(
            f"Unknown {kind} option {shorten_text(str(unknown))}. Known options: {', '.join(known)}.{hint}"
        )


def check_option(item: dataclasses.Field, value: Any) -> Any:
    """Check the value of one option and return it in the type of its field.

    Args:
        item: A field made by [`option`].
        value: Its value.

    Raises:
        ValueError: If the value has another type or breaks a rule; the message names the option and what it may be.
    """
    name, rules, kinds = item.name, item.metadata, str(item.type).split(" | ")
    if value is None and "None" in kinds:
        return None
    if "choices" in rules:
        if value not in rules["choices"]:
            check_choice(name, value, rules["choices"])
        return value
    limits = {words: (rules[rule], holds) for rule, (words, holds) in _LIMITS.items() if rule in rules}
    found = next((fit for kind in kinds if (fit := _fit(kind, value)) is not _MISFIT), _MISFIT)
    if found is _MISFIT:
        nouns = " or ".join(_NOUNS[kind] for kind in kinds if kind != "None")
        allowed = " and ".join(f"{words} {limit}" for words, (limit, _) in limits.items())
        raise ValueError(f"{name} must be {nouns}{f' ({allowed})' if allowed else ''}, got {shorten_value(value)}.")
    for words, (limit, holds) in limits.items():
        if not all(holds(entry, limit) for entry in (found if isinstance(found, tuple) else (found,))):
            raise ValueError(f"{name} must be {words} {limit}, got {shorten_value(value)}.")
    return found


def _fit(kind: str, value: Any) -> Any:
    """Convert a value to the type of an option where nothing is lost; return `_MISFIT` otherwise."""
    if kind == "Any":
        return value
    if kind == "bool":
        return value if isinstance(value, bool) else _MISFIT
    if kind == "str":
        return os.fspath(value) if isinstance(value, (str, os.PathLike)) else _MISFIT
    if kind == "dict":
        return dict(value) if isinstance(value, Mapping) else _MISFIT
    if kind.startswith("tuple"):
        single = isinstance(value, Real if kind == "tuple[int, ...]" else str)
        if not single and (not isinstance(value, Sequence) or isinstance(value, (str, bytes))):
            return _MISFIT
        entries = tuple(_fit(kind[6:9], entry) for entry in ([value] if single else value))
        return _MISFIT if _MISFIT in entries else entries
    if isinstance(value, bool):
        return _MISFIT
    if kind == "int":
        return int(value) if isinstance(value, Integral) else _MISFIT
    # Comparisons refuse NaN, infinities, and integers that no float can hold.
    number: Any = value
    if kind != "float" or not isinstance(value, Real) or not abs(number) <= sys.float_info.max:
        return _MISFIT
    return float(number)


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
