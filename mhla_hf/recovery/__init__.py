# SPDX-License-Identifier: Apache-2.0
"""From a converted model to one as good as its original: calibration, layer matching and distillation.

Names are loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any


_PUBLIC_NAMES = {
    "MatchingReport": "matching",
    "attention_matching_loss": "layer_training",
    "match_layers": "matching",
    "matching_losses": "matching",
}

__all__ = ["MatchingReport", "attention_matching_loss", "match_layers", "matching_losses"]

if TYPE_CHECKING:
    from .layer_training import attention_matching_loss
    from .matching import MatchingReport, match_layers, matching_losses


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_PUBLIC_NAMES[name]}"), name)
    globals()[name] = value
    return value
