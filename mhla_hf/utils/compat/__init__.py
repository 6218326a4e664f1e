# SPDX-License-Identifier: Apache-2.0
"""Private and fragile parts of other libraries, each behind one function.

`compat.transformers` and `compat.diffusers` hold the functions; here are the supported versions, the error for an
unknown shape, [`wrap`], which replaces a method of another library, and [`extend`], which does so right after that is
imported. Nothing is imported before a function is called.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any


SUPPORTED = {"transformers": ">=5.17,<6", "diffusers": ">=0.40", "peft": ">=0.18"}
"""Supported versions; the same ranges are in `pyproject.toml`."""

CHECKED = {"transformers": "5.17, 5.23 and 5.24", "diffusers": "0.40 and 0.42", "peft": "0.18 and 0.21"}
"""Versions that the functions below were checked with, the newest one last."""

logger = logging.getLogger(__name__)


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
    installed = installed_versions(library)[library]
    if installed is not None and SpecifierSet(SUPPORTED[library]).contains(installed, prereleases=True):
        return
    problem = " for this, which is not installed" if installed is None else f", but {installed} is installed"
    raise UnsupportedVersionError(f"mhla_hf needs {required}{problem}: pip install '{required}'")


@functools.cache
def note_unchecked(library: str) -> None:
    """Warn, once, of a library whose minor version is newer than all that were checked.

    Args:
        library: See [`check_version`].
    """
    from packaging.version import Version

    newest, installed = CHECKED[library].split()[-1], Version(version(library))
    if installed.release[:2] > Version(newest).release:
        known, advice = f"{newest}, the newest that mhla_hf was checked with", f"pip install '{library}=={newest}.*'"
        logger.warning("%s %s is newer than %s; if anything looks wrong: %s", library, installed, known, advice)


def unknown_shape(library: str, expected: str) -> UnsupportedVersionError:
    """Return the error for a library whose internals are not those that were checked.

    Args:
        library: Name of the library.
        expected: The missing or changed part.
    """
    installed = installed_versions(library)[library] or "(not installed)"
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
        library: Name of the library, for errors.
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
    kind = type(current) if isinstance(current, (classmethod, staticmethod)) else None
    setattr(owner, name, replacement if kind is None else kind(replacement))


def forward_parameters(module: Any) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a module's `forward` without `self`, read through its decorators."""
    parameters = inspect.signature(inspect.unwrap(type(module).forward)).parameters
    return {name: parameter for name, parameter in parameters.items() if name != "self"}


def unsplit_classes(model: Any) -> set[str]:
    """Return the names of layer classes that must not be split over devices.

    Models of transformers and diffusers declare them in `_no_split_modules`; empty for others.
    """
    return set(getattr(model, "_no_split_modules", None) or ())


def checkpointing_method(model: Any) -> Callable[..., None]:
    """Return the method of a model that lets it recompute activations in the backward pass.

    It has another name in diffusers, in transformers from 5.24 on, and before.
    """
    names = ("enable_gradient_checkpointing", "activation_checkpointing_enable", "gradient_checkpointing_enable")
    return next(getattr(model, name) for name in names if hasattr(model, name))


def set_process_timeout(timeout: timedelta) -> None:
    """Set how long the processes of `torch.distributed` wait for one another from now on (torch 2.6 to 2.15)."""
    from torch.distributed import distributed_c10d

    distributed_c10d._set_pg_timeout(timeout)
    # NCCL exchanges its id through the store at the first collective.
    distributed_c10d._get_default_store().set_timeout(timeout)


def installed_versions(*packages: str) -> dict[str, str | None]:
    """Return versions of packages by name; `None` for those that are not installed."""
    versions: dict[str, str | None] = dict.fromkeys(packages)
    for package in packages:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


# Extending other libraries after their own import.

Extension = Callable[[ModuleType], None]
"""Called with a module of another library."""

_warned: set[str] = set()


def after_import(name: str, callback: Extension) -> None:
    """Call `callback(module)` now if the module is imported, else as soon as it has been.

    Args:
        name: Full name of the module.
        callback: Gets the module that `sys.modules` holds then.
    """
    if name in sys.modules:
        callback(sys.modules[name])
    else:
        _finder.callbacks.setdefault(name, []).append(callback)


def extend(
    library: str, name: str, callback: Extension, otherwise: Callable[[ModuleType, ImportError], None] | None = None
) -> None:
    """As [`after_import`], for a supported library; others stay as they are, with one warning for each library.

    Args:
        library: Name of the library, see [`check_version`].
        name: Full name of one of its modules.
        callback: Gets the module. May raise `ImportError` where it does not know the library's internals.
        otherwise: Gets the module of an unsupported library, and the error that says what is wrong.
    """

    def extend_supported(module: ModuleType) -> None:
        try:
            check_version(library)
            callback(module)
        except ImportError as error:
            if library not in _warned:
                _warned.add(library)
                warnings.warn(f"MHLA models of {library} are not available: {error}", RuntimeWarning, stacklevel=2)
            if otherwise is not None:
                otherwise(module, error)

    after_import(name, extend_supported)


def extend_method(library: str, module: str, owner: str, name: str, around: Callable[..., Any]) -> None:
    """As [`wrap`], as soon as a supported library is imported.

    Args:
        library: Name of the library.
        module: Name of the module in it.
        owner: Name of the class; empty for a function of the module.
        name: Name of the method or function.
        around: See [`wrap`].
    """

    def wrap_in(found: ModuleType) -> None:
        wrap(library, getattr(found, owner) if owner else found, name, around)

    extend(library, f"{library}.{module}", wrap_in)


class _PostImportFinder(MetaPathFinder):
    """Let ordinary imports run and calls back right after.

    Finding a module is not importing it (other libraries look for it just to know whether it is installed), so the
    callbacks stay until the module has run.
    """

    def __init__(self) -> None:
        self.callbacks: dict[str, list[Extension]] = {}

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in self.callbacks:
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_call_back(module: ModuleType) -> None:
            execute(module)
            for callback in self.callbacks.pop(fullname, ()):
                # Packages may replace their own entry by a lazy module while they are executed.
                callback(sys.modules[fullname])

        spec.loader.exec_module = execute_and_call_back  # type: ignore[method-assign]
        return spec


# By name: one left by an earlier import of this package is of another class object.
sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != _PostImportFinder.__name__]
sys.meta_path.insert(0, _finder := _PostImportFinder())


def is_mhla(module: Any) -> bool:
    """Return whether a module is an MHLA layer, without importing what there is none of."""
    layers = sys.modules.get("mhla_hf.layers.mhla")
    return layers is not None and isinstance(module, layers.MHLA)


def has_mhla(model: Any) -> bool:
    """Return whether a model has MHLA layers."""
    return any(map(is_mhla, model.modules()))
