# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin that runs the suites of diffusers and transformers on MHLA models.

In test modules of diffusers the stock classes are replaced by their MHLA counterparts, and positions of image tokens,
which its testers draw at random, are those of an image. Model testers of transformers return configurations that ask
for `attn_implementation="mhla"`.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


# Sequences in the suites have 7 to 64 tokens, so that the default block size would give a single block.
LANGUAGE_OPTIONS = {"block_size": 4, "window": None}
SUITES = "tests."


def pytest_collection_modifyitems() -> None:
    """Substitutes in every module of the suites that collection has imported."""
    import mhla_hf  # noqa: F401

    for name, module in list(sys.modules.items()):
        if name.startswith(SUITES):
            _substitute_classes(module)
            _substitute_methods(module)


def _substitute_classes(module: ModuleType) -> None:
    from mhla_hf.models.registry import FAMILIES, MHLA_CLASSES, mhla_class_for

    for name, value in list(vars(module).items()):
        stock = getattr(value, "__name__", None)
        if isinstance(value, type) and stock in FAMILIES and stock not in MHLA_CLASSES:
            setattr(module, name, mhla_class_for(stock))


def _substitute_methods(module: ModuleType) -> None:
    for value in list(vars(module).values()):
        if not isinstance(value, type):
            continue
        for name, change in CHANGES.items():
            method = vars(value).get(name)
            if method is not None and (name != "get_config" or value.__name__.endswith("Tester")):
                setattr(value, name, _changed(method, change))


def _changed(method: Callable[..., Any], change: Callable[[Any], None]) -> Callable[..., Any]:
    if getattr(method, "is_changed", False):
        return method

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        change(result)
        return result

    wrapped.is_changed = True  # type: ignore[attr-defined]
    return wrapped


def _ask_for_mhla(config: Any) -> None:
    config._attn_implementation = "mhla"
    if not hasattr(config, "image_size"):
        config.mhla = dict(LANGUAGE_OPTIONS)


def _place_on_grid(inputs: dict[str, Any]) -> None:
    """Row by row, with rows as long as columns or longer."""
    ids = inputs.get("img_ids")
    if ids is None:
        return
    count = ids.shape[-2]
    height = next(height for height in range(math.isqrt(count), 0, -1) if count % height == 0)
    place = ids.new_tensor([(0, index // (count // height), index % (count // height)) for index in range(count)])
    inputs["img_ids"] = place.expand_as(ids)


# What is changed in results of testers' methods, by their names.
CHANGES = {"get_config": _ask_for_mhla, "get_dummy_inputs": _place_on_grid}
