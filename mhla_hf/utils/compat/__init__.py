# SPDX-License-Identifier: Apache-2.0
"""Private and fragile parts of other libraries, each behind one function.

`compat.transformers` and `compat.diffusers` hold the functions; here are the supported versions, the error for an
unknown shape, and [`wrap`], which replaces a method of another library. Nothing is imported before a function is
called.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any


SUPPORTED = {"transformers": ">=5.17,<6", "diffusers": ">=0.40", "peft": ">=0.18"}
"""Supported versions; the same ranges are in `pyproject.toml`."""

CHECKED = {"transformers": "5.17 and 5.23", "diffusers": "0.40 and 0.42", "peft": "0.18 and 0.21"}
"""Versions that the functions below were checked with."""

_wrapped: list[tuple[str, Any, str, Any]] = []


class UnsupportedVersionError(ImportError):
    """Raised where another library is absent, of an unsupported version, or shaped in an unknown way."""


def check_version(library: str) -> None:
    """Check the installed version of a library by its metadata, without importing it.

    Args:
        library: `"transformers"`, `"diffusers"` or `"peft"`.

    Raises:
        UnsupportedVersionError: If it is absent, or outside [`SUPPORTED`].
    """
    from packaging.specifiers import SpecifierSet

    required = f"{library}{SUPPORTED[library]}"
    try:
        installed = version(library)
        if SpecifierSet(SUPPORTED[library]).contains(installed, prereleases=True):
            return
        problem = f", but {installed} is installed"
    except PackageNotFoundError:
        problem = " for this, which is not installed"
    raise UnsupportedVersionError(f"mhla_hf needs {required}{problem}: pip install '{required}'")


def unknown_shape(library: str, expected: str) -> UnsupportedVersionError:
    """Return the error for a library whose internals are not those that were checked.

    Args:
        library: Name of the library.
        expected: The missing or changed part.
    """
    try:
        installed = version(library)
    except PackageNotFoundError:
        installed = "(not installed)"
    return UnsupportedVersionError(
        f"{library} {installed} does not have the known {expected}, which mhla_hf relies on (checked with {library} "
        f"{CHECKED[library]}). Install a checked version of {library}, or update mhla_hf."
    )


def imported(library: str, module: str, name: str) -> Any:
    """Return a name of a module of a library.

    Raises:
        UnsupportedVersionError: If there is no such module or name.
    """
    try:
        return getattr(importlib.import_module(f"{library}.{module}"), name)
    except (ImportError, AttributeError):
        raise unknown_shape(library, f"{module}.{name}") from None


def attribute(library: str, owner: Any, name: str, owner_name: str) -> Any:
    """Return an attribute of an object or class of a library.

    Raises:
        UnsupportedVersionError: If there is no such attribute.
    """
    if not hasattr(owner, name):
        raise unknown_shape(library, f"{owner_name}.{name}")
    return getattr(owner, name)


def wrap(library: str, owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a function or a method of any kind of another library; a second call does nothing.

    Args:
        library: Name of the library, for [`unwrap`] and errors.
        owner: Class or module.
        name: Name of the function in it.
        around: Called in its place as `around(original, *args, **kwargs)`. The first argument of methods is the
            object, of class methods the class; `original` takes it too.

    Raises:
        UnsupportedVersionError: If there is no such function.
    """
    current = vars(owner).get(name, getattr(owner, name, None))
    original = getattr(current, "__func__", current)
    if not callable(original):
        raise unknown_shape(library, f"{getattr(owner, '__name__', owner)}.{name}")
    if hasattr(original, "wrapped_by_mhla"):
        return

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    replacement.wrapped_by_mhla = True  # type: ignore[attr-defined]
    # An inherited function is restored by deleting the replacement.
    _wrapped.append((library, owner, name, current if name in vars(owner) else None))
    kind = type(current) if isinstance(current, (classmethod, staticmethod)) else None
    setattr(owner, name, replacement if kind is None else kind(replacement))


def unwrap(library: str) -> None:
    """Restore every function of a library that [`wrap`] replaced.

    Args:
        library: Name of the library.
    """
    for entry in [entry for entry in reversed(_wrapped) if entry[0] == library]:
        _, owner, name, original = entry
        if original is None:
            delattr(owner, name)
        else:
            setattr(owner, name, original)
        _wrapped.remove(entry)


def forward_parameters(module: Any) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a module's `forward` without `self`, whatever decorators are around it."""
    parameters = inspect.signature(inspect.unwrap(type(module).forward)).parameters
    return {name: parameter for name, parameter in parameters.items() if name != "self"}


def unsplit_classes(model: Any) -> set[str]:
    """Return the names of layer classes that must not be split over devices.

    Models of transformers and diffusers declare them in `_no_split_modules`; empty for others.
    """
    return set(getattr(model, "_no_split_modules", None) or ())


def installed_versions(*packages: str) -> dict[str, str | None]:
    """Return versions of packages by name; `None` for those that are not installed."""
    versions: dict[str, str | None] = dict.fromkeys(packages)
    for package in packages:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions
