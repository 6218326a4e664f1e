# SPDX-License-Identifier: Apache-2.0
"""From a converted model to one as good as its original: calibration, layer matching and distillation.

Names are loaded when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..utils.imports import lazy_names


_PUBLIC_NAMES = {
    "MatchingReport": ".training.matching.matching",
    "attention_matching_loss": ".training.matching.stage",
    "match_layers": ".training.matching.matching",
    "matching_losses": ".training.matching.matching",
}

__all__ = ["MatchingReport", "attention_matching_loss", "match_layers", "matching_losses"]

if TYPE_CHECKING:
    from ..training.matching.matching import MatchingReport, match_layers, matching_losses
    from ..training.matching.stage import attention_matching_loss


__getattr__, __dir__ = lazy_names(__name__, _PUBLIC_NAMES)
