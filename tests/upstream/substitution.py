# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin that runs the suites of diffusers and transformers on MHLA models.

In test modules of diffusers the stock classes are replaced by their MHLA counterparts. Model testers of transformers
return configurations that ask for `attn_implementation="mhla"`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


# Sequences in the suites have 7 to 64 tokens, so that the default block size would give a single block.
LANGUAGE_OPTIONS = {"block_size": 4}
SUITES = "tests."


def pytest_collection_modifyitems() -> None:
    """Substitutes in every module of the suites that collection has imported."""
    import mhla_hf  # noqa: F401

    for name, module in list(sys.modules.items()):
        if name.startswith(SUITES):
            _substitute_classes(module)
            _substitute_configurations(module)


def _substitute_classes(module: ModuleType) -> None:
    from mhla_hf.models.registry import FAMILIES, MHLA_CLASSES, mhla_class_for

    for name, value in list(vars(module).items()):
        stock = getattr(value, "__name__", None)
        if isinstance(value, type) and stock in FAMILIES and stock not in MHLA_CLASSES:
            setattr(module, name, mhla_class_for(stock))


def _substitute_configurations(module: ModuleType) -> None:
    for value in list(vars(module).values()):
        if isinstance(value, type) and value.__name__.endswith("Tester") and "get_config" in vars(value):
            value.get_config = _with_mhla(value.get_config)


def _with_mhla(get_config: Callable[..., Any]) -> Callable[..., Any]:
    if getattr(get_config, "gives_mhla", False):
        return get_config

    @functools.wraps(get_config)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        config = get_config(*args, **kwargs)
        config._attn_implementation = "mhla"
        if not hasattr(config, "image_size"):
            config.mhla = dict(LANGUAGE_OPTIONS)
        return config

    wrapped.gives_mhla = True  # type: ignore[attr-defined]
    return wrapped
