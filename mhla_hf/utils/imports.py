# SPDX-License-Identifier: Apache-2.0
"""Imports on first use, and of parts of the repository that the installed package leaves out."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any


REPOSITORY = Path(__file__).resolve().parents[2]
"""Root of the checkout, if the package runs from one."""


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
