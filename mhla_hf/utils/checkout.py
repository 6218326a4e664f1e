# SPDX-License-Identifier: Apache-2.0
"""Parts of the repository that the installed package leaves out."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType


REPOSITORY = Path(__file__).resolve().parents[2]
"""Root of the checkout, if the package runs from one."""


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
