# SPDX-License-Identifier: Apache-2.0
"""Calls a function right after another library's module is imported, without importing it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ..utils.compat import check_version


def after_import(name: str, callback: Callable[[ModuleType], None]) -> None:
    """Calls `callback(module)` now if the module is imported, else as soon as it has been.

    Args:
        name: Full name of the module.
        callback: Gets the module that `sys.modules` holds then. Called again by a second call of this function.
    """
    module = sys.modules.get(name)
    if module is not None:
        callback(module)
        return
    # By name: a hook left by an earlier import of this package belongs to another class object.
    stale = [
        finder
        for finder in sys.meta_path
        if type(finder).__name__ == _PostImportHook.__name__ and getattr(finder, "name", None) == name
    ]
    for finder in stale:
        sys.meta_path.remove(finder)
    sys.meta_path.insert(0, _PostImportHook(name, callback))


def extend(
    library: str,
    name: str,
    callback: Callable[[ModuleType], None],
    otherwise: Callable[[ModuleType, ImportError], None] | None = None,
) -> None:
    """As [`after_import`], for a supported library; others stay as they are, with one warning for each library.

    Args:
        library: Name of the library, see [`check_version`][mhla_hf.utils.compat.check_version].
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


_warned: set[str] = set()


class _PostImportHook(MetaPathFinder):
    """Lets the ordinary import run and calls back right after; then it is gone from `sys.meta_path`.

    Finding the module is not importing it (other libraries look for it just to know whether it is installed), so the
    hook stays until the module has run.
    """

    def __init__(self, name: str, callback: Callable[[ModuleType], None]) -> None:
        self.name, self.callback = name, callback

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_call_back(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            # Packages may replace their own entry by a lazy module while they are executed.
            self.callback(sys.modules[fullname])

        spec.loader.exec_module = execute_and_call_back  # type: ignore[method-assign]
        return spec
