# SPDX-License-Identifier: Apache-2.0
"""Values from files and users in one-line errors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


VALUE_LENGTH = 100
LIST_LENGTH = 300
# How many names a list has before the rest is only counted.
_NAMES = 6


def shorten_text(text: str, length: int = VALUE_LENGTH) -> str:
    """One line of text, its middle left out where it is longer than `length`."""
    text = " ".join(text[: 2 * length].split() + text[2 * length :][-length:].split())
    if len(text) <= length:
        return text
    head = (length - 3) * 2 // 3
    return f"{text[:head]}...{text[head + 3 - length :]}"


def one_line(text: object, length: int = VALUE_LENGTH) -> str:
    """Text of others as [`shorten_text`] shows it, with spaces for what cannot be printed."""
    return shorten_text("".join(letter if letter.isprintable() else " " for letter in str(text)), length)


def how_to_install(extra: str) -> str:
    """How to install this package with one of its extras: from a clone, as it is on no package index yet."""
    return f"pip install -e '.[{extra}]' in a clone of mhla_hf"


def counted(count: int, noun: str) -> str:
    """A number with its noun, in the plural but for 1."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def shorten_value(value: Any, length: int = VALUE_LENGTH) -> str:
    """The `repr` of a value, its middle left out where it is long."""
    try:
        return shorten_text(repr(value), length)
    except ValueError:
        # Python writes out no integers of thousands of digits.
        return f"{type(value).__name__} with thousands of digits"


def shorten_list(names: Iterable[object], length: int = LIST_LENGTH) -> str:
    """Joins sorted names: the first few of many, and those of them that fit."""
    every = sorted(names)  # type: ignore[type-var]
    shown: list[str] = []
    for name in every[:_NAMES]:
        text = shorten_text(str(name))
        if shown and sum(map(len, shown)) + len(text) > length:
            break
        shown.append(text)
    rest = len(every) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")


def check_choice(name: str, value: Any, allowed: Iterable[str], why: str = "") -> None:
    """Raises `ValueError` unless a value is one of the allowed strings.

    Args:
        name: Name of the argument.
        value: Its value.
        allowed: The allowed strings.
        why: Reason why there are no others, appended to the list.
    """
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name}={shorten_value(value)} is not one of {', '.join(map(repr, allowed))}{why}.")


def check_count(name: str, value: Any, minimum: int = 1, maximum: int | None = None) -> None:
    """Raises `ValueError` unless a value is a whole number in a range.

    Args:
        name: Name of the argument.
        value: Its value.
        minimum: The least number allowed.
        maximum: The largest one; `None` for no limit.
    """
    limit = "" if maximum is None else f" and at most {maximum:,}"
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or value < minimum or (maximum is not None and value > maximum):
        raise ValueError(f"{name}={shorten_value(value, 40)} must be a whole number of at least {minimum}{limit}.")
