# SPDX-License-Identifier: Apache-2.0
"""Adapters with whole modules (`modules_to_save`), where diffusers handles those of LoRA alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    # To the type checker a mixin has whatever the diffusers class beside it has.
    from typing import Any as Upstream
else:
    Upstream = object


class MHLAAdapterMixin(Upstream):
    """The adapter methods of a diffusers model, for adapters that carry MHLA parameters besides."""

    def enable_lora(self) -> None:
        """As upstream; MHLA parameters that an adapter carries go with it, here and in the methods below."""
        super().enable_lora()
        self._enable_saved_modules(True)

    def disable_lora(self) -> None:
        """As upstream, back to the model's own MHLA parameters."""
        super().disable_lora()
        self._enable_saved_modules(False)

    def enable_adapters(self) -> None:
        """As `enable_lora`."""
        super().enable_adapters()
        self._enable_saved_modules(True)

    def disable_adapters(self) -> None:
        """As `disable_lora`."""
        super().disable_adapters()
        self._enable_saved_modules(False)

    def set_adapters(self, adapter_names: list[str] | str, weights: Any = None) -> None:
        """As upstream. MHLA parameters that an adapter carries are used whole, or not at all where its weight is 0.

        Raises:
            ValueError: If several of the adapters carry MHLA parameters.
        """
        names = [adapter_names] if isinstance(adapter_names, str) else adapter_names
        each = weights if isinstance(weights, list) else [weights] * len(names)
        self._choose_saved_modules(names, each)
        super().set_adapters(adapter_names, weights)

    def set_adapter(self, adapter_name: list[str] | str) -> None:
        """As `set_adapters`, without weights."""
        names = [adapter_name] if isinstance(adapter_name, str) else adapter_name
        self._choose_saved_modules(names, [None] * len(names))
        super().set_adapter(adapter_name)

    def unload_lora(self) -> None:
        """As upstream; the model's own MHLA parameters are back in their place."""
        for name, wrapper in self._saved_modules():
            parent, _, child = name.rpartition(".")
            setattr(self.get_submodule(parent), child, wrapper.original_module)
        super().unload_lora()

    def delete_adapters(self, adapter_names: list[str] | str) -> None:
        """As upstream, with the MHLA parameters of the adapters."""
        names = [adapter_names] if isinstance(adapter_names, str) else adapter_names
        for _, wrapper in self._saved_modules():
            for name in names:
                wrapper.delete_adapter(name, [other for other in wrapper.active_adapters if other not in names])
        super().delete_adapters(adapter_names)

    def _saved_modules(self) -> list[tuple[str, Any]]:
        """The modules that adapters bring copies of, with their names."""
        from peft.utils import ModulesToSaveWrapper

        return [(name, module) for name, module in self.named_modules() if isinstance(module, ModulesToSaveWrapper)]

    def _enable_saved_modules(self, enabled: bool) -> None:
        for _, wrapper in self._saved_modules():
            wrapper.enable_adapters(enabled)

    def _choose_saved_modules(self, adapter_names: Sequence[str], weights: Sequence[Any]) -> None:
        """Turns to the modules of the one adapter that carries some; without one, back to the model's own."""
        wanted = [name for name, weight in zip(adapter_names, weights) if weight is None or weight]
        for path, wrapper in self._saved_modules():
            carrying = [name for name in wanted if name in wrapper.modules_to_save]
            if len(carrying) > 1:
                raise ValueError(
                    f"The adapters {', '.join(carrying)} each carry {path} whole, so only one of them can be active."
                )
            wrapper.enable_adapters(bool(carrying))
            if carrying:
                wrapper.set_adapter(carrying)
