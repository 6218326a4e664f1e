# SPDX-License-Identifier: Apache-2.0
"""From a converted model to one as good as its original: calibration, layer matching and distillation.

Names are loaded when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..utils import lazy_names


if TYPE_CHECKING:
    from ..matching.layer_training import attention_matching_loss as attention_matching_loss
    from ..matching.layerwise import MatchingReport as MatchingReport
    from ..matching.layerwise import match_layers as match_layers
    from ..matching.layerwise import matching_losses as matching_losses

__getattr__, __dir__, __all__ = lazy_names(__name__)
