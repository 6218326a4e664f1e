# SPDX-License-Identifier: Apache-2.0
"""Puts the MHLA model classes into the `diffusers` namespace.

A pipeline's `model_index.json` names each component as `[library, class]`, and diffusers refuses libraries that it
does not know for Hub repositories. So the MHLA classes say that they live in `diffusers`, and `diffusers.MHLA…`
resolves to them. Nothing is imported before it is asked for: importing diffusers takes seconds.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ..models.registry import MHLA_CLASSES


def register_with_diffusers() -> None:
    """Makes `diffusers.<MHLA class>` resolve, now or as soon as diffusers is imported; a second call does nothing."""
    module = sys.modules.get("diffusers")
    if module is not None:
        _extend_namespace(module)
    else:
        # By name: a hook left by an earlier import of this package belongs to another class object.
        stale = [finder for finder in sys.meta_path if type(finder).__name__ == _DiffusersImportHook.__name__]
        for finder in stale:
            sys.meta_path.remove(finder)
        sys.meta_path.insert(0, _DiffusersImportHook())


class _DiffusersImportHook(MetaPathFinder):
    """Lets the ordinary import run and extends the namespace right after; then it is gone from `sys.meta_path`.

    Finding the module is not importing it (other libraries look for diffusers just to know whether it is installed),
    so the hook stays until the module has run.
    """

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != "diffusers":
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_extend(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            # diffusers replaces its own entry by a lazy module while it is executed.
            _extend_namespace(sys.modules[fullname])

        spec.loader.exec_module = execute_and_extend  # type: ignore[method-assign]
        return spec


def _extend_namespace(module: ModuleType) -> None:
    base = type(module)
    if getattr(base, "_resolves_mhla_classes", False):
        return

    class DiffusersWithMHLA(base):  # type: ignore[misc, valid-type]
        _resolves_mhla_classes = True

        def __getattr__(self, name: str) -> Any:
            if name in MHLA_CLASSES:
                return MHLA_CLASSES[name].load_class()
            parent = getattr(super(), "__getattr__", None)
            if parent is None:
                raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
            return parent(name)

        def __dir__(self) -> list[str]:
            return sorted({*super().__dir__(), *MHLA_CLASSES})

    module.__class__ = DiffusersWithMHLA
