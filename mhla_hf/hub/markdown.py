# SPDX-License-Identifier: Apache-2.0
"""Markdown of model cards: texts of others escaped, numbers, and tables without empty rows and columns."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..utils.messages import one_line


LONGEST = 120
"""Letters of a name or text of others, at most."""

# Characters that begin markup. Of the others, Markdown has no backslash.
_SPECIAL = re.compile(r"[\\`*\[\]#!]|(?<![^\W_])_|_(?![^\W_])|[&<>|$~@]|(?<=:)//|(?<=www)\.", re.IGNORECASE)
_BACKSLASHED = set("\\`*[]#!_")


def plain(text: object, length: int = LONGEST) -> str:
    """Text of others that Markdown shows as it is, addresses included."""

    def escape(found: re.Match[str]) -> str:
        first, rest = found[0][0], found[0][1:]
        return (f"\\{first}" if first in _BACKSLASHED else f"&#{ord(first)};") + rest

    return _SPECIAL.sub(escape, one_line(text, length))


def code(text: object) -> str:
    """A code span, in tables too."""
    text = one_line(text, LONGEST).replace("`", "'").replace("|", "¦").strip()
    return f"`{text}`" if text else ""


def literal(text: object) -> str:
    """A Python string, on one line."""
    return json.dumps(one_line(text, 1000), ensure_ascii=False)


def number(value: Any) -> float | None:
    """The value if it is a finite number, else `None`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:
        return None


def count(value: Any) -> int | None:
    """The value if it is a whole number of at least 0 that a person can read, else `None`."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**15 else None


def show(value: Any, form: str) -> str | None:
    """A number in a format of `str.format`; `None` for anything but a finite number."""
    value = number(value)
    return None if value is None else form.format(value)


def rate(value: Any) -> str | None:
    """A learning rate, such as `2e-4`."""
    value = number(value)
    if value is None or value <= 0:
        return None
    return re.sub(r"e([+-])0*", lambda found: f"e{found[1].replace('+', '')}", f"{value:g}")


def size(value: Any) -> str | None:
    """Bytes in decimal units."""
    value = number(value)
    if value is None or value < 0:
        return None
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= factor:
            return f"{value / factor:.3g} {unit}" if value < 1000 * factor else f"{value / factor:,.0f} {unit}"
    return f"{value:.0f} B"


def duration(seconds: Any) -> str | None:
    """Seconds in a unit that is easy to read."""
    seconds = number(seconds)
    if seconds is None or seconds < 0:
        return None
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    if seconds < 600:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def sizes(values: Any) -> str | None:
    """Lengths along axes, such as `5×4×4`; `None` for anything but positive whole numbers."""
    if not isinstance(values, (list, tuple)) or not 1 <= len(values) <= 8:
        return None
    return "×".join(map(str, values)) if all(count(value) for value in values) else None


def ranges(indices: Sequence[int]) -> str:
    """Whole numbers as they are listed: `0–4, 6 and 8`."""
    parts: list[list[int]] = []
    for index in sorted(set(indices)):
        if parts and index == parts[-1][-1] + 1:
            parts[-1].append(index)
        else:
            parts.append([index])
    words: list[str] = []
    for part in parts:
        words += [f"{part[0]}–{part[-1]}"] if len(part) > 2 else map(str, part)
    return joined(words)


def joined(words: Iterable[str]) -> str:
    """Words as they are listed in a sentence: `a, b and c`."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def table(rows: Iterable[Mapping[str, str | None]], right: Iterable[str] = (), always: int = 1) -> str:
    """A table, without the rows and columns that have nothing to say; empty if that is all of them.

    Args:
        rows: Cells by the heading of their column, the same headings in every row.
        right: Headings of columns of figures.
        always: Number of first columns that only name a row.
    """
    rows = list(rows)
    headings = list(rows[0]) if rows else []
    rows = [row for row in rows if any(row[name] for name in headings[always:])]
    shown = [name for name in headings if any(row[name] for row in rows)]
    if not rows or not shown[always:]:
        return ""
    rulers = ["---:" if name in set(right) else "---" for name in shown]
    lines = [shown, rulers, *([row[name] or "" for name in shown] for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
