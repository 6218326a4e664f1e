# SPDX-License-Identifier: Apache-2.0
"""Pretraining of the demo's base model: a small Wan pipeline with softmax attention on moving handwritten digits.

`python -m conversion.digits` is the command. The result ships with the package as `mhla_hf/assets/digits_wan`.
"""

from .pretraining import pretrain
from .transformer import PretrainingConfig


__all__ = ["PretrainingConfig", "pretrain"]
