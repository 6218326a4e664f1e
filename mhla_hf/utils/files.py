# SPDX-License-Identifier: Apache-2.0
"""Files: written under a temporary name and then moved, found safely in directories of others, and read as JSON."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import stat
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NoReturn


TEMPORARY_PREFIX = ".tmp-"

IGNORED_FOLDERS = {".git", ".cache", "__pycache__", ".ipynb_checkpoints"}

MAX_BYTES = 256 * 2**20
"""Largest JSON file that is read. The index of a model with a million tensors has about 100 MB."""

MAX_DEPTH = 100
"""Deepest nesting of lists and objects; functions that walk them recursively fail near a thousand."""

Types = type | tuple[type, ...]


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def atomic_file(destination: Path) -> Iterator[Path]:
    """Yield a temporary sibling to write, and move it to `destination` when the block ends without an exception.

    Args:
        destination: The file to write; its parents are created and links are followed. The temporary name has the
            same suffix.
    """
    real = Path(os.path.realpath(destination))
    real.parent.mkdir(parents=True, exist_ok=True)
    temporary = real.with_name(temporary_sibling(destination).name)
    try:
        with clear_write_errors(destination):
            yield temporary
            flush_to_disk(temporary)
        os.replace(temporary, real)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(destination: Path, value: Any) -> None:
    """Write indented, sorted JSON with a final newline, atomically."""
    with atomic_file(destination) as temporary:
        write_staged_json(temporary, value, sort_keys=True)


def write_staged_json(destination: Path, value: Any, *, sort_keys: bool = False) -> None:
    """Write indented JSON in place, into a directory that is moved when it is complete."""
    destination.write_text(json.dumps(value, indent=2, sort_keys=sort_keys) + "\n", encoding="utf-8")


def link_or_copy(source: Path, target: Path) -> None:
    """Hard-link a file, or copy it where the file system has no hard links."""
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copyfile(source, target)


def temporary_sibling(path: Path) -> Path:
    """Return a new temporary name beside a path."""
    return path.with_name(f"{TEMPORARY_PREFIX}{uuid.uuid4().hex[:8]}-{path.name}")


def flush_to_disk(path: Path) -> None:
    """Wait until a file, or the list of a folder's entries, is on the disk."""
    if os.name == "nt" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def clear_write_errors(destination: Path) -> Iterator[None]:
    """Report a full disk in one line, for every exception that a writing library raises.

    Args:
        destination: The file or directory that is written, for the error.

    Raises:
        OSError: If the disk or a quota is full, or the system limits the size of files.
    """
    try:
        yield
    except Exception as error:
        # The wording of safetensors, of copies of directories, and of PyTorch's archives.
        numbers = re.findall(r"(?:os error |Errno )(\d+)", str(error))
        if not any(int(number) in _NO_ROOM for number in numbers) and "inline_container" not in str(error):
            raise
        raise OSError(
            f"{destination} cannot be written: no space is left on the disk (or a quota is full). Make room and run "
            "the same command again; what was complete before is still there."
        ) from error


def path_inside(root: Path, name: Any, where: str) -> Path:
    """Return the path of a file or folder that a file made by others names, which must lie below a folder.

    Links are not resolved here: the Hub's cache consists of links to files elsewhere.

    Args:
        root: The folder.
        name: The name as read: relative, without `..`, with `/` between its parts.
        where: Name of the file and field that it was read from, for errors.

    Raises:
        ValueError: If it is not such a name.
    """
    if isinstance(name, str) and name and "\0" not in name and "\\" not in name:
        parts = PurePosixPath(name).parts
        # A drive (C:) would make the path absolute on Windows; nothing is read from folders that are not listed.
        outside = name.startswith("/") or PureWindowsPath(name).drive or {"..", *IGNORED_FOLDERS} & set(parts)
        if parts and not outside:
            return root.joinpath(*parts)
    shown = repr(name) if len(repr(name)) <= 100 else f"{repr(name)[:100]}..."
    raise ValueError(f"{where} names {shown}, which is no path inside {root}.")


def list_files(root: Path) -> list[Path]:
    """List every file below `root`, relative to it and sorted, without version control and download caches.

    Links to files are followed to where [`check_entry`] allows.

    Raises:
        ValueError: If a link leads out of `root`, nowhere or to a folder, or something is neither file nor folder.
        OSError: If a folder cannot be read.
    """
    found: list[Path] = []
    for folder, folders, files in os.walk(root, onerror=_fail):
        folders[:] = [name for name in folders if name not in IGNORED_FOLDERS]
        for name in (*folders, *files):
            path = Path(folder, name)
            if not stat.S_ISDIR(check_entry(path, root).st_mode):
                found.append(path.relative_to(root))
            elif path.is_symlink():
                raise ValueError(f"{path} is a link to a folder; put a copy there or remove the link.")
    return sorted(found)


def _fail(error: OSError) -> NoReturn:
    raise error


def check_entry(path: Path, root: Path) -> os.stat_result:
    """Check that a path is a regular file or folder, and that links on the way stay inside a directory.

    Args:
        path: The path, below `root`.
        root: The directory. In the Hub's cache, links to the blobs of the same repository are inside.

    Returns:
        The status of the file or folder.

    Raises:
        ValueError: If it is a link to somewhere else or to nothing, or no file and no folder.
    """
    real = Path(os.path.realpath(path))
    if not any(real == allowed or allowed in real.parents for allowed in allowed_roots(root)):
        problem = f"leads by a link to {real}, outside {root}; put a copy there or remove the link"
    elif not path.exists():
        problem = f"does not exist or is a link to nothing ({real})"
    else:
        status = path.stat()
        if stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode):
            return status
        problem = "is neither a regular file nor a folder; remove it"
    raise ValueError(f"{path} {problem}.")


def read_weight_map(index: Path) -> list[Path]:
    """Return the files that the index of a sharded checkpoint lists.

    Args:
        index: The file, `*.safetensors.index.json` or one like it.

    Returns:
        Their paths, sorted, each once. They may be missing.

    Raises:
        ValueError: If the index has no `weight_map`, or one that names anything but files beside or below it.
    """
    weight_map = read_json(index, "the index").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"the index {index} has no weight_map.")
    names = {name if isinstance(name, str) else repr(name): name for name in weight_map.values()}
    return [path_inside(index.parent, names[name], f"weight_map of {index}") for name in sorted(names)]


def allowed_roots(root: Path) -> list[Path]:
    """Return the folders that files of a directory may be in: its own, and the blobs of its repository's cache."""
    real = Path(os.path.realpath(root))
    for folder in (real, *real.parents):
        # A snapshot of the Hub's cache consists of links to ../../blobs.
        blobs = folder.parent.parent / "blobs"
        if folder.parent.name == "snapshots" and blobs.is_dir() and not blobs.is_symlink():
            return [real, blobs]
    return [real]


def read_json(
    path: Path, what: str, *, required: Mapping[str, Types] | None = None, optional: Mapping[str, Types] | None = None
) -> dict[str, Any]:
    """Read a file that holds a JSON object.

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
    """Read a file that holds any JSON; arguments and errors as in [`read_json`]."""
    return parse_json(_read_text(path, what), f"{what} {path}")


def parse_json(text: str, where: str) -> Any:
    """Parse JSON.

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
        for _ in range(MAX_DEPTH + 1):
            level = [entry for entry in level if isinstance(entry, (dict, list))]
            if not level:
                return value
            level = [child for entry in level for child in (entry.values() if isinstance(entry, dict) else entry)]
        problem = "nested too deeply"
    raise ValueError(f"{where} is not valid JSON ({problem}).")


def check_fields(
    content: Any, where: str, required: Mapping[str, Types] | None = None, optional: Mapping[str, Types] | None = None
) -> dict[str, Any]:
    """Check that parsed JSON is an object with fields of the right types.

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
        raise ValueError(f"{where} is not a JSON object but {type(content).__name__}.")
    for name, types in {**(optional or {}), **(required or {})}.items():
        if name in content:
            allowed = types if isinstance(types, tuple) else (types,)
            if not _is(content[name], allowed):
                kinds = " or ".join(kind.__name__ for kind in allowed)
                raise ValueError(f"{where}: {name!r} must be {kinds}, and is {type(content[name]).__name__}.")
        elif required and name in required:
            raise ValueError(f"{where} has no field {name!r}.")
    return content


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


def _is(value: Any, allowed: tuple[type, ...]) -> bool:
    if isinstance(value, bool):
        return bool in allowed
    if isinstance(value, int) and float in allowed:
        return True
    return isinstance(value, allowed)
