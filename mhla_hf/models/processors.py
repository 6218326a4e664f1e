# SPDX-License-Identifier: Apache-2.0
"""Keeps MHLA layers their processors: others of diffusers would ignore their trained weights."""

from __future__ import annotations

from typing import Any, ClassVar

from .base import MHLAModelMixin, Upstream


class KeepsMHLAProcessor(Upstream):
    """Goes before an attention class of diffusers in the bases of its MHLA version."""

    # What computes the attention of a layer with MHLA parameters.
    mhla_processor_class: ClassVar[type]

    def set_processor(self, processor: object) -> None:
        """As upstream, but an MHLA layer keeps an MHLA processor: another one would drop its trained weights.

        Raises:
            ValueError: If a layer that has MHLA parameters is given another kind of processor.
        """
        self.check_processor(processor)
        super().set_processor(processor)

    def check_processor(self, processor: object) -> None:
        """Raises as `set_processor` does, and changes nothing."""
        if hasattr(self, "mhla") and not isinstance(processor, self.mhla_processor_class):
            raise ValueError(
                f"This layer's weights are MHLA; {type(processor).__name__} would ignore them. Load the original "
                "checkpoint instead, or leave this layer out of `layers` when you convert."
            )


class KeepsMHLAProcessors(MHLAModelMixin):
    """Goes first in the bases where the diffusers class has `set_attn_processor`, which sets those of all layers."""

    def set_attn_processor(self, processor: Any) -> None:
        """As upstream, but all or nothing: MHLA layers keep MHLA processors.

        Args:
            processor: One for all layers, or a dict by the names of `attn_processors`.

        Raises:
            ValueError: If a dict has another number of processors than there are attention modules, or a layer that
                has MHLA parameters is given another kind of processor; none is changed.
            KeyError: If a dict lacks a name; none is changed.
        """
        if isinstance(processor, dict):
            names = self.attn_processors
            if len(processor) == len(names):
                for name in names:
                    processor[name]
            else:
                # Upstream refuses it before it changes anything.
                super().set_attn_processor(processor)
        for name, module in self.named_modules():
            if isinstance(module, KeepsMHLAProcessor):
                key = f"{name}.processor"
                module.check_processor(processor[key] if isinstance(processor, dict) else processor)
        # Upstream empties the dict that it is given.
        super().set_attn_processor(dict(processor) if isinstance(processor, dict) else processor)
