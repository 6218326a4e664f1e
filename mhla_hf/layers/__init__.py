# SPDX-License-Identifier: Apache-2.0
"""Modules with parameters: the MHLA layer, its feature maps and its mixing weights."""

from .fused import AttentionParts, HalfRotary, HeadNorms, PairwiseRotary
from .joint import JointMHLA, TextTokens, attend_jointly
from .mhla import MHLA
from .mixing import (
    LearnedFeatureMap,
    effective_mixing,
    initial_mixing,
    mixing_parameter_value,
    reference_blocks,
    resolve_blocks,
)


__all__ = [
    "AttentionParts",
    "HalfRotary",
    "HeadNorms",
    "JointMHLA",
    "LearnedFeatureMap",
    "MHLA",
    "PairwiseRotary",
    "TextTokens",
    "attend_jointly",
    "effective_mixing",
    "initial_mixing",
    "mixing_parameter_value",
    "reference_blocks",
    "resolve_blocks",
]
