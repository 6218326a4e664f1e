# SPDX-License-Identifier: Apache-2.0
"""Pretraining of the demo's base model: a small Wan pipeline with softmax attention on moving handwritten digits.

`python -m conversion.digits` is the command. The result ships with the package as `mhla_hf/assets/digits_wan`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mhla_hf.utils import lazy_names


if TYPE_CHECKING:
    from .pretraining import pretrain as pretrain
    from .transformer import PretrainingConfig as PretrainingConfig

# Users of the optimiser alone need not import diffusers.
__getattr__, __dir__, __all__ = lazy_names(__name__)
