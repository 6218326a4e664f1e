# SPDX-License-Identifier: Apache-2.0
"""Puts the MHLA model classes into the `diffusers` namespace.

A pipeline's `model_index.json` names each component as `[library, class]`, and diffusers refuses libraries that it
does not know for Hub repositories. So the MHLA classes say that they live in `diffusers`, and `diffusers.MHLA…`
resolves to them. Nothing is imported before it is asked for: importing diffusers takes seconds.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ..models.registry import MHLA_CLASSES
from .import_hooks import after_import


def register_with_diffusers() -> None:
    """Makes `diffusers.<MHLA class>` resolve, now or as soon as diffusers is imported; a second call does nothing."""
    after_import("diffusers", _extend_namespace)


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
