# SPDX-License-Identifier: Apache-2.0
"""Values from files and users in one-line errors."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any


VALUE_LENGTH = 100
LIST_LENGTH = 300
# Names that a list shows before it counts the rest.
_NAMES = 6


def shorten_text(text: str, length: int = VALUE_LENGTH) -> str:
    """Return a text as one line, without its middle if it is longer than `length`."""
    text = " ".join(text[: 2 * length].split() + text[2 * length :][-length:].split())
    if len(text) <= length:
        return text
    head = (length - 3) * 2 // 3
    return f"{text[:head]}...{text[head + 3 - length :]}"


def one_line(text: object, length: int = VALUE_LENGTH) -> str:
    """Shorten untrusted text as [`shorten_text`] does and replace control characters by spaces."""
    return shorten_text("".join(letter if letter.isprintable() else " " for letter in str(text)), length)


def how_to_install(extra: str) -> str:
    """Return the command that installs an extra of this package, from a clone: it is on no package index yet."""
    return f"pip install -e '.[{extra}]' in a clone of mhla_hf"


def import_extra(module: str, what: str, extra: str) -> Any:
    """Import a module that an extra of this package installs.

    Args:
        module: Name of the module.
        what: What needs it, in the plural.
        extra: Name of the extra.

    Raises:
        ValueError: If it is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise ValueError(f"{what} need {module.partition('.')[0]}: {how_to_install(extra)}.") from error


def pluralize(count: int, noun: str) -> str:
    """Format a count with its noun: `1 file`, `2 files`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def format_bytes(count: float) -> str:
    """Format a number of bytes: `1.5 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"


def shorten_value(value: Any, length: int = VALUE_LENGTH) -> str:
    """Return the `repr` of a value, without its middle if it is long."""
    try:
        return shorten_text(repr(value), length)
    except ValueError:
        # Python refuses to print integers of thousands of digits.
        return f"{type(value).__name__} with thousands of digits"


def shorten_list(names: Iterable[object], length: int = LIST_LENGTH) -> str:
    """Join sorted names; of many, only the first few that fit."""
    every = sorted(names)  # type: ignore[type-var]
    shown: list[str] = []
    for name in every[:_NAMES]:
        text = shorten_text(str(name))
        if shown and sum(map(len, shown)) + len(text) > length:
            break
        shown.append(text)
    rest = len(every) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")


def did_you_mean(value: Any, allowed: Iterable[str]) -> str:
    """Suggest the allowed string that a value resembles: ` Did you mean 'relu'?`, empty if it resembles none."""
    allowed = list(allowed)
    text = value[:VALUE_LENGTH] if isinstance(value, str) else ""
    close = difflib.get_close_matches(text.lower(), allowed, n=1)
    close = close or [name for name in allowed if len(text) > 2 and text.lower() in name]
    return f" Did you mean {close[0]!r}?" if close else ""


def check_choice(name: str, value: Any, allowed: Iterable[str], why: str = "") -> None:
    """Raise `ValueError` unless a value is one of the allowed strings.

    Args:
        name: Name of the argument.
        value: Its value.
        allowed: The allowed strings.
        why: Reason why there are no others, appended to the list.
    """
    if not isinstance(value, str) or value not in allowed:
        shown = ", ".join(map(repr, allowed))
        raise ValueError(f"{name}={shorten_value(value)} is not one of {shown}{why}.{did_you_mean(value, allowed)}")


def check_count(name: str, value: Any, minimum: int = 1, maximum: int | None = None) -> None:
    """Raise `ValueError` unless a value is a whole number in a range.

    Args:
        name: Name of the argument.
        value: Its value.
        minimum: Smallest allowed number.
        maximum: Largest allowed number; `None` for no limit.
    """
    limit = "" if maximum is None else f" and at most {maximum:,}"
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or value < minimum or (maximum is not None and value > maximum):
        raise ValueError(f"{name}={shorten_value(value, 40)} must be a whole number of at least {minimum}{limit}.")


class StepCounter:
    """Counts its calls, and tells them and the total to a function, if there is one.

    Args:
        progress: Called with the number of calls so far and the total, which is never less.
        total: Calls to expect.
    """

    def __init__(self, progress: Callable[[int, int], None] | None, total: int) -> None:
        self.progress, self.total, self.done = progress, total, 0

    def __call__(self) -> None:
        """Count a step."""
        self.done += 1
        if self.progress is not None:
            self.progress(self.done, max(self.done, self.total))
