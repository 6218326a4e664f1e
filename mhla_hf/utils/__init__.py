# SPDX-License-Identifier: Apache-2.0
"""Parts that every other package uses, and names of packages that are imported on first use."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def lazy_names(
    package: str, *own: str, needs: Mapping[str, Callable[[], object]] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package that imports its public names on first use.

    The names are those that its `__init__.py` imports for type checkers, under `if TYPE_CHECKING:`.

    Args:
        package: The package's `__name__`.
        *own: Public names that `__init__.py` itself defines.
        needs: What is called before a name is imported, such as a check of the library that it needs.

    Examples:
        >>> __getattr__, __dir__, __all__ = lazy_names("mhla_hf.recovery")
        >>> __getattr__("match_layers").__name__
        'match_layers'
    """
    source = Path(str(sys.modules[package].__file__)).read_text(encoding="utf-8")
    blocks = [node for node in ast.parse(source).body if isinstance(node, ast.If)]
    modules = {
        alias.name: "." * node.level + (node.module or "")
        for block in blocks
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if needs and name in needs:
            needs[name]()
        value = getattr(importlib.import_module(modules[name], package), name)
        setattr(sys.modules[package], name, value)
        return value

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules})

    return load, list_names, sorted([*own, *modules])
