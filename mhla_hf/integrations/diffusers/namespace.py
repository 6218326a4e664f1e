# SPDX-License-Identifier: Apache-2.0
"""Makes diffusers know the MHLA model classes: as names of its own, in `from_pipe`, and in saved pipelines.

A pipeline's `model_index.json` names each component as `[library, class]`, and diffusers refuses libraries that it
does not know for Hub repositories. So the MHLA classes say that they live in `diffusers`, and `diffusers.MHLA…`
resolves to them. Nothing is imported before it is asked for: importing diffusers takes seconds.

`Pipeline.from_pipe` takes over the models whose class is the very one of the new pipeline's type hints. An MHLA class
is a subclass of that, so it is handed over as if the caller had named it.

A pipeline notes the class of a component when it is given one. Where its model was converted since, the index is
brought up to date as the pipeline is saved.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ...models.registry import MHLA_CLASSES, is_mhla_class
from ..import_hooks import after_import


def register_with_diffusers() -> None:
    """Tells diffusers about the MHLA classes, now or as soon as it is imported; a second call does nothing."""
    after_import("diffusers", _extend_namespace)
    after_import("diffusers.pipelines.pipeline_utils", _extend_pipelines)
    after_import("diffusers.modular_pipelines.modular_pipeline", _extend_modular_pipelines)


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


def _extend_pipelines(module: ModuleType) -> None:
    _extend_from_pipe(module)
    _extend_saving(module.DiffusionPipeline, _name_converted)


def _extend_modular_pipelines(module: ModuleType) -> None:
    _extend_saving(module.ModularPipeline, _name_converted_in_modular)


def _extend_saving(pipeline_class: Any, prepare: Callable[[Any], None]) -> None:
    """Brings the index up to date before a pipeline is saved, with models that were converted after it was made."""
    original = pipeline_class.save_pretrained
    if hasattr(original, "names_converted"):
        return

    @functools.wraps(original)
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        prepare(self)
        return original(self, *args, **kwargs)

    save_pretrained.names_converted = True  # type: ignore[attr-defined]
    pipeline_class.save_pretrained = save_pretrained


def _mhla_parts(pipeline: Any) -> dict[str, Any]:
    """The components that are MHLA, compiled or not, by name."""
    parts = {name: getattr(part, "_orig_mod", part) for name, part in pipeline.components.items()}
    return {name: part for name, part in parts.items() if is_mhla_class(type(part).__name__)}


def _name_converted(pipeline: Any) -> None:
    for name, part in _mhla_parts(pipeline).items():
        pipeline.register_to_config(**{name: ("diffusers", type(part).__name__)})


def _name_converted_in_modular(pipeline: Any) -> None:
    for name, part in _mhla_parts(pipeline).items():
        entry = pipeline.config.get(name)
        if isinstance(entry, (list, tuple)) and len(entry) == 3:
            pipeline._component_specs[name].type_hint = type(part)
            named = ("diffusers", type(part).__name__)
            pipeline.register_to_config(**{name: (*named, {**entry[2], "type_hint": named})})


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
