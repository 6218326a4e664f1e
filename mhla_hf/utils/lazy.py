# SPDX-License-Identifier: Apache-2.0
"""Package namespaces whose names are imported when they are first used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(package: str, names: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns `__getattr__` and `__dir__` for a package that imports its public names on first use.

    Args:
        package: The package's `__name__`.
        names: Public names and the modules that define them, relative to the package: `"config"` for a module of it,
            `".training"` for one beside it.

    Examples:
        >>> __getattr__, __dir__ = lazy_names("mhla_hf", {"MHLAConfig": "config"})
        >>> __getattr__("MHLAConfig").__name__
        'MHLAConfig'
    """

    def load(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f".{names[name]}", package), name)
        setattr(sys.modules[package], name, value)
        return value

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *names})

    return load, list_names
