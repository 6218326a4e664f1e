# SPDX-License-Identifier: Apache-2.0
"""The MHLA operator by Triton kernels. Names are loaded when first used: Triton need not be installed.

Each operator and direction has one file, with its formula, kernels, launches and custom operators.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...utils.imports import lazy_names


_PUBLIC_NAMES = {
    "attend_prompt": "prompt",
    "combine_parts": "combine",
    "decode_token": "decode",
    "fits_fused_kernels": "fused_products",
    "fits_hedgehog_kernels": "hedgehog_map",
    "fused_mhla_attention": "fused",
    "hedgehog_features": "hedgehog_map",
    "hedgehog_mhla_attention": "hedgehog",
    "rotated_tokens": "rotary",
    "triton_block_mhla_attention": "block",
    "triton_causal_mhla_attention": "causal",
}

__all__ = [
    "attend_prompt",
    "combine_parts",
    "decode_token",
    "fits_fused_kernels",
    "fits_hedgehog_kernels",
    "fused_mhla_attention",
    "hedgehog_features",
    "hedgehog_mhla_attention",
    "rotated_tokens",
    "triton_block_mhla_attention",
    "triton_causal_mhla_attention",
]

if TYPE_CHECKING:
    from .block import triton_block_mhla_attention
    from .causal import triton_causal_mhla_attention
    from .combine import combine_parts
    from .decode import decode_token
    from .fused import fused_mhla_attention
    from .fused_products import fits_fused_kernels
    from .hedgehog import hedgehog_mhla_attention
    from .hedgehog_map import fits_hedgehog_kernels, hedgehog_features
    from .prompt import attend_prompt
    from .rotary import rotated_tokens

__getattr__, __dir__ = lazy_names(__name__, _PUBLIC_NAMES)
