# SPDX-License-Identifier: Apache-2.0
"""The MHLA operator in all its forms: dense (the oracle), block-parallel, causal chunked and recurrent.

Names are loaded when first used, so that the tables of normalisers and feature maps can be read without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..utils import lazy_names


BACKENDS = ("auto", "torch", "triton")
OPERATOR_BACKENDS = (*BACKENDS, "naive")
"""Those of [`mhla_attention`]; `"naive"`, the dense oracle, can be asked for by name only."""

if TYPE_CHECKING:
    from ..layouts.sequences import extend_mixing as extend_mixing
    from ..layouts.sequences import mixing_at as mixing_at
    from .backends import choose_backend as choose_backend
    from .backends import triton_obstacle as triton_obstacle
    from .block import block_mhla_attention as block_mhla_attention
    from .causal import causal_mhla_attention as causal_mhla_attention
    from .dispatch import attend_blocks as attend_blocks
    from .dispatch import mhla_attention as mhla_attention
    from .feature_maps import FEATURE_MAPS as FEATURE_MAPS
    from .kernel_cases import kernel_errors as kernel_errors
    from .naive import naive_mhla_attention as naive_mhla_attention
    from .naive import naive_mhla_weights as naive_mhla_weights
    from .normalizers import NORMALIZERS as NORMALIZERS
    from .recurrent import MHLAState as MHLAState
    from .recurrent import empty_state as empty_state
    from .recurrent import rewind_state as rewind_state
    from .recurrent_extend import mhla_extend as mhla_extend
    from .recurrent_step import mhla_step as mhla_step

__getattr__, __dir__, __all__ = lazy_names(__name__, "BACKENDS", "OPERATOR_BACKENDS")
