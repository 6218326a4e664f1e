# SPDX-License-Identifier: Apache-2.0
"""MHLA in transformers, diffusers and peft: each is extended right after its own import, which is never forced."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ..utils.compat import check_version, wrap


Extension = Callable[[ModuleType], None]

_warned: set[str] = set()


def after_import(name: str, callback: Extension) -> None:
    """Call `callback(module)` now if the module is imported, else as soon as it has been.

    Args:
        name: Full name of the module.
        callback: Gets the module that `sys.modules` holds then.
    """
    if name in sys.modules:
        callback(sys.modules[name])
    else:
        _finder.callbacks.setdefault(name, []).append(callback)


def extend(
    library: str, name: str, callback: Extension, otherwise: Callable[[ModuleType, ImportError], None] | None = None
) -> None:
    """As [`after_import`], for a supported library; others stay as they are, with one warning for each library.

    Args:
        library: Name of the library, see [`check_version`][mhla_hf.utils.compat.check_version].
        name: Full name of one of its modules.
        callback: Gets the module. May raise `ImportError` where it does not know the library's internals.
        otherwise: Gets the module of an unsupported library, and the error that says what is wrong.
    """

    def extend_supported(module: ModuleType) -> None:
        try:
            check_version(library)
            callback(module)
        except ImportError as error:
            if library not in _warned:
                _warned.add(library)
                warnings.warn(f"MHLA models of {library} are not available: {error}", RuntimeWarning, stacklevel=2)
            if otherwise is not None:
                otherwise(module, error)

    after_import(name, extend_supported)


class _PostImportFinder(MetaPathFinder):
    """Let ordinary imports run and calls back right after.

    Finding a module is not importing it (other libraries look for it just to know whether it is installed), so the
    callbacks stay until the module has run.
    """

    def __init__(self) -> None:
        self.callbacks: dict[str, list[Extension]] = {}

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in self.callbacks:
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_call_back(module: ModuleType) -> None:
            execute(module)
            for callback in self.callbacks.pop(fullname, ()):
                # Packages may replace their own entry by a lazy module while they are executed.
                callback(sys.modules[fullname])

        spec.loader.exec_module = execute_and_call_back  # type: ignore[method-assign]
        return spec


# By name: one left by an earlier import of this package is of another class object.
sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != _PostImportFinder.__name__]
sys.meta_path.insert(0, _finder := _PostImportFinder())


def is_mhla(module: Any) -> bool:
    """Return whether a module is an MHLA layer, without importing what there is none of."""
    layers = sys.modules.get("mhla_hf.layers.mhla")
    return layers is not None and isinstance(module, layers.MHLA)


def has_mhla(model: Any) -> bool:
    """Return whether a model has MHLA layers."""
    return any(map(is_mhla, model.modules()))


def register_with_peft() -> None:
    """Check the base model of every adapter, now or as soon as peft is imported."""
    extend("peft", "peft.tuners.tuners_utils", lambda peft: wrap("peft", peft.BaseTuner, "inject_adapter", _inject))


def _inject(original: Any, tuner: Any, model: Any, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
    """Refuse adapters with `modules_to_save=["mhla"]` on models without MHLA layers.

    peft ignores names that it does not find, and weights that have no place: the adapter would run on softmax
    attention, and its MHLA parameters would be lost.
    """
    given = getattr(tuner.peft_config[adapter_name], "modules_to_save", None)
    wanted = [name for name in given or () if name.rpartition(".")[2] == "mhla"]
    if wanted and not any(name.rpartition(".")[2] == "mhla" for name, _ in model.named_modules()):
        raise ValueError(
            f"modules_to_save={wanted} needs a base model with MHLA layers, but {type(model).__name__} has none. Load "
            "it with attn_implementation='mhla' (the adapter's own base if it was saved after conversion), or call "
            "mhla_hf.convert(model) with the options that the adapter was trained with."
        )
    return original(tuner, model, adapter_name, *args, **kwargs)
