# SPDX-License-Identifier: Apache-2.0
"""Reading JSON that others wrote: files, their shape and the types of fields are checked, and errors name them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


MAX_BYTES = 256 * 2**20
"""Largest JSON file that is read. The index of a model with a million tensors has about 100 MB."""

MAX_DEPTH = 100
"""Deepest nesting of lists and objects; functions that walk them recursively fail near a thousand."""

Types = type | tuple[type, ...]

_NAMES: dict[type, str] = {
    dict: "an object",
    list: "a list",
    str: "a string",
    bool: "true or false",
    int: "an integer",
    float: "a number",
    type(None): "null",
}


def read_json(
    path: Path,
    what: str,
    *,
    required: Mapping[str, Types] | None = None,
    optional: Mapping[str, Types] | None = None,
) -> dict[str, Any]:
    """Reads a file that holds a JSON object.

    Args:
        path: The file. A byte-order mark is skipped.
        what: Name of the file's role, for errors.
        required: Fields that must be there, with their types; `bool` is not an `int` here, and `int` is a `float`.
        optional: Fields that may be missing, with their types.

    Raises:
        ValueError: If the file is missing, not a regular file, too large, not UTF-8, not JSON, nested too deeply, no
            object, or a field is missing or of another type. The message names the file and the field.
    """
    return check_fields(read_json_value(path, what), f"{what} {path}", required, optional)


def read_json_value(path: Path, what: str) -> Any:
    """Reads a file that holds any JSON; arguments and errors as in [`read_json`]."""
    return parse_json(_read_text(path, what), f"{what} {path}")


def parse_json(text: str, where: str) -> Any:
    """Parses JSON.

    Args:
        text: The JSON text.
        where: Name of its origin, for errors.

    Raises:
        ValueError: If it is not JSON, nested too deeply, or has an integer of thousands of digits.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        problem: object = "nested too deeply" if isinstance(error, RecursionError) else error
    else:
        level = [value]
        for _ in range(MAX_DEPTH):
            level = [child for parent in level for child in _children(parent) if isinstance(child, (dict, list))]
            if not level:
                return value
        problem = "nested too deeply"
    raise ValueError(f"{where} is not valid JSON ({problem}).")


def check_fields(
    content: Any,
    where: str,
    required: Mapping[str, Types] | None = None,
    optional: Mapping[str, Types] | None = None,
) -> dict[str, Any]:
    """Checks that parsed JSON is an object with fields of the right types.

    Args:
        content: The parsed JSON.
        where: Name of its origin, for errors; a path such as `file.json: source` for a nested object.
        required: See [`read_json`].
        optional: See [`read_json`].

    Returns:
        The content.

    Raises:
        ValueError: See [`read_json`].
    """
    problem = _problem(content, required or {}, optional or {})
    if problem:
        raise ValueError(f"{where}{problem}.")
    return content


def _problem(content: Any, required: Mapping[str, Types], optional: Mapping[str, Types]) -> str:
    if not isinstance(content, dict):
        return f" is not a JSON object but {_name(type(content))}"
    for name, types in {**optional, **required}.items():
        if name not in content:
            if name in required:
                return f" has no field {name!r}"
        elif not _is(content[name], types):
            allowed = " or ".join(_name(entry) for entry in _tuple(types))
            return f": {name!r} must be {allowed}, and is {_name(type(content[name]))}"
    return ""


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _read_text(path: Path, what: str) -> str:
    try:
        if not path.is_file():
            # Opening a FIFO would wait for a writer forever.
            problem = "is not a regular file" if path.exists() else "is missing"
        elif path.stat().st_size > MAX_BYTES:
            problem = f"has more than {MAX_BYTES:,} bytes"
        else:
            return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        problem = f"cannot be read ({error})"
    raise ValueError(f"{what} {path} {problem}.")


def _is(value: Any, types: Types) -> bool:
    allowed = _tuple(types)
    if isinstance(value, bool):
        return bool in allowed
    if isinstance(value, int) and float in allowed:
        return True
    return isinstance(value, allowed)


def _tuple(types: Types) -> tuple[type, ...]:
    return types if isinstance(types, tuple) else (types,)


def _name(entry: type) -> str:
    return _NAMES.get(entry, entry.__name__)
