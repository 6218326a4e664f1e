# SPDX-License-Identifier: Apache-2.0
"""The MHLA operator in all its forms: dense (the oracle), block-parallel, causal chunked and recurrent.

Names are loaded when first used, so that the tables of normalisers and feature maps can be read without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..utils.imports import lazy_names


BACKENDS = ("auto", "torch", "triton")
OPERATOR_BACKENDS = (*BACKENDS, "naive")
"""Those of [`mhla_attention`]; `"naive"`, the dense oracle, can be asked for by name only."""

_PUBLIC_NAMES = {
    "FEATURE_MAPS": "feature_maps",
    "MHLAState": "recurrent",
    "NORMALIZERS": "normalizers",
    "attend_blocks": "dispatch",
    "block_mhla_attention": "block",
    "causal_mhla_attention": "causal",
    "choose_backend": "backends",
    "empty_state": "recurrent",
    "extend_mixing": ".layouts.sequences",
    "kernel_errors": "kernel_cases",
    "mhla_attention": "dispatch",
    "mhla_extend": "recurrent_extend",
    "mhla_step": "recurrent_step",
    "mixing_at": ".layouts.sequences",
    "naive_mhla_attention": "naive",
    "naive_mhla_weights": "naive",
    "rewind_state": "recurrent",
    "triton_obstacle": "backends",
}

__all__ = [
    "BACKENDS",
    "FEATURE_MAPS",
    "MHLAState",
    "NORMALIZERS",
    "OPERATOR_BACKENDS",
    "attend_blocks",
    "block_mhla_attention",
    "causal_mhla_attention",
    "choose_backend",
    "empty_state",
    "extend_mixing",
    "kernel_errors",
    "mhla_attention",
    "mhla_extend",
    "mhla_step",
    "mixing_at",
    "naive_mhla_attention",
    "naive_mhla_weights",
    "rewind_state",
    "triton_obstacle",
]

if TYPE_CHECKING:
    from ..layouts.sequences import extend_mixing, mixing_at
    from .backends import choose_backend, triton_obstacle
    from .block import block_mhla_attention
    from .causal import causal_mhla_attention
    from .dispatch import attend_blocks, mhla_attention
    from .feature_maps import FEATURE_MAPS
    from .kernel_cases import kernel_errors
    from .naive import naive_mhla_attention, naive_mhla_weights
    from .normalizers import NORMALIZERS
    from .recurrent import MHLAState, empty_state, rewind_state
    from .recurrent_extend import mhla_extend
    from .recurrent_step import mhla_step

__getattr__, __dir__ = lazy_names(__name__, _PUBLIC_NAMES)
