# SPDX-License-Identifier: Apache-2.0
"""The MHLA operator by Triton kernels. Names are loaded when first used: Triton need not be installed.

Each operator and direction has one file, with its formula, kernels, launches and custom operators.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...utils import lazy_names


if TYPE_CHECKING:
    from .block import triton_block_mhla_attention as triton_block_mhla_attention
    from .causal import triton_causal_mhla_attention as triton_causal_mhla_attention
    from .decode import decode_token as decode_token
    from .fused import fused_mhla_attention as fused_mhla_attention
    from .fused_products import fits_fused_kernels as fits_fused_kernels
    from .hedgehog import fits_hedgehog_kernels as fits_hedgehog_kernels
    from .hedgehog import hedgehog_features as hedgehog_features

__getattr__, __dir__, __all__ = lazy_names(__name__)
