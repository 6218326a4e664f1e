# SPDX-License-Identifier: Apache-2.0
"""The MHLA operator in all its forms: dense (the oracle), block-parallel, causal chunked and recurrent.

Names are loaded when first used, so that the tables of normalisers and feature maps can be read without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..utils import lazy_names


if TYPE_CHECKING:
    from .backends import choose_backend as choose_backend
    from .backends import triton_obstacle as triton_obstacle
    from .band import extend_mixing as extend_mixing
    from .definitions import BACKENDS as BACKENDS
    from .definitions import FEATURE_MAPS as FEATURE_MAPS
    from .definitions import NORMALIZERS as NORMALIZERS
    from .definitions import OPERATOR_BACKENDS as OPERATOR_BACKENDS
    from .forms import mhla_attention as mhla_attention
    from .kernel_cases import compare_kernels as compare_kernels
    from .operands import MHLAState as MHLAState
    from .recurrent import empty_state as empty_state
    from .recurrent import mhla_extend as mhla_extend
    from .recurrent import mhla_step as mhla_step
    from .recurrent import rewind_state as rewind_state

__getattr__, __dir__, __all__ = lazy_names(__name__)
