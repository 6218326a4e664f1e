# SPDX-License-Identifier: Apache-2.0
"""Multi-Head Linear Attention (arXiv 2601.07832): block-parallel, causal and recurrent, in torch and Triton."""

__version__ = "0"

from . import layers
from .layouts.blocks import BlockLayout, choose_blocks
from .layouts.resampling import resample_mixing
from .ops import (
    FEATURE_MAPS,
    NORMALIZERS,
    MHLAState,
    choose_backend,
    empty_state,
    extend_mixing,
    mhla_attention,
    mhla_extend,
    mhla_step,
    rewind_state,
)


__all__ = [
    "BlockLayout",
    "FEATURE_MAPS",
    "MHLAState",
    "NORMALIZERS",
    "choose_backend",
    "choose_blocks",
    "empty_state",
    "extend_mixing",
    "fits_fused_kernels",
    "fused_mhla_attention",
    "layers",
    "mhla_attention",
    "mhla_extend",
    "mhla_step",
    "resample_mixing",
    "rewind_state",
]

_TRITON_NAMES = ("fits_fused_kernels", "fused_mhla_attention")


def __getattr__(name):
    # Triton need not be installed for the rest.
    if name in _TRITON_NAMES:
        from .ops import triton

        return getattr(triton, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
