# SPDX-License-Identifier: Apache-2.0
"""Keeps peft from dropping MHLA parameters: an adapter that trained them needs a base model that has them."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from .import_hooks import after_import


MODULE = "mhla"


def register_with_peft() -> None:
    """Checks every adapter against its base model, now or as soon as peft is imported."""
    after_import("peft.tuners.tuners_utils", install_check)


def install_check(module: ModuleType) -> None:
    """Makes peft refuse an adapter with `modules_to_save=["mhla"]` on a model without MHLA layers.

    peft itself ignores names that it does not find, and weights that have no place: the adapter would run on softmax
    attention, and its MHLA parameters would be lost.

    Args:
        module: `peft.tuners.tuners_utils`.
    """
    original = module.BaseTuner.inject_adapter
    if hasattr(original, "checks_mhla"):
        return

    @functools.wraps(original)
    def inject_adapter(self: Any, model: Any, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        check_base(model, getattr(self.peft_config[adapter_name], "modules_to_save", None))
        return original(self, model, adapter_name, *args, **kwargs)

    inject_adapter.checks_mhla = True  # type: ignore[attr-defined]
    module.BaseTuner.inject_adapter = inject_adapter


def check_base(model: Any, modules_to_save: Any) -> None:
    """Compares an adapter's configuration with the model that it is put on.

    Raises:
        ValueError: If it names MHLA's parameters and the model has none.
    """
    wanted = [name for name in modules_to_save or () if name.rpartition(".")[2] == MODULE]
    if wanted and not any(name.rpartition(".")[2] == MODULE for name, _ in model.named_modules()):
        raise ValueError(
            f"modules_to_save={wanted} needs a base model with MHLA layers, but {type(model).__name__} has none. Load "
            "it with attn_implementation='mhla' (the adapter's own base if it was saved after conversion), or call "
            "mhla_hf.convert(model) with the options that the adapter was trained with."
        )
