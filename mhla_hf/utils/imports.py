# SPDX-License-Identifier: Apache-2.0
"""Imports on first use, and of parts of the repository that the installed package leaves out."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


REPOSITORY = Path(__file__).resolve().parents[2]
"""Root of the checkout, if the package runs from one."""


def lazy_names(package: str, *own: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package that imports its public names on first use.

    The names are those that its `__init__.py` imports for type checkers, under `if TYPE_CHECKING:`.

    Args:
        package: The package's `__name__`.
        *own: Public names that `__init__.py` itself defines.

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
        value = getattr(importlib.import_module(modules[name], package), name)
        setattr(sys.modules[package], name, value)
        return value

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules})

    return load, list_names, sorted([*own, *modules])


def import_from_checkout(name: str, purpose: str) -> ModuleType:
    """Imports a module that is in the repository and not in the wheel.

    Args:
        name: Dotted name below the root of the repository, such as `conversion.digits`.
        purpose: What needs it, for the error.

    Raises:
        ValueError: If the package does not run from a checkout.
    """
    folder = REPOSITORY.joinpath(*name.split("."))
    if not (folder.is_dir() or folder.with_suffix(".py").is_file()):
        raise ValueError(
            f"{purpose} needs {name.replace('.', '/')} of the source repository, which the installed package does not "
            "contain; clone the repository and install it with pip install -e ."
        )
    if str(REPOSITORY) not in sys.path:
        sys.path.append(str(REPOSITORY))
    return importlib.import_module(name)
