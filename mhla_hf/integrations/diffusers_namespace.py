# SPDX-License-Identifier: Apache-2.0
"""Makes diffusers know the MHLA model classes: as names of its own, and in `from_pipe`.

A pipeline's `model_index.json` names each component as `[library, class]`, and diffusers refuses libraries that it
does not know for Hub repositories. So the MHLA classes say that they live in `diffusers`, and `diffusers.MHLA…`
resolves to them. Nothing is imported before it is asked for: importing diffusers takes seconds.

`Pipeline.from_pipe` takes over the models whose class is the very one of the new pipeline's type hints. An MHLA class
is a subclass of that, so it is handed over as if the caller had named it.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from ..models.registry import MHLA_CLASSES, is_mhla_class
from .import_hooks import after_import


def register_with_diffusers() -> None:
    """Tells diffusers about the MHLA classes, now or as soon as it is imported; a second call does nothing."""
    after_import("diffusers", _extend_namespace)
    after_import("diffusers.pipelines.pipeline_utils", _extend_from_pipe)


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


def _extend_from_pipe(module: ModuleType) -> None:
    original = module.DiffusionPipeline.from_pipe.__func__
    if hasattr(original, "hands_mhla_over"):
        return

    @functools.wraps(original)
    def from_pipe(cls: Any, pipeline: Any, **kwargs: Any) -> Any:
        ours = {name: part for name, part in pipeline.components.items() if is_mhla_class(type(part).__name__)}
        if ours and kwargs.get("custom_pipeline") is None:
            expected = cls._get_signature_types()
            fitting = {name: part for name, part in ours.items() if isinstance(part, expected.get(name, ()))}
            kwargs = {**fitting, **kwargs}
        return original(cls, pipeline, **kwargs)

    from_pipe.hands_mhla_over = True  # type: ignore[attr-defined]
    module.DiffusionPipeline.from_pipe = classmethod(from_pipe)
