# SPDX-License-Identifier: Apache-2.0
"""Modules with parameters: the MHLA layer, its feature maps and its mixing weights."""

from .blocks import reference_blocks, resolve_blocks
from .features import HedgehogFeatureMap, fixed_feature_map
from .fused import HeadNorms, PairwiseRotary
from .mhla import MHLA, AttentionParts
from .mixing import effective_mixing, initial_mixing, mixing_parameter_value


__all__ = [
    "AttentionParts",
    "HeadNorms",
    "HedgehogFeatureMap",
    "MHLA",
    "PairwiseRotary",
    "effective_mixing",
    "fixed_feature_map",
    "initial_mixing",
    "mixing_parameter_value",
    "reference_blocks",
    "resolve_blocks",
]
