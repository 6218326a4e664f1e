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
    except RecursionError:
        raise ValueError(f"{where} is not valid JSON (nested too deeply).") from None
    except ValueError as error:
        raise ValueError(f"{where} is not valid JSON ({error}).") from None
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for parent in level for child in _children(parent) if isinstance(child, (dict, list))]
        if not level:
            return value
    raise ValueError(f"{where} is not valid JSON for this package (nested too deeply).")


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
    if not isinstance(content, dict):
        raise ValueError(f"{where} is not a JSON object but {_name(type(content))}.")
    for name in required or {}:
        if name not in content:
            raise ValueError(f"{where} has no field {name!r}.")
    for name, types in {**(required or {}), **(optional or {})}.items():
        if name in content and not _is(content[name], types):
            allowed = " or ".join(_name(entry) for entry in _tuple(types))
            raise ValueError(f"{where}: {name!r} must be {allowed}, and is {_name(type(content[name]))}.")
    return content


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _read_text(path: Path, what: str) -> str:
    if not path.exists():
        raise ValueError(f"{what} {path} is missing.")
    # Opening a FIFO would wait for a writer for ever.
    if not path.is_file():
        raise ValueError(f"{what} {path} is not a regular file.")
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise ValueError(f"{what} {path} has {size:,} bytes; JSON files may have {MAX_BYTES:,}.")
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{what} {path} is not UTF-8 text ({error.reason} at byte {error.start}).") from None
    except OSError as error:
        raise ValueError(f"{what} {path} cannot be read ({error.strerror}).") from None


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
