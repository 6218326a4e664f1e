# SPDX-License-Identifier: Apache-2.0
"""Which versions of transformers this package works with, checked without importing transformers."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


TRANSFORMERS = ">=5.17,<6"
"""The versions of transformers that are supported; the same stands in pyproject.toml."""


def check_transformers() -> None:
    """Stops early where the installed transformers is one whose internals differ from those that MHLA hooks into.

    Raises:
        ImportError: If the installed version is outside [`TRANSFORMERS`].
    """
    try:
        installed = version("transformers")
    except PackageNotFoundError:
        # Whatever needs it will say so; the operator alone does not.
        return
    from packaging.specifiers import SpecifierSet

    if not SpecifierSet(TRANSFORMERS).contains(installed, prereleases=True):
        raise ImportError(
            f"mhla_hf needs transformers{TRANSFORMERS}, but {installed} is installed: "
            f"pip install 'transformers{TRANSFORMERS}'"
        )
